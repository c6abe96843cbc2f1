"""Traces of ranks that never ran, with times that are easily added up."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List, Sequence, Tuple

import numpy as np

from fugaku_gpt.records.flight import CALL_FIELDS, PHASES
from fugaku_gpt.records.trace import PHASE_FIELDS, ClockReading, TraceHead, write_trace

ORIGIN = 1.7e9  # seconds since the epoch
NAMES = ("", "send", "receive", "all_reduce_sum", "all_gather", "torch.float32", "parallel/pipeline.py:1")
COMMUNICATORS = ("world", "pp", "dp")

PhaseAt = Tuple[float, str, int, int]  # time, phase, iteration, micro-batch
CallAt = Tuple[str, str, float, float, float]  # operation, communicator, entered, waited (or 0), left (or 0)


def write_rank(
    directory: Path,
    rank: int,
    phases: Sequence[PhaseAt],
    calls: Sequence[CallAt] = (),
    end: float = 10.0,
    **changes: Any,
) -> None:
    """Writes a rank's trace of the iterations 4 and 5; times are in seconds since ``ORIGIN``, by the rank's clock."""
    phase_records, call_records = np.zeros(len(phases), PHASE_FIELDS), np.zeros(len(calls), CALL_FIELDS)
    for record, (time, phase, step, micro_batch) in zip(phase_records, phases):
        record["time"], record["phase"] = ORIGIN + time, PHASES.index(phase)
        record["step"], record["micro_batch"] = step, micro_batch
    for number, (record, (operation, communicator, entered, waited, left)) in enumerate(zip(call_records, calls)):
        record["ordinal"] = record["sequence"] = number + 1
        record["operation"], record["group"] = NAMES.index(operation), COMMUNICATORS.index(communicator)
        record["dtype"], record["site"] = 5, 6
        record["peer"] = 1 - rank if operation in ("send", "receive") else -1
        record["micro_batch"], record["shape"] = 0, [8, -1, -1, -1]
        record["entered"] = ORIGIN + entered
        record["waited"], record["left"] = (ORIGIN + time if time else 0.0 for time in (waited, left))
    values = {
        "rank": rank,
        "ranks": 2,
        "dp": 0,
        "pp": rank,
        "tp": 0,
        "host": f"node-{rank}",
        "first": 4,
        "last": 5,
        "started": ORIGIN,
        "ended": ORIGIN + end,
        "is_cut": False,
        "clock": (ClockReading(ORIGIN, 0.0, 0.0),),
        "names": NAMES,
        "communicators": COMMUNICATORS,
        "phases": len(phases),
        "calls": len(calls),
        **changes,
    }
    write_trace(directory, TraceHead(**values), phase_records.tobytes(), call_records.tobytes())


FIRST_RANK: List[PhaseAt] = [
    (0.0, "forward", 4, -1),
    (0.5, "forward", 4, 0),
    (2.0, "backward", 4, 0),
    (4.0, "sums", 4, -1),
    (4.5, "optimiser", 4, -1),
    (5.0, "forward", 5, -1),
    (5.5, "forward", 5, 0),
    (7.0, "backward", 5, 0),
    (9.0, "sums", 5, -1),
    (9.5, "optimiser", 5, -1),
]
FIRST_CALLS: List[CallAt] = [
    ("all_gather", "dp", -1.0, 0.0, 1.0),  # begun before the trace, never waited for
    ("receive", "pp", 1.0, 2.0, 3.0),  # the first second of the backward pass is a bubble
    ("send", "pp", 2.5, 0.0, 3.5),
    ("all_reduce_sum", "dp", 3.5, 4.0, 4.25),  # half a second of it below the backward pass
    ("all_reduce_sum", "world", 4.25, 4.25, 4.5),
    ("all_gather", "dp", 9.75, 0.0, 0.0),  # not done at the end
]


def write_two_ranks(directory: Path) -> None:
    """Writes the traces of two ranks; the clock of the second is 100 seconds ahead, and it does the same a second
    later, without communication."""
    write_rank(directory, 0, FIRST_RANK, FIRST_CALLS)
    later = [(time + 101.0, *rest) for time, *rest in FIRST_RANK]
    clock = (ClockReading(ORIGIN + 100, -100.0, 2e-6), ClockReading(ORIGIN + 111, -100.0, 2e-6))
    write_rank(directory, 1, later, (), 111.0, clock=clock, started=ORIGIN + 101)  # type: ignore[arg-type]
