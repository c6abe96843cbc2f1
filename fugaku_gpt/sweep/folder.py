"""Manages a sweep's folder: finds recorded runs, refuses foreign ones, and moves earlier attempts aside."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Dict, List, Tuple

import yaml

from fugaku_gpt.config import dotted_settings, load_run_config
from fugaku_gpt.config.paths import PATH_KEYS
from fugaku_gpt.errors import ConfigError, UsageError
from fugaku_gpt.input_files import resolved
from fugaku_gpt.records.files import is_temporary, write_text_atomically
from fugaku_gpt.records.job import read_history
from fugaku_gpt.records.run import REFUSED, Result, RunDirectory
from fugaku_gpt.records.sweep import ACCEPTED_FINDINGS, ATTEMPTS, FILE, SweepEntry, read_sweep_entry, write_sweep_entry
from fugaku_gpt.sweep.expand import Run, Sweep

# how a run is submitted, not what is computed: these settings may change between attempts
_SUBMISSION_KEYS = (
    "job.scheduler", "job.name", "job.group", "job.elapse", "job.elapse_min", "job.stop_margin", "job.chain",
    ACCEPTED_FINDINGS,
)  # fmt: skip


def with_recorded_names(sweep: Sweep, out: Path) -> Sweep:
    """Returns the sweep with each run under the name of the directory that already holds it.

    A row whose name another row gets later is named with a part of its digest; its recorded runs stay where they are.

    Raises:
        UsageError: a run's directory holds another run, or foreign files.
    """
    recorded_names: Dict[Tuple[str, int], str] = {}
    for path in sorted(out.glob(f"*/{FILE}")):
        entry = read_sweep_entry(path.parent)
        if entry is not None:
            recorded_names.setdefault((entry.digest, entry.repeat), path.parent.name)
    names = {run.name for run in sweep.runs}
    runs: List[Run] = []
    for run in sweep.runs:
        recorded_name = recorded_names.get((run.digest, run.repeat))
        if recorded_name is not None and recorded_name not in names and not (out / run.name).exists():
            run = replace(run, name=recorded_name)
        require_same_run(run, out / run.name)
        runs.append(run)
    return replace(sweep, runs=tuple(runs))


def require_same_run(run: Run, directory: Path) -> None:
    """Refuses to mix configurations under one name.

    Raises:
        UsageError: the directory belongs to another run, or holds other files.
    """
    if not directory.is_dir() or all(map(is_temporary, directory.iterdir())):
        return
    entry = read_sweep_entry(directory)
    if entry is None:
        raise UsageError(f"{directory}: holds files that are not a sweep's; choose another --out, or move them away")
    record = RunDirectory(directory)
    result = record.result()
    if entry.digest == run.digest or (result is not None and result.status == REFUSED):
        return
    changes = _differences(record, run)
    if changes is not None and not changes:
        return
    changes_text = f" ({'; '.join(changes[:3])})" if changes else ""
    raise UsageError(
        f"{directory}: run {run.name} was started with another configuration{changes_text}; "
        "choose another --out, or move this folder away to have it run again"
    )


def write_entry(sweep: str, run: Run, directory: Path) -> None:
    """Records in a run's directory which run it is."""
    directory.mkdir(parents=True, exist_ok=True)
    entry = SweepEntry(sweep, run.name, run.row, run.order, run.repeat, run.digest, run.variant)
    write_sweep_entry(directory, entry)


def write_refused(sweep: str, run: Run, directory: RunDirectory, reason: str, timestamp: float) -> Result:
    """Writes a refused run's directory: its settings as they were written, and why they are refused."""
    write_entry(sweep, run, directory.path)
    text = str(yaml.safe_dump(dict(run.written_settings), sort_keys=False, width=120, allow_unicode=True))
    write_text_atomically(directory.config_file, text)
    result = Result(REFUSED, first_line(reason), timestamp, timestamp)
    directory.write_result(result)
    return result


def move_attempt_aside(directory: Path, attempts: Path) -> None:
    """Moves the files of an earlier attempt to ``attempts``; a directory without a started rank is cleared instead."""
    record = RunDirectory(directory)
    if not record.log_file.exists() and not record.metrics_file.exists() and not read_history(directory).jobs:
        for name in ("result.json", "config.yaml"):
            if (directory / name).exists():
                (directory / name).unlink()
        return
    number = 1 + max((int(path.name) for path in attempts.glob("*") if path.name.isdecimal()), default=0)
    attempts.mkdir(parents=True, exist_ok=True)
    directory.rename(attempts / str(number))


def attempts_of(out: Path, run: Run) -> Path:
    """Folder of the earlier attempts of a run."""
    return out / ATTEMPTS / run.name


def first_line(text: str) -> str:
    """Shortens a message to its first line and the number of the others."""
    first, *more_lines = text.splitlines()
    return f"{first} (and {len(more_lines)} more)" if more_lines else first


def _differences(record: RunDirectory, run: Run) -> Any:
    """Changes such as ``["training.iterations: 60 then, 80 now"]``; None if the recorded config is unreadable."""
    if run.config is None:
        return None
    try:
        recorded = dotted_settings(asdict(load_run_config(record.config_file)))
        current = dotted_settings(asdict(run.config))
    except ConfigError:
        return None
    return [
        f"{key}: {recorded[key]} then, {current[key]} now"
        for key in current
        if key not in _SUBMISSION_KEYS and not _is_same_setting(key, recorded.get(key), current[key])
    ]


_PATH_KEYS = (*PATH_KEYS, "job.profile")


def _is_same_setting(key: str, recorded: Any, current: Any) -> bool:
    """True if a setting means the same; a job's paths were made absolute when it was submitted."""
    if recorded == current or key not in _PATH_KEYS:
        return bool(recorded == current)
    recorded_paths, current_paths = (recorded, current) if isinstance(current, tuple) else ((recorded,), (current,))
    return len(recorded_paths) == len(current_paths) and all(
        str(Path(recorded_path)) == str(Path(current_path))
        or (Path(recorded_path).is_absolute() and resolved(Path(recorded_path)) == resolved(Path(current_path)))
        for recorded_path, current_path in zip(recorded_paths, current_paths)
    )
