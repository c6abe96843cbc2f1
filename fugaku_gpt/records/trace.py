"""The traces of ranks, ``trace/*/rank-<rank>.trace``: what each rank did in the iterations of
``training.trace_iterations``.

A file is one rank's, little-endian:

* 16 bytes: a magic number, and the length of the head;
* the head, a JSON object with the fields below;
* ``phases`` records of 32 bytes, one for each beginning of a phase: the progress of the flight recorder's head at that
  moment (heartbeat, time, iteration, micro-batch, phase);
* ``calls`` records of 112 bytes, one for each MPI call that was under way in the time of the trace, in the order of
  their ends: the records of the flight recorder (``records/flight.py``).

Times are those of the rank's own clock, in seconds since the epoch. ``clock`` has what must be added to them to get
rank 0's, as it was measured by ping-pong at the beginning and at the end; in between it is interpolated.
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, List, Sequence, Tuple

import numpy as np

from fugaku_gpt.errors import UsageError
from fugaku_gpt.input_files import read_bytes
from fugaku_gpt.json_text import parse_json
from fugaku_gpt.limits import RANKS, TRACE
from fugaku_gpt.records.files import write_bytes_atomically
from fugaku_gpt.records.flight import CALL_FIELDS, PHASES, PROGRESS
from fugaku_gpt.typed_json import LATEST, check_times, record_of

VERSION = 1
MAGIC = b"FGTRACE\n"
_FILE = re.compile(r"rank-([0-9]{6,9})\.trace")
_LENGTH = struct.Struct("<8sQ")
PHASE_FIELDS = np.dtype(
    [("heartbeat", "<i8"), ("time", "<f8"), ("step", "<i8"), ("micro_batch", "<i4"), ("phase", "<u4")]
)
PHASE_INT64S, CALL_INT64S = PHASE_FIELDS.itemsize // 8, CALL_FIELDS.itemsize // 8  # of 8 bytes
assert PROGRESS.size - 32 == PHASE_FIELDS.itemsize  # its last 32 bytes are padding


@dataclass(frozen=True)
class ClockReading:
    """One alignment of a rank's clock with rank 0's.

    Attributes:
        time: when, by the rank's own clock.
        offset: seconds to add to the rank's times to get rank 0's.
        error: the offset is at most this wrong, in seconds; 0 where both ranks read the same clock.
    """

    time: float
    offset: float
    error: float


@dataclass(frozen=True)
class TraceHead:
    """The head of a rank's trace.

    Attributes:
        rank, ranks: number of the rank, and of all ranks.
        dp, pp, tp: its coordinates in the grid of ranks.
        host: name of its node.
        first, last: the iterations that were to be traced, as the log counts them.
        started, ended: when the trace was begun and ended.
        is_cut: whether the trace ended early, because its memory was full.
        clock: alignments of the clock, by time.
        names: texts to which the records of calls refer by index.
        communicators: names of the communicators, to which they refer by index.
        phases, calls: number of records of each kind.
    """

    rank: int
    ranks: int
    dp: int
    pp: int
    tp: int
    host: str
    first: int
    last: int
    started: float
    ended: float
    is_cut: bool
    clock: Tuple[ClockReading, ...]
    names: Tuple[str, ...]
    communicators: Tuple[str, ...]
    phases: int
    calls: int
    version: int = VERSION


@dataclass(frozen=True)
class RankTrace:
    """The trace of one rank; ``phases`` and ``calls`` have the fields of ``PHASE_FIELDS`` and of the flight recorder's
    ``CALL_FIELDS``."""

    head: TraceHead
    phases: "np.ndarray[Any, Any]"
    calls: "np.ndarray[Any, Any]"

    def on_common_clock(self, times: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        """Times of this rank's clock as those of rank 0's."""
        readings = self.head.clock
        offsets = np.interp(times, [reading.time for reading in readings], [reading.offset for reading in readings])
        return np.asarray(times + offsets)

    def name(self, index: int) -> str:
        """The text of an index in the records; "?" if the table was full when it was due."""
        return self.head.names[index] if 0 < index < len(self.head.names) else "?"

    def communicator(self, index: int) -> str:
        """The name of a communicator."""
        return self.head.communicators[index] if index < len(self.head.communicators) else "?"


def trace_file(directory: Path, rank: int) -> Path:
    """Path of a rank's trace; a thousand ranks share a folder, as flight recorders do."""
    return directory / f"{rank // 1000:03d}" / f"rank-{rank:06d}.trace"


def write_trace(directory: Path, head: TraceHead, phases: bytes, calls: bytes) -> None:
    """Write the trace of one rank.

    Raises:
        OSError: it cannot be written.
    """
    text = json.dumps(asdict(head), allow_nan=False).encode("utf-8")
    text += b" " * (-len(text) % 8)  # so that records begin at multiples of their words
    path = trace_file(directory, head.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes_atomically(path, b"".join((_LENGTH.pack(MAGIC, len(text)), text, phases, calls)))


def remove_traces(directory: Path) -> None:
    """Remove the traces of an earlier start: there may be fewer ranks this time.

    Raises:
        OSError: one cannot be removed.
    """
    for path in directory.glob("*/rank-*.trace"):
        path.unlink()


def traced_ranks(directory: Path) -> List[int]:
    """The ranks that have a trace, in order."""
    matches = (_FILE.fullmatch(path.name) for path in directory.glob("*/rank-*.trace"))
    return sorted(int(matched[1]) for matched in matches if matched is not None)


def read_trace(directory: Path, rank: int) -> RankTrace:
    """Read the trace of one rank.

    Raises:
        UsageError: there is none, or it is damaged or of another version.
    """
    path = trace_file(directory, rank)
    try:
        data = read_bytes(path, TRACE)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        return _parse(data)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"{path}: a damaged trace: {reason}") from None


def _parse(data: bytes) -> RankTrace:
    if len(data) < _LENGTH.size or not data.startswith(MAGIC):
        raise ValueError("it does not begin as a trace does")
    _, length = _LENGTH.unpack_from(data)
    if length > len(data) - _LENGTH.size:
        raise ValueError("it was cut short")
    values = parse_json(data[_LENGTH.size : _LENGTH.size + length])
    if isinstance(values, dict) and values.get("version") != VERSION:
        raise ValueError(f"it is of version {values.get('version')!r:.20}; this build reads {VERSION}")
    head = record_of(TraceHead, values)
    _check(head)
    at_phases = _LENGTH.size + length
    at_calls = at_phases + head.phases * PHASE_FIELDS.itemsize
    if len(data) != at_calls + head.calls * CALL_FIELDS.itemsize:
        raise ValueError("it was cut short, or has more than its head says")
    phases = np.frombuffer(data, PHASE_FIELDS, head.phases, at_phases)
    calls = np.frombuffer(data, CALL_FIELDS, head.calls, at_calls)
    if phases["phase"].max(initial=0) >= len(PHASES):
        raise ValueError("it has a phase that there is not")
    _check_columns(head, phases["time"], *(calls[name] for name in ("entered", "waited", "left")))
    return RankTrace(head, phases, calls)


def _check(head: TraceHead) -> None:
    counts = (head.dp, head.pp, head.tp, head.phases, head.calls)
    if not 0 <= head.rank < head.ranks <= RANKS.value or min(counts) < 0:
        raise ValueError("its rank, its place or its counts are none")
    if not head.clock:
        raise ValueError("it has no reading of the clock")
    if any(max(abs(reading.offset), abs(reading.error)) > LATEST for reading in head.clock):
        raise ValueError("it has an offset of the clock that no clock has")
    check_times(started=head.started, ended=head.ended, **{f"clock{n}": r.time for n, r in enumerate(head.clock)})


def _check_columns(head: TraceHead, *columns: "np.ndarray[Any, Any]") -> None:
    for times in columns:
        if len(times) and not (np.isfinite(times).all() and times.min() >= 0.0):
            raise ValueError("it has a time that is none")


def check_same_start(heads: Sequence[TraceHead]) -> None:
    """Check that the traces of several ranks are of the same iterations of the same run.

    Raises:
        UsageError: they are not.
    """
    kinds = {(head.ranks, head.first, head.last) for head in heads}
    if len(kinds) > 1:
        starts = [f"of {ranks} ranks in iterations {first}-{last}" for ranks, first, last in sorted(kinds)]
        raise UsageError(
            f"traces of different starts of a run: {' and '.join(starts[:2])}; remove those of one, or read only the "
            "others with --ranks"
        )
