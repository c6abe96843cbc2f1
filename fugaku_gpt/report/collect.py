"""Turns run directories into rows. Files that a killed run has left half-written are read as far as possible.

`report table`, and every other verb that shows runs as rows, use this; it only reads. What schedulers know has been put
into the run directories by ``jobs/gather.py`` (`job collect`).
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from fugaku_gpt.config import (
    RunConfig,
    SettingsLayer,
    build_run_config,
    readable_settings,
)
from fugaku_gpt.config.differences import differing_settings
from fugaku_gpt.config.knobs import is_requested
from fugaku_gpt.config.recorded import load_recorded
from fugaku_gpt.config.schema import NODE_KNOBS, POWER_KNOBS
from fugaku_gpt.config.tree import Scalar, Tree, flatten, read_yaml_file
from fugaku_gpt.errors import ConfigError, UsageError
from fugaku_gpt.formulas.flops import exact_formula, notes_formula
from fugaku_gpt.formulas.parameters import size_name
from fugaku_gpt.input_files import read_text, resolved
from fugaku_gpt.jobs.outcome import deciding_job
from fugaku_gpt.jobs.schedulers.registry import read_job_id, sub_job_ids
from fugaku_gpt.launch.lost_run import conclude_lost_run, lost_result
from fugaku_gpt.limits import YAML_TEXT
from fugaku_gpt.records.accounting import SIMULATED, JobAccount, energy_of, read_accounting
from fugaku_gpt.records.job import (
    ENDED,
    JOB_FILE,
    OVER,
    REJECTED,
    SubmittedJob,
    bulk_numbers,
    exit_records,
    read_history,
)
from fugaku_gpt.records.metrics import EVALUATION
from fugaku_gpt.records.run import REFUSED, RunDirectory
from fugaku_gpt.records.summary import summarise
from fugaku_gpt.records.sweep import ATTEMPTS, digest_of, read_sweep_entry
from fugaku_gpt.report.imported import imported_row, is_imported
from fugaku_gpt.report.notes_table import NO_VALUE, toggle_text
from fugaku_gpt.report.rows import COLUMN_KNOBS, FIGURES, MORE_KNOBS, UNFINISHED, UNREADABLE, ResultRow, merge_repeats
from fugaku_gpt.report.sheet import sheet_rows, sheets_in

_SUB = re.compile(r"^repeat-(\d{1,9})$")  # folder of one sub-job of a bulk job, in the bulk job's run directory
# PJM's name of a power knob → its name in a run file
_FIELDS = {knob.resource: knob.name for knob in POWER_KNOBS}


def collect_rows(paths: Sequence[Path], *, is_read_only: bool = False) -> Tuple[List[ResultRow], List[ResultRow]]:
    """Return (one row per configuration, one row per run) of run directories and of folders of them.

    Rows are in the order of their sweep, otherwise by model, sequence length, nodes, layout, batch and name. Those of
    imported sheets (:mod:`fugaku_gpt.report.sheet`) come last, each as it is.

    Args:
        is_read_only: whether the end of a lost run is not recorded in it.

    Raises:
        UsageError: a path holds no run and no sheet, or it is one run, and a file in it is damaged. Among several runs
            such a one is a row of status ``UNREADABLE``.
    """
    sheets_of_path = {path: sheets_in(path) for path in paths}
    with_runs = [path for path, sheets in sheets_of_path.items() if not sheets or holds_runs(path)]
    directories = find_runs(with_runs)
    read = read_run if len(directories) == 1 else _read_run_or_damage
    runs = sorted((read(path, is_read_only) for path in directories), key=_sort_key)
    groups: Dict[Tuple[str, str], List[ResultRow]] = {}
    for row in runs:
        groups.setdefault((row.sweep, row.digest), []).append(row)
    merged = _with_differences([merge_repeats(members) for members in groups.values()])
    every_sheet = dict.fromkeys(sheet for sheets in sheets_of_path.values() for sheet in sheets)
    references = [row for sheet in every_sheet for row in sheet_rows(sheet)]
    return [*merged, *references], [*runs, *references]


def holds_runs(path: Path) -> bool:
    """True for a run directory, and for a folder with one directly below it."""
    return path.is_dir() and (_is_run_directory(path) or any(map(_is_run_directory, path.iterdir())))


_IN_COLUMNS = frozenset(
    ("job.nodes", "layout.dp", "layout.tp", "layout.pp", "training.micro_batch", "training.global_batch")
    + ("model.name", "model.seq_len", "node.ranks_per_node")
    + tuple(knob.key for knob in (*COLUMN_KNOBS, *MORE_KNOBS))
)


def _with_differences(rows: List[ResultRow]) -> List[ResultRow]:
    """Add to each row's remarks the settings that differ between the rows of its model, unless a column shows them."""
    models: Dict[Tuple[str, Optional[int]], List[int]] = {}
    for number, row in enumerate(rows):
        models.setdefault((row.size, row.seq_len), []).append(number)
    for numbers in models.values():
        with_settings = [number for number in numbers if not rows[number].trainer]
        named = differing_settings([dict(rows[number].settings) for number in with_settings], _IN_COLUMNS)
        for number, settings in zip(with_settings, named):
            rows[number] = replace(rows[number], remarks=(*settings, *rows[number].remarks))
    return rows


def find_runs(paths: Sequence[Path]) -> List[Path]:
    """Find the run directories among ``paths`` and directly below them; earlier attempts are not listed, and a run that
    is there by a link as well is listed once."""
    run_directories: List[Path] = []
    for path in paths:
        if not path.is_dir():
            raise UsageError(f"{path}: no such folder; give a run directory, or a folder of run directories")
        if _is_run_directory(path):
            run_directories += sub_runs(path) or [path]
            continue
        children = [child for child in sorted(path.iterdir()) if child.name != ATTEMPTS and _is_run_directory(child)]
        if not children:
            raise UsageError(f"{path}: holds no run directory (a folder with config.yaml, or an imported log)")
        for child in children:
            run_directories += sub_runs(child) or [child]
    by_folder: Dict[Path, Path] = {}
    for path in sorted(dict.fromkeys(run_directories), key=Path.is_symlink):
        by_folder.setdefault(resolved(path), path)
    chosen = set(by_folder.values())
    return [path for path in dict.fromkeys(run_directories) if path in chosen]


def name_runs(runs: Sequence[Path], paths: Sequence[Path]) -> Dict[Path, str]:
    """Name runs that were found in ``paths``: by their paths below the folder that holds all of these."""
    stores = [path.parent if _is_run_directory(path) else path for path in paths]
    top = os.path.commonpath(list(map(os.path.abspath, stores)))
    return {run: os.path.relpath(os.path.abspath(run), top) for run in runs}


def sub_runs(path: Path) -> List[Path]:
    """List the run directories that a bulk job's sub-jobs have left, in their order; empty for other runs."""
    if not (path / JOB_FILE).exists():
        return []
    named = [(_SUB.search(child.name), child) for child in path.glob("repeat-*")]
    numbered = [(int(number[1]), child) for number, child in named if number is not None]
    return [child for _, child in sorted(numbered) if _is_run_directory(child) or (child / "result.json").exists()]


def locate_job(path: Path) -> Tuple[Path, Optional[int]]:
    """Return (directory with the records of a run's job, number of the run's sub-job or None)."""
    number = _SUB.search(path.name)
    if number is not None and not (path / JOB_FILE).exists() and (path.parent / JOB_FILE).exists():
        return path.parent, int(number[1])
    return path, None


def run_job_id(job: SubmittedJob, sub: Optional[int]) -> str:
    """Id of the job that executed a run: that of sub-job ``sub`` if the job is a bulk job, else the job's own."""
    if sub is None:
        return job.job_id
    return dict(zip(bulk_numbers(job.bulk), sub_job_ids(job))).get(sub, job.job_id)


def read_run(path: Path, is_read_only: bool = False) -> ResultRow:
    """Read the row of one run directory.

    Args:
        is_read_only: whether the end of a lost run is not recorded in it.

    Raises:
        UsageError: a file in it is damaged.
    """
    if is_imported(path):
        return _with_job(imported_row(path), path)
    directory = RunDirectory(path)
    result = directory.result() or (lost_result(path) if is_read_only else conclude_lost_run(path))
    environment, entry = directory.environment() or {}, read_sweep_entry(path)
    settings: Dict[str, Any]
    config: Optional[RunConfig] = None
    file = directory.config_file if directory.config_file.exists() else locate_job(path)[0] / "config.yaml"
    try:
        config, changed, _ = load_recorded(file)
        settings = _row_settings(config)
    except ConfigError:  # a refused row: its settings as they were written
        written = dict(flatten(read_yaml_file(file)))
        settings, changed = _settings_as_written(written), readable_settings(written)
    lines = directory.metrics("iteration")
    summary = result.summary if result is not None else {}
    if not summary and config is not None and lines:
        summary = summarise(config, lines, directory.metrics("validation"))
    figures: Dict[str, Any] = {name: summary.get(name) for name in _FIGURES}
    if result is not None and result.status == REFUSED:
        settings["requested"] = _every_request(changed)
    evaluations = _evaluations(directory) if config is not None and config.training.eval_files else ()
    accounts = accounts_of_run(path)
    toggles = _toggle_fields(settings.pop("requested"), environment, used_knobs(accounts))
    job_id, state, why, submitted = _job_fields(path)
    started = result.started if result is not None else submitted
    build = environment.get("build") or {}
    torch_build = str(build.get("torch", ""))
    text = read_text(file, YAML_TEXT)
    attempts = path.parent / ATTEMPTS / path.name
    return ResultRow(
        **settings,
        **toggles,
        **figures,
        evaluations=evaluations,
        threads_per_rank=_threads(environment),
        hardware=str(environment.get("processor") or ""),
        torch=_major_minor(torch_build),
        torch_build=torch_build,
        git_commit=str(environment.get("git_commit") or ""),
        iterations=result.iterations if result is not None else (lines[-1]["iteration"] if lines else 0),
        status=result.status if result is not None else state or UNFINISHED,
        reason=result.reason if result is not None else why,
        job_id=job_id,
        remarks=(*_bucket_remarks(config), *job_remarks(accounts)),
        **energy_figures(
            accounts,
            figures["seconds_per_iteration"],
            settings["nodes"],
            0 if figures["images_per_second"] else (settings["global_batch"] or 0) * (settings["seq_len"] or 0),
        ),
        date=time.strftime("%m-%d", time.gmtime(started)) if started is not None else "",
        attempts=1 + (len(list(attempts.iterdir())) if attempts.is_dir() else 0),
        sweep=entry.sweep if entry is not None else "",
        order=entry.order if entry is not None else 0,
        digest=entry.digest if entry is not None else digest_of(text),
        runs=(str(path),),
        settings=tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in changed.items()),
    )


def _read_run_or_damage(path: Path, is_read_only: bool) -> ResultRow:
    """Read the row of a run; of one with a damaged file, a row that says which and shows nothing else."""
    try:
        return read_run(path, is_read_only)
    except UsageError as error:
        unknown: Dict[str, Any] = dict.fromkeys(("seq_len", "nodes", "dp", "tp", "pp", "micro_batch", "global_batch"))
        digest = f"unreadable: {path}"  # so that it counts as no repeat of another run
        return ResultRow(
            NO_VALUE, **unknown, dtype="", status=UNREADABLE, reason=str(error), digest=digest, runs=(str(path),)
        )


def _evaluations(directory: RunDirectory) -> Tuple[Tuple[str, float, float], ...]:
    """The first and the last finite loss of each of the run's evaluation files, by name."""
    losses: Dict[str, List[float]] = {}
    for line in directory.metrics(EVALUATION):
        if line.get("loss") is not None:
            losses.setdefault(str(line.get("name")), []).append(line["loss"])
    return tuple((name, values[0], values[-1]) for name, values in losses.items())


_FIGURES = ("node_used_bytes", "rss_max_bytes", *FIGURES)


def _row_settings(config: RunConfig) -> Dict[str, Any]:
    layout, training, node = config.layout, config.training, config.node
    return {
        "size": size_name(config.model),
        "formula_notes": notes_formula(config.model),
        "formula_exact": exact_formula(config.model),
        "layers": config.model.layers,
        "hidden": config.model.hidden,
        "heads": config.model.heads,
        "seq_len": config.model.seq_len,
        "nodes": config.job.nodes,
        "dp": layout.dp,
        "tp": layout.tp,
        "pp": layout.pp,
        "micro_batch": training.micro_batch,
        "global_batch": training.global_batch,
        "ranks_per_node": config.ranks_per_node,
        "dtype": training.dtype,
        "requested": {knob.name: getattr(node, knob.name) for knob in (*COLUMN_KNOBS, *MORE_KNOBS)},
    }


def _bucket_remarks(config: Optional[RunConfig]) -> Tuple[str, ...]:
    """The sizes of grids of a classifier."""
    if config is None or not config.model.is_grid_classifier:
        return ()
    return (f"buckets {'+'.join(map(str, config.data.buckets))}",)


def _settings_as_written(written: Mapping[str, Tree]) -> Dict[str, Any]:
    """Like :func:`_row_settings`, for settings that make no valid configuration, as far as they can be read."""
    text = {key: value.text for key, value in written.items() if isinstance(value, Scalar)}
    integers = {key: int(value) for key, value in text.items() if re.fullmatch(r"\d{1,9}", value)}
    try:
        model_settings = SettingsLayer("", {key: value for key, value in written.items() if key.startswith("model.")})
        size = size_name(build_run_config([model_settings]).model)
    except ConfigError:
        size = text.get("model.name") or NO_VALUE
    defaults = RunConfig()
    layout = {name: integers.get(f"layout.{name}", 1) for name in ("dp", "tp", "pp")}
    nodes = integers.get("job.nodes", 1)
    ranks = layout["dp"] * layout["tp"] * layout["pp"]
    return {
        "size": size,
        "seq_len": integers.get("model.seq_len", defaults.model.seq_len),
        "nodes": nodes,
        **layout,
        "micro_batch": integers.get("training.micro_batch", defaults.training.micro_batch),
        "global_batch": integers.get("training.global_batch", defaults.training.global_batch),
        "ranks_per_node": integers.get("node.ranks_per_node", max(1, ranks // max(1, nodes))),
        "dtype": text.get("training.dtype", defaults.training.dtype),
        "requested": _every_request(readable_settings(written)),
    }


def _every_request(changed: Mapping[str, Any]) -> Dict[str, Any]:
    """The knobs that a refused run asks for, also those that tables do not show of a run that took place."""
    in_order = dict.fromkeys((*COLUMN_KNOBS, *MORE_KNOBS, *NODE_KNOBS))
    return {knob.name: changed.get(knob.key) for knob in in_order}


def _toggle_fields(
    requested: Mapping[str, Any], environment: Mapping[str, Any], used: Mapping[str, int]
) -> Dict[str, Any]:
    """Fields of the toggles that were applied according to the scheduler's account, or else to the ranks' environment;
    the other requested toggles go to ``not_applied``."""
    seen = {toggle.get("name"): bool(toggle.get("applied")) for toggle in environment.get("toggles") or []}
    asked = {name: value for name, value in requested.items() if is_requested(value)}
    seen.update({name: used[name] == value for name, value in asked.items() if name in used})
    applied = {name: value for name, value in asked.items() if seen.get(name, False)}
    missing = tuple(toggle_text(name, value) for name, value in asked.items() if name not in applied)
    for knob in POWER_KNOBS:
        if knob.historical_value is not None and used.get(knob.name, knob.historical_value) != knob.historical_value:
            applied[knob.name] = used[knob.name]
    knobs = tuple((knob.name, applied.pop(knob.name)) for knob in MORE_KNOBS if knob.name in applied)
    return {**applied, "knobs": knobs, "not_applied": missing}


def _with_job(row: ResultRow, path: Path) -> ResultRow:
    """Complete the row of an imported log by the records of the job that wrote it."""
    accounts = accounts_of_run(path)
    tokens = (row.global_batch or 0) * (row.seq_len or 0)
    return replace(
        row,
        job_id=row.job_id or _job_fields(path)[0],
        remarks=(*row.remarks, *job_remarks(accounts)),
        **energy_figures(accounts, row.seconds_per_iteration, row.nodes, tokens),
    )


def job_remarks(accounts: Tuple[JobAccount, ...]) -> Tuple[str, ...]:
    """Remarks on the power of a row's jobs."""
    capped = tuple(f"power capped {job.capped}" for job in accounts if job.capped)
    return (*capped, "energy simulated") if energy_of(accounts).basis == SIMULATED else capped


def used_knobs(accounts: Sequence[JobAccount]) -> Dict[str, int]:
    """Power knobs that all jobs of a run have used alike: name in a run file → value."""
    values_of_knob: Dict[str, Set[int]] = {}
    for job in accounts:
        for name, knob in job.knobs.items():
            digits = re.match(r"\d{1,9}\b", knob.use or "")
            if digits:
                values_of_knob.setdefault(_FIELDS.get(name, name), set()).add(int(digits[0]))
    return {name: values.pop() for name, values in values_of_knob.items() if len(values) == 1}


def energy_figures(
    accounts: Sequence[JobAccount], seconds: Optional[float], nodes: Optional[int], tokens: int
) -> Dict[str, Any]:
    """The energy fields of a row: average power times the time of an iteration; ``tokens`` per iteration."""
    energy = energy_of(tuple(accounts))
    if energy.watts is None:
        return {"energy_basis": energy.basis}
    counted = energy.nodes or nodes
    per_iteration = energy.watts * seconds if seconds is not None else None
    return {
        "energy_joules": energy.joules,
        "watts_per_node": energy.watts / counted if counted else None,
        "joules_per_iteration": per_iteration,
        "joules_per_token": per_iteration / tokens if per_iteration is not None and tokens else None,
        "energy_basis": energy.basis,
    }


def accounts_of_run(path: Path) -> Tuple[JobAccount, ...]:
    """The accounts of a run's jobs; for a sub-job of a bulk job, only its own.

    Raises:
        UsageError: the file is not of this format.
    """
    job_directory, sub = locate_job(path)
    accounts = read_accounting(job_directory)
    if sub is None:
        return accounts
    ids = ((job, read_job_id(job.scheduler, job.job_id)) for job in accounts)
    return tuple(job for job, job_id in ids if job_id is not None and job_id.index == sub)


def _job_fields(path: Path) -> Tuple[str, str, str, Optional[float]]:
    """Return (id, state, the scheduler's reason, time of submission) of the job that executed a run; the state is empty
    if it says no more than that there is no result."""
    job_directory, sub = locate_job(path)
    history = read_history(job_directory)
    job = deciding_job(history, exit_records(job_directory))
    if job is None:
        return "", REJECTED if history.refused else "", history.refused, None
    job_id = run_job_id(job, sub)
    status = history.statuses.get(job_id) or history.statuses.get(job.job_id)
    if status is None or status.state == ENDED:
        return job_id, "", "", job.time
    return job_id, status.state, status.reason if status.state in OVER else "", job.time


def _threads(environment: Mapping[str, Any]) -> Optional[int]:
    ranks = environment.get("ranks") or []
    threads = ranks[0].get("threads") if ranks and isinstance(ranks[0], dict) else None
    return threads if isinstance(threads, int) else None


def _major_minor(torch: str) -> str:
    matched = re.match(r"\d+\.\d+", torch)
    return matched[0] if matched else ""


def _is_run_directory(path: Path) -> bool:
    return path.is_dir() and ((path / "config.yaml").exists() or is_imported(path))


def _sort_key(row: ResultRow) -> Tuple[Any, ...]:
    layout = tuple(value or 0 for value in (row.dp, row.tp, row.pp, row.micro_batch, row.global_batch))
    if row.sweep:
        return (row.sweep, row.order, *layout, row.runs)
    return ("", 0, row.size, row.seq_len or 0, row.nodes or 0, *layout, row.runs)
