"""Flight recorder files of ranks that were never started, written by the real recorder."""

from __future__ import annotations

from pathlib import Path
from typing import Sequence, Tuple

from fugaku_gpt.comm.flight_recorder import FlightRecorder

Call = Tuple[str, str, str, bool]  # communicator, operation, call site, whether it has returned


class Told(FlightRecorder):
    """A recorder whose call sites are told to it."""

    site = "?"

    def _site(self) -> int:
        return self._name(self.site)


def write_flight(directory: Path, rank: int, ranks: int, calls: Sequence[Call]) -> Path:
    """One rank's file, with calls on communicators of all ranks."""
    recorder = Told(directory, rank, ranks)
    names = list(dict.fromkeys(call[0] for call in calls))
    groups = {name: recorder.group(name, range(ranks), rank) for name in names}
    for communicator, operation, recorder.site, returned in calls:
        number = recorder.enter(groups[communicator], operation, "float32", (4, 8), True)
        if returned:
            recorder.leave(number)
    return recorder.path
