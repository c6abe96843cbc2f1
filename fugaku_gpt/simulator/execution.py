"""A job's script as processes of this machine: started, asked to stop, ended."""

from __future__ import annotations

import contextlib
import os
import resource
import signal as signals
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional

import psutil

from fugaku_gpt.pjm.values import parse_count, parse_limit
from fugaku_gpt.simulator.environment import MARK, PART, job_environment, job_folder, output_paths
from fugaku_gpt.simulator.job import Job
from fugaku_gpt.simulator.spool import Spool

OPEN_FILES = 1024  # of one process, where proc-openfd says nothing
_KILL_SECONDS = 5.0


class CannotStart(Exception):
    """The script cannot be started.

    Attributes:
        directory: because its folder or output files cannot be reached; else because of its shell.
    """

    def __init__(self, text: str, directory: bool) -> None:
        super().__init__(text)
        self.directory = directory


@dataclass(frozen=True)
class End:
    """How the script's process ended.

    Attributes:
        exit_code: 0 where a signal ended it.
        signal: 0 where none did.
        memory: bytes, of its largest process.
        user, system: seconds of processor time, of all processes that were waited for.
    """

    exit_code: int
    signal: int
    memory: int
    user: float
    system: float


def start(spool: Spool, job: Job, max_ranks: int) -> int:
    """Start the script; returns its process id.

    Raises:
        CannotStart: see there.
    """
    request = job.request
    folder = job_folder(spool, job)
    for name in ("localtmp", "sharedtmp"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    out, err = output_paths(job)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    mode = 0o666 & ~request.umask
    with contextlib.ExitStack() as stack:
        try:
            os.stat(request.directory)
            stdout = os.open(out, flags, mode)
            stack.callback(os.close, stdout)
            stderr = stdout
            if not request.join:
                stderr = os.open(err, flags, mode)
                stack.callback(os.close, stderr)
        except OSError as error:
            raise CannotStart(f"{error.filename}: {error.strerror}", directory=True) from None
        limits = _limits(job)

        def prepare() -> None:
            os.umask(request.umask)
            for kind, value in limits.items():
                resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))

        try:
            process = subprocess.Popen(
                [*request.interpreter, request.script],
                cwd=request.directory,
                env=job_environment(spool, job, max_ranks),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=prepare,
            )
        except OSError as error:
            raise CannotStart(f"{request.interpreter[0]}: {error.strerror}", directory=False) from None
    process.returncode = 0  # it is waited for below, by its id: the object has nothing to wait for
    return process.pid


def _limits(job: Job) -> Dict[int, int]:
    """Limits that a process can set on itself: open files and core files."""
    found = {}
    for key, kind, default in (
        ("proc-openfd", resource.RLIMIT_NOFILE, OPEN_FILES),
        ("proc-core", resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        text = job.request.resources.get(key)
        wanted: Optional[int] = default
        if text is not None:
            with contextlib.suppress(ValueError):
                wanted = parse_limit(text, parse_count) if key == "proc-openfd" else parse_limit(text)
        if wanted is None:
            found[kind] = hard
        else:
            found[kind] = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    return found


def ended(pid: int) -> Optional[End]:
    """How a script ended; None while it runs."""
    try:
        done, status, usage = os.wait4(pid, os.WNOHANG)
    except ChildProcessError:  # not started by this daemon: its end is nobody's to tell
        return End(0, signals.SIGKILL, 0, 0.0, 0.0)
    if done == 0:
        return None
    signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0
    kibi = 1 if os.uname().sysname == "Darwin" else 1024
    return End(code, signal, usage.ru_maxrss * kibi, usage.ru_utime, usage.ru_stime)


def processes(job: Job) -> List[psutil.Process]:
    """The living processes of a job: those with its mark, and those of its script's session."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(MARK) == job.mark or (job.pid and os.getsid(process.pid) == job.pid):
                found.append(process)
        except (psutil.Error, OSError):  # gone meanwhile, or another user's
            continue
    return found


def is_script(job: Job) -> bool:
    """Whether the process of a job's number is still its script, as far as can be seen from outside."""
    try:
        return bool(job.pid) and psutil.Process(job.pid).environ().get(MARK) == job.mark
    except psutil.Error:
        return False


def ask_to_stop(job: Job) -> None:
    """SIGTERM to what the real machine would know as the job: script and ranks, but not the stand-in's launcher."""
    for process in processes(job):
        with contextlib.suppress(psutil.Error, OSError):
            if not process.environ().get(PART):
                process.send_signal(signals.SIGTERM)


def kill(job: Job) -> int:
    """SIGKILL to every process of a job, until none is left. Returns how many there were."""
    there = processes(job)
    count = len(there)
    deadline = time.monotonic() + _KILL_SECONDS
    while there and time.monotonic() < deadline:
        for process in there:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.01)
        there = processes(job)
    return count


def temporary_space(spool: Spool, job: Job) -> List[Path]:
    """The job's own temporary folders, which end with it."""
    return [job_folder(spool, job) / name for name in ("localtmp", "sharedtmp")]
