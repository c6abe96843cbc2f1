"""Ends a run on the rank that fails: prints and records the failure, and ends the other ranks."""

from __future__ import annotations

import socket
import sys
import time
import traceback
from dataclasses import replace
from typing import Optional

from fugaku_gpt.comm import Communicator
from fugaku_gpt.config import RunConfig
from fugaku_gpt.errors import EXIT_RUN_FAILED, FugakuGptError, ReplicasDiffer, RunFailed
from fugaku_gpt.harmless import harmless
from fugaku_gpt.machine.clock import steady_time
from fugaku_gpt.records.run import (
    FAILED,
    INTERRUPTED,
    OUT_OF_MEMORY,
    SUMMARY_SECONDS,
    Result,
    RunDirectory,
    failure_lines,
)
from fugaku_gpt.records.summary import summarise


def end_failed_run(
    directory: Optional[RunDirectory],
    world: Communicator,
    started: float,
    error: BaseException,
    has_supervisor: bool = False,
) -> None:
    """Print what happened on this rank, record it, and end the other ranks, which may be waiting for this one.

    Args:
        has_supervisor: rank 0 has a supervisor that prints what is recorded
            (:mod:`fugaku_gpt.launch.rank_supervisor`).
    """
    on_all_ranks = isinstance(error, RunFailed)  # raised by all ranks at the same point, so rank 0 reports it
    try:
        if not on_all_ranks or world.rank == 0:
            _record(directory, world, started, error, on_all_ranks)
        if has_supervisor and not on_all_ranks and world.rank != 0 and directory is not None:
            time.sleep(SUMMARY_SECONDS)
    except BaseException:
        try:
            traceback.print_exception(type(error), error, error.__traceback__)  # it may not have been printed
            traceback.print_exc()
        finally:
            world.abort(EXIT_RUN_FAILED)  # even with a full disk or a closed terminal
        raise
    if on_all_ranks:
        world.barrier()  # rank 0 has recorded it before any rank exits
    else:
        world.abort(EXIT_RUN_FAILED)


def _record(
    directory: Optional[RunDirectory], world: Communicator, started: float, error: BaseException, on_all_ranks: bool
) -> None:
    interrupted = isinstance(error, KeyboardInterrupt)
    expected = interrupted or isinstance(error, FugakuGptError) or _names_a_file(error)
    if not expected:
        traceback.print_exception(type(error), error, error.__traceback__)
    message_lines = _message(error).splitlines()
    reason = "interrupted" if interrupted else message_lines[0] if message_lines else ""
    exception_text = type(error).__name__ + (f": {reason}" if reason and not interrupted else "")
    reason = reason if expected and reason else exception_text
    if not isinstance(error, ReplicasDiffer):  # which names the rank that is to blame
        reason = f"rank {world.rank}: {reason}"
    status = INTERRUPTED if interrupted else OUT_OF_MEMORY if is_out_of_memory(error) else FAILED
    if directory is None:
        print(harmless(f"fugaku-gpt: {reason}"), file=sys.stderr, flush=True)
        return
    try:
        result = run_result(directory, None, status, reason, started)
    except (OSError, FugakuGptError):  # a file that cannot be read must not hide why the run has failed
        result = Result(status, reason, started, steady_time())
    rank, node = (None, "") if on_all_ranks else (world.rank, socket.gethostname())
    if isinstance(error, ReplicasDiffer):
        rank, node = error.rank, error.node
    result = replace(
        result,
        rank=rank,
        node=node,
        exception=exception_text,
    )
    print("\n".join(failure_lines(result)), file=sys.stderr, flush=True)
    try:
        directory.write_result(result, replace=False)
    except (OSError, FugakuGptError) as unwritten:  # such as the full disk that the run has failed for
        unrecorded = f"  how the run ended is not recorded: {_message(unwritten)}"
        print(harmless(unrecorded), file=sys.stderr, flush=True)


def _names_a_file(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.filename is not None and error.strerror is not None


def _message(error: BaseException) -> str:
    if isinstance(error, OSError) and _names_a_file(error):
        return f"{error.filename}: cannot be read or written: {error.strerror}"
    return str(error)


def is_out_of_memory(error: BaseException) -> bool:
    """True if memory could not be allocated: Python's own error, or the one that PyTorch's allocator raises."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


def run_result(
    directory: RunDirectory, config: Optional[RunConfig], status: str, reason: str, started: float
) -> Result:
    """Return the result of a run that ends now; with ``config``, it includes a summary of the logged metrics."""
    lines = directory.metrics("iteration")
    summary = summarise(config, lines, directory.metrics("validation")) if config is not None else {}
    return Result(
        status,
        reason,
        started,
        steady_time(),
        lines[-1]["iteration"] if lines else 0,
        summary,
        last_checkpoint=directory.last_checkpoint(),
    )
