"""Starts and stops simulators; :class:`Simulator` does both around a block of code."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal as signals
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Dict, List, Mapping, Optional, Sequence, Type

from fugaku_gpt.errors import RunFailed, UsageError
from fugaku_gpt.json_text import parse_json
from fugaku_gpt.simulator.client import BANNER, invocation_values, send_request
from fugaku_gpt.simulator.install import install_commands
from fugaku_gpt.simulator.settings import Settings, read_settings, write_settings
from fugaku_gpt.simulator.spool import Spool

START_SECONDS = 30.0
STOP_SECONDS = 30.0  # in addition to the grace time of jobs
NAME = "fugaku-gpt-sim"


def default_directory() -> Path:
    """The default folder of a simulator, one for each user."""
    return Path(tempfile.gettempdir()) / f"{NAME}-{os.getuid()}"


def find_spool(directory: Optional[Path] = None) -> Spool:
    """The simulator of a folder, whether it runs or not; by default the user's own.

    Raises:
        UsageError: the folder belongs to another user, who could have created it under the temporary folder with
            commands and a process id of their own.
    """
    folder = directory or default_directory()
    spool = Spool(Path(os.path.abspath(folder)))
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if spool.root.stat().st_uid != os.getuid():
            raise UsageError(f"{folder}: belongs to another user; name another folder")
    return spool


def start_simulator(directory: Path, settings: Optional[Settings] = None) -> Spool:
    """Start a simulator that outlives this process; it keeps the jobs of an earlier one in the folder.

    Args:
        directory: folder of the simulator; created if it does not exist.
        settings: default: the settings of the folder, or the defaults in a new one.

    Raises:
        UsageError: a simulator runs there, or the folder has other contents.
        RunFailed: the daemon does not start.
    """
    spool = find_spool(directory)
    if spool.root.exists() and (not spool.root.is_dir() or (any(spool.root.iterdir()) and not spool.settings.exists())):
        raise UsageError(f"{directory}: holds something else than a simulator; name a new or empty folder")
    if spool.daemon_pid() is not None:
        raise UsageError(f"{directory}: a simulator runs there already; `fugaku-gpt sim stop` ends it")
    try:
        spool.create_folders()
        write_settings(spool.settings, stored_settings(directory) if settings is None else settings)
        install_commands(spool)
    except OSError as error:
        raise UsageError(f"{directory}: cannot be written: {error.strerror}; name another folder") from None
    with open(spool.log, "ab") as log:
        process = subprocess.Popen(
            [sys.executable, str(spool.lib / "daemon.py")],
            cwd=spool.root,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_SECONDS
    while not is_answering(spool):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            log_tail = spool.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
            raise RunFailed(
                f"the simulator has not started ({spool.log}): {' / '.join(log_tail) or 'its log is empty'}"
            )
        time.sleep(0.01)
    _children[process.pid] = process
    return spool


def stored_settings(directory: Path) -> Settings:
    """The settings of the last start in a folder, without its owner; the defaults in a new folder.

    Raises:
        UsageError: the folder's settings cannot be read.
    """
    path = Spool(directory).settings
    return replace(read_settings(path), owner=0) if path.exists() else Settings()


# Popen objects of daemons that this process started, so that they are reaped when they end
_children: "Dict[int, subprocess.Popen[bytes]]" = {}


def is_answering(spool: Spool) -> bool:
    """Whether a daemon replies."""
    try:
        send_order(spool, ["ping"])
    except UsageError:
        return False
    return True


def send_order(spool: Spool, arguments: Sequence[str]) -> str:
    """Send an order to the daemon and return its output.

    Raises:
        UsageError: no simulator runs there, or it refuses the order.
    """
    try:
        reply = send_request(str(spool.root), invocation_values("order", list(arguments)))
    except OSError as error:
        raise UsageError(
            f"no simulator runs in {spool.root} ({error.strerror or error}); `fugaku-gpt sim start` starts one"
        ) from None
    if reply["code"]:
        raise UsageError(str(reply["err"]).strip())
    return str(reply["out"])


def stop_simulator(spool: Spool) -> None:
    """Stop a simulator and end its jobs.

    A daemon that does not reply is killed. This process then ends its jobs, as it does for jobs of a daemon that was
    killed earlier.

    Raises:
        UsageError: no simulator runs there, and no jobs are left of one.
    """
    pid = spool.daemon_pid()
    if pid is None:
        if spool.settings.exists() and end_orphans(spool):
            return
        raise UsageError(f"no simulator runs in {spool.root}")
    try:
        send_order(spool, ["stop"])
    except UsageError:  # it has ended meanwhile, or hangs
        os.kill(pid, signals.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    while spool.daemon_pid() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    if spool.daemon_pid() is not None:
        os.kill(pid, signals.SIGKILL)
        end_orphans(spool)
    daemon = _children.pop(pid, None)
    if daemon is not None:
        daemon.wait()


def end_orphans(spool: Spool) -> int:
    """End the jobs that a killed daemon left running; return their number."""
    from fugaku_gpt.simulator.faults import Faults
    from fugaku_gpt.simulator.job_manager import JobManager
    from fugaku_gpt.simulator.table import JobTable

    return JobManager(JobTable(spool), read_settings(spool.settings), Faults()).recover()


def simulator_status(spool: Spool) -> Dict[str, Any]:
    """The status of a simulator: ``jobs``, state → number of jobs, and ``faults``, a text.

    Raises:
        UsageError: no simulator runs there.
    """
    values = parse_json(send_order(spool, ["status"]))
    assert isinstance(values, dict)
    return values


def export_line(spool: Spool) -> str:
    """The shell command that puts the simulator's commands on PATH."""
    return f'export PATH={shlex.quote(str(spool.bin))}:"$PATH"'


class Simulator:
    """A simulator around a block of code::

        with Simulator(directory) as site:
            site.run("pjsub", "-z", "jid", "job.sh", cwd=work)

    It stops at the end of the block, and also when this process is killed. ``os.environ`` is not changed:
    :attr:`environment` has the commands on PATH.

    Args:
        directory: folder of the simulator, new or of an earlier one; default: a temporary folder, removed at the end.
        settings: see :class:`Settings`; default: its defaults.
    """

    def __init__(self, directory: Optional[Path] = None, settings: Optional[Settings] = None) -> None:
        self._temporary = directory is None
        self.directory = Path(tempfile.mkdtemp(prefix=NAME + "-")) if directory is None else Path(directory)
        self.settings = replace(settings if settings is not None else Settings(), owner=os.getpid())
        self.spool = Spool(Path(os.path.abspath(self.directory)))

    @property
    def bin(self) -> Path:
        """The folder of the commands."""
        return self.spool.bin

    @property
    def environment(self) -> Dict[str, str]:
        """The environment variables of this process, with the commands first on PATH."""
        return {**os.environ, "PATH": f"{self.spool.bin}{os.pathsep}{os.environ.get('PATH', '')}"}

    def __enter__(self) -> "Simulator":
        self.start()
        return self

    def __exit__(
        self,
        error_type: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        if self.spool.daemon_pid() is not None:
            self.stop()
        else:  # killed inside the block
            end_orphans(self.spool)
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    def start(self) -> None:
        """Start the simulator, also after :meth:`stop` or a kill."""
        start_simulator(self.directory, self.settings)

    def stop(self) -> None:
        """Stop the simulator and end its jobs."""
        stop_simulator(self.spool)

    def run(
        self,
        command: str,
        *arguments: str,
        cwd: Optional[Path] = None,
        stdin: str = "",
        environment: Optional[Mapping[str, str]] = None,
        timeout: float = 60.0,
    ) -> "subprocess.CompletedProcess[str]":
        """Run one of the commands; the output is text, without the banner on standard error."""
        completed = subprocess.run(
            [str(self.spool.bin / command), *arguments],
            cwd=cwd,
            input=stdin,
            env=dict(environment) if environment is not None else self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        banner = f"{command}: {BANNER}\n"
        if completed.stderr.startswith(banner):
            completed.stderr = completed.stderr[len(banner) :]
        return completed

    def submit(self, *arguments: str, cwd: Path) -> str:
        """Submit with ``pjsub -z jid`` and return the job's id.

        Raises:
            UsageError: the job was refused.
        """
        completed = self.run("pjsub", "-z", "jid", *arguments, cwd=cwd)
        if completed.returncode:
            raise UsageError(completed.stderr.strip())
        return completed.stdout.split()[-1]

    def wait(self, *ids: str, timeout: float = 60.0) -> List[List[str]]:
        """Wait with ``pjwait``; return [id, PJM code, exit code, signal] of each job.

        Raises:
            OSError: the jobs have not finished within ``timeout`` seconds.
        """
        return [line.split() for line in self._output_of("pjwait", *ids, timeout=timeout).splitlines()]

    def job_state(self, job_id: str) -> str:
        """The state of a job, also of a finished one; empty for an unknown job."""
        for options in ((), ("-H",)):
            for line in self._output_of("pjstat", *options, "-E", "--data", "--choose", "jid,st", job_id).splitlines()[
                1:
            ]:
                _, listed_id, state = line.split(",")
                if listed_id == job_id:
                    return state
        return ""

    def _output_of(self, command: str, *arguments: str, timeout: float = 60.0) -> str:
        """The output that a command would print, from the daemon, without a process for the command."""
        return str(send_request(str(self.spool.root), invocation_values(command, list(arguments)), timeout)["out"])

    def inject_fault(self, *arguments: str) -> None:
        """Inject a fault; the arguments are those of ``fugaku-gpt sim fault``.

        Raises:
            UsageError: there is no such fault.
        """
        send_order(self.spool, ["fault", *arguments])

    def daemon_pid(self) -> Optional[int]:
        """The process id of the daemon; None if it does not run."""
        return self.spool.daemon_pid()
