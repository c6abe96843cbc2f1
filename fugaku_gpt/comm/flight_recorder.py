"""The writer of the flight recorder (format: ``records/flight.py``): about two microseconds per MPI call."""

from __future__ import annotations

import mmap
import os
import sys
import time
from pathlib import Path
from typing import Dict, Tuple

from fugaku_gpt.records.flight import (
    HEADER,
    LEFT,
    LEFT_OFFSET,
    MAGIC,
    NAME_SIZE,
    NAMES,
    RECORD,
    SLOTS,
    VERSION,
    file_size,
    flight_file,
)


class FlightRecorder:
    """A ring of this rank's last calls in a memory-mapped file, which the kernel keeps when the process is killed."""

    def __init__(self, directory: Path, rank: int, ranks: int) -> None:
        path = flight_file(directory, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            os.ftruncate(descriptor, file_size())
            self._map = mmap.mmap(descriptor, file_size())
        finally:
            os.close(descriptor)
        HEADER.pack_into(self._map, 0, MAGIC, VERSION, SLOTS, rank, ranks, os.getpid())
        self._names: Dict[str, int] = {}
        self._sites: Dict[Tuple[object, int], int] = {}
        self._sequence = 0

    def enter(self, communicator: str, operation: str, dtype: str, shape: Tuple[int, ...]) -> int:
        """Record that this rank is about to enter a call; returns what :meth:`leave` wants."""
        self._sequence += 1
        offset = HEADER.size + (self._sequence % SLOTS) * RECORD.size
        sizes = (*shape[:4], -1, -1, -1, -1)
        RECORD.pack_into(
            self._map,
            offset,
            self._sequence,
            self._name(communicator),
            self._name(operation),
            self._name(dtype),
            self._site(),
            sizes[0],
            sizes[1],
            sizes[2],
            sizes[3],
            time.time(),
            0.0,
        )
        return offset

    def leave(self, offset: int) -> None:
        """Record that the call has returned."""
        LEFT.pack_into(self._map, offset + LEFT_OFFSET, time.time())

    def _site(self) -> int:
        frame = sys._getframe(4)  # 0 this, 1 enter, 2 Communicator._enter, 3 the communicator's method, 4 its caller
        key = (frame.f_code, frame.f_lineno)
        index = self._sites.get(key)
        if index is None:
            parts = Path(frame.f_code.co_filename).parts[-2:]
            index = self._sites[key] = self._name(f"{'/'.join(parts)}:{frame.f_lineno}")
        return index

    def _name(self, name: str) -> int:
        index = self._names.get(name)
        if index is None:
            if len(self._names) == NAMES:  # more call sites than any build of ours has: the reader shows "?"
                return NAMES
            index = self._names[name] = len(self._names)
            start = HEADER.size + SLOTS * RECORD.size + index * NAME_SIZE
            text = name.encode("utf-8")[:NAME_SIZE]
            self._map[start : start + len(text)] = text
        return index
