"""Locks a directory, so that only one sweep at a time uses it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import sys
import uuid
from pathlib import Path
from typing import IO, Optional

from fugaku_gpt.errors import UsageError
from fugaku_gpt.json_text import parse_json
from fugaku_gpt.launch.processes import GRACE_SECONDS, end_marked_processes
from fugaku_gpt.records.claim import AlreadyClaimed, claim_folder, current_process, release_claim

FILE = ".sweep.lock"
CLAIM = ".sweep.claim"  # where the file system has no locks
_UNSUPPORTED_LOCK_ERRORS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class SweepLock:
    """The lock on a sweep's directory. The kernel releases it when its holder dies, however it dies.

    The file holds the holder's process and the mark by which its ranks are found: the next holder ends ranks that a
    killed sweep has left behind, before they write into a run directory that is used again.

    On a file system without locks a claim replaces it (see :mod:`fugaku_gpt.records.claim`): a dead holder is noticed
    on its own machine only; elsewhere the file of the claim has to be removed by hand.
    """

    def __init__(self, directory: Path) -> None:
        self.mark = uuid.uuid4().hex
        self._directory = directory
        self._path = directory / FILE
        self._stream: Optional[IO[str]] = None

    def __enter__(self) -> SweepLock:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            stream = open(self._path, "a+", encoding="utf-8")  # noqa: SIM115  # held for the whole sweep
        except OSError as error:
            reason = error.strerror
            raise UsageError(f"{self._path.parent}: cannot be written: {reason}; choose another --out") from None
        stream.seek(0)
        text = stream.read()
        try:
            self._lock(stream, text)
        except BaseException:
            stream.close()
            raise
        stale_mark = _field(text, "mark")
        if stale_mark:
            end_marked_processes(stale_mark, GRACE_SECONDS)
        stream.truncate(0)
        stream.write(json.dumps({"process": os.getpid(), "mark": self.mark}) + "\n")
        stream.flush()
        self._stream = stream
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.truncate(0)
            release_claim(self._directory, CLAIM, self.mark)
            self._stream.close()

    def _lock(self, stream: IO[str], text: str) -> None:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in _UNSUPPORTED_LOCK_ERRORS:
                holder = _field(text, "process") or "unknown"
                raise UsageError(
                    f"{self._directory}: a sweep is already running there (process {holder}); "
                    "wait for its end, or choose another --out"
                ) from None
            print(
                f"note: {self._directory}: its file system has no locks ({error.strerror}); a claim file stands in",
                file=sys.stderr,
            )
        try:
            claim_folder(self._directory, CLAIM, current_process(self.mark), same_process=False)
        except AlreadyClaimed as claimed:
            raise UsageError(
                f"{self._directory}: a sweep is already running there ({claimed}); wait for its end, or choose another "
                f"--out; if that process is gone, remove {claimed.file}"
            ) from None


def _field(text: str, name: str) -> str:
    try:
        values = parse_json(text)
    except ValueError:  # empty: the last holder has ended well; or cut short by a full disk
        return ""
    return str(values.get(name, "")) if isinstance(values, dict) else ""
