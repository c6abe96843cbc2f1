"""Runs a sweep on this machine, one run at a time; survives failures, can be stopped, and resumes what is missing.

A run's directory is ``OUT/<run>``. A run that ended well is kept. One that failed, timed out or ran out of memory is
kept too, unless failed runs are to be tried again; one that was interrupted, or refused (a corpus that was not there
yet), is tried again. What an earlier attempt has left moves to ``OUT/attempts/<run>/<number>``, so no retry
hides it.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Protocol

import yaml

from fugaku_gpt.config import RunConfig, dump_run_config, load_run_config
from fugaku_gpt.errors import ConfigError, UsageError
from fugaku_gpt.jobs.ending import result_of
from fugaku_gpt.jobs.processes import Outcome
from fugaku_gpt.records.files import write_text_atomically
from fugaku_gpt.records.run import INTERRUPTED, OK, REFUSED, Result, RunDirectory
from fugaku_gpt.records.sweep import ATTEMPTS, SweepEntry, read_sweep_entry, write_sweep_entry
from fugaku_gpt.sweep.expand import Run, Sweep
from fugaku_gpt.sweep.lock import SweepLock

Launch = Callable[..., Outcome]  # as fugaku_gpt.jobs.launcher.launch


class Progress(Protocol):
    """Who is told what goes on."""

    def started(self, run: Run, number: int, total: int, directory: RunDirectory) -> None:
        """The ``number``-th of ``total`` runs begins."""

    def ended(self, run: Run, number: int, total: int, result: Result, kept: bool) -> None:
        """A run has ended, or is ``kept`` from an earlier time."""


@dataclass(frozen=True)
class Ended:
    """One run of the sweep and how it ended."""

    run: Run
    result: Result

    @property
    def failed(self) -> bool:
        """Neither ok nor refused for its configuration, which is an answer and not a failure."""
        return self.result.status != OK and self.run.config is not None


def run_sweep(
    sweep: Sweep,
    out: Path,
    launch: Launch,
    progress: Progress,
    *,
    timeout: Optional[float] = None,
    retry_failed: bool = False,
) -> List[Ended]:
    """Run what is missing. The list ends early, with a run that was interrupted, if the sweep was stopped.

    Args:
        launch: starts the ranks of one run and waits for them; see :func:`fugaku_gpt.jobs.launcher.launch`.
        timeout: seconds for each run, beside its own ``job.elapse``.

    Raises:
        UsageError: another sweep runs in ``out``, or holds runs of other configurations under the same names.
    """
    with SweepLock(out) as lock:
        for run in sweep.runs:
            _check_recorded(run, out / run.name)
        ended: List[Ended] = []
        total = len(sweep.runs)
        for number, run in enumerate(sweep.runs, start=1):
            directory = RunDirectory(out / run.name)
            result = _to_keep(run, directory, retry_failed)
            kept = result is not None
            if result is None:
                _make_room(directory.path, out / ATTEMPTS / run.name)
                progress.started(run, number, total, directory)
                result = _run_one(sweep, run, directory, launch, timeout, lock.mark)
            ended.append(Ended(run, result))
            progress.ended(run, number, total, result, kept)
            if result.status == INTERRUPTED:
                break
        return ended


def _run_one(
    sweep: Sweep, run: Run, directory: RunDirectory, launch: Launch, timeout: Optional[float], mark: str
) -> Result:
    started = time.time()
    directory.path.mkdir(parents=True, exist_ok=True)
    write_sweep_entry(directory.path, SweepEntry(sweep.name, run.name, run.row, run.order, run.repeat, run.digest))
    if run.config is None:
        text = str(yaml.safe_dump(dict(run.written), sort_keys=False, width=120, allow_unicode=True))
        write_text_atomically(directory.config_file, text)
        result = Result(REFUSED, _first_line(run.refusal), started, started)
    else:
        directory.create(dump_run_config(run.config), mark)
        log = directory.log_file
        limits = [limit for limit in (timeout, run.config.job.elapse) if limit is not None]
        try:
            outcome = launch(
                run.config,
                directory.config_file,
                directory.path,
                log=log,
                timeout=min(limits) if limits else None,
                mark=mark,
            )
            result = result_of(directory, run.config, outcome, log, started)
        except UsageError as error:
            result = Result(REFUSED, _first_line(str(error)), started, time.time())
    directory.write_result(result)
    return result


def _to_keep(run: Run, directory: RunDirectory, retry_failed: bool) -> Optional[Result]:
    """The recorded result, if the run need not be run."""
    result = directory.result()
    if result is None or result.status == INTERRUPTED:
        return None
    if result.status == REFUSED:  # cheap to ask again, and its cause may be gone: a corpus made, an error mended
        return None
    return None if retry_failed and result.status != OK else result


def _make_room(directory: Path, attempts: Path) -> None:
    """Move what an earlier attempt has left out of the way; what never started any rank is no attempt."""
    if not RunDirectory(directory).log_file.exists():
        for name in ("result.json", "config.yaml"):
            if (directory / name).exists():
                (directory / name).unlink()
        return
    number = 1 + max((int(path.name) for path in attempts.glob("*") if path.name.isdigit()), default=0)
    attempts.mkdir(parents=True, exist_ok=True)
    directory.rename(attempts / str(number))


def _check_recorded(run: Run, directory: Path) -> None:
    """Refuse to mix configurations under one name.

    Raises:
        UsageError: the directory is not of this run.
    """
    if not directory.is_dir() or not any(directory.iterdir()):
        return
    entry = read_sweep_entry(directory)
    if entry is None:
        raise UsageError(f"{directory}: holds files that are not a sweep's; choose another --out, or move them away")
    record = RunDirectory(directory)
    result = record.result()
    if entry.digest == run.digest or (result is not None and result.status == REFUSED):
        return
    raise UsageError(
        f"{directory}: run {run.name} was started with another configuration{_differences(record, run)}; "
        "choose another --out, or move this folder away to have it run again"
    )


def _differences(record: RunDirectory, run: Run) -> str:
    """`` (training.iterations: 60 then, 80 now)``, or "" where the recorded configuration cannot be read."""
    if run.config is None:
        return ""
    try:
        then, now = _flat(load_run_config(record.config_file)), _flat(run.config)
    except ConfigError:
        return ""
    changed = [f"{key}: {then[key]} then, {now[key]} now" for key in now if then.get(key) != now[key]]
    return f" ({'; '.join(changed[:3])})" if changed else ""


def _first_line(text: str) -> str:
    first, *more = text.splitlines()
    return f"{first} (and {len(more)} more)" if more else first


def _flat(config: RunConfig) -> Dict[str, Any]:
    return {f"{section}.{key}": value for section, values in asdict(config).items() for key, value in values.items()}
