"""The simulator's folder: its files and how they are written.

::

    SPOOL/
      bin/            pjsub, pjstat, ..., to be put on PATH
      lib/            programs that they start
      settings.json   see :class:`fugaku_gpt.simulator.settings.Settings`
      socket          the daemon listens here
      lock            locked by the running daemon; has its process id
      daemon.log      messages of the daemon
      jobs/238.json   record of a job; 239[1].json that of a sub-job
      jobs/238/       the job's script and files of its mpiexec calls
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

from fugaku_gpt.errors import UsageError
from fugaku_gpt.input_files import read_text
from fugaku_gpt.json_text import parse_json
from fugaku_gpt.limits import RECORD

FOLDER_MODE = 0o700  # whoever can enter the folder can submit jobs in the user's name


@dataclass(frozen=True)
class Spool:
    """The folder of one simulator and the paths below it."""

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

    def record_path(self, job_id: str) -> Path:
        """The path of a job's record."""
        return self.jobs / f"{job_id}.json"

    def job_folder(self, job_id: str) -> Path:
        """The folder of a job's own files."""
        return self.jobs / job_id

    def create_folders(self) -> None:
        """Create the folders, readable by their owner alone."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.root.chmod(FOLDER_MODE)
        for folder in (self.bin, self.lib, self.jobs):
            folder.mkdir(exist_ok=True)

    def write_record(self, job_id: str, value: Any) -> None:
        """Write a job's record atomically."""
        _write_atomically(self.record_path(job_id), json.dumps(value))

    def read_records(self) -> List[Any]:
        """The records of all jobs; temporary files, which a kill left half-written, are removed.

        Raises:
            UsageError: a record cannot be read, or is not JSON.
        """
        records = []
        for path in self.jobs.glob(".*.tmp"):
            path.unlink()
        for path in self.jobs.glob("*.json"):
            try:
                records.append(parse_json(read_text(path, RECORD)))
            except OSError as error:
                raise UsageError(f"{path}: cannot be read: {error.strerror}; remove it, and the job with it") from None
            except ValueError as error:
                raise UsageError(f"{path}: not a job's record: {error}; remove it, and the job with it") from None
        return records

    def remove_job(self, job_id: str) -> None:
        """Remove a job's record and folder."""
        with contextlib.suppress(FileNotFoundError):
            self.record_path(job_id).unlink()
        shutil.rmtree(self.job_folder(job_id), ignore_errors=True)

    def next_number(self, first: int) -> int:
        """A job number that was not used before; the first one is ``first``."""
        path = self.root / "next"
        try:
            number = int(path.read_text(encoding="ascii"))
        except (OSError, ValueError):
            number = first
        _write_atomically(path, str(number + 1))
        return number

    def daemon_pid(self) -> Optional[int]:
        """The process id of the daemon that holds the lock; None if no daemon runs."""
        try:
            with open(self.lock, encoding="ascii") as stream:
                try:
                    fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except OSError:  # a running daemon holds it: the kernel releases the lock of a dead one
                    text = stream.read().strip()
                    return int(text) if text.isdecimal() else 0
        except OSError:
            pass
        return None

    @contextlib.contextmanager
    def locked(self) -> Iterator[IO[str]]:
        """Hold the daemon's lock.

        Raises:
            BlockingIOError: another daemon holds it.
        """
        with open(self.lock, "a+", encoding="ascii") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            stream.truncate(0)
            stream.write(f"{os.getpid()}\n")
            stream.flush()
            yield stream


def _write_atomically(path: Path, text: str) -> None:
    """Write a file atomically, also if this process is killed.

    It is not flushed to the disk, since no job survives a power cut.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as stream:
        stream.write(text)
    os.replace(temporary, path)
