"""Tests of the simulator's mpiexec: Fujitsu's options and files, and real ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fugaku_gpt.errors import UsageError
from fugaku_gpt.simulator.mpiexec import expand_path, node_local_ranks, parse_command
from fugaku_gpt.simulator.session import Simulator
from tests.simulator.conftest import Write

JOB = {"PJM_JOBID": "9999", "PJM_SUBJOBID": "9999[4]", "PJM_BULKNUM": "4", "PJM_JOBNAME": "run"}


@pytest.mark.parametrize(
    ("path", "rank", "expanded"),
    [
        ("./output.%j/%/1000r/%m/stdout.%m.%r", 1500, "./output.9999/1000/2/stdout.2.1500"),
        ("./output.%j/%m/%/500r/stdout.%m.%r", 499, "./output.9999/2/0/stdout.2.499"),
        ("%n.%J.%b.%06r", 12, "run.9999[4].4.000012"),
        ("%04/10r", 37, "0030"),
        ("100%", 1, "100%"),
        ("%s|", 1, "|"),
    ],
)
def test_metacharacters_of_paths(path: str, rank: int, expanded: str) -> None:
    assert expand_path(path, JOB, 2, rank) == expanded


def test_node_local_ranks_follow_the_rank_map() -> None:
    assert node_local_ranks(6, {"PJM_PROC_BY_NODE": "3", "PJM_NODE": "2", "PJM_RANK_MAP_BYCHIP": "1"}) == [
        0,
        1,
        2,
        0,
        1,
        2,
    ]
    assert node_local_ranks(6, {"PJM_PROC_BY_NODE": "3", "PJM_NODE": "2", "PJM_RANK_MAP_BYNODE": "1"}) == [
        0,
        0,
        1,
        1,
        2,
        2,
    ]


def test_options_of_the_command_line() -> None:
    policy = ["-mca", "plm_ple_numanode_assign_policy", "simplex", "--mca", "a", "b"]
    arguments = ["--vcoordfile", "v", *policy, "-np", "4", "-x", "A=1", "-x", "B", "./a.out", "-n", "3"]
    command = parse_command(arguments, {"B": "of the job"})
    (segment,) = command.segments
    assert (segment.ranks, segment.environment, segment.argv) == (
        4,
        {"A": "1", "B": "of the job"},
        ["./a.out", "-n", "3"],
    )
    two = parse_command(["-n", "2", "./a", ":", "-n", "4", "./b", "x"], {})
    assert [(part.ranks, part.argv) for part in two.segments] == [(2, ["./a"]), (4, ["./b", "x"])]


@pytest.mark.parametrize("arguments", [[], ["-n", "2"], ["-n", "none", "a"], ["--unheard-of", "a"], ["-n"]])
def test_an_invalid_command_line_is_refused(arguments: "list[str]") -> None:
    with pytest.raises(UsageError, match="mpiexec"):
        parse_command(arguments, {})


def run_job(site: Simulator, write: Write, tmp_path: Path, body: str, directives: str = "--mpi proc=2") -> "list[str]":
    """Run a script; returns its id, PJM code, exit code and signal."""
    return site.wait(site.submit("-L", "elapse=1:00", write(body, directives), cwd=tmp_path))[0]


@pytest.mark.mpi
def test_output_goes_where_fugaku_puts_it(site: Simulator, write: Write, tmp_path: Path) -> None:
    talk = "sh -c 'echo out $PMIX_RANK $PLE_RANK_ON_NODE; test $PMIX_RANK = 1 && echo err >&2; true'"
    body = (
        f"mpiexec {talk}\nmpiexec -n 1 -stdout-proc o/%j -stderr-proc=no {talk} || mpiexec -n 1 --std-proc o/s {talk}"
    )
    job_id, code, exit_code, _ = run_job(site, write, tmp_path, body)
    assert (code, exit_code) == ("0", "0")
    first = tmp_path / f"output.{job_id}" / "0" / "1"
    assert sorted(path.name for path in first.iterdir()) == ["stderr.1.1", "stdout.1.0", "stdout.1.1"]
    assert (first / "stdout.1.1").read_text() == "out 1 1\n"  # both on one node
    assert (tmp_path / "o" / "s.2.0").read_text() == "out 0 0\n"


@pytest.mark.mpi
def test_ignored_output_options_are_warned_of(site: Simulator, write: Write, tmp_path: Path) -> None:
    job_id = run_job(site, write, tmp_path, "mpiexec -stdout all.txt -oferr e.txt sh -c 'echo $PMIX_RANK'")[0]
    err = (tmp_path / f"job.sh.{job_id}.err").read_text()
    assert "[WARN] PLE 0605 plexec ignore option -ofout/-stdout(stdout outputs to all.txt).\n" in err
    assert "[WARN] PLE 0605 plexec ignore option -oferr/-stderr(stderr outputs to e.txt).\n" in err
    assert not (tmp_path / "all.txt").exists()
    assert (tmp_path / f"output.{job_id}/0/1/stdout.1.1").read_text() == "1\n"


@pytest.mark.mpi
def test_exit_codes_and_refusals_pass_through(site: Simulator, write: Write, tmp_path: Path) -> None:
    assert run_job(site, write, tmp_path, "mpiexec sh -c 'exit 7'; exit $?")[2] == "7"
    job_id, _, exit_code, _ = run_job(site, write, tmp_path, "mpiexec -n 49 true", "--mpi max-proc-per-node=48")
    assert exit_code == "1"
    assert "the job has room for 48" in (tmp_path / f"job.sh.{job_id}.err").read_text()


@pytest.mark.mpi
def test_standard_input_comes_from_a_file_only(site: Simulator, write: Write, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("from a file\n")
    job_id = run_job(site, write, tmp_path, "mpiexec -n 1 -stdin in.txt cat\necho shell | mpiexec -n 1 cat")[0]
    assert (tmp_path / f"output.{job_id}/0/1/stdout.1.0").read_text() == "from a file\n"
    assert not (tmp_path / f"output.{job_id}/0/2/stdout.2.0").exists()


@pytest.mark.mpi
def test_variables_for_the_ranks_alone(site: Simulator, write: Write, tmp_path: Path) -> None:
    body = "mpiexec -n 1 -x LD_PRELOAD=/no/such.so -x OMP_NUM_THREADS=12 env"
    job_id = run_job(site, write, tmp_path, body)[0]
    seen = (tmp_path / f"output.{job_id}/0/1/stdout.1.0").read_text()
    assert "\nLD_PRELOAD=/no/such.so\n" in f"\n{seen}" and "\nOMP_NUM_THREADS=12\n" in f"\n{seen}"
    assert "FUGAKU_GPT_SIMULATOR_PART" not in seen
    # loaded into the rank (which says so), but into nothing around it
    assert "such.so" not in (tmp_path / f"job.sh.{job_id}.err").read_text()


@pytest.mark.mpi
def test_two_real_ranks_meet(site: Simulator, write: Write, tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    (tmp_path / "meet.py").write_text(
        "from mpi4py import MPI\nfrom fugaku_gpt.machine.rank import launched_rank\n"
        "world = MPI.COMM_WORLD\nassert launched_rank() == (world.rank, None)\n"
        "print(world.rank, world.size, world.allreduce(world.rank + 1))\n"
    )
    job_id, code, exit_code, _ = run_job(site, write, tmp_path, f"mpiexec {sys.executable} meet.py")
    assert (code, exit_code) == ("0", "0")
    outputs = [(tmp_path / f"output.{job_id}/0/1/stdout.1.{rank}").read_text() for rank in range(2)]
    assert outputs == ["0 2 3\n", "1 2 3\n"]


@pytest.mark.mpi
def test_a_signal_reaches_the_ranks_and_lets_them_finish(site: Simulator, write: Write, tmp_path: Path) -> None:
    (tmp_path / "rank.sh").write_text(
        "trap 'sleep 0.3; echo saved $PMIX_RANK >> saved; kill $!; exit 0' TERM\n"
        "sleep 60 & touch ready.$PMIX_RANK; wait\n"
    )
    body = (
        "mpiexec sh rank.sh & pid=$!\nwhile ! test -e ready.0 -a -e ready.1; do sleep 0.02; done\nkill $pid; wait $pid"
    )
    assert run_job(site, write, tmp_path, body)[1:] == ["0", "0", "0"]
    assert sorted((tmp_path / "saved").read_text().splitlines()) == ["saved 0", "saved 1"]


def test_file_transfers_check_their_arguments(site: Simulator, write: Write, tmp_path: Path) -> None:
    body = "llio_transfer job.sh && llio_transfer --purge job.sh && dir_transfer -l log . && ! llio_transfer none"
    job_id, _, exit_code, _ = run_job(site, write, tmp_path, body)
    assert exit_code == "0"
    err = (tmp_path / f"job.sh.{job_id}.err").read_text()
    assert "llio_transfer: none: not a file, or not readable\n" in err
    assert "llio_transfer: simulated PJM on this machine, not Fugaku\n" in err
    assert (tmp_path / "log").read_text() == ".\n"


def test_mpiexec_outside_a_job_is_refused(site: Simulator, tmp_path: Path) -> None:
    done = site.run("mpiexec", "true", cwd=tmp_path)
    assert done.returncode == 1
    assert "only inside a job of the simulator" in done.stderr
