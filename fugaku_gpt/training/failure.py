"""How a run ends on the rank that fails: what is said, what is recorded, and that the other ranks end too."""

from __future__ import annotations

import sys
import time
import traceback
from typing import Optional

from fugaku_gpt.comm import Communicator
from fugaku_gpt.config import RunConfig
from fugaku_gpt.errors import EXIT_RUN_FAILED, FugakuGptError, RunFailed
from fugaku_gpt.records.run import FAILED, INTERRUPTED, OUT_OF_MEMORY, Result, RunDirectory
from fugaku_gpt.records.summary import summarise


def end_badly(directory: Optional[RunDirectory], world: Communicator, started: float, error: BaseException) -> None:
    """Say what happened on this rank, record it, and end the other ranks, which may be waiting for this one."""
    alike = isinstance(error, RunFailed)  # raised by all ranks at the same place: one voice is enough, and nobody waits
    try:
        if not alike or world.rank == 0:
            _record(directory, world, started, error)
    except BaseException:
        world.abort(EXIT_RUN_FAILED)  # a full disk, a closed terminal: the others must be ended all the same
        raise
    if alike:
        world.barrier()  # rank 0 has recorded it before anyone leaves
    else:
        world.abort(EXIT_RUN_FAILED)


def _record(directory: Optional[RunDirectory], world: Communicator, started: float, error: BaseException) -> None:
    interrupted = isinstance(error, KeyboardInterrupt)
    expected = interrupted or isinstance(error, FugakuGptError)
    if not expected:
        traceback.print_exception(type(error), error, error.__traceback__)
    reason = "interrupted" if interrupted else str(error) if expected else f"{type(error).__name__}: {error}"
    reason = f"rank {world.rank}: " + reason.splitlines()[0] if reason else f"rank {world.rank}: {type(error).__name__}"
    status = INTERRUPTED if interrupted else OUT_OF_MEMORY if is_out_of_memory(error) else FAILED
    print(f"fugaku-gpt: {reason}", file=sys.stderr, flush=True)
    if directory is not None:
        directory.write_result(result_of(directory, None, status, reason, started), replace=False)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory could not be allocated: Python's own error, or the one that PyTorch's allocator raises."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


def result_of(directory: RunDirectory, config: Optional[RunConfig], status: str, reason: str, started: float) -> Result:
    """How the run ends now, with the figures of its lines where ``config`` is given."""
    lines = directory.metrics("iteration")
    summary = summarise(config, lines, directory.metrics("validation")) if config is not None else {}
    return Result(status, reason, started, time.time(), lines[-1]["iteration"] if lines else 0, summary)
