"""Flight recorder files, written by their documented layout."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, Sequence, Tuple

from fugaku_gpt.records.flight import HEADER, MAGIC, NAME_SIZE, NAMES, RECORD, VERSION, flight_file

SLOTS = 256
Call = Tuple[str, str, str, bool]  # communicator, operation, call site, whether it has returned


def write_flight(directory: Path, rank: int, ranks: int, calls: Sequence[Call], first: int = 1) -> Path:
    """One rank's file: calls numbered from ``first``, one second apart."""
    names: Dict[str, int] = {}

    def index(name: str) -> int:
        return names.setdefault(name, len(names))

    records = bytearray(SLOTS * RECORD.size)
    for number, (communicator, operation, site, returned) in enumerate(calls, start=first):
        RECORD.pack_into(
            records,
            (number % SLOTS) * RECORD.size,
            number,
            index(communicator),
            index(operation),
            index("float32"),
            index(site),
            *(4, 8, -1, -1),
            1.7e9 + number,
            1.7e9 + number + 0.5 if returned else 0.0,
        )
    table = b"".join(name.encode().ljust(NAME_SIZE, b"\0") for name in names).ljust(NAMES * NAME_SIZE, b"\0")
    path = flight_file(directory, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(HEADER.pack(MAGIC, VERSION, SLOTS, rank, ranks, 4711) + bytes(records) + table)
    return path
