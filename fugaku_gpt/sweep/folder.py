"""A sweep's folder: which run lies where, what is mixed up, and room for another attempt."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Dict, List, Tuple

import yaml

from fugaku_gpt.config import RunConfig, load_run_config
from fugaku_gpt.errors import ConfigError, UsageError
from fugaku_gpt.records.files import is_temporary, write_text_atomically
from fugaku_gpt.records.job import read_history
from fugaku_gpt.records.run import REFUSED, Result, RunDirectory
from fugaku_gpt.records.sweep import ATTEMPTS, FILE, SweepEntry, read_sweep_entry, write_sweep_entry
from fugaku_gpt.sweep.expand import Run, Sweep

# how a run is handed in, not what is run: these may change between attempts
_HANDLING = (
    "job.scheduler", "job.name", "job.group", "job.elapse", "job.elapse_min", "job.stop_margin", "job.chain",
)  # fmt: skip


def settled(sweep: Sweep, out: Path) -> Sweep:
    """The sweep with each run under the name of the directory that holds it already.

    A row that gets a namesake later is named with a piece of its digest; what it has run stays where it is.

    Raises:
        UsageError: a run's directory holds another run, or foreign files.
    """
    places: Dict[Tuple[str, int], str] = {}
    for path in sorted(out.glob(f"*/{FILE}")):
        entry = read_sweep_entry(path.parent)
        if entry is not None:
            places.setdefault((entry.digest, entry.repeat), path.parent.name)
    names = {run.name for run in sweep.runs}
    runs: List[Run] = []
    for run in sweep.runs:
        place = places.get((run.digest, run.repeat))
        if place is not None and place not in names and not (out / run.name).exists():
            run = replace(run, name=place)
        check_recorded(run, out / run.name)
        runs.append(run)
    return replace(sweep, runs=tuple(runs))


def check_recorded(run: Run, directory: Path) -> None:
    """Refuse to mix configurations under one name.

    Raises:
        UsageError: the directory is not of this run.
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
    changed = _differences(record, run)
    if changed is not None and not changed:
        return
    said = f" ({'; '.join(changed[:3])})" if changed else ""
    raise UsageError(
        f"{directory}: run {run.name} was started with another configuration{said}; "
        "choose another --out, or move this folder away to have it run again"
    )


def enter(sweep: Sweep, run: Run, directory: Path) -> None:
    """Say in a run's directory which run it is."""
    directory.mkdir(parents=True, exist_ok=True)
    entry = SweepEntry(sweep.name, run.name, run.row, run.order, run.repeat, run.digest, run.variant)
    write_sweep_entry(directory, entry)


def write_refused(sweep: Sweep, run: Run, directory: RunDirectory, reason: str, now: float) -> Result:
    """A refused run's directory: its settings as they were written, and why they make no run."""
    enter(sweep, run, directory.path)
    text = str(yaml.safe_dump(dict(run.written), sort_keys=False, width=120, allow_unicode=True))
    write_text_atomically(directory.config_file, text)
    result = Result(REFUSED, first_line(reason), now, now)
    directory.write_result(result)
    return result


def make_room(directory: Path, attempts: Path) -> None:
    """Move what an earlier attempt has left out of the way; what never started any rank is no attempt."""
    record = RunDirectory(directory)
    if not record.log_file.exists() and not record.metrics_file.exists() and not read_history(directory).jobs:
        for name in ("result.json", "config.yaml"):
            if (directory / name).exists():
                (directory / name).unlink()
        return
    number = 1 + max((int(path.name) for path in attempts.glob("*") if path.name.isdigit()), default=0)
    attempts.mkdir(parents=True, exist_ok=True)
    directory.rename(attempts / str(number))


def attempts_of(out: Path, run: Run) -> Path:
    """Where earlier attempts of a run are kept."""
    return out / ATTEMPTS / run.name


def first_line(text: str) -> str:
    """A message in one line."""
    first, *more = text.splitlines()
    return f"{first} (and {len(more)} more)" if more else first


def _differences(record: RunDirectory, run: Run) -> Any:
    """``["training.iterations: 60 then, 80 now"]``; None where the recorded configuration cannot be read."""
    if run.config is None:
        return None
    try:
        then, now = _flat(load_run_config(record.config_file)), _flat(run.config)
    except ConfigError:
        return None
    return [
        f"{key}: {then[key]} then, {now[key]} now"
        for key in now
        if key not in _HANDLING and not _same(key, then.get(key), now[key])
    ]


_PATHS = ("data.paths", "job.transfer", "job.transfer_dirs", "job.tarball", "job.rank_map_file", "job.profile",
          "job.template")  # fmt: skip


def _same(key: str, then: Any, now: Any) -> bool:
    """Whether a setting means the same; a job's paths were made absolute when it was handed in."""
    if then == now or key not in _PATHS:
        return bool(then == now)
    before, after = (then, now) if isinstance(now, tuple) else ((then,), (now,))
    return len(before) == len(after) and all(
        str(Path(one)) == str(Path(other)) or (Path(one).is_absolute() and Path(one).resolve() == Path(other).resolve())
        for one, other in zip(before, after)
    )


def _flat(config: RunConfig) -> Dict[str, Any]:
    return {f"{section}.{key}": value for section, values in asdict(config).items() for key, value in values.items()}
