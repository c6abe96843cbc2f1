"""The simulator's folder: where everything lies, and how it is written.

::

    SPOOL/
      bin/            pjsub, pjstat, ...: to be put on PATH
      lib/            what they start
      settings.json   see :class:`fugaku_gpt.simulator.settings.Settings`
      socket          the daemon listens here
      lock            held by the daemon while it lives; its process id is written in it
      daemon.log      what the daemon has to say
      jobs/238.json   one job; 239[1].json a sub-job
      jobs/238/       its script, and what its mpiexec calls leave
      next            id of the next job
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Iterator, List, Optional

MODE = 0o700  # of the folder: whoever may enter it may submit jobs in the user's name


@dataclass(frozen=True)
class Spool:
    """Paths below one simulator's folder."""

    root: Path

    @property
    def bin(self) -> Path:
        return self.root / "bin"

    @property
    def lib(self) -> Path:
        return self.root / "lib"

    @property
    def settings(self) -> Path:
        return self.root / "settings.json"

    @property
    def socket(self) -> Path:
        return self.root / "socket"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def log(self) -> Path:
        return self.root / "daemon.log"

    @property
    def jobs(self) -> Path:
        return self.root / "jobs"

    def record(self, job_id: str) -> Path:
        """The file that describes a job."""
        return self.jobs / f"{job_id}.json"

    def folder(self, job_id: str) -> Path:
        """The folder of a job's own files."""
        return self.jobs / job_id

    def make(self) -> None:
        """Create the folders, readable by their owner alone."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.root.chmod(MODE)
        for folder in (self.bin, self.lib, self.jobs):
            folder.mkdir(exist_ok=True)

    def write_record(self, job_id: str, value: Any) -> None:
        """Replace a job's file in one step."""
        _replace(self.record(job_id), json.dumps(value))

    def read_records(self) -> List[Any]:
        """Every job's record; what a kill has left half-written is a temporary file, and is removed."""
        found = []
        for path in self.jobs.glob(".*.tmp"):
            path.unlink()
        for path in self.jobs.glob("*.json"):
            found.append(json.loads(path.read_text(encoding="utf-8")))
        return found

    def forget(self, job_id: str) -> None:
        """Remove everything of a job."""
        with contextlib.suppress(FileNotFoundError):
            self.record(job_id).unlink()
        shutil.rmtree(self.folder(job_id), ignore_errors=True)

    def next_number(self, first: int) -> int:
        """A job number that was never given out."""
        path = self.root / "next"
        try:
            number = int(path.read_text(encoding="ascii"))
        except (OSError, ValueError):
            number = first
        _replace(path, str(number + 1))
        return number

    def daemon_pid(self) -> Optional[int]:
        """The process id of the daemon that holds the lock; None where none lives."""
        try:
            with open(self.lock, encoding="ascii") as stream:
                try:
                    fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except OSError:  # held: by a living daemon, for the kernel lets go of a dead one's
                    text = stream.read().strip()
                    return int(text) if text.isdigit() else 0
        except OSError:
            pass
        return None

    @contextlib.contextmanager
    def held(self) -> Iterator[IO[str]]:
        """The daemon's lock.

        Raises:
            BlockingIOError: another daemon has it.
        """
        with open(self.lock, "a+", encoding="ascii") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            stream.truncate(0)
            stream.write(f"{os.getpid()}\n")
            stream.flush()
            yield stream


def _replace(path: Path, text: str) -> None:
    """Whole or not at all, also when this process is killed. Not flushed to the disk: no job survives a power cut."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as stream:
        stream.write(text)
    os.replace(temporary, path)
