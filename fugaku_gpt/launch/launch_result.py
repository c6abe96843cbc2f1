"""What became of a run: from how its launcher ended, its log, and what the ranks themselves have recorded."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import List

from fugaku_gpt.config import RunConfig
from fugaku_gpt.config.values import format_duration
from fugaku_gpt.errors import EXIT_USAGE
from fugaku_gpt.launch.processes import Outcome
from fugaku_gpt.records.run import (
    FAILED,
    INTERRUPTED,
    OK,
    OUT_OF_MEMORY,
    REFUSED,
    STOPPED,
    TIMEOUT,
    Result,
    RunDirectory,
)
from fugaku_gpt.records.summary import summarise

_TAIL_BYTES = 64 * 1024
_REASON_LENGTH = 300
_MEMORY = re.compile(r"MemoryError|can't allocate memory|Cannot allocate memory|std::bad_alloc|oom-kill|Out of memory")
_ERROR = re.compile(r"^(fugaku-gpt: .+|(?:\w+\.)*\w*(?:Error|Exception)\b.*)")
# what launchers say about a rank's end, around the rank's own last words
_LAUNCHER_NOISE = re.compile(
    r"^(=|-{5,}|YOUR APPLICATION TERMINATED|This typically refers|Please see the FAQ|Primary job|a non-zero exit code|"
    r"mpirun (detected|noticed)|the job to be terminated|Abort\(\d+\) on node|application called MPI_Abort|"
    r"\s+Process name:|\s+Exit code:)"
)


def result_of(directory: RunDirectory, config: RunConfig, outcome: Outcome, log: Path, started: float) -> Result:
    """The result of a run that has just ended.

    What the ranks recorded stands, unless who started them knows better: that it ended them itself, that memory ran
    out, or that they failed after they had recorded their success. Of a run that profiles its operators that success
    stands even then, and where it was stopped: what has failed, or was broken off, came after the run.
    """
    own = directory.result()
    tail = log_tail(log)
    lines, validations = directory.metrics("iteration"), directory.metrics("validation")
    measured = Result(
        status=FAILED,
        reason="",
        started=started,
        ended=started + outcome.seconds,
        iterations=lines[-1]["iteration"] if lines else 0,
        summary=summarise(config, lines, validations) if lines else {},
        last_checkpoint=directory.last_checkpoint(),
    )
    if own is not None and own.resumable and own.ended >= started:  # whatever code their launcher tells
        if outcome.stopped_by is None:
            return own
        signal_name = signal.Signals(outcome.stopped_by).name  # the ranks were told by another one
        return replace(own, reason=f"{STOPPED}{signal_name}, after iteration {own.iterations}")
    if own is not None and own.status == OK and own.ended >= started and _profiles_after(config, own):
        return own
    if outcome.stopped_by is not None:
        return replace(measured, status=INTERRUPTED, reason=f"stopped by {signal.Signals(outcome.stopped_by).name}")
    if outcome.timed_out:
        return replace(measured, status=TIMEOUT, reason=f"ended after {format_duration(outcome.seconds)}")
    if own is not None and own.status == OK and outcome.exit_code == 0:
        return own
    if own is not None and own.status not in (OK, FAILED):
        return replace(own, iterations=measured.iterations, summary=own.summary or measured.summary)
    killed_for_memory = outcome.oom_kills > 0
    if killed_for_memory or says_out_of_memory(tail):
        reason = f"{outcome.oom_kills} processes killed by the kernel" if killed_for_memory else reason_of(tail)
        return replace(measured, status=OUT_OF_MEMORY, reason=reason)
    if own is not None and own.status == FAILED:
        return replace(own, iterations=measured.iterations, summary=own.summary or measured.summary)
    if outcome.exit_code == EXIT_USAGE and not _written_since(directory.metrics_file, started):
        return replace(measured, status=REFUSED, reason=reason_of(tail))
    words = f"signal {outcome.signal}" if outcome.signal is not None else f"exit code {outcome.exit_code}"
    if outcome.exit_code == 0:
        words += ", but no result was recorded"
    said = reason_of(tail)
    return replace(measured, reason=f"{words}: {said}" if said else words)


def _profiles_after(config: RunConfig, own: Result) -> bool:
    training = config.training
    return training.profile_operators is not None and own.iterations >= training.iterations


def _written_since(path: Path, moment: float) -> bool:
    try:
        return path.stat().st_mtime >= moment
    except FileNotFoundError:
        return False


def log_tail(log: Path) -> List[str]:
    """The last lines of a log, without blank ones and without what launchers add."""
    try:
        with open(log, "rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - _TAIL_BYTES))
            text = stream.read().decode("utf-8", "replace")
    except OSError:  # nothing was started: there is no log
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip() and not _LAUNCHER_NOISE.match(line)]


def says_out_of_memory(tail: List[str]) -> bool:
    """Whether last words tell of memory that ran out: Python's, the C library's, the kernel's or a scheduler's."""
    return any(_MEMORY.search(line) for line in tail)


def reason_of(tail: List[str]) -> str:
    """One line for a person: the last error that was printed, or else the last three lines."""
    for line in reversed(tail):
        found = _ERROR.match(line.strip())
        if found:
            return found[1].replace("fugaku-gpt: ", "", 1)[:_REASON_LENGTH]
    return " / ".join(line.strip() for line in tail[-3:])[:_REASON_LENGTH]
