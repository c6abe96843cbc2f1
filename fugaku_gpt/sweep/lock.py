"""One sweep at a time in a directory."""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from pathlib import Path
from typing import IO, Optional

from fugaku_gpt.errors import UsageError
from fugaku_gpt.jobs.processes import GRACE_SECONDS, end_marked

FILE = ".sweep.lock"


class SweepLock:
    """Holds a sweep's directory. The kernel lets go of the lock when its holder dies, however it dies.

    The file says who holds it and by which mark its ranks are found: the next holder ends ranks that a killed sweep has
    left behind, before they write into a run directory that is used again.
    """

    def __init__(self, directory: Path) -> None:
        self.mark = uuid.uuid4().hex
        self._path = directory / FILE
        self._stream: Optional[IO[str]] = None

    def __enter__(self) -> SweepLock:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            stream = open(self._path, "a+", encoding="utf-8")  # noqa: SIM115  # held for the whole sweep
        except OSError as error:
            why = error.strerror
            raise UsageError(f"{self._path.parent}: cannot be written: {why}; choose another --out") from None
        stream.seek(0)
        text = stream.read()
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            stream.close()
            holder = _field(text, "process") or "unknown"
            raise UsageError(
                f"{self._path.parent}: a sweep is already running there (process {holder}); "
                "wait for its end, or choose another --out"
            ) from None
        left_by = _field(text, "mark")
        if left_by:
            end_marked(left_by, GRACE_SECONDS)
        stream.truncate(0)
        stream.write(json.dumps({"process": os.getpid(), "mark": self.mark}) + "\n")
        stream.flush()
        self._stream = stream
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.truncate(0)
            self._stream.close()


def _field(text: str, name: str) -> str:
    try:
        values = json.loads(text)
    except ValueError:  # empty: the last holder has ended well; or cut short by a full disk
        return ""
    return str(values.get(name, "")) if isinstance(values, dict) else ""
