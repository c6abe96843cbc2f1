"""How a run ended, from its launcher's outcome, its log, and the result that the ranks recorded themselves."""

from __future__ import annotations

import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import List, Optional

from fugaku_gpt.config import RunConfig
from fugaku_gpt.config.values import format_duration
from fugaku_gpt.errors import EXIT_USAGE, UsageError
from fugaku_gpt.launch.processes import Outcome
from fugaku_gpt.machine.signals import signal_name
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
_ERROR = re.compile(r"^(fugaku-gpt: (?!note: |warning: ).+|(?:\w+\.)*\w*(?:Error|Exception)\b.*)")
# lines that a healthy run prints: they are never the cause of its end
_PROGRESS = re.compile(
    r"iteration +\d+/\d+ \||validation at iteration|checkpoint at iteration|resuming from |run directory: |next: "
)
# lines that launchers print about a rank's end, around the rank's own last ones
_LAUNCHER_NOISE = re.compile(
    r"^(=|-{5,}|YOUR APPLICATION TERMINATED|This typically refers|Please see the FAQ|Primary job|a non-zero exit code|"
    r"\[(mpiexec@|proxy:)\S+\] |mpirun (detected|noticed)|the job to be terminated|Abort\(\d+\) on node|"
    r"application called MPI_Abort|"
    r"\s+Process name:|\s+Exit code:)"
)


def result_of_launch(directory: RunDirectory, config: RunConfig, outcome: Outcome, log: Path, started: float) -> Result:
    """Return the result of a run that has just ended.

    The result that the ranks recorded stands, unless the process that started them knows better: that it ended them
    itself, that memory ran out, or that they failed after they had recorded their success. If the run profiles its
    operators, that success stands even then, and also if it was stopped: whatever failed or was stopped came after the
    training.
    """
    problems: List[str] = []
    recorded = _recorded(directory, problems)
    if recorded is not None and recorded.status == OK and outcome.exit_code == 0 and not outcome.lost_reason:
        return recorded  # without a look at files that may not be readable
    measured = _measured(directory, config, outcome, started, problems)
    result = _judged(
        recorded, measured, config, outcome, log_tail(log), _is_written_since(directory.metrics_file, started)
    )
    return replace(result, reason="; ".join([result.reason, *problems])) if problems else result


def _recorded(directory: RunDirectory, problems: List[str]) -> Optional[Result]:
    """The result that the ranks recorded. One that cannot be read is none, and is added to the problems."""
    try:
        return directory.result()
    except UsageError as error:
        problems.append(" ".join(str(error).splitlines()))
        return None


def _measured(
    directory: RunDirectory, config: RunConfig, outcome: Outcome, started: float, problems: List[str]
) -> Result:
    """A failed result with what the ranks measured. Metrics that cannot be read are added to the problems."""
    result = Result(
        status=FAILED,
        reason="",
        started=started,
        ended=started + outcome.seconds,
        last_checkpoint=directory.last_checkpoint(),
    )
    try:
        lines = directory.metrics("iteration")
        summary = summarise(config, lines, directory.metrics("validation")) if lines else {}
    except UsageError as error:
        problems.append(" ".join(str(error).splitlines()))
        return result
    return replace(result, iterations=lines[-1]["iteration"] if lines else 0, summary=summary)


def _judged(
    recorded: Optional[Result],
    measured: Result,
    config: RunConfig,
    outcome: Outcome,
    tail: List[str],
    has_begun: bool,
) -> Result:
    """The recorded result where that is true, or else the measured one with status and reason."""
    started = measured.started
    if (
        recorded is not None and recorded.is_resumable and recorded.ended >= started
    ):  # whatever exit code their launcher reports
        if outcome.lost_reason:  # the ranks were asked to stop for it
            return replace(recorded, reason=f"{STOPPED}{outcome.lost_reason}, after iteration {recorded.iterations}")
        if outcome.stopped_by is None:
            return recorded
        stopped_by = signal_name(outcome.stopped_by)  # the ranks got another signal
        return replace(recorded, reason=f"{STOPPED}{stopped_by}, after iteration {recorded.iterations}")
    if (
        recorded is not None
        and recorded.status == OK
        and recorded.ended >= started
        and _profiles_after_training(config, recorded)
    ):
        return recorded
    if outcome.stopped_by is not None:
        return replace(measured, status=INTERRUPTED, reason=f"stopped by {signal_name(outcome.stopped_by)}")
    if outcome.timed_out:
        return replace(measured, status=TIMEOUT, reason=f"ended after {format_duration(outcome.seconds)}")
    if recorded is not None and recorded.status == OK:
        death = _death(outcome, tail)
        if death or outcome.exit_code == 0:  # nothing of the run is lost
            return replace(recorded, reason=f"after the last iteration: {death}" if death else recorded.reason)
    if outcome.lost_reason and (
        recorded is None or recorded.status == INTERRUPTED or recorded.ended >= started + outcome.lost_after
    ):  # a rank that was ended for it may have recorded just that
        return replace(measured, reason=outcome.lost_reason)
    if recorded is not None and recorded.status not in (OK, FAILED):
        return replace(recorded, iterations=measured.iterations, summary=recorded.summary or measured.summary)
    killed_for_memory = outcome.oom_kills > 0
    if killed_for_memory or has_out_of_memory_message(tail):
        reason = f"{outcome.oom_kills} processes killed by the kernel" if killed_for_memory else failure_reason(tail)
        return replace(measured, status=OUT_OF_MEMORY, reason=reason)
    if recorded is not None and recorded.status == FAILED:
        return replace(recorded, iterations=measured.iterations, summary=recorded.summary or measured.summary)
    if outcome.exit_code == EXIT_USAGE and not has_begun:
        return replace(measured, status=REFUSED, reason=failure_reason(tail))
    if outcome.signal is not None:
        reason = _with_error(_killed_launcher(outcome.signal), printed_error(tail))
        exception = f"signal {outcome.signal} ({signal_name(outcome.signal)})"
        return replace(measured, reason=reason, node=socket.gethostname(), exception=exception)
    how_it_ended = f"exit code {outcome.exit_code}"
    if outcome.exit_code == 0:
        how_it_ended += ", but no result was recorded"
    return replace(measured, reason=_with_error(how_it_ended, failure_reason(tail)))


def _death(outcome: Outcome, tail: List[str]) -> str:
    """Which process of a run was killed, or stopped, after the run had recorded its success; empty if none was."""
    if outcome.lost_reason or outcome.signal is not None:
        return outcome.lost_reason or _killed_launcher(outcome.signal)
    error = printed_error(tail)
    return error if outcome.exit_code > 128 and "killed by signal" in error else ""


def _killed_launcher(number: Optional[int]) -> str:
    return f"the launcher was killed by signal {number} ({signal_name(number)})" if number is not None else ""


def _with_error(how_it_ended: str, error: str) -> str:
    return f"{how_it_ended}: {error}" if error else how_it_ended


def _profiles_after_training(config: RunConfig, recorded: Result) -> bool:
    training = config.training
    return training.profile_operators is not None and recorded.iterations >= training.iterations


def _is_written_since(path: Path, moment: float) -> bool:
    try:
        return path.stat().st_mtime >= moment
    except OSError:  # there is none, or it cannot be looked at
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


def has_out_of_memory_message(tail: List[str]) -> bool:
    """True if last lines report that memory ran out, in words of Python, the C library, the kernel or a scheduler."""
    return any(_MEMORY.search(line) for line in tail)


def failure_reason(tail: List[str]) -> str:
    """The reason in one line: the last error that was printed, or else the last three lines that a healthy run does not
    print; empty if there are none."""
    error = printed_error(tail)
    if error:
        return error
    lines = [line.strip() for line in tail if not _PROGRESS.search(line)]
    return " / ".join(lines[-3:])[:_REASON_LENGTH]


def printed_error(tail: List[str]) -> str:
    """The last error among last lines; empty if there is none."""
    for line in reversed(tail):
        error = _ERROR.match(line.strip())
        if error:
            return error[1].replace("fugaku-gpt: ", "", 1)[:_REASON_LENGTH]
    return ""
