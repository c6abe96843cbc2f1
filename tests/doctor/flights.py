"""Flight recorder files of ranks that were never started, written by the real recorder."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path
from typing import Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from fugaku_gpt.comm.flight_recorder import FlightRecorder
from fugaku_gpt.records.flight import FORWARD, PROGRESS_OFFSET, RECORD, RING_OFFSET, SLOTS


class RecorderWithSite(FlightRecorder):
    """A recorder whose call site is set by the test."""

    site = "?"

    def _site(self) -> int:
        return self._name(self.site)

    def age(self, seconds: float) -> None:
        """Sets back the times of all that was recorded."""
        offsets = [PROGRESS_OFFSET // 8 + 1]
        for slot in range(SLOTS):
            last = (RING_OFFSET + (slot + 1) * RECORD.size) // 8
            offsets += [offset for offset in range(last - 4, last - 1) if self._seconds[offset]]
        for offset in offsets:
            self._seconds[offset] -= seconds


class Ranks:
    """Ranks with their communicators, whose calls a test makes for them."""

    def __init__(self, directory: Path, size: int, groups: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """``groups`` maps a name to the world ranks of each communicator of that name."""
        self.directory = directory
        self.recorders = [RecorderWithSite(directory, rank, size) for rank in range(size)]
        self._groups: List[Dict[str, int]] = [{} for _ in range(size)]
        for name, communicators in groups.items():
            for members in communicators:
                for group_rank, rank in enumerate(members):
                    self._groups[rank][name] = self.recorders[rank].group(name, members, group_rank)

    def progress(self, ranks: Iterable[int], phase: int = FORWARD, step: int = 1, micro_batch: int = 0) -> None:
        """Lets ranks begin another phase of work."""
        for rank in ranks:
            self.recorders[rank].mark_phase(phase, step, micro_batch)

    def stand_still(self, seconds: float, timeout: float = 1800.0, watched: Optional[Iterable[int]] = None) -> None:
        """Ages all that was recorded by a time, in which the watchdogs of some ranks, by default all, still looked."""
        for rank, recorder in enumerate(self.recorders):
            recorder.age(seconds)
            if watched is None or rank in watched:
                recorder.watched(timeout, False)

    def all_end(self) -> None:
        """Lets the processes of all ranks be gone."""
        ended = subprocess.Popen(["true"])
        ended.wait()
        for recorder in self.recorders:
            struct.pack_into("<I", recorder._map, 28, ended.pid)

    def call(
        self,
        ranks: Iterable[int],
        name: str,
        site: str,
        operation: str = "all_reduce_sum",
        shape: Tuple[int, ...] = (4, 8),
        peer: Optional[int] = None,
        returns: bool = True,
    ) -> None:
        """Lets ranks enter a call, and leave it unless ``returns`` is false."""
        for rank in ranks:
            recorder = self.recorders[rank]
            recorder.site = site
            number = recorder.enter(
                self._groups[rank][name], operation, "float32", shape, True, -1 if peer is None else peer
            )
            if returns:
                recorder.leave(number)
