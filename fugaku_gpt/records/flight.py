"""The flight recorder's file: one rank's last MPI calls, in a ring that outlives the process.

Layout, little-endian: a header of 64 bytes (magic, version, slots, rank, ranks, process id); ``slots`` records of 64
bytes (sequence number from 1, communicator, operation, data type, call site, shape, time entered, time left or 0); then
a table of names, 96 bytes each, that records refer to by index. The writer stores a record before it enters the call,
so a rank that hangs or dies inside one is seen there.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import List, Tuple

from fugaku_gpt.errors import UsageError

MAGIC = b"FGFLIGHT"
VERSION = 1
HEADER = struct.Struct("<8sIIIII36x")
RECORD = struct.Struct("<QHHHHqqqqdd")
LEFT = struct.Struct("<d")
LEFT_OFFSET = RECORD.size - LEFT.size
NAME_SIZE = 96
NAMES = 512
SLOTS = 256


@dataclass(frozen=True)
class Call:
    """One MPI call. ``left`` is 0 while the rank is inside. Times are seconds since the epoch."""

    sequence: int
    communicator: str
    operation: str
    dtype: str
    site: str
    shape: Tuple[int, ...]
    entered: float
    left: float


@dataclass(frozen=True)
class Flight:
    """What one rank last did; calls in order."""

    rank: int
    ranks: int
    process: int
    calls: List[Call]


def flight_file(directory: Path, rank: int) -> Path:
    """A rank's file; a thousand ranks to a folder, because metadata servers dislike larger ones."""
    return directory / f"{rank // 1000:03d}" / f"rank-{rank:06d}.flight"


def file_size(slots: int = SLOTS) -> int:
    """Bytes of a file."""
    return HEADER.size + slots * RECORD.size + NAMES * NAME_SIZE


def read_flight(path: Path) -> Flight:
    """Read one rank's file, even while it is being written or after a kill.

    Raises:
        UsageError: the file is not a flight recorder's of this version.
    """
    data = path.read_bytes()
    if len(data) < HEADER.size or not data.startswith(MAGIC):
        raise UsageError(f"{path}: not a flight recorder file")
    _, version, slots, rank, ranks, process = HEADER.unpack_from(data)
    if version != VERSION or len(data) != file_size(slots):
        raise UsageError(f"{path}: a flight recorder file of another version or cut short")
    names_at = HEADER.size + slots * RECORD.size

    def name(index: int) -> str:
        start = names_at + index * NAME_SIZE
        return data[start : start + NAME_SIZE].rstrip(b"\0").decode("utf-8", "replace") if index < NAMES else "?"

    calls = []
    for slot in range(slots):
        fields = RECORD.unpack_from(data, HEADER.size + slot * RECORD.size)
        sequence, communicator, operation, dtype, site = fields[:5]
        if sequence:
            shape = tuple(size for size in fields[5:9] if size >= 0)
            calls.append(
                Call(sequence, name(communicator), name(operation), name(dtype), name(site), shape, *fields[9:])
            )
    return Flight(rank, ranks, process, sorted(calls, key=lambda call: call.sequence))
