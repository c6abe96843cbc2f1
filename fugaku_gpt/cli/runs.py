"""``fugaku-gpt runs``: list and show the runs in a store of run directories."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Tuple

import click

from fugaku_gpt.cli.options import PATH, format_option
from fugaku_gpt.cli.output import echo, json_document, render_rows
from fugaku_gpt.config import RunConfig, changed_settings, load_run_config, preset_names
from fugaku_gpt.errors import ConfigError, UsageError
from fugaku_gpt.jobs.run_table import (
    IMAGES,
    NOTES,
    RUN_COLUMNS,
    SHOWN,
    RunValues,
    chosen_runs,
    listed_runs,
    run_names,
    valid_run_names,
)
from fugaku_gpt.jobs.store import FIGURES

if TYPE_CHECKING:
    from fugaku_gpt.config.expression_tokens import Value
    from fugaku_gpt.jobs.store import RunRecord

_DEFAULT_STORE = Path("runs")

_store_argument = click.argument("store", metavar="[STORE]", required=False, default=_DEFAULT_STORE, type=PATH)


@click.group()
def runs() -> None:
    """List and show the runs in STORE (default: runs), in the folders of sweeps below it, and their attempts.

    The end of a run of yours whose processes on this machine are all gone, and which has no result, is recorded in it
    as `lost`.
    """


@runs.command("ls")
@_store_argument
@click.option(
    "--where", "condition", metavar="EXPR", help="List only runs that meet this condition, such as layout.tp > 1."
)
@click.option(
    "--sort", "keys", metavar="NAME[,NAME]", help="Sort by columns or settings; -NAME sorts the largest first."
)
@click.option("--columns", metavar="NAME[,NAME]", help="Columns and settings to show.")
@click.option("--attempts", is_flag=True, help="List earlier attempts too.")
@format_option()
def list_(
    store: Path, condition: Optional[str], keys: Optional[str], columns: Optional[str], attempts: bool, form: str
) -> None:
    """List the runs in STORE.

    The notes name the settings in which runs of one model differ, such as lr=0.001, and which no column shows. Where a
    run classifies grids, there is a column images_per_second.

    EXPR and NAME may use the columns (status, sweep, iterations, seconds_per_iteration, last_loss, job, ...) and every
    setting of a run file, such as layout.dp; texts in EXPR are quoted: status == "ok".
    """
    from fugaku_gpt.config.expression import parse_expression

    shown = run_names(columns, "--columns") if columns is not None else list(SHOWN)
    ordering = run_names(keys, "--sort", is_order=True) if keys is not None else []
    if condition is not None:
        parse_expression(condition, "--where", valid_run_names())  # a mistake in it is reported before runs are read
    records = [record for record in listed_runs(store) if attempts or record.attempt == 0]
    if columns is None and any(IMAGES in record.figures for record in records):
        shown.insert(shown.index("seconds_per_iteration") + 1, IMAGES)
    records = chosen_runs(records, condition, ordering, shown)
    values = RunValues(records, shown)
    cells = [list(map(_cell_of(name, form), map(values.of(name), records))) for name in shown]
    rows = (dict(zip(shown, row)) for row in (zip(*cells) if cells else [()] * len(records)))
    echo(render_rows(shown, rows, form), nl=False)
    for record in records:
        if record.problem:
            echo(f"note: {store / record.run}: {record.problem}", err=True)


@runs.command()
@click.argument("directory", metavar="RUN", type=PATH)
@format_option()
def show(directory: Path, form: str) -> None:
    """Show one run: how it ended, its settings that differ from its preset, its jobs, and what it ran on."""
    from fugaku_gpt.jobs.store import read_record
    from fugaku_gpt.launch.lost_run import conclude_lost_run

    conclude_lost_run(directory)
    record = read_record(directory, ".") if (directory / "config.yaml").exists() else None
    if record is None:
        raise UsageError(f"{directory}: not a run directory: it has no config.yaml")
    facts = {
        "run": {**_run_facts(record), "path": str(directory)},
        **_config_facts(directory),
        **_job_and_environment_facts(directory),
    }
    if form == "json":
        echo(json_document(facts), nl=False)
        return
    rows = [
        {"of": section, "name": name, "value": _value_text(value)}
        for section, values in facts.items()
        for name, value in _flat(values)
        if value not in (None, "", [], {})
    ]
    echo(render_rows(("of", "name", "value"), rows, form), nl=False)


@runs.command()
@_store_argument
def reindex(store: Path) -> None:
    """Rebuild the index of STORE from all runs; remove temporary files that killed writers have left."""
    from fugaku_gpt.jobs.store import reindex as read_all

    listing, removed = read_all(store)
    problems = [record for record in listing.runs if record.problem]
    for record in problems:
        echo(f"{store / record.run}: {record.problem}", err=True)
    leftover = f"; {removed} leftover temporary files removed" if removed else ""
    echo(f"{store}: {len(listing.runs)} runs, {len(problems)} of them damaged{leftover}")


_DEFAULTS = RunConfig()


def _cell_of(name: str, form: str) -> Callable[["Value"], Any]:
    """The function that makes a cell of a column's value."""
    is_raw, is_time = form in ("csv", "json"), name in ("started", "ended")
    pattern = "{:.4f}" if name == "last_loss" else "{:.4g}"

    def cell(value: "Value") -> Any:
        if value is None or value == "" or value == ():
            return None
        if isinstance(value, tuple):
            return list(value) if is_raw else ", ".join(map(str, value))
        if is_raw or isinstance(value, str):
            return value
        if is_time:
            return _clock(value)
        return pattern.format(value) if isinstance(value, float) else value

    return cell


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds)) + " UTC"


def _run_facts(record: "RunRecord") -> Dict[str, Any]:
    left_out = ("run", "attempt", NOTES, *FIGURES)
    facts = {name: getattr(record, name) for name in RUN_COLUMNS if name not in left_out}
    for name in ("started", "ended"):
        facts[name] = _clock(facts[name]) if facts[name] is not None else None
    return {**facts, "figures": dict(record.figures)}


def _config_facts(directory: Path) -> Dict[str, Any]:
    """The preset that the run is nearest to, and the settings that differ from it."""
    try:
        settings = changed_settings(load_run_config(directory / "config.yaml"))
    except ConfigError as error:
        return {"settings": {"not valid": "; ".join(str(error).splitlines())}}
    preset, base = _nearest_preset(settings)
    defaults = _DEFAULTS
    differing: Dict[str, Any] = {}
    for key in {**base, **settings}:
        section, _, leaf = key.partition(".")
        default = base.get(key, getattr(getattr(defaults, section), leaf))
        value = settings.get(key, getattr(getattr(defaults, section), leaf))
        if value != default:
            default_value = list(default) if isinstance(default, tuple) else default
            differing[key] = {"value": value, "preset" if key in base else "default": default_value}
    return {"preset": {"name": preset}, "settings": differing}


def _nearest_preset(settings: Dict[str, Any]) -> Tuple[Optional[str], Dict[str, Any]]:
    """Name and settings of the preset with this model, of several the most similar; (None, {}) if there is none."""
    candidates: List[Tuple[int, str, Dict[str, Any]]] = []
    for name in preset_names():
        base = changed_settings(load_run_config(preset=name))
        shape = {key: base.get(key) for key in ("model.layers", "model.hidden", "model.heads")}
        if shape == {key: settings.get(key) for key in shape}:
            differences = sum(base.get(key) != settings.get(key) for key in {**base, **settings})
            candidates.append((differences, name, base))
    _, nearest, settings_of_preset = min(candidates, key=lambda candidate: candidate[0], default=(0, None, {}))
    return nearest, settings_of_preset


def _job_and_environment_facts(directory: Path) -> Dict[str, Any]:
    from fugaku_gpt.records.run import RunDirectory

    facts: Dict[str, Any] = {"jobs": _job_facts(directory)}
    try:
        environment = RunDirectory(directory).environment() or {}
    except UsageError as error:
        return {**facts, "environment": {"damaged": str(error)}}
    ranks = environment.pop("ranks", None)
    if isinstance(ranks, list):
        environment["ranks"] = len(ranks)
        environment["hosts"] = sorted({str(rank.get("host")) for rank in ranks if isinstance(rank, dict)})
    return {**facts, "environment": environment}


def _job_facts(directory: Path) -> Dict[str, Any]:
    from fugaku_gpt.jobs.outcome import job_outcome
    from fugaku_gpt.records.job import read_history

    try:
        history = read_history(directory)
        if not history.jobs and not history.open and not history.refused:
            return {}
        verdict = job_outcome(directory)
    except UsageError as error:
        return {"damaged": str(error)}
    facts: Dict[str, Any] = {}
    for job in history.jobs:
        state = history.statuses.get(job.job_id)
        details = [
            job.scheduler,
            f"link {job.link} of {job.chain}" if job.chain > 1 else "",
            f"bulk {job.bulk}" if job.bulk else "",
        ]
        details += [
            f"submitted {_clock(job.time)}",
            f"{state.state} {state.raw}".strip() if state is not None else "not queried yet",
        ]
        facts[job.job_id] = ", ".join(detail for detail in details if detail)
    return {
        **facts,
        "verdict": ": ".join(text for text in (verdict.status or verdict.state, verdict.cause) if text),
        "advice": verdict.advice,
        "earlier attempts": history.attempts or None,
    }


def _flat(values: Any, prefix: str = "") -> List[Tuple[str, Any]]:
    """(dotted name, value) of each of nested facts."""
    named_values: List[Tuple[str, Any]] = []
    for name, value in values.items():
        dotted = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(value, dict) and not ({"value"} <= set(value)):
            named_values += _flat(value, dotted)
        elif isinstance(value, list) and value and all(isinstance(item, dict) and "name" in item for item in value):
            for item in value:
                named_values.append((f"{dotted}.{item['name']}", {key: item[key] for key in item if key != "name"}))
        else:
            named_values.append((dotted, value))
    return named_values


def _value_text(value: Any) -> str:
    if isinstance(value, dict) and "value" in value:
        reference = ", ".join(f"{key} {_value_text(entry)}" for key, entry in value.items() if key != "value")
        return f"{_value_text(value['value'])} ({reference})"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_value_text(entry)}" for key, entry in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_value_text, value)) or "none"
    if value is None or value == "":
        return "not set"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value).lower() if isinstance(value, bool) else str(value)
