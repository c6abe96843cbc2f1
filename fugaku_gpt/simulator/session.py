"""Starting and stopping a simulator, and :class:`Simulator`, which does both around a block of code."""

from __future__ import annotations

import contextlib
import json
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
from fugaku_gpt.simulator.client import BANNER, ask, values_of
from fugaku_gpt.simulator.install import install
from fugaku_gpt.simulator.settings import Settings, read_settings, write_settings
from fugaku_gpt.simulator.spool import Spool

START_SECONDS = 30.0
STOP_SECONDS = 30.0  # above the grace that jobs have
NAME = "fugaku-gpt-sim"


def default_directory() -> Path:
    """Where a simulator lives when nothing is said: one for each user."""
    return Path(tempfile.gettempdir()) / f"{NAME}-{os.getuid()}"


def find(directory: Optional[Path] = None) -> Spool:
    """The simulator of a folder, whether one runs there or not; default: the user's own.

    Raises:
        UsageError: the folder is another user's. Everybody may make one of that name under the temporary folder, with
            commands and a process id of theirs in it.
    """
    place = directory or default_directory()
    spool = Spool(Path(os.path.abspath(place)))
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if spool.root.stat().st_uid != os.getuid():
            raise UsageError(f"{place}: belongs to another user; name another folder")
    return spool


def start(directory: Path, settings: Optional[Settings] = None) -> Spool:
    """Start a simulator that outlives this process; jobs of an earlier one in the folder are known to it.

    Args:
        directory: the simulator's own; created where it is not there.
        settings: default: those of the folder, or the defaults in a new one.

    Raises:
        UsageError: one runs there, or the folder is of something else.
        RunFailed: it does not start.
    """
    spool = find(directory)
    if spool.root.exists() and (not spool.root.is_dir() or (any(spool.root.iterdir()) and not spool.settings.exists())):
        raise UsageError(f"{directory}: holds something else than a simulator; name a new or empty folder")
    if spool.daemon_pid() is not None:
        raise UsageError(f"{directory}: a simulator runs there already; `fugaku-gpt sim stop` ends it")
    try:
        spool.make()
        write_settings(spool.settings, stored_settings(directory) if settings is None else settings)
        install(spool)
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
    while not answers(spool):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            tail = spool.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
            raise RunFailed(f"the simulator has not started ({spool.log}): {' / '.join(tail) or 'it says nothing'}")
        time.sleep(0.01)
    _children[process.pid] = process
    return spool


def stored_settings(directory: Path) -> Settings:
    """The settings of the last start in a folder, but for its owner; the defaults in a new one.

    Raises:
        UsageError: the folder holds something else.
    """
    path = Spool(directory).settings
    return replace(read_settings(path), owner=0) if path.exists() else Settings()


# Popen objects of daemons that this process has started, so that they are reaped when they have ended
_children: "Dict[int, subprocess.Popen[bytes]]" = {}


def answers(spool: Spool) -> bool:
    """Whether a daemon answers."""
    try:
        send(spool, ["ping"])
    except UsageError:
        return False
    return True


def send(spool: Spool, words: Sequence[str]) -> str:
    """An order to the daemon; returns what it prints.

    Raises:
        UsageError: no simulator runs there, or it does not know the order.
    """
    try:
        answer = ask(str(spool.root), values_of("order", list(words)))
    except OSError as error:
        raise UsageError(
            f"no simulator runs in {spool.root} ({error.strerror or error}); `fugaku-gpt sim start` starts one"
        ) from None
    if answer["code"]:
        raise UsageError(str(answer["err"]).strip())
    return str(answer["out"])


def stop(spool: Spool) -> None:
    """End a simulator and its jobs; one that does not answer is killed, and its jobs are ended from here, as are those
    that a killed one has left.

    Raises:
        UsageError: none runs there, and none has left jobs.
    """
    pid = spool.daemon_pid()
    if pid is None:
        if spool.settings.exists() and end_orphans(spool):
            return
        raise UsageError(f"no simulator runs in {spool.root}")
    try:
        send(spool, ["stop"])
    except UsageError:  # it has gone meanwhile, or hangs
        os.kill(pid, signals.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    while spool.daemon_pid() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    if spool.daemon_pid() is not None:
        os.kill(pid, signals.SIGKILL)
        end_orphans(spool)
    child = _children.pop(pid, None)
    if child is not None:
        child.wait()


def end_orphans(spool: Spool) -> int:
    """End what a killed daemon has left running; returns how many jobs."""
    from fugaku_gpt.simulator.core import Core
    from fugaku_gpt.simulator.faults import Faults
    from fugaku_gpt.simulator.table import Table

    return Core(Table(spool), read_settings(spool.settings), Faults()).recover()


def status(spool: Spool) -> Dict[str, Any]:
    """What a simulator says of itself: ``jobs``, state → number, and ``faults``, in words.

    Raises:
        UsageError: none runs there.
    """
    values = json.loads(send(spool, ["status"]))
    assert isinstance(values, dict)
    return values


def export_line(spool: Spool) -> str:
    """The line for a shell that puts the commands on PATH."""
    return f'export PATH={shlex.quote(str(spool.bin))}:"$PATH"'


class Simulator:
    """A simulator around a block of code::

        with Simulator(directory) as site:
            site.run("pjsub", "-z", "jid", "job.sh", cwd=work)

    It ends with the block, and also when this process is killed. Nothing of ``os.environ`` is changed:
    :attr:`environment` has the commands on PATH.

    Args:
        directory: its own folder, new or of an earlier one; default: a temporary one, removed at the end.
        settings: see :class:`Settings`.
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
        """This process's variables with the commands first on PATH."""
        return {**os.environ, "PATH": f"{self.spool.bin}{os.pathsep}{os.environ.get('PATH', '')}"}

    def __enter__(self) -> "Simulator":
        self.start()
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
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
        """Start, or start again after :meth:`stop` or a kill."""
        start(self.directory, self.settings)

    def stop(self) -> None:
        """End it and its jobs."""
        stop(self.spool)

    def run(
        self,
        command: str,
        *words: str,
        cwd: Optional[Path] = None,
        stdin: str = "",
        environment: Optional[Mapping[str, str]] = None,
        timeout: float = 60.0,
    ) -> "subprocess.CompletedProcess[str]":
        """One of the commands; its output as text, without the banner on standard error."""
        done = subprocess.run(
            [str(self.spool.bin / command), *words],
            cwd=cwd,
            input=stdin,
            env=dict(environment) if environment is not None else self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        banner = f"{command}: {BANNER}\n"
        if done.stderr.startswith(banner):
            done.stderr = done.stderr[len(banner) :]
        return done

    def submit(self, *words: str, cwd: Path) -> str:
        """``pjsub -z jid``; returns the job's id.

        Raises:
            UsageError: it was refused.
        """
        done = self.run("pjsub", "-z", "jid", *words, cwd=cwd)
        if done.returncode:
            raise UsageError(done.stderr.strip())
        return done.stdout.split()[-1]

    def wait(self, *ids: str, timeout: float = 60.0) -> List[List[str]]:
        """``pjwait``: [id, PJM code, exit code, signal] of each job.

        Raises:
            OSError: they are not over within ``timeout`` seconds.
        """
        return [line.split() for line in self._ask("pjwait", *ids, timeout=timeout).splitlines()]

    def state(self, job_id: str) -> str:
        """The state of a job, finished ones included; empty where it is not known."""
        for words in ((), ("-H",)):
            for line in self._ask("pjstat", *words, "-E", "--data", "--choose", "jid,st", job_id).splitlines()[1:]:
                _, found, state = line.split(",")
                if found == job_id:
                    return state
        return ""

    def _ask(self, command: str, *words: str, timeout: float = 60.0) -> str:
        """What a command would print, without starting it."""
        return str(ask(str(self.spool.root), values_of(command, list(words)), timeout)["out"])

    def fault(self, *words: str) -> None:
        """Make something go wrong; the words of ``fugaku-gpt sim fault``.

        Raises:
            UsageError: there is no such fault.
        """
        send(self.spool, ["fault", *words])

    def daemon_pid(self) -> Optional[int]:
        """The daemon's process id; None where it does not run."""
        return self.spool.daemon_pid()
