"""``sweep.json`` of a run directory: the sweep and run it belongs to. It orders tables and groups repeats."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Optional

from fugaku_gpt.config import RunConfig, changed_settings, load_run_config
from fugaku_gpt.errors import ConfigError
from fugaku_gpt.records.files import write_json_atomically
from fugaku_gpt.typed_json import record_of
from fugaku_gpt.versioned_json import read_versioned_json

VERSION = 2
FIRST_VERSION = 1  # its digests were of the configuration with every field written out
FILE = "sweep.json"
ACCEPTED_FINDINGS = "job.accept_findings"  # says how a script is checked, and nothing of the run
ATTEMPTS = "attempts"  # folder of a sweep's directory: earlier attempts of its runs, attempts/<run>/<number>


@dataclass(frozen=True)
class SweepEntry:
    """Position of a run in its sweep.

    Attributes:
        sweep: name of the sweep.
        run: name of the run, and of its directory.
        row: name of the configuration, equal for all repeats.
        order: index of the row in the sweep, from 0.
        repeat: number of the repeat, from 1.
        digest: digest of the resolved configuration (:func:`digest_of_config`).
        variant: the row's toggles as tables name them, such as ``2.2GHz, LD_PRELOAD=libtcmalloc.so``.
    """

    sweep: str
    run: str
    row: str
    order: int
    repeat: int
    digest: str
    variant: str = ""
    version: int = VERSION


def write_sweep_entry(directory: Path, entry: SweepEntry) -> None:
    """Record in a run directory which run of a sweep it is."""
    write_json_atomically(directory / FILE, asdict(entry))


def read_sweep_entry(directory: Path) -> Optional[SweepEntry]:
    """Read the position of a run in its sweep; None if it was not started by one.

    Raises:
        UsageError: the file is not of this format.
    """
    entry = read_versioned_json(
        directory / FILE,
        "a sweep entry",
        (VERSION, FIRST_VERSION),
        lambda values: record_of(SweepEntry, values),
        mend="remove this run's folder to have it run again",
    )
    return _upgraded(directory, entry) if entry is not None and entry.version == FIRST_VERSION else entry


def digest_of(text: str) -> str:
    """Compute a short fingerprint of a configuration's text."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def digest_of_config(config: RunConfig) -> str:
    """Compute the digest of the settings that differ from their defaults, in any order. A field that the schema gains
    later does not change the digests of older runs, and no finding that is accepted makes another run."""
    changed = changed_settings(config)
    changed.pop(ACCEPTED_FINDINGS, None)
    return digest_of(json.dumps(changed, sort_keys=True))


def _upgraded(directory: Path, entry: SweepEntry) -> SweepEntry:
    """Convert an entry of the first version: its configuration's digest is computed anew."""
    try:
        digest = digest_of_config(load_run_config(directory / "config.yaml"))
    except ConfigError:  # a refused row: its settings make no configuration
        digest = entry.digest
    return replace(entry, digest=digest, version=VERSION)
