"""Tests of the simulator's mpiexec: Fujitsu's options and files, and real ranks."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from fugaku_gpt.errors import UsageError
from fugaku_gpt.launch.launcher import MPICH, OPEN_MPI, find_launcher
from fugaku_gpt.records.run import RunDirectory
from fugaku_gpt.simulator.environment import NODE_VARIABLE
from fugaku_gpt.simulator.mpiexec import expand_path, node_local_ranks, parse_command
from fugaku_gpt.simulator.session import Simulator
from tests.simulator.conftest import Write, alive
from tests.support.corpus import write_byte_corpus

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


@pytest.mark.usefixtures("forked_starts")
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


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_ignored_output_options_are_warned_of(site: Simulator, write: Write, tmp_path: Path) -> None:
    job_id = run_job(site, write, tmp_path, "mpiexec -stdout all.txt -oferr e.txt sh -c 'echo $PMIX_RANK'")[0]
    err = (tmp_path / f"job.sh.{job_id}.err").read_text()
    assert "[WARN] PLE 0605 plexec ignore option -ofout/-stdout(stdout outputs to all.txt).\n" in err
    assert "[WARN] PLE 0605 plexec ignore option -oferr/-stderr(stderr outputs to e.txt).\n" in err
    assert not (tmp_path / "all.txt").exists()
    assert (tmp_path / f"output.{job_id}/0/1/stdout.1.1").read_text() == "1\n"


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_exit_codes_and_refusals_pass_through(site: Simulator, write: Write, tmp_path: Path) -> None:
    assert run_job(site, write, tmp_path, "mpiexec sh -c 'exit 7'; exit $?")[2] == "7"
    job_id, _, exit_code, _ = run_job(site, write, tmp_path, "mpiexec -n 49 true", "--mpi max-proc-per-node=48")
    assert exit_code == "1"
    assert "the job has room for 48" in (tmp_path / f"job.sh.{job_id}.err").read_text()


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_standard_input_comes_from_a_file_only(site: Simulator, write: Write, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("from a file\n")
    job_id = run_job(site, write, tmp_path, "mpiexec -n 1 -stdin in.txt cat\necho shell | mpiexec -n 1 cat")[0]
    assert (tmp_path / f"output.{job_id}/0/1/stdout.1.0").read_text() == "from a file\n"
    assert not (tmp_path / f"output.{job_id}/0/2/stdout.2.0").exists()


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_variables_for_the_ranks_alone(site: Simulator, write: Write, tmp_path: Path) -> None:
    body = "mpiexec -n 1 -x LD_PRELOAD=/no/such.so -x OMP_NUM_THREADS=12 env"
    job_id = run_job(site, write, tmp_path, body)[0]
    seen = (tmp_path / f"output.{job_id}/0/1/stdout.1.0").read_text()
    assert "\nLD_PRELOAD=/no/such.so\n" in f"\n{seen}" and "\nOMP_NUM_THREADS=12\n" in f"\n{seen}"
    assert "FUGAKU_GPT_SIMULATOR_PART" not in seen
    # loaded into the rank (which says so), but into nothing around it
    assert "such.so" not in (tmp_path / f"job.sh.{job_id}.err").read_text()


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_two_real_ranks_meet(site: Simulator, write: Write, tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    (tmp_path / "meet.py").write_text(
        "from mpi4py import MPI\nfrom fugaku_gpt.machine.rank import launched_rank\n"
        "world, launched = MPI.COMM_WORLD, launched_rank()\n"
        "assert (launched.rank, launched.ranks) == (world.rank, None)\n"
        "print(world.rank, world.size, world.allreduce(world.rank + 1))\n"
    )
    job_id, code, exit_code, _ = run_job(site, write, tmp_path, f"mpiexec {sys.executable} meet.py")
    assert (code, exit_code) == ("0", "0")
    outputs = [(tmp_path / f"output.{job_id}/0/1/stdout.1.{rank}").read_text() for rank in range(2)]
    assert outputs == ["0 2 3\n", "1 2 3\n"]


# what a rank of a simulated job has in common with one of Fugaku, by the family of the MPI behind the stand-in
JOINED_BY = {
    OPEN_MPI: r"PMIX_\w+|OMPI_MCA_orte_local_daemon_uri",  # the latter for Open MPI 4 only
    MPICH: r"PMIX_RANK|PMI_(?:FD|HOSTNAME|RANK|SIZE)",  # which needs its PMI_*: `train` does not look at them
}


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_ranks_have_the_variables_of_fujitsus_mpiexec_and_those_that_join_them(
    site: Simulator, write: Write, tmp_path: Path
) -> None:
    pytest.importorskip("mpi4py")
    (tmp_path / "variables.py").write_text(
        "import json, os\nbefore = dict(os.environ)\nfrom mpi4py import MPI\nassert MPI.COMM_WORLD.size == 2\n"
        "print(json.dumps(before))\n"
    )
    body = (
        f"export OMPI_MCA_btl=self,vader MPIR_CVAR_DEBUG_SUMMARY=0\nenv -0 > job\nmpiexec {sys.executable} variables.py"
    )
    job_id, code, exit_code, _ = run_job(site, write, tmp_path, body)
    assert (code, exit_code) == ("0", "0")
    job = dict(entry.split("=", 1) for entry in (tmp_path / "job").read_text().split("\0") if entry)
    for rank in range(2):
        variables = json.loads((tmp_path / f"output.{job_id}/0/1/stdout.1.{rank}").read_text())
        assert variables["PMIX_RANK"] == variables["PLE_RANK_ON_NODE"] == str(rank)
        assert {"OMPI_MCA_btl", "MPIR_CVAR_DEBUG_SUMMARY"} <= set(variables)  # settings of the job's own
        own = {NODE_VARIABLE, "PLE_RANK_ON_NODE", "LD_LIBRARY_PATH", "LC_CTYPE"}
        added = {name for name in variables if name not in job} - own
        assert not [name for name in added if not re.fullmatch(JOINED_BY[find_launcher().family], name)], added


# A rank for which another rank's PMI_RANK, and a number of ranks of 1, stand in its variables until MPI begins.
MISLED_PROGRAM = """
import os, sys
true = {name: os.environ[name] for name in ("PMI_RANK", "PMI_SIZE")}
os.environ.update(PMI_RANK=str(1 - int(true["PMI_RANK"])), PMI_SIZE="1")
from fugaku_gpt.launch import rank_supervisor
supervise_rank = rank_supervisor.supervise_rank

def supervise_rank_and_mend(rank, directory):
    os.environ.update(true)
    print("supervised as rank", rank)
    return supervise_rank(rank, directory)

rank_supervisor.supervise_rank = supervise_rank_and_mend
from fugaku_gpt.cli.main import run
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_train_takes_its_rank_from_fujitsus_variables_not_from_those_behind_them(
    site: Simulator, write: Write, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    if find_launcher().family != MPICH:
        pytest.skip("only MPICH gives ranks a PMI_RANK; under Open MPI they have none (see the test above)")
    corpus = write_byte_corpus(tmp_path / "bytes")
    (tmp_path / "misled.py").write_text(MISLED_PROGRAM)
    settings = (
        "model.layers=1", "model.hidden=16", "model.heads=2", "model.seq_len=16", "model.vocab_size=256", "layout.dp=2",
        "training.iterations=2", "training.global_batch=2", "training.micro_batch=1",
    )  # fmt: skip
    arguments = " ".join(f"--set {setting}" for setting in settings)
    body = f"mpiexec {sys.executable} misled.py train --data {corpus} --out run {arguments}"
    job_id, code, exit_code, _ = run_job(site, write, tmp_path, body)
    assert (code, exit_code) == ("0", "0")
    outputs = [(tmp_path / f"output.{job_id}/0/1/stdout.1.{rank}").read_text() for rank in range(2)]
    assert [output.splitlines()[0] for output in outputs] == ["supervised as rank 0", "supervised as rank 1"]
    result = RunDirectory(tmp_path / "run").result()
    assert result is not None and (result.status, result.iterations) == ("ok", 2)


@pytest.mark.usefixtures("forked_starts")
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


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_calls_at_once_need_nodes_of_their_own(site: Simulator, write: Write, tmp_path: Path) -> None:
    wait = "while ! test -e go; do sleep 0.02; done"
    body = (
        f"mpiexec -n 1 sh -c 'touch up; {wait}' &\nwhile ! test -e up; do sleep 0.02; done\n"
        "time sh -c 'mpiexec -n 1 touch second'; echo $?\n"
        "mpiexec -n 1 -vcoordfile one touch third; echo $?\ntouch go; wait\n"
        "mpiexec -n 1 touch fourth; echo $?"
    )
    (tmp_path / "one").write_text("(1)\n")
    job_id = run_job(site, write, tmp_path, body, "-L node=2")[0]
    assert (tmp_path / f"job.sh.{job_id}.out").read_text() == "1\n1\n0\n"
    err = (tmp_path / f"job.sh.{job_id}.err").read_text()
    assert err.count("[ERR.] PLE 0008 plexec must be started sequentially.(nid=own node)") == 2
    assert (tmp_path / "fourth").exists() and not (tmp_path / "second").exists() and not (tmp_path / "third").exists()


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_calls_with_coordinates_run_at_once_where_they_share_no_node(
    site: Simulator, write: Write, tmp_path: Path
) -> None:
    for name, text in {"a": "(0,0) # first\n\n(0,0)\n", "b": "(1,0)\n", "c": "(0,0)\n", "d": "(2,0)\n"}.items():
        (tmp_path / name).write_text(text)
    meet = "touch $0; while ! test -e a_up -a -e b_up; do sleep 0.02; done; echo $PLE_RANK_ON_NODE"
    hold = "while ! test -e go; do sleep 0.02; done"
    body = (
        f"mpiexec -n 2 -vcoordfile a sh -c '{meet}; {hold}' a_up &\nmpiexec -n 1 --vcoordfile b sh -c '{meet}' b_up\n"
        "echo $?\nmpiexec -n 1 -vcoordfile c true; echo $?; mpiexec -n 1 -vcoordfile d true; echo $?\n"
        "mpiexec -n 2 -vcoordfile b true; echo $?; touch go; wait"
    )
    job_id = run_job(site, write, tmp_path, body, "-L node=2x1\n--mpi max-proc-per-node=2")[0]
    assert (tmp_path / f"job.sh.{job_id}.out").read_text() == "0\n1\n1\n1\n"
    err = (tmp_path / f"job.sh.{job_id}.err").read_text()
    assert "the node (0,0) is used by another mpiexec" in err and "(2,0): is no node of this job, node=2x1" in err
    assert "has 1 coordinates for 2 processes" in err
    numbers = {path.name: path.read_text() for path in (tmp_path / f"output.{job_id}").glob("0/*/stdout*")}
    assert sorted(numbers.values()) == ["0\n", "0\n", "1\n"]  # two ranks on (0,0), one on (1,0)


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
@pytest.mark.parametrize("form", ["{} &", "nohup bash -c '{}' &", "(setsid {} &)\nwait"])
def test_background_ranks_end_with_a_script_that_does_not_wait(
    site: Simulator, write: Write, tmp_path: Path, form: str
) -> None:
    (tmp_path / "rank.sh").write_text("echo $$ > pid.$PMIX_RANK; sleep 300")
    body = form.format("mpiexec -n 2 sh rank.sh") + "\nwhile ! test -s pid.0 -a -s pid.1; do sleep 0.02; done"
    assert run_job(site, write, tmp_path, body)[1:] == ["0", "0", "0"]
    assert not alive(tmp_path / "pid.0") and not alive(tmp_path / "pid.1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "directives", "is_refused"),
    [
        ("mpiexec ./a.out", "--mpi proc=300", True),
        ("mpiexec -n 300 ./a.out", "--mpi max-proc-per-node=48", True),
        ('launch=(mpiexec -n 300)\n"${launch[@]}" ./a.out', "--mpi proc=300", True),
        ("sh -c 'mpiexec -n 300 ./a.out' &\nwait", "--mpi proc=300", True),
        ("mpiexec -n 2 true", "--mpi proc=300", False),
        ("echo no ranks", "--mpi proc=300", False),
    ],
)
def test_more_ranks_than_can_be_started_are_refused_at_submission(
    site: Simulator, write: Write, tmp_path: Path, body: str, directives: str, is_refused: bool
) -> None:
    done = site.run("pjsub", write(body, f"-L node=300,elapse=1:00\n{directives}"), cwd=tmp_path)
    assert (done.returncode != 0) is is_refused
    assert (
        "PJM 0057 pjsub proc=300 is greater than the upper limit (256) of this simulator" in done.stderr
    ) is is_refused
