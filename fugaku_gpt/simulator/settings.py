"""Settings of a simulated site: its size, its time limits and its rules, chosen when the simulator starts."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict

from fugaku_gpt.errors import UsageError
from fugaku_gpt.input_files import read_text
from fugaku_gpt.json_text import parse_json
from fugaku_gpt.limits import RECORD, cut
from fugaku_gpt.typed_json import record_of

FIELDS_ABOVE_ZERO = ("nodes", "slots", "max_ranks", "max_bulk", "first_job", "tick")


@dataclass(frozen=True)
class Settings:
    """Settings of one simulated site.

    Attributes:
        nodes: compute nodes that all jobs share. Fugaku: 158,976.
        slots: number of jobs that run at once on this machine, however many nodes they simulate.
        grace: seconds between SIGTERM and SIGKILL, at an elapse limit and at a deletion.
        tick: seconds between two checks of the jobs.
        transition: shortest time in seconds in each of the short states (RNA, RNP, RNE, RNO).
        min_elapse: seconds; the lower limit of ``elapse=``. Fugaku: 60.
        sampling: seconds that a job must run for energy rows in its statistics. Fugaku: 60.
        strict_groups: refuse jobs without ``-g``, and the groups that Fugaku refuses.
        max_ranks: largest number of real processes that one ``mpiexec`` may start.
        max_bulk: largest number of sub-jobs of one bulk job.
        accept_limit: largest number of unfinished jobs of the user; further ones are refused (PJM 0072).
        first_job: id of the first job.
        owner: pid of the process without which the simulator stops itself; 0: none.
    """

    nodes: int = 158_976
    slots: int = 1
    grace: float = 5.0
    tick: float = 0.02
    transition: float = 0.0
    min_elapse: float = 60.0
    sampling: float = 60.0
    strict_groups: bool = False
    max_ranks: int = 256
    max_bulk: int = 10000
    accept_limit: int = 100
    first_job: int = 1
    owner: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value < 0 or (field.name in FIELDS_ABOVE_ZERO and value == 0):
                raise UsageError(f"simulator: {field.name}: {value}: must be positive")


def write_settings(path: Path, settings: Settings) -> None:
    """Write the settings to a file, for the daemon and for a later start."""
    path.write_text(json.dumps(dataclasses.asdict(settings), indent=2) + "\n", encoding="utf-8")


def read_settings(path: Path) -> Settings:
    """Read settings from a file.

    Raises:
        UsageError: the file cannot be read or has no settings.
    """
    try:
        values: Dict[str, Any] = parse_json(read_text(path, RECORD))
        return record_of(Settings, values)
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = cut(str(error))
        raise UsageError(f"{path}: not a simulator's settings: {reason}; remove the folder and start again") from None
