"""Tests of the supervisor of a rank: it reports how the rank ended, and ends with it."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import List, Tuple
from unittest import mock

import psutil
import pytest

from fugaku_gpt.errors import UsageError
from fugaku_gpt.launch import rank_supervisor
from fugaku_gpt.machine.shared_memory import bus_error_cause
from fugaku_gpt.records.run import FAILED, Result, RunDirectory
from tests.support.waiting import until

pytestmark = pytest.mark.slow  # each test starts processes and waits for their end

# a rank that reports to its supervisor that it has joined MPI, and the run directory, prints its process id, and runs
# the given code
RANK = """
import os, sys, time
from pathlib import Path
from fugaku_gpt.launch.rank_supervisor import supervise_rank
link = supervise_rank(int(sys.argv[1]))
link.report_joined()
if sys.argv[2]:
    link.report_directory(Path(sys.argv[2]))
print(os.getpid(), flush=True)
{behaviour}
"""
SLEEP = "time.sleep(60)"


def start(
    rank: int, directory: Path, behaviour: str = SLEEP, prefix: Tuple[str, ...] = ()
) -> Tuple["subprocess.Popen[str]", int]:
    """Start a supervisor, through the program of the prefix if there is one; return it and the process id of its
    rank."""
    command = [*prefix, sys.executable, "-c", RANK.format(behaviour=behaviour), str(rank), str(directory)]
    supervisor = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    return supervisor, int(supervisor.stdout.readline())


def end_of(supervisor: "subprocess.Popen[str]") -> Tuple[int, List[str]]:
    _, errors = supervisor.communicate(timeout=30)
    return supervisor.returncode, errors.splitlines()


# a mount namespace of its own, in which /dev/shm has 1 MiB
SMALL_SHARED_MEMORY = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"', "sh")
FILL_SHARED_MEMORY = """
import mmap
with open("/dev/shm/messages", "wb+") as file:
    file.truncate(2**22)
    mmap.mmap(file.fileno(), 2**22).write(bytes(2**22))
"""


@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run([*SMALL_SHARED_MEMORY, "true"], capture_output=True).returncode != 0,
    reason="needs root, and the right to mount",
)
def test_a_rank_that_fills_shared_memory_is_reported_with_its_size(tmp_path: Path) -> None:
    supervisor, _ = start(0, tmp_path, FILL_SHARED_MEMORY, SMALL_SHARED_MEMORY)
    code, _ = end_of(supervisor)
    result = RunDirectory(tmp_path).result()
    assert code == 128 + signal.SIGBUS and result is not None
    assert result.reason.startswith(
        "rank 0: killed by signal 7 (SIGBUS): /dev/shm, through which ranks of a node exchange messages, is full: "
        "0 of 1 MiB are free; "
    )


def test_a_bus_error_with_room_in_shared_memory_is_of_another_file(tmp_path: Path) -> None:
    assert bus_error_cause(tmp_path).startswith("a file that was mapped into memory is shorter than it was")
    assert bus_error_cause(tmp_path / "none") == (
        f"there is no {tmp_path}/none, through which ranks of a node exchange messages: mount it"
    )


def test_a_rank_whose_launcher_is_gone_is_ended_and_the_launcher_named(tmp_path: Path) -> None:
    launcher, rank = start(1, tmp_path, prefix=("sh", "-c", '"$@" & wait', "sh"))
    supervisor = psutil.Process(rank).parent()
    assert supervisor is not None
    launcher.kill()
    psutil.wait_procs([supervisor], timeout=30)
    until(lambda: not psutil.pid_exists(rank))
    result = RunDirectory(tmp_path).result()
    host = os.uname().nodename
    assert result is not None and (result.status, result.rank, result.node) == (FAILED, 1, host)
    assert result.reason == f"sh (process {launcher.pid}) on {host}, which had started rank 1, is gone"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_rank_is_reported_with_the_signal(tmp_path: Path, number: signal.Signals) -> None:
    supervisor, rank = start(3, tmp_path)
    os.kill(rank, number)
    code, errors = end_of(supervisor)
    result = RunDirectory(tmp_path).result()
    assert result is not None and (result.status, result.rank, result.node) == (FAILED, 3, os.uname().nodename)
    assert result.reason == f"rank 3: killed by signal {int(number)} ({number.name})"
    assert code == 128 + number and errors == [f"fugaku-gpt: {result.reason}"]


def test_a_supervisor_exits_with_the_exit_code_of_the_rank(tmp_path: Path) -> None:
    supervisor, _ = start(0, tmp_path, "sys.exit(75)")
    assert end_of(supervisor) == (75, []) and list(tmp_path.iterdir()) == []


def test_a_killed_supervisor_takes_the_rank_with_it(tmp_path: Path) -> None:
    supervisor, rank = start(1, tmp_path)
    supervisor.kill()
    end_of(supervisor)
    until(lambda: not psutil.pid_exists(rank) or psutil.Process(rank).status() == psutil.STATUS_ZOMBIE)


def test_signals_are_passed_on(tmp_path: Path) -> None:
    # short sleeps: Python looks at a signal that comes just before a sleep when that is over
    caught = """
import signal
signal.signal(signal.SIGUSR1, lambda *_: os._exit(9))
print('up', flush=True)
for _ in range(6000): time.sleep(0.01)
"""
    supervisor, _ = start(1, tmp_path, caught)
    assert supervisor.stdout is not None and supervisor.stdout.readline() == "up\n"
    supervisor.send_signal(signal.SIGUSR1)
    assert end_of(supervisor)[0] == 9
    supervisor, _ = start(1, tmp_path)
    supervisor.send_signal(signal.SIGTERM)
    assert end_of(supervisor)[0] == 128 + signal.SIGTERM
    result = RunDirectory(tmp_path).result()
    assert result is not None and result.status == "interrupted"


def test_a_signal_that_comes_before_the_supervisor_is_ready_is_passed_on(tmp_path: Path) -> None:
    slow = """
import os, signal, time
from fugaku_gpt.launch import rank_supervisor
begin = rank_supervisor._RankSupervisor.wait
rank_supervisor._RankSupervisor.wait = lambda *arguments: (time.sleep(1), begin(*arguments))[1]
rank_supervisor.supervise_rank(1).report_joined()
signal.signal(signal.SIGUSR1, lambda *_: os._exit(9))
print("up", flush=True)
for _ in range(6000): time.sleep(0.01)
"""
    command = [sys.executable, "-c", slow]
    supervisor = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None and supervisor.stdout.readline() == "up\n"
    supervisor.send_signal(signal.SIGUSR1)
    assert end_of(supervisor)[0] == 9


def test_rank_0_reports_how_another_rank_failed(tmp_path: Path) -> None:
    supervisor, rank = start(0, tmp_path)
    failure = Result(
        FAILED, "rank 2: ValueError: x", 0.0, time.time() + 900, 7, rank=2, node="n1", last_checkpoint="step-00000005"
    )
    RunDirectory(tmp_path).write_result(failure)
    assert supervisor.stderr is not None
    assert supervisor.stderr.readline() == "fugaku-gpt: rank 2: ValueError: x\n"
    assert supervisor.stderr.readline() == "  on n1, last iteration 7, last checkpoint: step-00000005\n"
    os.kill(rank, signal.SIGKILL)
    end_of(supervisor)
    assert RunDirectory(tmp_path).result().rank == 0  # type: ignore[union-attr]  # its death came before that end


def test_a_result_that_cannot_be_read_does_not_cost_the_rank(tmp_path: Path) -> None:
    supervisor, rank = start(0, tmp_path)
    (tmp_path / "result.json").write_text("{")  # being written, as another node may see it
    time.sleep(0.6)  # several polls of the supervisor
    assert supervisor.poll() is None and psutil.Process(rank).is_running()
    os.kill(rank, signal.SIGKILL)
    assert end_of(supervisor)[0] == 128 + signal.SIGKILL


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_are_killed_together_are_named_together(tmp_path: Path, ranks: int) -> None:
    pairs = [start(rank, tmp_path) for rank in range(ranks)]
    for _, rank in pairs:
        os.kill(rank, signal.SIGKILL)
    assert [end_of(supervisor)[0] for supervisor, _ in pairs] == [128 + signal.SIGKILL] * ranks
    result = RunDirectory(tmp_path).result()
    assert result is not None and (result.rank, result.node, result.signal) == (None, os.uname().nodename, 9)
    names = ", ".join(map(str, range(ranks)))
    assert result.reason == f"ranks {names}: killed by signal 9 (SIGKILL), at one time"


def test_files_of_a_killed_rank_in_shared_memory_are_removed(tmp_path: Path) -> None:
    name = f"mpich_shm_test_{os.getpid()}_0"
    # the supervisor reads a second report when it has done all that follows from the first; the third it reads only
    # when the rank is dead
    behaviour = f"""
import array, fcntl, mmap, signal, termios
file = open("/dev/shm/{name}", "wb+")
file.truncate(4096)
memory = mmap.mmap(file.fileno(), 4096)
for _ in range(2):
    link.report_joined()
    unread = array.array("i", [1])
    while unread[0]:
        time.sleep(0.01)
        fcntl.ioctl(link._pipe, termios.FIONREAD, unread)
os.kill(os.getppid(), signal.SIGSTOP)
link.report_joined()
print("mapped", flush=True)
time.sleep(60)
"""
    supervisor, rank = start(1, tmp_path, behaviour)
    assert supervisor.stdout is not None and supervisor.stdout.readline() == "mapped\n"
    assert Path("/dev/shm", name).exists()
    os.kill(rank, signal.SIGKILL)
    until(lambda: psutil.Process(rank).status() == psutil.STATUS_ZOMBIE)
    supervisor.send_signal(signal.SIGCONT)
    end_of(supervisor)
    assert not Path("/dev/shm", name).exists()


def test_a_run_directory_is_read_even_if_the_launcher_dies_meanwhile(tmp_path: Path) -> None:
    """The launcher dies, and the rank reports its directory, between a look at the pipe and one at the launcher."""
    code = """
import os, sys, time
from pathlib import Path
from fugaku_gpt.launch import rank_supervisor
directory = Path(sys.argv[1])
def wait_before_looking_for_the_launcher(supervisor):
    (directory / "between").touch()
    while not (directory / "go").exists():
        time.sleep(0.01)
rank_supervisor._RankSupervisor._print_recorded_failure = wait_before_looking_for_the_launcher
link = rank_supervisor.supervise_rank(1)
link.report_joined()
while not (directory / "between").exists():
    time.sleep(0.01)
link.report_directory(directory)
(directory / "reported").touch()
time.sleep(60)
"""
    launcher = subprocess.Popen(["sh", "-c", '"$@" & wait', "sh", sys.executable, "-c", code, str(tmp_path)])
    until((tmp_path / "reported").exists)
    launcher.kill()
    launcher.wait()
    (tmp_path / "go").touch()
    until((tmp_path / "result.json").exists)
    result = RunDirectory(tmp_path).result()
    assert result is not None and "which had started rank 1, is gone" in result.reason


def test_a_launcher_that_dies_during_the_fork_is_missed(tmp_path: Path) -> None:
    """The supervisor's parent has ended before it looks: the process that is its parent then is no launcher."""
    slow = """
import os, sys, time
from pathlib import Path
fork = os.fork
def fork_slowly():
    print(os.getpid(), flush=True)
    child = fork()
    if child:
        while os.getppid() == launcher: time.sleep(0.01)
    return child
launcher, os.fork = os.getppid(), fork_slowly
from fugaku_gpt.launch.rank_supervisor import supervise_rank
supervise_rank(1, Path(sys.argv[1])).report_joined()
time.sleep(60)
"""
    command = ["sh", "-c", '"$@" & wait', "sh", sys.executable, "-c", slow, str(tmp_path)]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert launcher.stdout is not None
    supervisor = psutil.Process(int(launcher.stdout.readline()))
    launcher.kill()
    launcher.wait()
    psutil.wait_procs([supervisor], timeout=30)
    result = RunDirectory(tmp_path).result()
    assert result is not None and f"(process {launcher.pid})" in result.reason and "is gone" in result.reason


def test_a_secondary_failure_does_not_replace_the_first_result(tmp_path: Path) -> None:
    first = Result(FAILED, "rank 2: ValueError: x", 0.0, time.time(), rank=2)
    RunDirectory(tmp_path).write_result(first)
    supervisor, rank = start(1, tmp_path)
    os.kill(rank, signal.SIGKILL)
    end_of(supervisor)
    assert RunDirectory(tmp_path).result() == first


# a rank of which every other one waits in MPI_Init: it ends before it has joined them
UNJOINED = """
import os, signal, sys
from pathlib import Path
from fugaku_gpt.launch import rank_supervisor
rank_supervisor._RANK_0_SECONDS = 0.0
rank_supervisor.supervise_rank(int(sys.argv[1]), Path(sys.argv[2]))
{behaviour}
"""


def end_unjoined(rank: int, directory: Path, behaviour: str, **variables: str) -> Tuple[int, List[str], str]:
    """Return the exit code, the printed lines, and what was asked of the launcher, where it is MPICH's."""
    reading, writing = os.pipe()
    command = [sys.executable, "-c", UNJOINED.format(behaviour=behaviour), str(rank), str(directory)]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PMI", "OMPI", "PLE", "SLURM"))
    }
    environment.update({name: value.replace("PIPE", str(writing)) for name, value in variables.items()})
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, pass_fds=[writing])
    os.close(writing)
    asked = ""
    if "PMI_FD" in variables:
        asked = os.read(reading, 100).decode()
        process.kill()  # as the launcher does
    os.close(reading)
    code, lines = end_of(process)
    return code, lines, asked


@pytest.mark.parametrize(("behaviour", "code"), [("os._exit(3)", 3), ("os._exit(0)", 0), ("os._exit(75)", 75)])
def test_a_rank_that_ends_before_it_joins_mpi_ends_the_launch(tmp_path: Path, behaviour: str, code: int) -> None:
    ended, lines, asked = end_unjoined(1, tmp_path, behaviour, PMI_FD="PIPE")
    reason = f"rank 1 on {os.uname().nodename} ended (exit code {code}) before it joined MPI"
    result = RunDirectory(tmp_path).result()
    assert result is not None and (result.status, result.reason, result.rank) == (FAILED, reason, 1)
    assert lines == [f"fugaku-gpt: {reason}"] and asked == "cmd=abort exitcode=1\n"


def test_without_a_pipe_the_launch_is_ended_by_a_signal_or_by_an_exit_code(tmp_path: Path) -> None:
    """MPICH's launcher without the pipe of PMI-1 notices signals; Slurm and launchers of unknown kinds, exit codes."""
    assert end_unjoined(1, tmp_path, "os._exit(0)", PMI_RANK="1")[0] == -signal.SIGTERM
    assert end_unjoined(1, tmp_path, "os._exit(0)", PMI_RANK="1", SLURM_STEP_ID="0")[0] == 1
    assert end_unjoined(1, tmp_path, "os._exit(0)", OMPI_COMM_WORLD_RANK="1")[0] == 1
    assert end_unjoined(1, tmp_path, "os._exit(0)")[0] == 1
    assert end_unjoined(1, tmp_path, "os.kill(os.getpid(), 11)", PLE_RANK_ON_NODE="1")[0] == 1


def test_a_mistake_that_all_ranks_refuse_is_no_failure_of_a_rank(tmp_path: Path) -> None:
    ended, lines, asked = end_unjoined(0, tmp_path, "os._exit(2)", PMI_FD="PIPE")
    assert (lines, asked) == ([], "cmd=abort exitcode=2\n") and RunDirectory(tmp_path).result() is None
    assert end_unjoined(0, tmp_path, "os._exit(2)")[:2] == (2, [])  # job scripts read the code, under srun as well
    _, lines, _ = end_unjoined(1, tmp_path, "os._exit(2)", PMI_FD="PIPE")  # rank 0 had no objection
    assert len(lines) == 1 and "ended (exit code 2) before it joined MPI" in lines[0]


@pytest.mark.parametrize(("rank", "code", "who"), [(0, 2, ""), (1, 1, f"rank 1 on {os.uname().nodename}: ")])
def test_a_refusal_by_all_ranks_is_a_usage_error_and_by_a_single_rank_a_failure(rank: int, code: int, who: str) -> None:
    program = (
        "from fugaku_gpt.errors import UsageError; from fugaku_gpt.launch import rank_supervisor\n"
        "rank_supervisor._RANK_0_SECONDS = 0.0\n"
        f"rank_supervisor.refuse_launch({rank}, UsageError('run.yaml: no such file\\nvalid: a file'))"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PMI")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stderr == f"fugaku-gpt: {who}run.yaml: no such file\nfugaku-gpt: {who}valid: a file\n"


def test_a_refusal_by_one_supervised_rank_ends_it(capfd: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(rank_supervisor, "_RANK_0_SECONDS", 0.0), pytest.raises(SystemExit) as end:
        rank_supervisor.refuse_on_one_rank(3, UsageError("run.yaml: no such file"))
    assert end.value.code == 1
    assert capfd.readouterr().err == f"fugaku-gpt: rank 3 on {os.uname().nodename}: run.yaml: no such file\n"


def test_a_launcher_is_asked_to_end_only_when_it_has_read_all_output(tmp_path: Path) -> None:
    program = (
        "import os, sys; from fugaku_gpt.launch import rank_supervisor\n"
        "print('why', file=sys.stderr); rank_supervisor._ABORT_SECONDS = 0.0; rank_supervisor._READERS_SECONDS = 60.0\n"
        "rank_supervisor.end_launch(1, may_signal=False)"
    )
    asked_read, asked_write = os.pipe()
    environment = {**os.environ, "PMI_FD": str(asked_write)}
    argv = [sys.executable, "-c", program]
    with subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE, pass_fds=[asked_write]) as process:
        os.close(asked_write)
        assert process.stderr is not None
        while not _unread(process.stderr.fileno()):
            time.sleep(0.01)
        assert not select.select([asked_read], [], [], 1.0)[0]  # the line is still in the pipe
        assert process.stderr.read() == b"why\n"  # at its end
    with os.fdopen(asked_read) as asked:
        assert asked.read() == "cmd=abort exitcode=1\n"


def _unread(pipe: int) -> bool:
    return bool(select.select([pipe], [], [], 0)[0])
