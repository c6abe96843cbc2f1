"""A cache over many run directories: one file that can be deleted at any time, and whose entries are always verified.

The file has lines. The first is an object with the version, a digest of what the reading program makes records of, the
time of writing by the file system's clock, and a checksum of the others. Each of these is one run: an array that begins
with its path, which of its files there are, and their fingerprint, and, after a tab, an object with its settings, which
many runs have in common. It is read at once, and replaced by a rename, so readers need no lock, and the last of several
writers wins.

An entry is valid as long as the fingerprint is unchanged: size, time of change, time of change of the status, and inode
of the run's folder, which shows new and missing files, and of each file that a record is made of. So a file that is
replaced, changed in place, restored with an old time, moved or deleted shows. What changes twice within a tick of the
clock has one time: a run is not indexed before its files have been at rest for ``TICK_NS``. If the clock was set back
since the index was written, times of before may come again, and the index is ignored, as one is that is damaged, of
another version, or of a program that makes other records.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import uuid
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional

from fugaku_gpt.input_files import read_bytes
from fugaku_gpt.json_text import parse_json, parse_json_at
from fugaku_gpt.limits import INDEX
from fugaku_gpt.records.files import write_bytes_atomically

FILE = ".runs-index.json"
VERSION = 2
# Time stamps tick coarsely, down to a second or two on some file systems: within a tick, a file can change twice.
TICK_NS = 2_000_000_000

Record = Any
# size, time of change, time of change of the status (they may be before 1970), inode
_STAMP = struct.Struct("<QqqQ").pack


class Entry(NamedTuple):
    """An entry of the index: a run and its fingerprint.

    Attributes:
        files: which of its files there are, as the bits of a number.
        fingerprint: of the run's folder and these files (:func:`fingerprint_of`).
        record: what was read from them.
        line: the line of the file.
    """

    files: int
    fingerprint: str
    record: Record
    line: bytes


MakeRecord = Callable[[str, List[Any], Dict[str, Any]], Record]


def fingerprint_of(stats: Iterable[os.stat_result]) -> str:
    """Compute the fingerprint of a run's folder and files, in a fixed order."""
    packed = b"".join([_STAMP(one.st_size, one.st_mtime_ns, one.st_ctime_ns, one.st_ino) for one in stats])
    return hashlib.blake2b(packed, digest_size=16).hexdigest()


def newest_change_ns(stats: Iterable[os.stat_result]) -> int:
    """The time of the last change of any of a run's folder and files, or of their status."""
    return max(max(one.st_mtime_ns, one.st_ctime_ns) for one in stats)


def is_settled(newest_ns: int, since_ns: int) -> bool:
    """True if the last change was well before ``since_ns``, so that a later one shows in the fingerprint."""
    return newest_ns < since_ns - TICK_NS


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


def read_index(folder: Path, schema: str, make_record: MakeRecord, present_ns: Optional[int]) -> Dict[str, Entry]:
    """Read the entries of a folder's index, run → entry; empty if it is missing, or ignored for a reason above.

    Args:
        schema: digest of what the program makes records of.
        make_record: makes a record of a run's path, values and settings; a ValueError or TypeError in it means that the
            index is damaged.
        present_ns: the present time by the file system's clock.
    """
    try:
        content = read_bytes(folder / FILE, INDEX)
        start = content.index(b"\n") + 1
        head = parse_json(content[:start])
        written_ns = head["time_ns"]
        if head != _head(schema, written_ns, memoryview(content)[start:]):
            return {}
        if present_ns is not None and written_ns > present_ns + TICK_NS:
            return {}
        lines = content[start:].splitlines()
        del content
        return _entries_of(lines, make_record)
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def _entries_of(lines: List[bytes], make_record: MakeRecord) -> Dict[str, Entry]:
    entries: Dict[str, Entry] = {}
    settings_of_text: Dict[bytes, Dict[str, Any]] = {}
    for line in lines:
        values_text, _, settings_text = line.partition(b"\t")
        (run, files, fingerprint, *values), _ = parse_json_at(values_text.decode("ascii"), 0)
        settings = settings_of_text.get(settings_text)
        if settings is None:
            settings = settings_of_text[settings_text] = parse_json(settings_text)
            if not isinstance(settings, dict):
                raise ValueError("settings that are none")
        if not (isinstance(run, str) and isinstance(files, int) and isinstance(fingerprint, str)):
            raise ValueError("no entry of a run")
        entries[run] = Entry(files, fingerprint, make_record(run, values, settings), line)
    return entries


class LineWriter:
    """Makes the lines of entries; the text of settings that several runs have in common is made once."""

    def __init__(self) -> None:
        self._text_of_settings: Dict[int, Any] = {}  # identity → settings, which must stay alive, and their text

    def line(self, run: str, files: int, fingerprint: str, values: List[Any], settings: Dict[str, Any]) -> bytes:
        """The line of one run."""
        made = self._text_of_settings.get(id(settings))
        if made is None:
            made = self._text_of_settings[id(settings)] = (settings, json.dumps(settings))
        return f"{json.dumps([run, files, fingerprint, *values])}\t{made[1]}".encode("ascii")


def write_index(folder: Path, schema: str, time_ns: int, lines: Iterable[bytes]) -> None:
    """Replace a folder's index; one that would be longer than its limit is not written.

    Args:
        schema: as of :func:`read_index`.
        time_ns: time by the file system's clock before any of the runs was read.

    Raises:
        OSError: it cannot be written.
    """
    body = b"\n".join(lines)
    if len(body) + 1024 < INDEX.value:
        head = json.dumps(_head(schema, time_ns, body)).encode("ascii")
        write_bytes_atomically(folder / FILE, head + b"\n" + body)


def _head(schema: str, time_ns: int, body: Any) -> Dict[str, Any]:
    return {
        "kind": "index of runs",
        "version": VERSION,
        "schema": schema,
        "time_ns": time_ns,
        "sha256": hashlib.sha256(body).hexdigest(),
    }
