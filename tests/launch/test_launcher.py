"""Tests of how ranks are started: the command line, the variables, and real ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import List

import pytest

from fugaku_gpt.config import load_run_config
from fugaku_gpt.config.profile import Profile
from fugaku_gpt.errors import UsageError
from fugaku_gpt.launch.launcher import (
    MPICH,
    OPEN_MPI,
    Launcher,
    exit_code_of,
    find_launcher,
    launch,
    parse_version,
    rank_command,
    tcmalloc_library,
    threads_per_rank,
    train_command,
)
from fugaku_gpt.launch.processes import Outcome, run_command
from fugaku_gpt.records.run import Result, RunDirectory

HYDRA = "HYDRA build details:\n    Version:                                 5.0.2\n    Release Date: today\n"


@pytest.mark.parametrize(
    ("version_output", "expected"),
    [
        (HYDRA, (MPICH, "5.0.2")),
        ("mpirun (Open MPI) 4.1.8\n\nReport bugs to ...", (OPEN_MPI, "4.1.8")),
        ("mpirun (Open MPI) 5.0.11\n", (OPEN_MPI, "5.0.11")),
        ("some other program 1.0", None),
        ("", None),
    ],
)
def test_mpi_families_are_recognised_by_version_output(version_output: str, expected: object) -> None:
    assert parse_version(version_output) == expected


def test_the_command_is_a_pure_function_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LD_PRELOAD", "PARALLEL", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    config = load_run_config(preset="tiny", overrides=["layout.dp=2", "layout.tp=2"])
    command = train_command(Launcher(Path("/m/mpirun"), MPICH, "5"), config, Path("c.yaml"), Path("o"), 8, None)
    assert command.environment == {}
    assert command.argv == [
        *(
            "/m/mpirun",
            "-print-all-exitcodes",
            "-launcher",
            "fork",
            "-hosts",
            "localhost",
            "-n",
            "4",
            "env",
            "OMP_NUM_THREADS=2",
            "MKL_NUM_THREADS=2",
            "GOMP_SPINCOUNT=2000",
        ),
        *(sys.executable, "-m", "fugaku_gpt", "train", "c.yaml", "--out", "o"),
    ]
    open_mpi = Launcher(Path("/m/mpirun"), OPEN_MPI, "4.1.8", {"OMPI_ALLOW_RUN_AS_ROOT": "1"})
    command = train_command(open_mpi, config, Path("c.yaml"), Path("o"), 2, None, ["--resume", "auto"])
    assert command.argv[-4:] == ["--out", "o", "--resume", "auto"]
    assert command.argv[:9] == [
        *("/m/mpirun", "-n", "4", "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"),
        *("env", "OMP_NUM_THREADS=1"),
    ]
    assert command.environment == {"OMPI_ALLOW_RUN_AS_ROOT": "1"}


def test_tcmalloc_is_preloaded_into_the_ranks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/lib/other.so")
    launcher = Launcher(Path("/m/mpirun"), MPICH, "5")
    config = load_run_config(preset="tiny", overrides=["node.tcmalloc=true"])
    command = train_command(launcher, config, Path("c"), Path("o"), 1, Path("/lib/libtcmalloc.so.4"))
    assert "LD_PRELOAD=/lib/libtcmalloc.so.4:/lib/other.so" in command.argv
    assert "LD_PRELOAD" not in command.environment
    assert not any("PRELOAD" in word for word in train_command(launcher, config, Path("c"), Path("o"), 1, None).argv)
    plain = load_run_config(preset="tiny")
    argv = train_command(launcher, plain, Path("c"), Path("o"), 1, Path("/lib/libtcmalloc.so.4")).argv
    assert not any("PRELOAD" in word for word in argv)


def test_another_build_starts_with_the_profile_s_python_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LD_PRELOAD", "PYTHONPATH", "PARALLEL", "LD_LIBRARY_PATH", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/usr/bin")
    profile = Profile(
        python="/e/bin/python", path=("/e/mpi",), library_path=("/e/lib",), environment=("A=b=c",), tcmalloc="/e/tc.so"
    )
    config = load_run_config(preset="tiny", overrides=["node.tcmalloc=true", "node.large_pages=hugetlbfs"])
    argv = rank_command(config, Path("c"), Path("o"), 2, tcmalloc_library(profile), [], profile)
    checkout = Path(__file__).resolve().parents[2]
    assert argv == [
        *("env", "A=b=c", "PATH=/e/mpi:/usr/bin", "LD_LIBRARY_PATH=/e/lib", f"PYTHONPATH={checkout}"),
        *(
            "OMP_NUM_THREADS=2",
            "MKL_NUM_THREADS=2",
            "GOMP_SPINCOUNT=2000",
            "XOS_MMM_L_HPAGE_TYPE=hugetlbfs",
            "LD_PRELOAD=/e/tc.so",
        ),
        *("/e/bin/python", "-m", "fugaku_gpt", "train", "c", "--out", "o"),
    ]


def test_variables_of_a_build_are_preserved_unless_the_run_sets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/one side's:/usr/bin")
    monkeypatch.setenv("FUGAKU_GPT_KEPT_PATH", "/usr/bin")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/one side's")
    monkeypatch.setenv("FUGAKU_GPT_KEPT_LD_LIBRARY_PATH", "")
    monkeypatch.setenv("XOS_MMM_L_PAGING_POLICY", "demand:demand:demand")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    own = ("PYTHONPATH=/mine", "LD_LIBRARY_PATH=/own", "OMP_NUM_THREADS=7", "XOS_MMM_L_HPAGE_TYPE=none")
    profile = Profile(python="/e/python", path=("/e/bin",), library_path=("/e/lib",), environment=own)
    config = load_run_config(preset="tiny", overrides=["node.large_pages=hugetlbfs"])
    argv = rank_command(config, Path("c"), Path("o"), 2, None, [], profile)
    checkout = Path(__file__).resolve().parents[2]
    assert argv[:3] == ["env", "-u", "XOS_MMM_L_PAGING_POLICY"]
    assert set(argv[3 : argv.index("/e/python")]) == {
        f"PYTHONPATH={checkout}:/mine", "LD_LIBRARY_PATH=/e/lib:/own", "PATH=/e/bin:/usr/bin",
        "OMP_NUM_THREADS=2", "MKL_NUM_THREADS=2", "GOMP_SPINCOUNT=2000", "XOS_MMM_L_HPAGE_TYPE=hugetlbfs",
    }  # fmt: skip
    argv = rank_command(config, Path("c"), Path("o"), 2, None, [], Profile(python="/e/python"))
    assert {"PATH=/usr/bin", "LD_LIBRARY_PATH="} <= set(argv)  # nothing of the other side's


def test_an_mpirun_that_is_not_beside_the_python_is_taken_from_the_profile_s_path(tmp_path: Path) -> None:
    own = find_launcher()
    (tmp_path / "bin").mkdir()
    (tmp_path / "mpi").mkdir()
    (tmp_path / "mpi" / "mpirun").symlink_to(own.path.resolve())
    profile = Profile(python=str(tmp_path / "bin" / "python"), path=(str(tmp_path / "mpi"),))
    assert find_launcher(profile=profile).path == tmp_path / "mpi" / "mpirun"


def test_inside_a_job_the_ranks_start_with_the_given_command(tmp_path: Path) -> None:
    config = load_run_config(preset="tiny", overrides=["layout.dp=4", "node.threads_per_rank=1"])
    directory = RunDirectory(tmp_path)
    outcome = launch(config, directory, start=["echo", "start", "{ranks}", "-c{threads}"])
    assert outcome.ok and directory.log_file.read_text().startswith("start 4 -c1 env OMP_NUM_THREADS=1 ")


def test_threads_are_an_equal_share_unless_given() -> None:
    config = load_run_config(preset="tiny", overrides=["layout.dp=4"])
    assert [threads_per_rank(config, cores) for cores in (2, 4, 48)] == [1, 1, 12]
    config = load_run_config(preset="tiny", overrides=["layout.dp=4", "node.threads_per_rank=3"])
    assert threads_per_rank(config, 2) == 3


def test_multiple_nodes_are_refused() -> None:
    config = load_run_config(preset="tiny", overrides=["layout.dp=4", "job.nodes=2"])
    with pytest.raises(UsageError, match="job.nodes: 2: .*valid: 1"):
        train_command(Launcher(Path("m"), MPICH, "5"), config, Path("c"), Path("o"), 2, None)


def test_a_missing_mpirun_is_refused_with_advice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="no mpirun beside .*\n.*pip install mpich"):
        find_launcher()
    foreign = tmp_path / "mpirun"
    foreign.write_text("#!/bin/sh\necho launcher of another kind\n")
    foreign.chmod(0o755)
    with pytest.raises(UsageError, match="neither MPICH nor Open MPI .*launcher of another kind"):
        find_launcher()


@pytest.mark.parametrize(("root", "allowed"), [(True, True), (False, False)])
def test_open_mpi_is_allowed_to_run_as_root_only_for_root(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, root: bool, allowed: bool
) -> None:
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1.8'\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM" in find_launcher(is_root=root).environment) is allowed


def test_the_exit_code_of_a_run() -> None:
    assert exit_code_of(Outcome(3, None, False, 1.0, 0)) == 3
    for code in (255, 9):  # of a launcher that failed itself, and of one whose rank a signal killed
        assert exit_code_of(Outcome(code, None, False, 1.0, 0)) == 1
    assert exit_code_of(Outcome(-9, 9, False, 1.0, 0)) == 137
    assert exit_code_of(Outcome(15, None, False, 1.0, 0, stopped_by=2)) == 130
    assert exit_code_of(Outcome(0, None, True, 1.0, 0)) == 1
    killed = Result("failed", "rank 1: killed", 0.0, 1.0, rank=1, exception="signal 9 (SIGKILL)")
    for code in (137, 9, 143, 255):  # MPICH's launcher may report a rank that it has killed itself
        assert exit_code_of(Outcome(code, None, False, 1.0, 0), killed) == 137
    unreadable = Result("failed", "exit code 0, but no result was recorded", 0.0, 1.0)
    assert exit_code_of(Outcome(0, None, False, 1.0, 0), unreadable) == 1
    stopped = Result("interrupted", "stopped: SIGTERM on n1, after iteration 3", 0.0, 1.0, 3)
    for code in (75, 9):  # mpirun may report ranks that it killed as they exited
        assert exit_code_of(Outcome(code, None, False, 1.0, 0, stopped_by=15), stopped) == 75


@pytest.mark.mpi
def test_real_ranks_get_their_variables_and_rank_numbers() -> None:
    program = (
        "import os; from fugaku_gpt.machine.rank import launched_rank; "
        "print('place', *launched_rank()[:2], os.environ['LD_PRELOAD'], flush=True)"
    )
    launcher = find_launcher()
    lines: List[str] = []
    argv = [*launcher.command_prefix(3), "env", "LD_PRELOAD=libm.so.6", sys.executable, "-c", program]
    outcome = run_command(argv, launcher.environment, timeout=300, on_line=lines.append)
    assert outcome.ok and "LD_PRELOAD" not in os.environ
    fields = sorted(" ".join(lines).replace("place", "").split())
    assert fields == sorted(["0", "3", "libm.so.6", "1", "3", "libm.so.6", "2", "3", "libm.so.6"])
