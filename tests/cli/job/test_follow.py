"""``fugaku-gpt job submit`` and what follows it, as a person uses it, on this machine's own queue."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest

from fugaku_gpt.cli.main import run
from fugaku_gpt.config import load_run_config
from fugaku_gpt.jobs.schedulers.local import LocalScheduler
from fugaku_gpt.jobs.schedulers.protocol import Submission
from fugaku_gpt.jobs.submission import prepare_job
from fugaku_gpt.launch.processes import end_marked_processes
from fugaku_gpt.records.job import append_event, read_events
from fugaku_gpt.records.run import OK, Result, RunDirectory

Said = pytest.CaptureFixture[str]
WAIT_SECONDS = 300.0
# what the templates' scripts leave, without the training
RECORD = """
code=$1; mkdir -p exit; printf '{"version": 1, "job_id": "%s", "sub_job": "%s", "exit_code": %d, "signal": "",
 "started": 1, "ended": 2, "host": "x"}' "$FUGAKU_GPT_JOB" "$FUGAKU_GPT_JOB" "$code" > "exit/$FUGAKU_GPT_JOB.json"
exit "$code"
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home, and so a queue, of each test's own."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(tmp_path)
    yield folder
    store = LocalScheduler().store
    for job in store.jobs() if store.root.exists() else []:
        store.set_request(job, "cancel")
        end_marked_processes(job.mark, grace=0.0)


def ready(name: str, body: str, *settings: str) -> Path:
    """A prepared run directory with another script."""
    config = load_run_config(preset="tiny", overrides=["job.scheduler=local", "job.elapse=10:00", *settings])
    directory = Path("runs") / name
    prepare_job(config, directory)
    (directory / "job.sh").write_text(f"end() {{ {RECORD} }}\n{body}\n", encoding="utf-8")
    return directory


def rows(capsys: Said, *words: str) -> List[Dict[str, Any]]:
    capsys.readouterr()
    assert run(["job", "status", *words, "--format", "json"]) == 0
    return list(json.loads(capsys.readouterr().out))


def until_exists(path: Path) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


def test_a_dry_run_shows_script_command_and_cost_and_does_nothing(capsys: Said) -> None:
    words = ["--preset", "124m", "--set", "job.nodes=384", "--set", "layout.dp=384", "--set", "job.elapse=1:30:00"]
    settings = ["--set", "training.global_batch=3072", "--set", "job.chain=2"]
    assert run(["job", "submit", *words, *settings, "--scheduler", "pjm", "--out", "a run", "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("#!/bin/bash\n#PJM") and '"node=384' in shown.out
    assert "node-hours: 1152 at most" in shown.err and "note: " in shown.err
    assert "command: cd 'a run' && pjsub -z jid --comment fugaku-gpt-TAG --step --sparam sn=0 job.sh" in shown.err
    assert "--sparam 'jid=<id of link 1>,sn=1,sd=ec!=75:all' job.sh" in shown.err
    assert not Path("a run").exists()


def test_a_job_is_handed_in_and_followed_to_its_end(capsys: Said) -> None:
    directory = ready("good", "echo hello; sleep 0.3; end 0")
    assert run(["job", "submit", str(directory)]) == 0
    said = capsys.readouterr()
    assert said.out == "local-1\n" and "submitted" in said.err
    assert run(["job", "submit", str(directory)]) == 2
    assert "local-1" in capsys.readouterr().err
    assert run(["job", "watch", str(directory)]) == 1  # the script trained nothing: exit code 0 is no result
    lines = capsys.readouterr()
    assert "local-1 failed exit code 0, but no result was recorded: hello" in lines.out
    assert "1 of 1 did not end well: runs/good" in lines.err


def test_the_end_of_a_run_that_went_well_is_exit_code_0(capsys: Said) -> None:
    directory = ready("good", "sleep 0.2; end 0")
    assert run(["job", "submit", str(directory)]) == 0
    RunDirectory(directory).write_result(Result(OK, "", 1.0, 2.0))
    assert run(["job", "watch", str(directory)]) == 0
    (row,) = rows(capsys, str(directory))
    assert (row["state"], row["status"], row["job"], row["cause"]) == ("ended", "ok", "local-1", None)


@pytest.mark.slow
def test_status_has_four_forms_and_a_store(capsys: Said) -> None:
    run(["job", "submit", str(ready("a", "end 3"))])
    run(["job", "submit", str(ready("b", "echo 'ValueError: a | b'; end 4"))])
    assert run(["job", "watch"]) == 1
    found = rows(capsys)
    assert [row["run"] for row in found] == ["runs/a", "runs/b"]
    assert [row["status"] for row in found] == ["failed", "failed"]
    assert found[1]["cause"] == "exit code 4: ValueError: a | b" and "--force" in found[0]["advice"]
    assert run(["job", "status", "--store", "runs", "--format", "csv"]) == 0
    assert [row["job"] for row in csv.DictReader(io.StringIO(capsys.readouterr().out))] == ["local-1", "local-2"]
    assert run(["job", "status", "runs/b", "--format", "md"]) == 0
    assert "a \\| b" in capsys.readouterr().out
    assert run(["job", "status", "runs"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["run", "job", "state", "status", "cause", "advice"]


@pytest.mark.slow
def test_cancel_hold_and_release_tell_what_was_accepted(capsys: Said) -> None:
    first, second = ready("first", "touch up; sleep 900"), ready("second", "end 1")
    for directory in (first, second):
        assert run(["job", "submit", str(directory)]) == 0
    until_exists(first / "up")
    capsys.readouterr()
    assert run(["job", "hold", str(first), str(second)]) == 1
    said = capsys.readouterr()
    assert said.out.splitlines() == ["runs/first: local-1: is running", "runs/second: local-2: held"]
    assert "not held: local-1" in said.err
    assert [row["state"] for row in rows(capsys)] == ["running", "held"]
    assert run(["job", "release", str(second)]) == 0
    assert run(["job", "cancel", str(first)]) == 0
    assert run(["job", "watch", "runs"]) == 1
    assert [(row["state"], row["status"]) for row in rows(capsys)] == [
        ("cancelled", "interrupted"),
        ("ended", "failed"),
    ]
    assert [event.kind for event in read_events(second)].count("released") == 1
    assert run(["job", "cancel", str(first)]) == 2
    assert "no job is waiting or running" in capsys.readouterr().err


def test_cancel_finds_a_job_whose_submission_was_killed(capsys: Said) -> None:
    directory = ready("killed", "sleep 900")
    store = LocalScheduler()
    append_event(directory, "intent", time.time(), scheduler="local", tag="t-1", link=1, chain=1, bulk="")
    assert run(["job", "cancel", str(directory)]) == 1
    assert "a submission is not over" in capsys.readouterr().out
    store.submit(Submission("job.sh", directory.absolute(), "killed", tag="t-1"))
    assert run(["job", "cancel", str(directory)]) == 0
    assert capsys.readouterr().out == f"{directory}: local-1: cancelled\n"


@pytest.mark.slow
def test_resume_hands_in_what_can_go_on_and_keeps_what_was(capsys: Said) -> None:
    directory = ready("stopped", "echo once; end 75")
    run(["job", "submit", str(directory)])
    run(["job", "watch", str(directory)])
    (row,) = rows(capsys, str(directory))
    assert (row["status"], "can be resumed" in row["cause"]) == ("interrupted", True)
    assert run(["job", "resume", str(directory), "--dry-run"]) == 0
    assert "resume: it has stopped" in capsys.readouterr().err
    (directory / "job.sh").write_text("touch up; sleep 900", encoding="utf-8")
    assert run(["job", "resume", str(directory)]) == 0
    assert capsys.readouterr().out == "local-2\n"
    kept = Path("runs/attempts/stopped/1")
    assert (kept / "local-1.out").read_text(encoding="utf-8") == "once\n" and (kept / "exit" / "local-1.json").exists()
    assert not (directory / "result.json").exists()
    assert run(["job", "resume", str(directory)]) == 2
    assert "cancel it, or wait for its end" in capsys.readouterr().err


@pytest.mark.slow
def test_resume_refuses_what_would_end_the_same_way(capsys: Said) -> None:
    directory = ready("bad", "end 3")
    run(["job", "submit", str(directory)])
    run(["job", "watch", str(directory)])
    capsys.readouterr()
    assert run(["job", "resume", str(directory)]) == 2
    assert "would end the same way (exit code 3)" in capsys.readouterr().err
    assert run(["job", "resume", str(directory), "--force"]) == 0
    assert capsys.readouterr().out == "local-2\n"


@pytest.mark.slow
def test_of_several_resume_leaves_out_what_must_not_be_and_says_so(capsys: Said) -> None:
    for name, code in (("bad", 3), ("stopped", 75)):
        run(["job", "submit", str(ready(name, f"end {code}"))])
    run(["job", "watch"])
    capsys.readouterr()
    assert run(["job", "resume", "runs/bad", "runs/stopped"]) == 0
    said = capsys.readouterr()
    assert said.out == "local-3\n" and "runs/bad: left out: would end the same way" in said.err


def test_logs_are_the_script_s_words_made_harmless(capsys: Said) -> None:
    directory = ready("loud", "printf 'one\\ntwo\\n\\033[31mred\\n'; end 0")
    run(["job", "submit", str(directory)])
    run(["job", "watch", str(directory)])
    capsys.readouterr()
    assert run(["job", "logs", str(directory)]) == 0
    assert capsys.readouterr().out == "one\ntwo\n\\x1b[31mred\n"
    assert run(["job", "logs", str(directory), "--lines", "2"]) == 0
    assert capsys.readouterr().out == "two\n\\x1b[31mred\n"
    assert run(["job", "logs", str(directory), "--rank", "3"]) == 2
    assert "rank 3 has printed nothing" in capsys.readouterr().err


def test_logs_follow_a_job_to_its_end(capsys: Said) -> None:
    directory = ready("slow", "echo first; sleep 1; echo second; end 0")
    run(["job", "submit", str(directory)])
    capsys.readouterr()
    assert run(["job", "logs", str(directory), "--follow"]) == 0
    assert capsys.readouterr().out == "first\nsecond\n"


@pytest.mark.parametrize(
    ("words", "told"),
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
def test_a_slip_is_exit_code_2(words: List[str], told: str, capsys: Said) -> None:
    Path("runs").mkdir()
    assert run(["job", *words]) == 2
    captured = capsys.readouterr()
    assert told in captured.err and "Traceback" not in captured.err


def test_without_the_scheduler_s_commands_nothing_is_handed_in(capsys: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin-of-nobody")
    words = ["--preset", "tiny", "--scheduler", "pjm", "--out", "run"]
    assert run(["job", "submit", *words]) == 2
    assert "pjsub: no such command on this machine" in capsys.readouterr().err
    (row,) = rows(capsys, "run")
    assert row["job"] is None and "not taken" in row["cause"]


def test_a_prepared_directory_takes_no_settings(capsys: Said) -> None:
    directory = ready("a", "end 0")
    assert run(["job", "submit", str(directory), "--set", "job.nodes=2"]) == 2
    assert "are for a run file" in capsys.readouterr().err


def in_a_terminal(words: List[str], answer: bytes = b"") -> Any:
    """(exit code, what was shown) of a command whose input and output are a terminal."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "fugaku_gpt", *words],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "200"},
    )
    os.close(follower)
    shown, asked = b"", False
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        if select.select([leader], [], [], 0.1)[0]:
            try:
                shown += os.read(leader, 65536)
            except OSError:  # Linux: the other end is closed
                break
        if answer and not asked and b"submit?" in shown:
            os.write(leader, answer)
            asked = True
    os.close(leader)
    return process.wait(timeout=WAIT_SECONDS), shown.decode("utf-8", "replace")


@pytest.mark.parametrize(("answer", "handed_in"), [(b"n\n", False), (b"y\n", True)])
@pytest.mark.slow
def test_on_a_terminal_it_is_asked_first(answer: bytes, handed_in: bool) -> None:
    directory = ready("a", "end 0")
    code, shown = in_a_terminal(["job", "submit", str(directory)], answer)
    assert code == 0 and "node-hours: 0.1667 at most; submit?" in shown
    assert (directory / "job.jsonl").exists() is handed_in


@pytest.mark.slow
def test_on_a_terminal_watching_is_a_table() -> None:
    directory = ready("a", "sleep 0.3; end 3")
    run(["job", "submit", str(directory)])
    code, shown = in_a_terminal(["job", "watch", str(directory)])
    assert code == 1
    assert "the jobs continue" in shown and "exit code 3" in shown and "┃" in shown
