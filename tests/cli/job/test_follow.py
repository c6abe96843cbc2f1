"""Tests of ``fugaku-gpt job submit`` and of the commands after it, with the local scheduler."""

from __future__ import annotations

import csv
import io
import os
import pty
import select
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any, Iterator, List

import pytest

from fugaku_gpt.cli.main import run
from fugaku_gpt.config import load_run_config
from fugaku_gpt.jobs.schedulers.local import LocalScheduler
from fugaku_gpt.jobs.schedulers.protocol import Submission
from fugaku_gpt.jobs.submission import prepare_job
from fugaku_gpt.launch.processes import end_marked_processes
from fugaku_gpt.records.job import append_event, read_events
from fugaku_gpt.records.run import OK, Result, RunDirectory
from tests.support.commands import Capture, json_of
from tests.support.prepared_corpus import PREPARED
from tests.support.waiting import until

WAIT_SECONDS = 300.0
# writes the exit record that the templates' scripts write, without training
RECORD = """
code=$1; mkdir -p exit; printf '{"version": 1, "job_id": "%s", "sub_job": "%s", "exit_code": %d, "signal": "",
 "started": 1, "ended": 2, "host": "x"}' "$FUGAKU_GPT_JOB" "$FUGAKU_GPT_JOB" "$code" > "exit/$FUGAKU_GPT_JOB.json"
exit "$code"
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Each test has its own home folder, and so its own queue of the local scheduler."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(tmp_path)
    yield folder
    store = LocalScheduler().store
    for job in store.jobs() if store.root.exists() else []:
        store.set_request(job, "cancel")
        end_marked_processes(job.mark, grace=0.0)


def prepare_run_directory(name: str, body: str, *settings: str) -> Path:
    """Prepare a run directory and replace its job script."""
    config = load_run_config(preset="tiny", overrides=["job.scheduler=local", "job.elapse=10:00", *settings])
    directory = Path("runs") / name
    prepare_job(config, directory)
    (directory / "job.sh").write_text(f"end() {{ {RECORD} }}\n{body}\n", encoding="utf-8")
    return directory


def test_a_dry_run_prints_script_command_and_cost_and_submits_nothing(capsys: Capture) -> None:
    arguments = ["--preset", "124m", "--set", "job.nodes=384", "--set", "layout.dp=384", "--set", "job.elapse=1:30:00"]
    settings = ["--set", "training.global_batch=3072", "--set", "job.chain=2"]
    assert run(["job", "submit", *arguments, *settings, "--scheduler", "pjm", "--out", "a run", "--dry-run"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("#!/bin/bash\n#PJM") and '"node=384' in captured.out
    assert "node-hours: 1152 at most" in captured.err and "note: " in captured.err
    assert "command: cd 'a run' && pjsub -z jid --comment fugaku-gpt-TAG --step --sparam sn=0 job.sh" in captured.err
    assert "--sparam 'jid=<id of link 1>,sn=1,sd=ec==1,2,76:all' job.sh" in captured.err
    assert "a run/job.sh:2: PJM022 warning: no -x PJM_LLIO_GFSCACHE" in captured.err
    assert not Path("a run").exists()


def test_a_dry_run_shows_the_reason_of_a_refusal(capsys: Capture) -> None:
    arguments = ["--preset", "tiny", "--set", "job.resource_group=int", "--set", "job.local_tmp=200Gi"]
    assert run(["job", "submit", *arguments, "--scheduler", "pjm", "--dry-run"]) == 0
    err = capsys.readouterr().err
    assert "PJM080" in err and "PJM024" in err and "command: " in err


@pytest.mark.slow
def test_a_job_is_submitted_and_watched_to_the_end(capsys: Capture) -> None:
    directory = prepare_run_directory("good", "echo hello; sleep 0.3; end 0")
    assert run(["job", "submit", str(directory)]) == 0
    submit_output = capsys.readouterr()
    assert submit_output.out == "local-1\n" and "submitted" in submit_output.err
    assert run(["job", "submit", str(directory)]) == 2
    assert "local-1" in capsys.readouterr().err
    assert run(["job", "watch", str(directory)]) == 1  # the script trained nothing: exit code 0 is no result
    watch_output = capsys.readouterr()
    assert "local-1 failed exit code 0, but no result was recorded: hello" in watch_output.out
    assert "1 of 1 did not end well: runs/good" in watch_output.err


@pytest.mark.slow
def test_watching_a_successful_run_is_exit_code_0(capsys: Capture) -> None:
    directory = prepare_run_directory("good", "sleep 0.2; end 0")
    assert run(["job", "submit", str(directory)]) == 0
    RunDirectory(directory).write_result(Result(OK, "", 1.0, 2.0))
    assert run(["job", "watch", str(directory)]) == 0
    (row,) = json_of(capsys, "job", "status", str(directory))
    assert (row["state"], row["status"], row["job"], row["cause"]) == ("ended", "ok", "local-1", None)


@pytest.mark.slow
def test_status_has_four_formats_and_takes_a_store(capsys: Capture) -> None:
    run(["job", "submit", str(prepare_run_directory("a", "end 3"))])
    run(["job", "submit", str(prepare_run_directory("b", "echo 'ValueError: a | b'; end 4"))])
    assert run(["job", "watch"]) == 1
    rows = json_of(capsys, "job", "status")
    assert [row["run"] for row in rows] == ["runs/a", "runs/b"]
    assert [row["status"] for row in rows] == ["failed", "failed"]
    assert rows[1]["cause"] == "exit code 4: ValueError: a | b" and "--force" in rows[0]["advice"]
    assert run(["job", "status", "--store", "runs", "--format", "csv"]) == 0
    assert [row["job"] for row in csv.DictReader(io.StringIO(capsys.readouterr().out))] == ["local-1", "local-2"]
    assert run(["job", "status", "runs/b", "--format", "md"]) == 0
    assert "a \\| b" in capsys.readouterr().out
    assert run(["job", "status", "runs"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["run", "job", "state", "status", "cause", "advice"]


@pytest.mark.slow
def test_cancel_hold_and_release_report_the_accepted_jobs(capsys: Capture) -> None:
    first, second = prepare_run_directory("first", "touch up; sleep 900"), prepare_run_directory("second", "end 1")
    for directory in (first, second):
        assert run(["job", "submit", str(directory)]) == 0
    until((first / "up").exists)
    capsys.readouterr()
    assert run(["job", "hold", str(first), str(second)]) == 1
    captured = capsys.readouterr()
    assert captured.out.splitlines() == ["runs/first: local-1: is running", "runs/second: local-2: held"]
    assert "not held: local-1" in captured.err
    assert [row["state"] for row in json_of(capsys, "job", "status")] == ["running", "held"]
    assert run(["job", "release", str(second)]) == 0
    assert run(["job", "cancel", str(first)]) == 0
    assert run(["job", "watch", "runs"]) == 1
    assert [(row["state"], row["status"]) for row in json_of(capsys, "job", "status")] == [
        ("cancelled", "interrupted"),
        ("ended", "failed"),
    ]
    assert [event.kind for event in read_events(second)].count("released") == 1
    assert run(["job", "cancel", str(first)]) == 2
    assert "no job is waiting or running" in capsys.readouterr().err


@pytest.mark.slow
def test_cancel_finds_a_job_whose_submission_was_killed(capsys: Capture) -> None:
    directory = prepare_run_directory("killed", "sleep 900")
    scheduler = LocalScheduler()
    append_event(directory, "intent", time.time(), scheduler="local", tag="t-1", link=1, chain=1, bulk="")
    assert run(["job", "cancel", str(directory)]) == 1
    assert "a submission is not over" in capsys.readouterr().out
    scheduler.submit(Submission("job.sh", directory.absolute(), "killed", tag="t-1"))
    assert run(["job", "cancel", str(directory)]) == 0
    assert capsys.readouterr().out == f"{directory}: local-1: cancelled\n"


@pytest.mark.slow
def test_resume_submits_a_stopped_run_and_keeps_the_previous_attempt(capsys: Capture) -> None:
    directory = prepare_run_directory("stopped", "echo once; end 75")
    run(["job", "submit", str(directory)])
    run(["job", "watch", str(directory)])
    (row,) = json_of(capsys, "job", "status", str(directory))
    assert (row["status"], "can be resumed" in row["cause"]) == ("interrupted", True)
    assert run(["job", "resume", str(directory), "--dry-run"]) == 0
    assert "resume: it has stopped" in capsys.readouterr().err
    assert run(["job", "resume", str(directory), "--exclude-node", "node7"]) == 2
    assert "--exclude-node node7: this machine is the only node" in capsys.readouterr().err
    (directory / "job.sh").write_text("touch up; sleep 900", encoding="utf-8")
    assert run(["job", "resume", str(directory)]) == 0
    assert capsys.readouterr().out == "local-2\n"
    attempt = Path("runs/attempts/stopped/1")
    assert (attempt / "local-1.out").read_text(encoding="utf-8") == "once\n" and (
        attempt / "exit" / "local-1.json"
    ).exists()
    assert not (directory / "result.json").exists()
    assert run(["job", "resume", str(directory)]) == 2
    assert "cancel it, or wait for its end" in capsys.readouterr().err


@pytest.mark.slow
def test_resume_refuses_a_run_that_would_fail_the_same_way(capsys: Capture) -> None:
    directory = prepare_run_directory("bad", "end 3")
    run(["job", "submit", str(directory)])
    run(["job", "watch", str(directory)])
    capsys.readouterr()
    assert run(["job", "resume", str(directory)]) == 2
    assert "would end the same way (exit code 3)" in capsys.readouterr().err
    assert run(["job", "resume", str(directory), "--force"]) == 0
    assert capsys.readouterr().out == "local-2\n"


@pytest.mark.slow
def test_resume_of_several_runs_reports_and_skips_those_that_would_fail_again(capsys: Capture) -> None:
    for name, code in (("bad", 3), ("stopped", 75)):
        run(["job", "submit", str(prepare_run_directory(name, f"end {code}"))])
    run(["job", "watch"])
    capsys.readouterr()
    assert run(["job", "resume", "runs/bad", "runs/stopped"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "local-3\n" and "runs/bad: left out: would end the same way" in captured.err


@pytest.mark.slow
def test_resume_of_a_folder_with_one_finished_run_submits_the_others(capsys: Capture) -> None:
    for name, code in (("done", 3), ("stopped", 75)):
        run(["job", "submit", str(prepare_run_directory(name, f"end {code}"))])
    run(["job", "watch"])
    capsys.readouterr()
    assert run(["job", "resume", "runs"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "local-3\n" and "runs/done: left out: would end the same way" in captured.err


@pytest.mark.slow
def test_resume_that_submits_none_of_several_runs_is_exit_code_2(capsys: Capture) -> None:
    for name in ("bad", "worse"):
        run(["job", "submit", str(prepare_run_directory(name, "end 3"))])
    run(["job", "watch"])
    capsys.readouterr()
    for arguments in (["runs/bad", "runs/worse"], ["runs"], ["runs", "--dry-run"]):
        assert run(["job", "resume", *arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("left out: would end the same way") == 2
        assert "none of 2 runs can be submitted again" in captured.err


def lose_job(name: str) -> Path:
    """Prepare a run directory whose job the local scheduler does not know."""
    directory = prepare_run_directory(name, "sleep 900")
    facts = {"scheduler": "local", "tag": f"t-{name}", "link": 1, "chain": 1, "bulk": ""}
    append_event(directory, "intent", time.time(), **facts)
    append_event(directory, "submitted", time.time(), **facts, job_id="local-9", script="job.sh", command=[])
    return directory


def test_resume_leaves_a_lost_job_alone_that_cannot_be_cancelled(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalScheduler, "cancel", lambda scheduler, ids: dict.fromkeys(ids, "controller not reached"))
    first, second = lose_job("first"), lose_job("second")
    assert run(["job", "resume", str(first), str(second)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "not submitted: runs/first, runs/second" in captured.err
    assert "runs/first: not submitted: local-9 may still run: controller not reached" in captured.err
    assert all("attempt" not in {event.kind for event in read_events(directory)} for directory in (first, second))
    assert not LocalScheduler().store.root.exists()


@pytest.mark.slow
def test_resume_submits_a_lost_job_of_which_the_scheduler_knows_nothing(capsys: Capture) -> None:
    assert run(["job", "resume", str(lose_job("lost"))]) == 0
    assert capsys.readouterr().out == "local-1\n"


@pytest.mark.slow
def test_logs_escape_control_characters_of_the_script_s_output(capsys: Capture) -> None:
    directory = prepare_run_directory("loud", "printf 'one\\ntwo\\n\\033[31mred\\n'; end 0")
    run(["job", "submit", str(directory)])
    run(["job", "watch", str(directory)])
    capsys.readouterr()
    assert run(["job", "logs", str(directory)]) == 0
    assert capsys.readouterr().out == "one\ntwo\n\\x1b[31mred\n"
    assert run(["job", "logs", str(directory), "--lines", "2"]) == 0
    assert capsys.readouterr().out == "two\n\\x1b[31mred\n"
    assert run(["job", "logs", str(directory), "--rank", "3"]) == 2
    assert "rank 3 has printed nothing" in capsys.readouterr().err


@pytest.mark.slow
def test_logs_of_any_length_take_little_memory(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = prepare_run_directory("long", "end 0")
    run(["job", "submit", str(directory)])
    run(["job", "watch", str(directory)])
    output = next(path for path in directory.iterdir() if path.suffix == ".out")
    with open(output, "r+b") as stream:
        stream.truncate(2**30)  # one line of a GiB that takes no room on the disk
        stream.seek(0, os.SEEK_END)
        stream.write(b"\nlast but one \xe3\x81\x82\nlast")
    capsys.readouterr()
    tracemalloc.start()
    assert run(["job", "logs", str(directory), "--lines", "2"]) == 0
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert capsys.readouterr().out == "last but one あ\nlast" and peak < 16 * 2**20


@pytest.mark.slow
def test_logs_follow_a_job_to_the_end(capsys: Capture) -> None:
    directory = prepare_run_directory("slow", "echo first; sleep 1; echo second; end 0")
    run(["job", "submit", str(directory)])
    capsys.readouterr()
    assert run(["job", "logs", str(directory), "--follow"]) == 0
    assert capsys.readouterr().out == "first\nsecond\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["submit", "none.yaml"], "none.yaml"),
        (["submit", "runs"], "job.sh"),
        (["submit", "--preset", "huge"], "not a preset"),
        (["status", "none"], "no such folder"),
        (["status"], "runs"),
        (["logs", "runs"], "holds no run directory"),
        (["cancel"], "Missing argument"),
    ],
)
def test_a_mistake_is_exit_code_2(arguments: List[str], message: str, capsys: Capture) -> None:
    Path("runs").mkdir()
    assert run(["job", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and "Traceback" not in captured.err


def test_without_the_scheduler_s_commands_nothing_is_submitted(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin-of-nobody")
    arguments = ["--preset", "tiny", "--scheduler", "pjm", "--out", "run"]
    assert run(["job", "submit", *arguments, "--set", f"data.paths=[{PREPARED}]", "--set", "job.group=hp1"]) == 2
    assert "pjsub: no such command on this machine" in capsys.readouterr().err
    (row,) = json_of(capsys, "job", "status", "run")
    assert row["job"] is None and "not submitted: pjsub: no such command" in row["cause"]


def test_settings_for_a_prepared_directory_are_refused(capsys: Capture) -> None:
    directory = prepare_run_directory("a", "end 0")
    assert run(["job", "submit", str(directory), "--set", "job.nodes=2"]) == 2
    assert "are for a run file" in capsys.readouterr().err


def run_on_terminal(arguments: List[str], answer: bytes = b"") -> Any:
    """Run a command on a terminal and return its exit code and its output."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "fugaku_gpt", *arguments],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "200"},
    )
    os.close(follower)
    output, is_answered = b"", False
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        if select.select([leader], [], [], 0.1)[0]:
            try:
                output += os.read(leader, 65536)
            except OSError:  # Linux: the other end is closed
                break
        if answer and not is_answered and b"submit?" in output:
            os.write(leader, answer)
            is_answered = True
    os.close(leader)
    return process.wait(timeout=WAIT_SECONDS), output.decode("utf-8", "replace")


@pytest.mark.parametrize(("answer", "is_submitted"), [(b"n\n", False), (b"y\n", True)])
@pytest.mark.slow
def test_submit_on_a_terminal_asks_first(answer: bytes, is_submitted: bool) -> None:
    directory = prepare_run_directory("a", "end 0")
    code, output = run_on_terminal(["job", "submit", str(directory)], answer)
    assert code == 0 and "node-hours: 0.1667 at most; submit?" in output
    assert (directory / "job.jsonl").exists() is is_submitted


@pytest.mark.slow
def test_watch_on_a_terminal_prints_a_table() -> None:
    directory = prepare_run_directory("a", "sleep 0.3; end 3")
    run(["job", "submit", str(directory)])
    code, output = run_on_terminal(["job", "watch", str(directory)])
    assert code == 1
    assert "the jobs continue" in output and "exit code 3" in output and "┃" in output


def test_a_job_that_lacks_something_is_refused_and_nothing_is_written(capsys: Capture) -> None:
    arguments = ["--preset", "tiny", "--scheduler", "pjm", "--out", "run"]
    assert run(["job", "submit", *arguments, "--set", "job.tarball=no.tar", "--set", "job.local_tmp=1Gi"]) == 2
    error = capsys.readouterr().err
    assert "data.paths: empty" in error and "job.group: not set" in error and "no.tar: is not there" in error
    assert not Path("run").exists()
    assert run(["job", "render", *arguments[:-2]]) == 0
    captured = capsys.readouterr()
    assert "note: data.paths: empty" in captured.err and "# Note: job.group: not set" in captured.out


def test_a_script_in_which_lint_finds_an_error_is_not_submitted(capsys: Capture) -> None:
    settings = ["job.scheduler=pjm", "job.group=hp1", f"data.paths=[{PREPARED}]"]
    config = load_run_config(preset="tiny", overrides=settings)
    prepare_job(config, Path("runs/a"))
    script = Path("runs/a/job.sh")
    script.write_text(script.read_text().replace('#PJM -L "node=1"', '#PJM -L "node=0"'))
    assert run(["job", "submit", "runs/a"]) == 2
    error = capsys.readouterr().err
    assert "runs/a/job.sh:" in error and "`job lint` finds errors" in error
    assert not Path("runs/a/job.jsonl").exists()


@pytest.mark.slow
def test_a_script_is_submitted_and_followed_by_job_id(capsys: Capture) -> None:
    Path("job.sh").write_text("#!/bin/bash\necho from $PWD; touch up; if [[ -e wait ]]; then sleep 900; fi\n")
    assert run(["job", "submit", "job.sh"]) == 2
    assert "name the scheduler with --scheduler" in capsys.readouterr().err
    assert run(["job", "submit", "job.sh", "--scheduler", "local", "--set", "job.nodes=2"]) == 2
    assert run(["job", "submit", "job.sh", "--scheduler", "local", "--dry-run"]) == 0
    assert "command: bash job.sh" in capsys.readouterr().err and not Path("runs").exists()
    assert run(["job", "submit", "job.sh", "--scheduler", "local"]) == 0
    assert capsys.readouterr().out == "local-1\n"
    assert run(["job", "watch"]) == 0
    (row,) = json_of(capsys, "job", "status", "local-1")
    assert (row["job"], row["status"], row["run"].startswith("runs/job-")) == ("local-1", "ok", True)
    assert run(["job", "logs", "local-1"]) == 0
    assert capsys.readouterr().out == f"from {Path.cwd()}\n"

    Path("up").unlink()
    Path("wait").touch()
    assert run(["job", "submit", "job.sh", "--scheduler", "local", "--out", "second"]) == 0
    until(Path("up").exists)
    capsys.readouterr()
    assert run(["job", "cancel", "local-2"]) == 0  # not below runs/: asked for at the scheduler
    assert capsys.readouterr().out == "local-2: cancelled\n"
    assert run(["job", "watch", "second"]) == 1
    (row,) = json_of(capsys, "job", "status", "local-2")
    assert (row["run"], row["status"], row["state"]) == (None, "interrupted", "cancelled")
    assert run(["job", "cancel", "local-1"]) == 1  # is over: the scheduler says so


def test_a_plain_script_is_linted_before_it_is_submitted(capsys: Capture) -> None:
    Path("bad.sh").write_text("#!/bin/bash\n#PJM -L node=0\n")
    assert run(["job", "submit", "bad.sh"]) == 2
    error = capsys.readouterr().err
    assert "bad.sh:2: PJM" in error and "not submitted: `job lint` finds errors" in error and not Path("runs").exists()
