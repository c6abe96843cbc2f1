"""Claims on folders: one holder at a time may write a folder, without any lock of the file system.

A claim is a file ``<stem>.<number>`` that is created once and never changed; the highest number counts. A process that
sees a claim whose holder is dead creates the next number, and the file system lets only one succeed. So a claim is
never taken away from a living holder, as could happen if the dead holder's file were removed and created anew.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Mapping, Optional, Tuple

from fugaku_gpt.input_files import read_text
from fugaku_gpt.json_text import parse_json
from fugaku_gpt.limits import RECORD
from fugaku_gpt.records.files import create_json_atomically
from fugaku_gpt.typed_json import record_of

HOLDER_VARIABLE = "FUGAKU_GPT_LAUNCH"  # passes the holder's name from the launcher to its ranks
_JOB_VARIABLES = ("PJM_SUBJOBID", "PJM_JOBID", "SLURM_JOB_ID")
_BIRTH_SECONDS = 1.0  # two processes with the same id start at least this far apart


@dataclass(frozen=True)
class Holder:
    """One process, or several that were started together.

    Attributes:
        name: equal for processes that belong together, such as ranks and their launcher.
        host: host on which the process runs.
        process: its process id there.
        born: start of the process, seconds since the epoch.
        job: id of its batch job; empty outside of one.
    """

    name: str
    host: str
    process: int
    born: float
    job: str = ""


class AlreadyClaimed(Exception):
    """Another holder, which seems to be alive, has claimed the folder."""

    def __init__(self, file: Path, holder: Optional[Holder]) -> None:
        self.file, self.holder = file, holder
        holder_text = f"process {holder.process} on {holder.host}" if holder is not None else "an unknown process"
        super().__init__(holder_text)


def current_process(name: str, environment: Optional[Mapping[str, str]] = None) -> Holder:
    """Return the current process as a holder."""
    import psutil  # here: readers of run directories do without it

    variables = os.environ if environment is None else environment
    job = next((variables[key] for key in _JOB_VARIABLES if variables.get(key)), "")
    return Holder(name, socket.gethostname(), os.getpid(), psutil.Process().create_time(), job)


def claim_folder(
    folder: Path, stem: str, holder: Holder, same_process: bool = True, ended: Optional[float] = None
) -> Path:
    """Claim a folder; returns the claim's file.

    Args:
        same_process: whether this very process may claim it again under another name.
        ended: time at which the work in the folder has ended by its own record, seconds since the epoch: an earlier
            holder on another host, whose processes cannot be examined, is then taken as done.

    Raises:
        AlreadyClaimed: another holder has it.
        OSError: the folder cannot be written.
    """
    while True:
        number, current = newest_claim(folder, stem)
        if number and current == holder:
            return folder / f"{stem}.{number}"
        over = current is not None and ended is not None and _claim_time(folder / f"{stem}.{number}") <= ended
        elsewhere = current is not None and current.host != holder.host
        if number and not (over and elsewhere) and not _may_follow(current, holder, same_process):
            raise AlreadyClaimed(folder / f"{stem}.{number}", current)
        path = folder / f"{stem}.{number + 1}"
        if create_json_atomically(path, {**asdict(holder), "time": time.time()}):
            return path


def release_claim(folder: Path, stem: str, name: str) -> bool:
    """Remove a holder's claim and older ones, lowest number first, so that the highest counts until the end. Returns
    False, and does nothing, if the newest claim is not (or no longer) this holder's, or cannot be read."""
    try:
        number, current = newest_claim(folder, stem)
    except OSError:
        return False
    if current is None or current.name != name:
        return False
    for older_number in range(1, number + 1):
        with contextlib.suppress(FileNotFoundError):
            (folder / f"{stem}.{older_number}").unlink()
    return True


def newest_claim(folder: Path, stem: str) -> Tuple[int, Optional[Holder]]:
    """Return (highest number, its holder): (0, None) if there is no claim; holder None if it is not complete (yet).

    Raises:
        OSError: the claim cannot be read.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return 0, None
    numbers = [name[len(stem) + 1 :] for name in names if name.startswith(stem + ".")]
    number = max((int(text) for text in numbers if text.isdecimal()), default=0)
    if number == 0:
        return 0, None
    try:
        values = parse_json(read_text(folder / f"{stem}.{number}", RECORD))
        return number, record_of(Holder, values)
    except FileNotFoundError:  # released since the folder was listed
        return newest_claim(folder, stem)
    except (ValueError, KeyError, TypeError):
        return number, None


def _claim_time(claim: Path) -> float:
    """Time of a claim, seconds since the epoch; the present time if it cannot be read."""
    try:
        return float(parse_json(read_text(claim, RECORD))["time"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return time.time()


def _may_follow(current: Optional[Holder], holder: Holder, same_process: bool) -> bool:
    """True if ``holder`` may claim after the current claim: both belong together, or the current holder is dead."""
    if current is None:
        return False
    if current.name == holder.name:
        return True
    if current.host == holder.host:
        return (same_process and current.process == holder.process) or not is_holder_alive(current)
    # a batch system that starts a job again has ended it before, wherever that was
    return current.job != "" and current.job == holder.job


def is_holder_alive(holder: Holder) -> bool:
    """Whether the process of a holder lives on this machine, which is the holder's host."""
    import psutil

    try:
        process = psutil.Process(holder.process)
        zombie = process.status() == psutil.STATUS_ZOMBIE
        return not zombie and abs(process.create_time() - holder.born) < _BIRTH_SECONDS
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:  # another user's: alive
        return True
