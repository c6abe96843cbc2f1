"""A cache over many run directories: one file that can be deleted at any time, and whose entries are always verified.

An entry is valid as long as the fingerprints of the run's own files (size, time of change, inode) are unchanged. The
file is replaced by a rename, so readers need no lock and the last of several writers wins. It begins with a checksum:
an index that is damaged or of another version is ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import uuid
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple

from fugaku_gpt.input_files import read_bytes
from fugaku_gpt.json_text import parse_json
from fugaku_gpt.limits import INDEX
from fugaku_gpt.records.files import write_text_atomically

FILE = ".runs-index.json"
VERSION = 1
# Time stamps tick coarsely, down to a second or two on some file systems: within a tick, a file can change twice.
TICK_NS = 2_000_000_000

Fingerprint = Dict[str, List[int]]  # name of a file → size, time of change in ns, inode
Entries = Dict[str, Tuple[Fingerprint, Dict[str, Any]]]  # run → fingerprint of its files, record read from them


def fingerprint_of(stats: Mapping[str, os.stat_result]) -> Fingerprint:
    """Compute the fingerprint of a run's files."""
    return {name: [stat.st_size, stat.st_mtime_ns, stat.st_ino] for name, stat in sorted(stats.items())}


def is_settled(fingerprint: Fingerprint, since_ns: int) -> bool:
    """True if every file was last changed well before ``since_ns``, so that a later change shows in the fingerprint."""
    return all(changed < since_ns - TICK_NS for _, changed, _ in fingerprint.values())


def file_system_time_ns(folder: Path) -> Optional[int]:
    """Current time by the file system that holds a folder, in ns; None if nothing can be written there."""
    probe = folder / f".{FILE}.{uuid.uuid4().hex}.tmp"
    try:
        with open(probe, "xb"):
            pass
        return probe.stat().st_mtime_ns
    except OSError:
        return None
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def read_index(folder: Path) -> Entries:
    """Read the entries of a folder's index; empty if it is missing, damaged or of another version."""
    try:
        head, _, body = read_bytes(folder / FILE, INDEX).partition(b"\n")
        if parse_json(head) != _head(body):
            return {}
        entries = parse_json(body)
        return {str(run): (fingerprint, record) for run, (fingerprint, record) in entries.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def write_index(folder: Path, entries: Entries) -> None:
    """Replace a folder's index.

    Raises:
        OSError: it cannot be written.
    """
    body = json.dumps({run: list(entry) for run, entry in sorted(entries.items())})
    head = json.dumps(_head(body.encode("utf-8")))
    write_text_atomically(folder / FILE, f"{head}\n{body}")


def _head(body: bytes) -> Dict[str, Any]:
    return {"kind": "index of runs", "version": VERSION, "sha256": hashlib.sha256(body).hexdigest()}
