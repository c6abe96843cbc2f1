"""Tests of scripts that the simulator runs: their variables, files, limits, dependencies and ends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Dict, Iterator, List

import pytest

from fugaku_gpt.simulator.session import Simulator
from tests.simulator.conftest import GO, Write, alive
from tests.support.simulated import simulated
from tests.support.waiting import until

pytestmark = pytest.mark.slow


def variables(text: str) -> Dict[str, str]:
    return dict(line.partition("=")[::2] for line in text.splitlines() if "=" in line)


def test_only_requested_variables_are_inherited(
    site: Simulator, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_SHELL", "1")
    monkeypatch.setenv("TAKEN", "from the shell")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    job_id = site.submit("-x", "A=b c,TAKEN,PJM_JOBID=7", write("env"), cwd=tmp_path)
    site.wait(job_id)
    seen = variables((tmp_path / f"job.sh.{job_id}.out").read_text())
    assert "SECRET_OF_THE_SHELL" not in seen and "PYTHONPATH" not in seen
    assert (seen["A"], seen["TAKEN"]) == ("b c", "from the shell")
    assert seen["PJM_JOBID"] == job_id  # what PJM computes cannot be overridden
    assert seen["FUGAKU_GPT_SIMULATOR"] == "1"
    assert seen["PATH"].split(":")[0] == str(site.bin)


def test_everything_is_inherited_with_capital_x(
    site: Simulator, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_SHELL", "1")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere")
    job_id = site.submit("-X", write("env"), cwd=tmp_path)
    site.wait(job_id)
    seen = variables((tmp_path / f"job.sh.{job_id}.out").read_text())
    assert seen["OF_THE_SHELL"] == "1"
    assert "LD_LIBRARY_PATH" not in seen


def test_variables_of_a_job(site: Simulator, write: Write, tmp_path: Path) -> None:
    directives = (
        '-L "node=2x3x2:torus,elapse=0:01:30,freq=2000,eco_state=0"\n--mpi "max-proc-per-node=4,rank-map-bynode=XYZ"\n'
        "-N my-job\n--comment tag\n--llio localtmp-size=10Gi\n-g hp000000"
    )
    job_id = site.submit(write("env; pwd; touch $PJM_LOCALTMP/x", directives), cwd=tmp_path)
    assert site.wait(job_id) == [[job_id, "0", "0", "0"]]
    text = (tmp_path / f"my-job.{job_id}.out").read_text()
    seen = variables(text)
    assert text.splitlines()[-1] == str(tmp_path)
    expected = {
        "PJM_JOBID": job_id,
        "PJM_SUBJOBID": job_id,
        "PJM_JOBNAME": "my-job",
        "PJM_JOBDIR": str(tmp_path),
        "PJM_O_WORKDIR": str(tmp_path),
        "PJM_ENVIRONMENT": "BATCH",
        "PJM_ELAPSE_LIMIT": "90",
        "PJM_NODE": "12",
        "PJM_NODE_X": "2",
        "PJM_NODE_Y": "3",
        "PJM_NODE_Z": "2",
        "PJM_NODE_ALLOCATION_MODE": "torus",
        "PJM_MPI_PROC": "48",
        "PJM_PROC_BY_NODE": "4",
        "PJM_RANK_MAP_BYNODE": "XYZ",
        "PJM_COMMENT": "tag",
        "PJM_LLIO_LOCALTMP_SIZE": "10Gi",
        "PJM_RSCGRP": "small",
        "PJM_STDOUT_PATH": str(tmp_path / f"my-job.{job_id}.out"),
    }
    assert {name: seen.get(name) for name in expected} == expected
    assert {"freq=2000", "eco_state=0", "retention_state=1"} <= set(seen["PJM_CUSTOM_RESOURCES"].split(","))
    assert not Path(seen["PJM_LOCALTMP"]).exists()  # it ends with the job


def test_the_script_is_taken_at_submission(site: Simulator, write: Write, tmp_path: Path) -> None:
    first = site.submit("--at", "20991231", write("true"), cwd=tmp_path)
    site.run("pjhold", first)
    second = site.submit("--step", write(GO + "; echo first text"), cwd=tmp_path)
    third = site.submit("--step", "--sparam", f"jid={second[:-2]}", write("echo second text"), cwd=tmp_path)
    write("echo third text")
    (tmp_path / "go").touch()
    site.wait(third)
    assert (tmp_path / f"job.sh.{second}.out").read_text() == "first text\n"
    assert (tmp_path / f"job.sh.{third}.out").read_text() == "second text\n"
    site.run("pjdel", first)


def test_the_command_line_wins_key_by_key(site: Simulator, write: Write, tmp_path: Path) -> None:
    script = write("echo $PJM_NODE $PJM_ELAPSE_LIMIT $PJM_JOBNAME $A", '-L "node=3,elapse=77"\n-N inside\n-x A=1,B=2')
    job_id = site.submit("-L", "node=5", "-N", "outside", "-x", "A=2", script, cwd=tmp_path)
    site.wait(job_id)
    assert (tmp_path / f"outside.{job_id}.out").read_text() == "5 77 outside 2\n"


def test_the_hash_bang_line_chooses_the_interpreter(site: Simulator, write: Write, tmp_path: Path) -> None:
    import sys

    python = write("import sys; print(sys.flags.isolated)", name="p.py", interpreter=f"#!{sys.executable} -I")
    none = write("echo $BASH", name="none.sh", interpreter="")
    environment = {**site.environment, "SHELL": "/bin/bash"}
    run = [site.run("pjsub", "-z", "jid", script, cwd=tmp_path, environment=environment) for script in (python, none)]
    ids = [done.stdout.strip() for done in run]
    site.wait(*ids)
    assert (tmp_path / f"p.py.{ids[0]}.out").read_text() == "1\n"
    assert (tmp_path / f"none.sh.{ids[1]}.out").read_text() == "/bin/bash\n"


def test_scripts_for_sh_run_in_bash_as_on_fugaku(site: Simulator, write: Write, tmp_path: Path) -> None:
    body = "nodes=(a b); if [[ ${nodes[1]} == b ]]; then echo ${BASH_VERSION:+bash} $(set -o | grep -c 'posix.*on'); fi"
    job_id = site.submit(write(body, interpreter="#!/bin/sh"), cwd=tmp_path)
    assert site.wait(job_id) == [[job_id, "0", "0", "0"]]
    assert (tmp_path / f"job.sh.{job_id}.out").read_text() == "bash 1\n"


def test_module_loads_nothing_and_says_so(site: Simulator, write: Write, tmp_path: Path) -> None:
    job_id = site.submit(write("set -e; module load lang/tcsds-1.2.38; echo done"), cwd=tmp_path)
    site.wait(job_id)
    assert (tmp_path / f"job.sh.{job_id}.out").read_text() == "done\n"
    err = (tmp_path / f"job.sh.{job_id}.err").read_text()
    assert "module load lang/tcsds-1.2.38: nothing is loaded: this machine has no module of Fugaku" in err


def test_without_a_hash_bang_line_the_login_shell_runs_the_script(
    site: Simulator, write: Write, tmp_path: Path
) -> None:
    shell = tmp_path / "my shell"
    shell.write_text('#!/bin/sh\necho mine; exec /bin/sh "$@"\n')
    shell.chmod(0o755)
    script = write("echo ran", interpreter="")
    done = site.run("pjsub", "-z", "jid", script, cwd=tmp_path, environment={**site.environment, "SHELL": str(shell)})
    site.wait(done.stdout.strip())
    assert (tmp_path / f"job.sh.{done.stdout.strip()}.out").read_text() == "mine\nran\n"


def test_a_script_with_carriage_returns_does_not_start(site: Simulator, write: Write, tmp_path: Path) -> None:
    job_id = site.submit(write("true", interpreter="#!/bin/bash\r"), cwd=tmp_path)
    assert site.wait(job_id) == [[job_id, "21", "0", "0"]]


def test_a_missing_shell_is_pjm_code_21(site: Simulator, write: Write, tmp_path: Path) -> None:
    job_id = site.submit(write("true", interpreter="#!/no/such/shell"), cwd=tmp_path)
    assert site.wait(job_id)[0][1] == "21"
    assert site.job_state(job_id) == "EXT"


def test_output_that_cannot_be_written_is_pjm_code_16(site: Simulator, write: Write, tmp_path: Path) -> None:
    job_id = site.submit("-o", "no/such/folder/out", write("true"), cwd=tmp_path)
    assert site.wait(job_id)[0][1] == "16"


@pytest.mark.parametrize(
    ("arguments", "script", "made"),
    [
        ([], "job.sh", ["job.sh.{id}.err", "job.sh.{id}.out"]),
        ([], "1st.sh", ["J1st.sh.{id}.err", "J1st.sh.{id}.out"]),
        (["-j"], "job.sh", ["job.sh.{id}.out"]),
        (["-o", "%n-%j.log", "-j"], "job.sh", ["job.sh-{id}.log"]),
        (["-N", "run", "-s"], "job.sh", ["run.{id}.err", "run.{id}.out", "run.{id}.stats"]),
        (["-s", "--spath", "s.%j", "-j"], "job.sh", ["job.sh.{id}.out", "s.{id}"]),
    ],
)
def test_names_of_output_files(
    site: Simulator, write: Write, tmp_path: Path, arguments: List[str], script: str, made: List[str]
) -> None:
    job_id = site.submit(*arguments, write("echo out; echo err >&2", name=script), cwd=tmp_path)
    site.wait(job_id)
    created_files = sorted(path.name for path in tmp_path.iterdir() if path.name != script)
    assert created_files == sorted(name.format(id=job_id) for name in made)
    if "-j" in arguments:
        assert (tmp_path / made[0].format(id=job_id)).read_text() == "out\nerr\n"


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[Simulator]:
    """A simulator with a grace period long enough for jobs to end by themselves, even on a busy machine."""
    with simulated(tmp_path / "patient", grace=5.0) as site:
        yield site


def test_the_elapse_limit_is_sigterm_and_then_sigkill(patient: Simulator, write: Write, tmp_path: Path) -> None:
    site = patient
    stubborn = site.submit(
        "-L", "elapse=3", write("trap 'echo asked' TERM; echo $$ > pid; while :; do sleep 0.1; done"), cwd=tmp_path
    )
    polite = site.submit(
        "-L", "elapse=3", "-s", write("trap 'echo bye; exit 5' TERM; sleep 60 & wait", name="b.sh"), cwd=tmp_path
    )
    assert site.wait(stubborn, polite) == [[stubborn, "11", "0", "24"], [polite, "11", "0", "24"]]
    assert (tmp_path / f"job.sh.{stubborn}.out").read_text() == "asked\n"
    assert (tmp_path / f"b.sh.{polite}.out").read_text() == "bye\n"
    assert not alive(tmp_path / "pid")
    rows = site.run("pjstat", "-H", "-v", stubborn).stdout.splitlines()
    assert rows[1].rstrip().endswith("ELAPSE LIMIT EXC")  # cut to 16 characters, as on the real machine
    stats = (tmp_path / f"b.sh.{polite}.stats").read_text()
    assert " REASON                    : ELAPSE LIMIT EXCEEDED\n" in stats
    assert " STATE                     : EXT\n" in stats


def test_a_rank_keeps_the_grace_period_when_the_shell_exits_at_once(
    patient: Simulator, write: Write, tmp_path: Path
) -> None:
    site = patient
    body = "bash -c \"trap 'sleep 0.3; echo saved > saved; exit' TERM; touch ready; sleep 60 & wait\""
    job_id = site.submit("-L", "elapse=1:00", write(body + "\ntrue"), cwd=tmp_path)
    until((tmp_path / "ready").exists)
    assert site.run("pjdel", job_id).returncode == 0
    assert site.wait(job_id)[0][1] == "1"
    assert (tmp_path / "saved").read_text() == "saved\n"
    assert site.job_state(job_id) == "CCL"


def test_processes_that_a_script_leaves_running_are_ended(site: Simulator, write: Write, tmp_path: Path) -> None:
    body = "setsid sleep 300 & echo $! > pid; env -i sleep 301 & echo $! > other; sleep 0.2"
    job_id = site.submit("-L", "elapse=1:00", write(body), cwd=tmp_path)
    assert site.wait(job_id)[0] == [job_id, "0", "0", "0"]
    assert not alive(tmp_path / "pid") and not alive(tmp_path / "other")


def test_a_script_that_kills_itself_reports_the_signal(site: Simulator, write: Write, tmp_path: Path) -> None:
    job_id = site.submit(write("kill -9 $$"), cwd=tmp_path)
    assert site.wait(job_id) == [[job_id, "0", "0", "9"]]


def test_deleting_before_while_and_after_running(tmp_path: Path, write: Write) -> None:
    stays = "trap 'until test -e end; do sleep 0.02; done; exit' TERM; echo $$ > pid; sleep 60 & wait"
    write(stays)  # after SIGTERM too, so that it can be deleted once more
    with simulated(tmp_path / "sim", slots=1, grace=60.0) as site:
        running = site.submit("-L", "elapse=1:00", "job.sh", cwd=tmp_path)
        waiting = site.submit("-s", "job.sh", cwd=tmp_path)
        until((tmp_path / "pid").exists)
        assert [site.job_state(job_id) for job_id in (running, waiting)] == ["RUN", "QUE"]
        assert site.run("pjdel", waiting).returncode == 0
        assert site.job_state(waiting) == "CCL"
        assert site.run("pjdel", running).returncode == 0
        again = site.run("pjdel", running)
        assert again.stdout == f"[INFO] PJM 0119 pjdel Already accepted job {running}.\n"
        (tmp_path / "end").touch()
        assert site.wait(running)[0][1] == "1"
        assert site.job_state(running) == "CCL"
        assert not alive(tmp_path / "pid")
        over = site.run("pjdel", running)
        assert over.stderr == f"[ERR.] PJM 0112 pjdel Job {running} does not exist.\n"
        stats = (tmp_path / f"job.sh.{waiting}.stats").read_text()
        assert " JOB START DATE            : -\n" in stats and " PJM CODE                  : 1\n" in stats


def test_hold_and_release(tmp_path: Path, write: Write) -> None:
    write("echo run >> runs; " + GO, name="long.sh")
    write("echo run >> runs")
    with simulated(tmp_path / "sim", slots=1) as site:
        first = site.submit("-L", "elapse=1:00", "long.sh", cwd=tmp_path)
        second = site.submit("job.sh", cwd=tmp_path)
        assert site.run("pjhold", second).returncode == 0
        assert site.job_state(second) == "HLD"
        refused = site.run("pjhold", first)  # it runs, and may not be run again
        assert (refused.returncode, refused.stdout) == (1, "")
        (tmp_path / "go").touch()
        site.wait(first)
        assert site.job_state(second) == "HLD"
        assert site.run("pjrls", second).returncode == 0
        assert site.wait(second) == [[second, "0", "0", "0"]]
        assert site.run("pjrls", second).returncode == 1

        (tmp_path / "go").unlink()
        again = site.submit("--restart", "-L", "elapse=1:00", "long.sh", cwd=tmp_path)
        until(lambda: len((tmp_path / "runs").read_text().split()) == 3)
        assert site.run("pjhold", again).returncode == 0
        until(lambda: site.job_state(again) == "HLD")
        (tmp_path / "go").touch()
        site.run("pjrls", again)
        assert site.wait(again) == [[again, "0", "0", "0"]]
        assert len((tmp_path / "runs").read_text().split()) == 4


def test_order_slots_priority_and_nodes(tmp_path: Path, write: Write) -> None:
    write("echo $PJM_JOBNAME >> order; " + GO)
    with simulated(tmp_path / "sim", slots=1, nodes=8) as site:
        ids = [
            site.submit("-L", "elapse=1:00", "-N", name, "-p", priority, "job.sh", cwd=tmp_path)
            for name, priority in (("a", "127"), ("b", "10"), ("c", "127"), ("d", "255"))
        ]
        (tmp_path / "go").touch()
        site.wait(*ids)
        assert (tmp_path / "order").read_text().split() == ["a", "d", "c", "b"]
        too_large = site.run("pjsub", "-L", "node=9", "job.sh", cwd=tmp_path)
        assert too_large.stderr == "[ERR.] PJM 0057 pjsub node=9 is greater than the upper limit (8).\n"
    (tmp_path / "go").unlink()
    with simulated(tmp_path / "wide", slots=2, nodes=8) as site:  # the nodes hold the second one up
        ids = [site.submit("-L", "node=5,elapse=1:00", "job.sh", cwd=tmp_path) for _ in range(2)]
        until(lambda: "RUN" in [site.job_state(job_id) for job_id in ids])
        assert site.job_state(ids[1]) == "QUE"
        (tmp_path / "go").touch()
        assert [codes[1] for codes in site.wait(*ids)] == ["0", "0"]


def test_a_job_with_an_elapse_range_yields_after_the_minimum(tmp_path: Path, write: Write) -> None:
    # more than the minimum of a second after its start, it says so
    write("trap 'echo checkpoint; exit' TERM; sleep 1.3; touch over; sleep 60 & wait", name="long.sh")
    write("true")
    with simulated(tmp_path / "sim", slots=1) as site:
        long = site.submit("-L", "elapse=1-1:00:00", "long.sh", cwd=tmp_path)
        until((tmp_path / "over").exists)
        site.job_state(long)  # the daemon looks at all jobs before it reads the next request
        assert site.job_state(long) == "RUN"  # nobody waits
        assert (tmp_path / f"long.sh.{long}.out").read_text() == ""
        short = site.submit("job.sh", cwd=tmp_path)
        assert site.wait(long, short)[0][:2] == [long, "18"]
        assert site.job_state(long) == "CCL"
        assert (tmp_path / f"long.sh.{long}.out").read_text() == "checkpoint\n"
        row = site.run("pjstat", "-H", "-v", long).stdout.splitlines()[1]
        assert "0000:00:01-0001:00:00" in row and "ANOTHER JOB STAR" in row


def test_a_bulk_job_runs_as_sub_jobs(site: Simulator, write: Write, tmp_path: Path) -> None:
    script = write("echo $PJM_SUBJOBID $PJM_BULKNUM $PJM_JOBID; exit $PJM_BULKNUM", "-s")
    bulk = site.submit("--bulk", "--sparam", "0-3", script, cwd=tmp_path)
    assert site.run("pjwait", bulk).stdout == f"{bulk} - - -\n"
    for number in range(4):
        assert (tmp_path / f"job.sh.{bulk}[{number}].out").read_text() == f"{bulk}[{number}] {number} {bulk}\n"
        assert (tmp_path / f"job.sh.{bulk}[{number}].stats").exists()
    assert not (tmp_path / f"job.sh.{bulk}.out").exists()
    stats = (tmp_path / f"job.sh.{bulk}.stats").read_text()
    assert " SUB JOB NUM               : 4\n" in stats and " END BULKNO                : 3\n" in stats
    listed = site.run("pjstat", "-H", "-E", "--data", "--choose", "jid,ec", bulk).stdout.splitlines()[1:]
    assert listed == [f",{bulk},3", *(f",{bulk}[{number}],{number}" for number in range(4))]
    named = site.run("pjstat", "-H", "--data", "--choose", "jid", f"{bulk}[1-2]").stdout.splitlines()[1:]
    assert named == [f",{bulk}[1]", f",{bulk}[2]"]


STEP = f'case "$PJM_STEPNUM" in 0) {GO}; exit 75;; 1) exit 3;; *) exit 0;; esac'


@pytest.mark.parametrize(
    ("conditions", "codes"),
    [
        ([None, None, None], ["0", "0", "0"]),
        (["ec!=75:all", "ec!=75:all", "ec!=75:all"], ["0", "6", "6"]),
        (["ec==75:one", None, "ec==0:one:0"], ["6", "0", "0"]),
        (["ec==75:after", "ec==9:after:1", "ec==9:one:0"], ["6", "6", "0"]),
        (["ec==75:all", None, None], ["6", "6", "6"]),
        (["pc==0:one", "NONE", None], ["6", "0", "0"]),
        (["ec==75,76:one", "sn>0:one", "ec<3:one"], ["6", "0", "6"]),
        (["ec!=0,75:one", "ec!=0,1:one:0", "NONE"], ["0", "6", "0"]),
    ],
)
def test_step_conditions_cancel(
    site: Simulator, write: Write, tmp_path: Path, conditions: List["str | None"], codes: List[str]
) -> None:
    script = write(STEP)
    first = site.submit("--step", "--sparam", "sn=0", "-L", "elapse=1:00", script, cwd=tmp_path)
    number = first.partition("_")[0]
    assert first == f"{number}_0"
    ids = [first]
    for condition in conditions:
        sparam = f"jid={number}" + (f",sd={condition}" if condition else "")
        ids.append(site.submit("--step", "--sparam", sparam, script, cwd=tmp_path))
    (tmp_path / "go").touch()
    site.run("pjwait", number)
    waited = [line.split() for line in site.run("pjwait", *ids).stdout.splitlines()]
    assert [line[1] for line in waited] == ["0", *codes]
    assert [site.job_state(job_id) for job_id in ids[1:]] == ["CCL" if code == "6" else "EXT" for code in codes]


def test_steps_run_sequentially_and_are_joined_by_name(site: Simulator, write: Write, tmp_path: Path) -> None:
    script = write(GO + "; echo $PJM_STEPNUM >> order; sleep 0.1; echo $PJM_STEPNUM >> order")
    ids = [site.submit("--step", "--sparam", "jnam=chain", script, cwd=tmp_path) for _ in range(3)]
    number = ids[0].partition("_")[0]
    assert ids == [f"{number}_{step}" for step in range(3)]
    (tmp_path / "go").touch()
    site.run("pjwait", number)
    assert (tmp_path / "order").read_text().split() == ["0", "0", "1", "1", "2", "2"]
    assert (tmp_path / f"chain.{ids[2]}.out").exists()
    over = site.run("pjsub", "--step", "--sparam", f"jid={number}", script, cwd=tmp_path)
    assert over.stderr == f"[ERR.] PJM 0012 pjsub Job {number} does not exist.\n"


def test_limits_of_processes_are_set(site: Simulator, write: Write, tmp_path: Path) -> None:
    ids = [
        site.submit(*arguments, write("ulimit -Sn; ulimit -Sc"), cwd=tmp_path)
        for arguments in ([], ["-L", "proc-openfd=2048"])
    ]
    site.wait(*ids)
    assert (tmp_path / f"job.sh.{ids[0]}.out").read_text().split() == ["1024", "0"]
    assert (tmp_path / f"job.sh.{ids[1]}.out").read_text().split() == ["2048", "0"]


def test_the_umask_of_the_submitting_shell(site: Simulator, write: Write, tmp_path: Path) -> None:
    script = write("umask")
    before = os.umask(0o027)
    try:
        job_id = site.submit(script, cwd=tmp_path)
    finally:
        os.umask(before)
    site.wait(job_id)
    out = tmp_path / f"job.sh.{job_id}.out"
    assert out.read_text() == "0027\n"
    assert out.stat().st_mode & 0o777 == 0o640


def test_the_short_states_can_be_seen(tmp_path: Path, write: Write) -> None:
    write("sleep 1")
    seen: List[str] = []
    with simulated(tmp_path / "sim", transition=1.0) as site:
        job_id = site.submit("-L", "elapse=1:00", "job.sh", cwd=tmp_path)
        while seen[-1:] != ["EXT"]:
            seen.append(site.job_state(job_id))
            if seen[-1] == "RNE":  # neither before nor after the script can a job be deleted
                refused = site.run("pjdel", job_id)
                assert site.job_state(job_id) == "EXT" or refused.stderr.startswith("[ERR.] PJM 0113 pjdel Job ")
    assert {"RNA", "RNP", "RUN", "RNE", "RNO", "EXT"} <= set(seen)
