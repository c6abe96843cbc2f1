"""Tests that commands end with all their processes: by themselves, at a time limit and at a signal."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import List

import pytest

from fugaku_gpt.errors import UsageError
from fugaku_gpt.launch import processes
from fugaku_gpt.launch.launcher import find_launcher
from fugaku_gpt.launch.processes import end_marked_processes, marked_processes, run_command
from fugaku_gpt.launch.rank_supervisor import unread_bytes
from tests.support.waiting import until

pytestmark = pytest.mark.slow  # each test starts processes and waits for their end

F_GETPIPE_SZ = 1032  # from linux/fcntl.h, which Python's fcntl has from 3.10 on
LIMIT_SECONDS = 600.0  # of commands; a test moves its clock to reach it

# starts a child in a session of its own that ignores SIGTERM, then does what the argument says; the child writes a file
# if it is left to its own end
PARENT = """
import os, subprocess, sys, time
child = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); "
child += "time.sleep(600); open(sys.argv[1], 'w')"
command = [sys.executable, "-c", child, sys.argv[2]]
started = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
started.stdout.readline()
print("ready", flush=True)
if sys.argv[1] == "wait": time.sleep(600)
"""


class Clock:
    """Stands in for the module ``time``: the real time, plus the seconds by which a test has moved it ahead."""

    def __init__(self) -> None:
        self.ahead = 0.0
        self.sleep = time.sleep

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that commands are ended by."""
    replaced = Clock()
    monkeypatch.setattr(processes, "time", replaced)
    return replaced


def test_output_goes_to_the_log_and_to_the_listener(tmp_path: Path) -> None:
    lines: List[str] = []
    log = tmp_path / "log.txt"
    program = "import sys; print('one'); print('two', file=sys.stderr); print('é'); sys.exit(3)"
    argv = [sys.executable, "-c", program]
    outcome = run_command(argv, {"PYTHONIOENCODING": "utf-8"}, log=log, on_line=lines.append)
    assert (outcome.exit_code, outcome.signal, outcome.timed_out, outcome.ok) == (3, None, False, False)
    assert sorted(lines) == ["one", "two", "é"]
    assert sorted(log.read_text(encoding="utf-8").splitlines()) == sorted(lines)


@pytest.mark.long
def test_all_output_is_passed_on_however_slow_its_reader() -> None:
    lines: List[str] = []

    def listener(line: str) -> None:
        time.sleep(7.0 if not lines else 0.0)  # far longer than the command takes
        lines.append(line)

    assert run_command([sys.executable, "-c", "print('a'); print('b'); print('c', end='')"], {}, on_line=listener).ok
    assert lines == ["a", "b", "c"]


def test_an_error_of_the_listener_is_raised_when_the_command_has_ended(tmp_path: Path) -> None:
    def listener(line: str) -> None:
        raise KeyError(line)

    program = "for number in range(40000): print('line', number)"  # far more than a pipe holds
    with pytest.raises(KeyError, match="line 0"):
        run_command([sys.executable, "-c", program], {}, log=tmp_path / "log", on_line=listener)
    assert (tmp_path / "log").read_text().splitlines()[-1] == "line 39999"


def test_what_outlives_the_command_and_keeps_its_output_open_is_not_waited_for(tmp_path: Path) -> None:
    program = """
import os, sys, time
print("one\\ntwo", end="", flush=True)
if not os.fork():
    os.setsid()
    os.execve(sys.executable, [sys.executable, "-c", sys.argv[1], sys.argv[2]], {})
while not os.path.exists(sys.argv[2]): time.sleep(0.01)
"""
    survivor = "import os, sys, time; open(sys.argv[1] + '.new', 'w').write(str(os.getpid())); "
    survivor += "os.rename(sys.argv[1] + '.new', sys.argv[1]); time.sleep(600)"
    lines: List[str] = []
    file = tmp_path / "process"
    try:
        assert run_command([sys.executable, "-c", program, survivor, str(file)], {}, on_line=lines.append).ok
        assert lines == ["one", "two"]
    finally:
        os.kill(int(file.read_text()), signal.SIGKILL)  # raises if it has ended before


def test_a_signal_ends_a_process_whose_output_nobody_reads() -> None:
    program = (
        "import sys; from fugaku_gpt.cli.output import echo_at_once; from fugaku_gpt.launch import processes; "
        "processes._OUTPUT_AFTER_SIGNAL_SECONDS = 0; "
        "command = [sys.executable, '-c', 'for _ in range(64): print(65535 * \"x\")']; "
        "sys.exit(processes.run_command(command, {}, on_line=echo_at_once).stopped_by)"
    )
    starter = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
    assert starter.stdout is not None
    pipe = starter.stdout.fileno()
    until(lambda: unread_bytes(pipe) == fcntl.fcntl(pipe, F_GETPIPE_SZ))
    starter.send_signal(signal.SIGINT)
    assert starter.wait(timeout=300) == signal.SIGINT
    starter.stdout.close()


@pytest.mark.parametrize("listener_fails", [False, True], ids=["log", "listener"])
def test_a_pipe_is_emptied_though_nobody_can_take_the_lines(tmp_path: Path, listener_fails: bool) -> None:
    """A pipe that is not emptied stops the command: 4 MiB are more than it holds."""
    lines: List[str] = []

    def listener(line: str) -> None:
        if listener_fails:
            raise BrokenPipeError("the terminal is gone")
        lines.append(line)

    log = tmp_path / "log.txt" if listener_fails else Path("/dev/full")
    command = [sys.executable, "-c", "for _ in range(64): print('x' * 65535)"]
    assert run_command(command, {}, log=log, on_line=listener, timeout=60.0).ok
    assert log.stat().st_size == 2**22 if listener_fails else len(lines) == 64


def test_a_killed_command_reports_the_signal() -> None:
    outcome = run_command([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], {})
    assert (outcome.exit_code, outcome.signal) == (-9, 9)


def test_a_command_that_cannot_be_started_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be started"):
        run_command([str(tmp_path / "none")], {})
    with pytest.raises(UsageError, match="cannot be written"):
        run_command([sys.executable, "-c", ""], {}, log=tmp_path / "no" / "log.txt")


@pytest.mark.parametrize(("behaviour", "timed_out"), [("wait", True), ("leave", False)])
def test_no_process_survives_in_any_session(behaviour: str, timed_out: bool, clock: Clock, tmp_path: Path) -> None:
    lines: List[str] = []

    def move_clock(line: str) -> None:
        lines.append(line)
        clock.ahead = LIMIT_SECONDS if timed_out else 0.0

    mark = uuid.uuid4().hex
    argv = [sys.executable, "-c", PARENT, behaviour, str(tmp_path / "left to its own end")]
    outcome = run_command(argv, {}, timeout=LIMIT_SECONDS, grace=0.3, mark=mark, on_line=move_clock)
    assert outcome.timed_out is timed_out and lines == ["ready"]
    assert marked_processes(mark) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.mpi
def test_real_ranks_that_hang_and_ignore_sigterm_are_ended(clock: Clock) -> None:
    program = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); from mpi4py import MPI; "
        "w = MPI.COMM_WORLD; print('up', flush=True); "
        "w.Recv(bytearray(8), source=1) if w.Get_rank() == 0 else time.sleep(600)"
    )
    output: List[str] = []

    def move_clock(line: str) -> None:
        output.append(line)
        ranks = "".join(output).count("up")  # mpirun may put the texts of two ranks on one line
        clock.ahead = LIMIT_SECONDS if ranks == 2 else 0.0

    launcher, mark = find_launcher(), uuid.uuid4().hex
    argv = [*launcher.command_prefix(2), sys.executable, "-c", program]
    outcome = run_command(argv, launcher.environment, timeout=LIMIT_SECONDS, grace=0.5, mark=mark, on_line=move_clock)
    assert outcome.timed_out and "".join(output).count("up") == 2
    assert marked_processes(mark) == []


# a command that saves and exits at SIGUSR1 if its argument is "saves", and only prints a line otherwise
SAVES = """
import os, signal, sys, time
signal.signal(
    signal.SIGUSR1,
    lambda *_: (time.sleep(0.5), sys.exit(75)) if sys.argv[1] == "saves" else os.write(1, b"told\\n"),
)
print(1, flush=True)
while True: time.sleep(1)
"""


def starter_of(behaviour: str, mark: str, more: str = "", same: float = 1000.0) -> "subprocess.Popen[bytes]":
    """Start a process that runs a command, prints a line for each of the command's and how it ended; signals within
    ``same`` seconds count as one."""
    program = (
        f"import sys; from fugaku_gpt.launch import processes; processes._DUPLICATE_SECONDS = {same}; "
        f"command = [sys.executable, '-c', {SAVES!r}, {behaviour!r}]; "
        f"o = processes.run_command(command, {{}}, mark={mark!r}, on_line=lambda line: print('up', flush=True){more}); "
        "print('ended', o.exit_code, o.stopped_by)"
    )
    # where the tests run under nohup, too
    hang_up = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); "
    starter = subprocess.Popen(
        [sys.executable, "-c", hang_up + program], stdout=subprocess.PIPE, start_new_session=True
    )
    assert starter.stdout is not None and starter.stdout.readline() == b"up\n"
    return starter


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_and_is_reported(number: int) -> None:
    mark = uuid.uuid4().hex
    starter = starter_of("sleeps", mark)
    starter.send_signal(number)
    output, _ = starter.communicate(timeout=300)
    assert output.decode().split() == ["ended", "-15", str(int(number))]
    assert starter.returncode == 0 and marked_processes(mark) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_command_that_can_save_is_signalled_and_waited_for(number: int) -> None:
    mark = uuid.uuid4().hex
    starter = starter_of("saves", mark, ", control=processes.Control(10, 1e6), grace=0.1")
    starter.send_signal(number)
    starter.send_signal(number)  # the same request by another path
    output, _ = starter.communicate(timeout=300)
    assert output.decode().split() == ["ended", "75", str(int(number))] and marked_processes(mark) == []


def test_a_command_can_save_though_the_terminal_is_gone() -> None:
    mark = uuid.uuid4().hex
    control = ", control=processes.Control(10, 1e6, on_stop=lambda number: open('/dev/full', 'wb', 0).write(b'x'))"
    starter = starter_of("saves", mark, control + ", grace=0.1")
    starter.send_signal(signal.SIGHUP)
    output, _ = starter.communicate(timeout=300)
    assert output.decode().split() == ["ended", "75", str(int(signal.SIGHUP))] and marked_processes(mark) == []


def test_a_second_signal_ends_a_command_that_does_not_save() -> None:
    mark = uuid.uuid4().hex
    starter = starter_of("never", mark, ", control=processes.Control(10, 1e6), grace=1e6", same=0.05)
    starter.send_signal(signal.SIGUSR1)
    assert starter.stdout is not None and starter.stdout.readline() == b"up\n"  # the command has the signal
    time.sleep(0.1)  # longer than two signals count as one
    assert starter.poll() is None
    starter.send_signal(signal.SIGTERM)
    output, _ = starter.communicate(timeout=300)
    assert output.decode().split()[0] == "ended" and marked_processes(mark) == []


def test_marked_processes_are_listed_after_the_starter_has_exited(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = uuid.uuid4().hex
    environment = {**os.environ, "FUGAKU_GPT_LAUNCH": mark}
    program = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    assert len(marked_processes(mark)) == 1
    sleeps: List[float] = []

    def sleep(seconds: float) -> None:  # until it has ended: from then on there is nothing to wait for
        until(lambda: marked_processes(mark) == [])
        sleeps.append(seconds)

    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: sum(sleeps), sleep=sleep))
    assert end_marked_processes(mark, grace=60.0) == 1
    assert marked_processes(mark) == [] and len(sleeps) <= 1
