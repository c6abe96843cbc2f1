"""Runs a command under the shim that logs its calls to the file system, and makes one of them fail."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

import psutil

SOURCE = Path(__file__).with_name("shim.c")
# beyond what a busy machine needs for a command that does not wait for ever
HANG_SECONDS = 300.0
LINGER_SECONDS = 20.0  # in which what the commands have started in the background ends by itself, such as a queue
# the errors with which calls fail, on a disk that is full, over quota, broken, remounted read-only, without locks
ERRORS: Dict[str, Sequence[int]] = {
    "open-to-read": (errno.EIO,),
    "open-to-write": (errno.ENOSPC, errno.EROFS),
    "write": (errno.ENOSPC, errno.EDQUOT, errno.EIO),
    "truncate": (errno.ENOSPC,),
    "allocate": (errno.ENOSPC,),
    "fsync": (errno.EIO, errno.EDQUOT),
    "rename": (errno.EIO, errno.ENOENT),  # the second as where somebody has removed the folder
    "link": (errno.EIO, errno.ENOENT),
    "mkdir": (errno.ENOSPC, errno.EROFS),
    "unlink": (errno.EROFS,),
    "lock": (errno.ENOLCK,),
}


@dataclass(frozen=True)
class Call:
    """One call of a command, as the shim names it.

    Attributes:
        role: ``main`` for what the user starts, or ``rank0``, ``supervisor1`` and so on.
        name: the kind of call.
        path: its file, relative to the folder, numbers as N and hexadecimal names as H.
        nth: which of the calls of this name and path in its process.
        is_last: whether no later one was seen.
    """

    role: str
    name: str
    path: str
    nth: int
    is_last: bool = False

    def fault(self, error: int) -> str:
        """The text for the shim that makes this call and all later ones fail."""
        return f"{self.role} {self.name} {self.path} {self.nth}+ {error}"


@dataclass(frozen=True)
class Ended:
    """How the commands ended.

    Attributes:
        codes: their exit codes; None for one that had to be killed, which is the last.
        output: what they printed on both streams.
        orphans: processes that they have left.
    """

    codes: List[Optional[int]]
    output: str
    orphans: List[int]

    @property
    def is_ok(self) -> bool:
        """Whether each exit code is 0."""
        return all(code == 0 for code in self.codes)


def compile_shim(folder: Path) -> Path:
    """Compile the shim, and return its path."""
    library = folder / "disk-faults.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"], check=True)
    return library


def run_under_shim(
    shim: Path, root: Path, commands: Sequence[Sequence[str]], *, fault: str = "", log: Optional[Path] = None
) -> Ended:
    """Run commands in turn, whose calls below the folder ``root`` are logged, or one of which fails."""
    environment = {**os.environ, "LD_PRELOAD": str(shim), "DISK_FAULT_ROOT": str(root), "PYTHONUNBUFFERED": "1"}
    environment.update({"DISK_FAULT": fault} if fault else {})
    environment.update({"DISK_FAULT_LOG": str(log)} if log is not None else {})
    environment["HOME"] = str(root)  # where the queue of this machine is
    codes: List[Optional[int]] = []
    printed = b""
    for command in commands:
        code, output = _run(command, environment, root)
        codes.append(code)
        printed += output
        if code is None:
            break
    orphans = [process.pid for process in _end_processes_below(root, 0.0 if codes[-1] is None else LINGER_SECONDS)]
    return Ended(codes, printed.decode("utf-8", "replace"), orphans)


def _run(command: Sequence[str], environment: Dict[str, str], folder: Path) -> Tuple[Optional[int], bytes]:
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, cwd=folder, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=HANG_SECONDS)
            return process.returncode, output
        except subprocess.TimeoutExpired as expired:
            _end_processes_below(folder, 0.0)
            return None, expired.output or b""


def seen_calls(log: Path) -> List[Call]:
    """The calls of a log: of each name on each file the first, and the last where there are more."""
    last: Counter[str] = Counter()
    for line in log.read_text(encoding="utf-8").splitlines():
        key, _, nth = line.rpartition(" ")
        last[key] = max(last[key], int(nth))
    calls = []
    for key, most in sorted(last.items()):
        role, name, path = key.split(" ")
        for number in sorted({1, most}):
            calls.append(Call(role, name, path, number, number == most))
    return calls


def _end_processes_below(root: Path, linger: float) -> List[psutil.Process]:
    """Kill the processes that were started for this folder and live on for a while; returns them."""
    end = time.monotonic() + linger
    while time.monotonic() < end and _processes_below(root):
        time.sleep(0.05)
    processes = _processes_below(root)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return processes


def _processes_below(root: Path) -> List[psutil.Process]:
    """The living processes that were started for this folder."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get("DISK_FAULT_ROOT") == str(root) and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes
