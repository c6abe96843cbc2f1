"""Processes of a job's script on this machine: start, stop, kill, and the end of the script."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal as signals
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional

import psutil

from fugaku_gpt.pjm.values import parse_count, parse_limit
from fugaku_gpt.simulator.environment import (
    JOB_MARK_VARIABLE,
    NODE_VARIABLE,
    STAND_IN_VARIABLE,
    SYSTEM_PATH,
    job_environment,
    job_folder,
    output_paths,
)
from fugaku_gpt.simulator.job import Job
from fugaku_gpt.simulator.spool import Spool

OPEN_FILES = 1024  # limit of one process if the job sets no proc-openfd
_KILL_SECONDS = 5.0
_SH = ("/bin/sh", "/usr/bin/sh")


class CannotStart(Exception):
    """The script cannot be started.

    Attributes:
        directory: True if its folder or output files cannot be reached; False if its shell cannot be started.
    """

    def __init__(self, text: str, directory: bool) -> None:
        super().__init__(text)
        self.directory = directory


@dataclass(frozen=True)
class ScriptEnd:
    """The end of a script's process.

    Attributes:
        exit_code: its exit code; 0 if a signal ended it.
        signal: number of the signal that ended it; 0 if none did.
        memory: bytes of memory of its largest process.
        user, system: seconds of processor time of all processes that were waited for.
    """

    exit_code: int
    signal: int
    memory: int
    user: float
    system: float


def start_script(spool: Spool, job: Job, max_ranks: int) -> int:
    """Start the script and return its process id.

    Raises:
        CannotStart: the folder, the output files or the shell cannot be used.
    """
    request = job.request
    folder = job_folder(spool, job)
    for name in ("localtmp", "sharedtmp"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    out, err = output_paths(job)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    file_mode = 0o666 & ~request.umask
    with contextlib.ExitStack() as stack:
        try:
            os.stat(request.directory)
            stdout = os.open(out, flags, file_mode)
            stack.callback(os.close, stdout)
            stderr = stdout
            if not request.join:
                stderr = os.open(err, flags, file_mode)
                stack.callback(os.close, stderr)
        except OSError as error:
            raise CannotStart(f"{error.filename}: {error.strerror}", directory=True) from None
        limits = _limits(job)

        def prepare_process() -> None:
            os.umask(request.umask)
            for resource_kind, value in limits.items():
                resource.setrlimit(resource_kind, (value, resource.getrlimit(resource_kind)[1]))

        try:
            process = subprocess.Popen(
                [*request.interpreter, request.script],
                executable=_program_of(request.interpreter[0]),
                cwd=request.directory,
                env=job_environment(spool, job, max_ranks),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=prepare_process,
            )
        except OSError as error:
            raise CannotStart(f"{request.interpreter[0]}: {error.strerror}", directory=False) from None
    process.returncode = 0  # poll_end waits for it by its pid: the Popen object must not
    return process.pid


def _program_of(interpreter: str) -> str:
    """The program that is started as an interpreter: bash for ``sh``, which it is on Fugaku's nodes. Under the name of
    ``sh`` it is in POSIX mode, with arrays and ``[[``, which a small ``sh`` of this machine may not have."""
    bash = shutil.which("bash", path=SYSTEM_PATH)
    return bash if interpreter in _SH and bash is not None else interpreter


def _limits(job: Job) -> Dict[int, int]:
    """Resource limits that a process can set on itself: open files and core files."""
    limits = {}
    for key, resource_kind, default in (
        ("proc-openfd", resource.RLIMIT_NOFILE, OPEN_FILES),
        ("proc-core", resource.RLIMIT_CORE, 0),
    ):
        hard_limit = resource.getrlimit(resource_kind)[1]
        text = job.request.resources.get(key)
        soft_limit: Optional[int] = default
        if text is not None:
            with contextlib.suppress(ValueError):
                soft_limit = parse_limit(text, parse_count) if key == "proc-openfd" else parse_limit(text)
        if soft_limit is None:
            limits[resource_kind] = hard_limit
        else:
            limits[resource_kind] = soft_limit if hard_limit == resource.RLIM_INFINITY else min(soft_limit, hard_limit)
    return limits


def poll_end(pid: int) -> Optional[ScriptEnd]:
    """The end of a script; None while it runs."""
    try:
        ended_pid, status, usage = os.wait4(pid, os.WNOHANG)
    except ChildProcessError:  # not a child of this daemon: its end is unknown
        return ScriptEnd(0, signals.SIGKILL, 0, 0.0, 0.0)
    if ended_pid == 0:
        return None
    signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0
    memory_unit = 1 if os.uname().sysname == "Darwin" else 1024
    return ScriptEnd(code, signal, usage.ru_maxrss * memory_unit, usage.ru_utime, usage.ru_stime)


def find_processes(job: Job) -> List[psutil.Process]:
    """The living processes of a job: those with its mark and those in the session of its script."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(JOB_MARK_VARIABLE) == job.mark or (job.pid and os.getsid(process.pid) == job.pid):
                processes.append(process)
        except (psutil.Error, OSError):  # has ended, or belongs to another user
            continue
    return processes


def is_script_running(job: Job) -> bool:
    """Whether the process with the pid of a job's script has the mark of the job."""
    try:
        return bool(job.pid) and psutil.Process(job.pid).environ().get(JOB_MARK_VARIABLE) == job.mark
    except psutil.Error:
        return False


def terminate_processes(job: Job) -> None:
    """Send SIGTERM to the processes that the real job would have: script and ranks, not the stand-in's launcher."""
    for process in find_processes(job):
        with contextlib.suppress(psutil.Error, OSError):
            if not process.environ().get(STAND_IN_VARIABLE):
                process.send_signal(signals.SIGTERM)


def kill_processes(job: Job) -> int:
    """Send SIGKILL to every process of a job until none is left; return their number at the start."""
    processes = find_processes(job)
    count = len(processes)
    deadline = time.monotonic() + _KILL_SECONDS
    while processes and time.monotonic() < deadline:
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.01)
        processes = find_processes(job)
    return count


def kill_node(job: Job, node: int) -> int:
    """Send SIGKILL to every process of a job that is on one of its nodes; return their number.

    Args:
        node: number of the node in the job. The script, and the launchers that it starts, are on node 0.
    """
    count = 0
    for process in find_processes(job):
        with contextlib.suppress(psutil.Error, OSError):
            if int(process.environ().get(NODE_VARIABLE, "0")) == node:
                process.kill()
                count += 1
    return count


def temporary_folders(spool: Spool, job: Job) -> List[Path]:
    """Temporary folders of a job, which are removed when it ends."""
    return [job_folder(spool, job) / name for name in ("localtmp", "sharedtmp")]
