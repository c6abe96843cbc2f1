"""Tests of waiting for jobs: ``job submit --wait``, ``job status --watch --format jsonl``, with a simulated PJM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List

import pytest

from fugaku_gpt.cli.job.changes import json_lines, print_changes, require_success
from fugaku_gpt.cli.main import run
from fugaku_gpt.errors import RunFailed
from fugaku_gpt.jobs.outcome import Outcome
from fugaku_gpt.jobs.poll import PolledRun
from fugaku_gpt.simulator.session import Simulator
from tests.support.commands import Capture
from tests.support.simulated import simulated_pjm  # noqa: F401
from tests.support.waiting import until

SCRIPT = "#!/bin/bash\n#PJM -L node=1,elapse=0:10:00,rscgrp=small\n#PJM -g hp000000\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def polled(name: str, state: str, status: str = "", cause: str = "") -> PolledRun:
    return PolledRun(Path(name), Outcome(status, state, cause), "pjm", "7", 1, 1)


def objects(text: str) -> List[Dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_line_is_printed_for_each_change_and_no_other_poll(capsys: Capture) -> None:
    steps = [
        [polled("a", "queued"), polled("b", "running")],
        [polled("a", "queued"), polled("b", "running")],
        [polled("a", "running"), polled("b", "running")],
        [polled("a", "ended", "ok"), polled("b", "ended", "failed", "exit code 3: a\x7fb\n\x1b[1m")],
    ]
    assert print_changes(steps, json_lines) == steps[-1]
    output = capsys.readouterr().out
    assert output.isascii() and not {"\x7f", "\x1b"} & set(output)
    lines = objects(output)
    assert [(line["run"], line["state"], line["status"], line["is_over"]) for line in lines] == [
        ("a", "queued", None, False),
        ("b", "running", None, False),
        ("a", "running", None, False),
        ("a", "ended", "ok", True),
        ("b", "ended", "failed", True),
    ]
    assert lines[-1]["cause"] == "exit code 3: a\x7fb\n\x1b[1m" and lines[0]["cause"] is None
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)


def test_jobs_that_did_not_end_well_are_named() -> None:
    require_success([polled("a", "ended", "ok")])
    with pytest.raises(RunFailed, match=r"1 of 2 did not end well: b$"):
        require_success([polled("a", "ended", "ok"), polled("b", "lost", "lost")])


@pytest.mark.slow
def test_submit_waits_for_the_end_and_its_exit_code_tells_how_it_was(
    simulated_pjm: Simulator,  # noqa: F811
    capsys: Capture,
) -> None:
    Path("good.sh").write_text(f"{SCRIPT}exit 0\n", encoding="utf-8")
    Path("bad.sh").write_text(f"{SCRIPT}echo no such file; exit 3\n", encoding="utf-8")
    assert run(["job", "submit", "good.sh", "--out", "good", "--wait"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "1\n" and captured.err.splitlines()[-1].endswith("good: 1 ok")
    assert run(["job", "submit", "bad.sh", "--out", "bad", "--wait"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "2\n"
    assert "bad: 2 failed" in captured.err and "1 of 1 did not end well: bad" in captured.err


@pytest.mark.slow
def test_a_watcher_gets_an_object_for_each_change_until_all_jobs_have_ended(simulated_pjm: Simulator) -> None:  # noqa: F811
    Path("job.sh").write_text(f"{SCRIPT}until test -e go; do sleep 0.05; done; exit 4\n", encoding="utf-8")
    assert run(["job", "submit", "job.sh", "--out", "recorded"]) == 0
    subprocess.run(["pjsub", "job.sh"], check=True, stdout=subprocess.DEVNULL)  # by other means: no record of it
    command = ["job", "status", "recorded", "2", "--scheduler", "pjm", "--watch", "--format", "jsonl", "--longest", "1"]
    with subprocess.Popen([sys.executable, "-m", "fugaku_gpt", *command], stdout=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdout is not None
        first = [json.loads(watcher.stdout.readline()) for _ in range(2)]
        assert {line["job"] for line in first} == {"1", "2"} and not any(line["is_over"] for line in first)
        Path("go").touch()
        last = objects(watcher.stdout.read())[-2:]
    assert watcher.returncode == 0
    by_job = {line["job"]: line for line in last}
    assert {job: (line["run"], line["is_over"], line["status"]) for job, line in by_job.items()} == {
        "1": ("recorded", True, "failed"),
        "2": (None, True, "failed"),
    }
    assert "exit code 4" in by_job["1"]["cause"] and by_job["1"]["scheduler"] == "pjm"


@pytest.mark.slow
def test_stopping_the_wait_leaves_the_job_alone(simulated_pjm: Simulator) -> None:  # noqa: F811
    Path("job.sh").write_text(f"{SCRIPT}until test -e go; do sleep 0.05; done; touch done\n", encoding="utf-8")
    command = [sys.executable, "-m", "fugaku_gpt", "job", "submit", "job.sh", "--wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as waiting:
        assert waiting.stdout is not None and waiting.stdout.readline() == "1\n"
        waiting.terminate()
    Path("go").touch()
    until(Path("done").exists)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["submit", "--preset", "tiny", "--wait", "--dry-run"], "--dry-run submits none"),
        (["status", "7", "--watch"], "add --format jsonl"),
    ],
)
def test_options_that_contradict_each_other_are_refused(arguments: List[str], message: str, capsys: Capture) -> None:
    assert run(["job", *arguments]) == 2
    assert message in capsys.readouterr().err
