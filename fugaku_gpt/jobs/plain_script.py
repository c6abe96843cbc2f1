"""Job scripts that are not of a run: any script for PJM, Slurm or this machine, submitted as it is.

Such a job starts in the folder from which it is submitted, as with ``pjsub``, and leaves its output there. A folder of
its own has the record of it (``job.jsonl``) and a copy of the script.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Optional

from fugaku_gpt.errors import UsageError
from fugaku_gpt.input_files import read_bytes, resolved
from fugaku_gpt.jobs.schedulers.protocol import Scheduler, Submission
from fugaku_gpt.jobs.submission import SCRIPT, require_no_run, submit_recorded
from fugaku_gpt.limits import SCRIPT_TEXT
from fugaku_gpt.records.files import write_bytes_atomically

_RUN_FILES = (".yaml", ".yml", ".json")
_DIRECTIVES = {"pjm": re.compile(rb"^#PJM\b", re.M), "slurm": re.compile(rb"^#SBATCH\b", re.M)}
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True)
class PlainScript:
    """A script that is not of a run.

    Attributes:
        path: path as it was given.
        content: the script.
        scheduler: name of the scheduler that its directives are for, or that was asked for.
    """

    path: Path
    content: bytes
    scheduler: str

    @property
    def text(self) -> str:
        """The script as text; bytes that are not UTF-8 are kept as surrogates."""
        return self.content.decode("utf-8", "surrogateescape")

    @property
    def name(self) -> str:
        """A name for the folder of its record: the file's, without its suffix."""
        return _NOT_IN_NAMES.sub("_", self.path.stem).lstrip(".") or "job"


def is_plain_script(path: Path) -> bool:
    """Whether a file is a script and no run file: it has another suffix, and begins with ``#!`` or has directives."""
    if path.suffix in _RUN_FILES or not path.is_file():
        return False
    try:
        content = read_bytes(path, SCRIPT_TEXT)
    except OSError:
        return False
    return content.startswith(b"#!") or any(pattern.search(content) for pattern in _DIRECTIVES.values())


def read_plain_script(path: Path, scheduler: Optional[str] = None) -> PlainScript:
    """Read a script, and decide for which scheduler it is.

    Args:
        scheduler: name of the scheduler; default: the one whose directives the script has.

    Raises:
        UsageError: it cannot be read, or its directives are of no scheduler or of several.
    """
    try:
        content = read_bytes(path, SCRIPT_TEXT)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    named = [name for name, pattern in _DIRECTIVES.items() if pattern.search(content)]
    if scheduler is None and len(named) != 1:
        problem = "#PJM and #SBATCH lines" if named else "neither #PJM nor #SBATCH lines"
        raise UsageError(f"{path}: has {problem}: name the scheduler with --scheduler pjm, slurm or local")
    return PlainScript(path, content, scheduler or named[0])


def submission_of(script: PlainScript, start: Path) -> Submission:
    """Return the submission of a script that starts in a folder."""
    return Submission(script=str(script.path), directory=start, name=script.name)


def submit_plain_script(
    script: PlainScript,
    record: Path,
    scheduler: Scheduler,
    start: Optional[Path] = None,
    clock: Callable[[], float] = time.time,
) -> str:
    """Submit a script, with its record in a new folder; return the job id.

    Args:
        record: folder for the record.
        start: folder in which the job starts; default: the present one.

    Raises:
        Refused, Uncertain: see :func:`fugaku_gpt.jobs.submission.submit_recorded`.
        UsageError: the folder holds a job or a run, or cannot be written.
    """
    require_no_run(record)
    start = resolved(start if start is not None else Path.cwd())
    try:
        record.mkdir(parents=True, exist_ok=True)
        write_bytes_atomically(record / SCRIPT, script.content)
    except OSError as error:
        raise UsageError(f"{record}: cannot be written: {error.strerror}; choose another --out") from None
    return submit_recorded(record, submission_of(script, start), scheduler, clock, folder=str(start))
