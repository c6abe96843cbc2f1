"""``sweep.json`` of a run directory: which run of which sweep it is. It gives tables their order and groups repeats."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Optional

from fugaku_gpt.errors import UsageError
from fugaku_gpt.records.files import write_json_atomically

VERSION = 1
FILE = "sweep.json"
ATTEMPTS = "attempts"  # folder of a sweep's directory: earlier attempts of its runs, attempts/<run>/<number>


@dataclass(frozen=True)
class SweepEntry:
    """One run's place in its sweep.

    Attributes:
        sweep: name of the sweep.
        run: name of the run, and of its directory.
        row: name of the configuration, equal for all repeats.
        order: of the row in the sweep, from 0.
        repeat: from 1.
        digest: of the resolved configuration.
    """

    sweep: str
    run: str
    row: str
    order: int
    repeat: int
    digest: str
    version: int = VERSION


def write_sweep_entry(directory: Path, entry: SweepEntry) -> None:
    """Say in a run directory which run it is."""
    write_json_atomically(directory / FILE, asdict(entry))


def read_sweep_entry(directory: Path) -> Optional[SweepEntry]:
    """The place of a run in its sweep, or None where it was not started by one.

    Raises:
        UsageError: the file is not of this format.
    """
    path = directory / FILE
    if not path.exists():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        entry = SweepEntry(**values)
    except (ValueError, TypeError, OSError):
        raise UsageError(f"{path}: not a sweep entry; remove this run's folder to have it run again") from None
    if entry.version != VERSION:
        raise UsageError(f"{path}: version {entry.version} of this format; this program reads version {VERSION}")
    return entry


def digest_of(text: str) -> str:
    """A short fingerprint of a configuration's text."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]
