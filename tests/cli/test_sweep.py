"""Tests of ``fugaku-gpt sweep`` with the real trainer on a minuscule model."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, List

import numpy as np
import pytest

from fugaku_gpt.cli.main import run
from fugaku_gpt.config import load_run_config
from fugaku_gpt.data.indexed import IndexedWriter
from fugaku_gpt.launch.processes import marked_processes
from fugaku_gpt.records.job import JobStatus
from fugaku_gpt.records.run import RunDirectory
from tests.support.prepared_corpus import PREPARED
from tests.support.waiting import until
from tests.sweep.fake import leave_run
from tests.sweep.fake_scheduler import FakeScheduler

SWEEP = """
defaults:
  model: {layers: 1, hidden: 16, heads: 4, seq_len: 16, vocab_size: 256, vocab_multiple: 8, name: mini}
  data: {paths: [DATA], split: [80, 19, 1]}
  training: {global_batch: 4, iterations: 4, lr: 1e-2, min_lr: 1e-3, eval_interval: 2, eval_batches: 1}
  node.threads_per_rank: 1
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("data") / "bytes"
    text = np.frombuffer(Path(os.__file__).read_bytes(), dtype=np.uint8).astype(np.uint16)
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for start in range(0, 20_000, 1000):
            writer.add_document(text[start : start + 1000])
    return prefix


def write_sweep(tmp_path: Path, data: Path, more_yaml: str) -> Path:
    file = tmp_path / "mini.yaml"
    file.write_text(SWEEP.replace("DATA", str(data)) + more_yaml, encoding="utf-8")
    return file


def start_sweep(file: Path, out: Path, *options: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "fugaku_gpt", "sweep", "run", str(file), "--out", str(out), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_a_sweep_from_start_to_table(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    matrix = "matrix:\n  layout: {dp: [1, 2], tp: [2, 3]}\nexclude: [{layout.dp: 2, layout.tp: 3}]\n"
    toggles = "include: [{label: toggles, node.freq_mhz: 2200, node.retention_state: 0}]\n"
    file, out = write_sweep(tmp_path, data, matrix + toggles), tmp_path / "out"
    assert run(["sweep", "run", str(file), "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert "[2/4] dp1-tp3-r1: refused: " in captured.err and "4 runs: 3 ok, 1 refused" in captured.err
    assert f"tables: {out}/table.md" in captured.err
    results = {path.name: RunDirectory(path).result() for path in out.iterdir() if path.name.endswith("-r1")}
    losses = set()
    for name in ("dp1-tp2-r1", "dp2-tp2-r1", "toggles-r1"):
        result = results[name]
        assert result is not None and result.status == "ok", (out / name / "log.txt").read_text()
        losses.add(round(result.summary["last_validation_loss"], 4))
        assert result.summary["last_validation_loss"] < result.summary["first_validation_loss"]
    assert len(losses) == 1  # every layout draws the same curve
    table = (out / "table.md").read_text()
    assert table.startswith("### mini model, Sequence Length=16, PyTorch ")
    assert "| 1 (max-proc-per-node=4) | mini | 2 | 2 | 1 | 1 | 4 | " in table
    assert "not applied: 2.2GHz, retention_state=0 |" in table
    assert "refused: layout.tp: 3: must divide model.heads 4; valid: 1, 2, 4" in table
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/result.json") if "tp3" not in str(path)}
    assert run(["sweep", "run", str(file), "--out", str(out)]) == 0
    assert "[1/4] dp1-tp2-r1: kept: ok" in capsys.readouterr().err
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in before.items())
    assert (out / "table.md").read_text() == table  # byte-stable


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_a_missing_corpus_fails_and_is_tried_again(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = write_sweep(tmp_path, tmp_path / "corpus", ""), tmp_path / "out"
    assert run(["sweep", "run", str(file), "--out", str(out)]) == 1
    assert "refused" in capsys.readouterr().err and "corpus" in (out / "table.md").read_text()
    for suffix in (".bin", ".idx"):
        os.link(str(data) + suffix, str(tmp_path / "corpus") + suffix)
    assert run(["sweep", "run", str(file), "--out", str(out)]) == 0


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_ctrl_c_records_the_run_and_leaves_no_rank(tmp_path: Path, data: Path) -> None:
    matrix = "matrix:\n  layout.dp: [2]\n  training.iterations: [1000000]\n"
    file, out = write_sweep(tmp_path, data, matrix), tmp_path / "out"
    sweep = start_sweep(file, out)
    metrics = out / "dp2-tp1-iterations1000000-r1" / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.stat().st_size > 0)
    mark = json.loads((out / ".sweep.lock").read_text())["mark"]
    assert len(marked_processes(mark)) >= 3  # mpirun and two ranks
    sweep.send_signal(signal.SIGINT)
    output, _ = sweep.communicate(timeout=300)
    assert sweep.returncode == 1 and b"the same command runs what is missing" in output and b"Traceback" not in output
    assert marked_processes(mark) == []
    result = RunDirectory(metrics.parent).result()
    assert result is not None and result.iterations > 0
    reason = f"stopped: Ctrl-C (SIGINT), after iteration {result.iterations}"
    assert (result.status, result.reason) == ("interrupted", reason)


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_a_killed_rank_and_a_time_limit_are_rows(tmp_path: Path, data: Path) -> None:
    # a start on busy cores takes some of the 20 s
    include = "include:\n  - {label: killed, layout.dp: 2}\n  - {label: slow, layout.tp: 2, job.elapse: 0:00:20}\n"
    file, out = write_sweep(tmp_path, data, include), tmp_path / "out"
    sweep = start_sweep(file, out, "--set", "training.iterations=1000000")
    metrics = out / "killed-r1" / "metrics.jsonl"
    until(lambda: bool(RunDirectory(metrics.parent).metrics("iteration")))
    environment = RunDirectory(metrics.parent).environment()
    assert environment is not None
    os.kill(environment["ranks"][1]["process"], signal.SIGKILL)
    sweep.communicate(timeout=180)
    assert sweep.returncode == 1
    results: List[Any] = [RunDirectory(out / name).result() for name in ("killed-r1", "slow-r1")]
    assert [result.status for result in results] == ["failed", "timeout"]
    assert all(result.iterations > 0 for result in results)
    assert "failed: " in (out / "table.md").read_text() and ", timeout |" in (out / "table.md").read_text()


def test_expand_in_every_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("preset: tiny\nmatrix: {layout.tp: [2, 3]}\n", encoding="utf-8")

    def expand(form: str) -> str:
        assert run(["sweep", "expand", str(file), "--format", form]) == 0
        return capsys.readouterr().out

    rows = json.loads(expand("json"))
    assert [(row["run"], row["status"]) for row in rows] == [("dp1-tp2-r1", "to run"), ("dp1-tp3-r1", "refused")]
    assert rows[0]["ranks"] == 2 and "must divide model.heads 4" in rows[1]["reason"]
    assert [row["run"] for row in csv.DictReader(io.StringIO(expand("csv")))] == ["dp1-tp2-r1", "dp1-tp3-r1"]
    assert expand("md").startswith("| run | ranks |") and "dp1-tp3-r1" in expand("table")


JOBS = f"""
preset: tiny
defaults: {{data.paths: [{PREPARED}], job.elapse: 0:30:00}}
matrix: {{layout.tp: [1, 2, 3]}}
variants: {{base: {{}}, LD_PRELOAD=libtcmalloc.so: {{node.tcmalloc: true}}}}
where: layout.tp < 3 or not node.tcmalloc
"""


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeScheduler:
    (tmp_path / "jobs.yaml").write_text(JOBS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    scheduler = FakeScheduler(tmp_path / "queue")
    monkeypatch.setattr("fugaku_gpt.jobs.schedulers.slurm.SlurmScheduler", lambda: scheduler)
    return scheduler


def test_a_dry_run_prints_every_job_with_script_and_node_hours(
    tmp_path: Path, queue: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(os.listdir(tmp_path))
    dry_run = ["sweep", "submit", "jobs.yaml", "--out", "o", "--scheduler", "slurm", "--dry-run"]
    assert run(dry_run) == 0
    output = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in output.splitlines() if line.startswith("dp1")}
    row = ["dp1-tp1-LD_PRELOAD_libtcmalloc.so-r1", "slurm", "1", "1", "0:30:00", "1", "0.5", "-"]
    assert rows[row[0]] == row and rows["dp1-tp3-r1"][1:7] == ["-"] * 6 and "layout.tp: 3" in output
    notes = [line for line in output.splitlines() if line.startswith("note")]
    assert notes == list(dict.fromkeys(notes)) and "note: no job.profile" in output  # once for all jobs
    assert "#!/bin/bash" not in output
    assert output.endswith("total: 4 jobs, 2 node-hours, 1 refused; nothing was written\n")
    assert run([*dry_run, "--scripts"]) == 0
    output = capsys.readouterr().out
    assert output.count("#!/bin/bash") == 4 and "#SBATCH --time=0:30:00" in output.replace('"', "")
    assert sorted(os.listdir(tmp_path)) == before and queue.jobs() == [] and queue.polls == []
    assert run(["sweep", "submit", "jobs.yaml", "--out", "o", "--set", "job.elapse=null", "--dry-run"]) == 0
    assert "total: 4 jobs, 0 node-hours and 4 without a time limit (job.elapse), 1 refused" in capsys.readouterr().out


@pytest.mark.slow
def test_jobs_are_submitted_followed_and_resumed(
    tmp_path: Path, queue: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    submit = ["sweep", "submit", "jobs.yaml", "--out", "an out", "--scheduler", "slurm", "--max-in-flight", "3"]
    assert run(submit) == 0
    progress = capsys.readouterr().err
    assert "[1/3] dp1-tp1-r1: job 100" in progress and "5 runs: 3 submitted now, 1 left" in progress
    assert (
        "to continue: fugaku-gpt sweep submit jobs.yaml --out 'an out' --scheduler slurm --max-in-flight 3" in progress
    )
    out = tmp_path / "an out"
    leave_run(out / "dp1-tp1-r1", load_run_config(out / "dp1-tp1-r1" / "config.yaml"))
    queue.states = {
        "100": JobStatus("100", "ended", "COMPLETED", exit_code=0),
        "101": JobStatus("101", "ended", "NODE_FAIL"),
        "102": JobStatus("102", "running", "RUNNING"),
    }
    assert run(["sweep", "status", "an out", "--format", "json"]) == 0
    captured = capsys.readouterr()
    rows = {row["run"]: row for row in json.loads(captured.out)}
    assert [row["status"] for row in rows.values()] == ["ok", "failed", "running", "missing", "refused"]
    assert rows["dp1-tp1-r1"]["iteration"] == "4/100" and rows["dp1-tp1-r1"]["seconds_per_iteration"] == 0.5
    assert "node" in rows["dp1-tp1-LD_PRELOAD_libtcmalloc.so-r1"]["reason"]
    assert "1 ok, " in captured.err and "1 failed" in captured.err
    assert run(["sweep", "resume", "an out", "--yes", "--dry-run"]) == 0
    assert "total: 2 jobs, 1 node-hours" in capsys.readouterr().out
    assert run(["sweep", "resume", "an out", "--yes"]) == 0
    assert "2 submitted now, 0 left" in capsys.readouterr().err
    assert run(["sweep", "resume", "jobs.yaml", "--out", "an out", "--scheduler", "slurm"]) == 0
    assert "0 submitted now, 0 left" in capsys.readouterr().err
    assert [job["run"] for job in queue.jobs()].count("dp1-tp1-LD_PRELOAD_libtcmalloc.so-r1") == 2
    polls = len(queue.polls)
    assert run(["sweep", "status", "an out", "--no-ask"]) == 0
    assert "running" in capsys.readouterr().out and len(queue.polls) == polls


@pytest.mark.slow
def test_waiting_submits_the_next_runs_as_jobs_end(
    tmp_path: Path, queue: FakeScheduler, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "o"
    pauses = []

    def end_a_job(seconds: float) -> None:
        pauses.append(seconds)
        job_id = f"{99 + len(pauses)}"
        (job,) = [job for job in queue.jobs() if job["id"] == job_id]
        if job_id != "101":
            leave_run(out / job["run"], load_run_config(out / job["run"] / "config.yaml"))
        raw = "NODE_FAIL" if job_id == "101" else "COMPLETED"
        queue.states[job_id] = JobStatus(job_id, "ended", raw, exit_code=0)

    monkeypatch.setattr("fugaku_gpt.cli.sweep_runs.time.sleep", end_a_job)
    submit = ["sweep", "submit", "jobs.yaml", "--out", "o", "--scheduler", "slurm", "--max-in-flight", "2"]
    assert run([*submit, "--wait"]) == 1  # one run has failed, and is not tried again
    error = capsys.readouterr().err
    assert len(queue.jobs()) == 4 and len(pauses) == 4 and pauses[0] > 0
    assert "5 runs: 4 submitted now, 0 left" in error and "runs: 3 ok, 1 failed, 1 refused" in error
    assert "to submit failed runs again: fugaku-gpt sweep resume o" in error


def test_the_line_for_cron_continues_a_submission(
    tmp_path: Path, queue: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    submit = ["sweep", "submit", "jobs.yaml", "--out", "o", "--scheduler", "slurm", "--max-in-flight", "1"]
    assert run([*submit, "--set", "job.name=a%b"]) == 1  # a name that is refused, but it shows how cron reads %
    line = next(line for line in capsys.readouterr().err.splitlines() if "by cron: " in line)
    command = line.partition("by cron: ")[2]
    assert command.startswith(f"*/10 * * * * cd {tmp_path} && /")
    assert command.endswith(r" --set job.name=a\%b --max-in-flight 1 --yes")


def test_submit_asks_for_confirmation(
    tmp_path: Path, queue: FakeScheduler, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = ["n\n", "y\n"]

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for answer, jobs in zip(answers, (0, 4)):
        monkeypatch.setattr("sys.stdin", Terminal(answer))
        assert run(["sweep", "submit", "jobs.yaml", "--out", "o", "--scheduler", "slurm"]) == 0
        assert "submit 4 jobs, 2 node-hours? [y/N]" in capsys.readouterr().err
        assert len(queue.jobs()) == jobs
    assert run(["sweep", "submit", "jobs.yaml", "--out", "o", "--scheduler", "slurm"]) == 0  # nothing to ask about


def test_a_refusal_by_the_scheduler_is_a_failure_with_the_scheduler_s_message(
    tmp_path: Path, queue: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    queue.refuse = {"dp1-tp2-r1": "sbatch: error: more nodes than the partition has"}
    assert run(["sweep", "submit", "jobs.yaml", "--out", "o", "--scheduler", "slurm"]) == 1
    error = capsys.readouterr().err
    assert "dp1-tp2-r1: not submitted: sbatch: error: more nodes than the partition has" in error
    assert run(["sweep", "status", "o"]) == 0
    assert "not submitted: sbatch: error" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["sweep", "run", "none.yaml", "--out", "o"],
        ["sweep", "expand", "none.yaml"],
        ["sweep", "run", "s.yaml"],
        ["sweep", "run", "s.yaml", "--out", "o", "--timeout", "soon"],
        ["sweep", "run", "s.yaml", "--out", "o", "--timeout", "0"],
        ["sweep", "run", "s.yaml", "--out", "o", "--scheduler", "none"],
        ["sweep", "run", "s.yaml", "--out", "s.yaml"],
        ["sweep", "expand", "s.yaml", "--set", "a=b"],
        ["sweep", "expand", "s.yaml", "--scheduler", "none"],
        ["sweep", "submit", "s.yaml"],
        ["sweep", "submit", "none.yaml", "--out", "o"],
        ["sweep", "submit", "s.yaml", "--out", "o", "--max-in-flight", "0"],
        ["sweep", "resume", "s.yaml"],
        ["sweep", "resume", ".", "--out", "o"],
        ["sweep", "resume", "."],
        ["sweep", "status", "."],
        ["sweep", "status", "none"],
    ],
)
def test_mistakes_are_exit_code_2_and_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: List[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.yaml").write_text("preset: tiny\n", encoding="utf-8")
    assert run(arguments) == 2
    assert os.listdir(tmp_path) == ["s.yaml"]


@pytest.mark.slow
def test_commands_for_the_login_node_import_neither_pytorch_nor_mpi() -> None:
    program = (
        "import sys; import fugaku_gpt.cli.sweep, fugaku_gpt.cli.report, fugaku_gpt.cli.doctor; "
        "print([name for name in ('torch', 'mpi4py', 'rich') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True).stdout.strip() == b"[]"
