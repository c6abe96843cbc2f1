"""How a run ends on the rank that fails: what is said, what is recorded, and that the other ranks end too."""

from __future__ import annotations

import socket
import sys
import time
import traceback
from dataclasses import replace
from typing import Optional

from fugaku_gpt.comm import Communicator
from fugaku_gpt.config import RunConfig
from fugaku_gpt.errors import EXIT_RUN_FAILED, FugakuGptError, RunFailed
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


def end_badly(
    directory: Optional[RunDirectory], world: Communicator, started: float, error: BaseException, kept: bool = False
) -> None:
    """Say what happened on this rank, record it, and end the other ranks, which may be waiting for this one.

    Args:
        kept: rank 0 has a keeper that says what is recorded (:mod:`fugaku_gpt.launch.rank_supervisor`).
    """
    alike = isinstance(error, RunFailed)  # raised by all ranks at the same place: one voice is enough, and nobody waits
    try:
        if not alike or world.rank == 0:
            _record(directory, world, started, error, alike)
        if kept and not alike and world.rank != 0 and directory is not None:
            time.sleep(SUMMARY_SECONDS)
    except BaseException:
        try:
            traceback.print_exception(type(error), error, error.__traceback__)  # it may not have been told
            traceback.print_exc()
        finally:
            world.abort(EXIT_RUN_FAILED)  # a full disk, a closed terminal: the others must be ended all the same
        raise
    if alike:
        world.barrier()  # rank 0 has recorded it before anyone leaves
    else:
        world.abort(EXIT_RUN_FAILED)


def _record(
    directory: Optional[RunDirectory], world: Communicator, started: float, error: BaseException, alike: bool
) -> None:
    interrupted = isinstance(error, KeyboardInterrupt)
    expected = interrupted or isinstance(error, FugakuGptError)
    if not expected:
        traceback.print_exception(type(error), error, error.__traceback__)
    words = str(error).splitlines()
    reason = "interrupted" if interrupted else words[0] if words else ""
    named = type(error).__name__ + (f": {reason}" if reason and not interrupted else "")
    reason = f"rank {world.rank}: {reason if expected and reason else named}"
    status = INTERRUPTED if interrupted else OUT_OF_MEMORY if is_out_of_memory(error) else FAILED
    if directory is None:
        print(f"fugaku-gpt: {reason}", file=sys.stderr, flush=True)
        return
    result = replace(
        result_of(directory, None, status, reason, started),
        rank=None if alike else world.rank,
        node="" if alike else socket.gethostname(),
        exception=named,
    )
    print("\n".join(failure_lines(result)), file=sys.stderr, flush=True)
    directory.write_result(result, replace=False)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory could not be allocated: Python's own error, or the one that PyTorch's allocator raises."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


def result_of(directory: RunDirectory, config: Optional[RunConfig], status: str, reason: str, started: float) -> Result:
    """How the run ends now, with the figures of its lines where ``config`` is given."""
    lines = directory.metrics("iteration")
    summary = summarise(config, lines, directory.metrics("validation")) if config is not None else {}
    return Result(
        status,
        reason,
        started,
        time.time(),
        lines[-1]["iteration"] if lines else 0,
        summary,
        last_checkpoint=directory.last_checkpoint(),
    )
