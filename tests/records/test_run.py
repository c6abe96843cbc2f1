"""Tests of a run directory: it is claimed by one process, written completely, and read as far as a kill allowed."""

from __future__ import annotations

import errno
import json
import math
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

import pytest

from fugaku_gpt.errors import UsageError
from fugaku_gpt.records.claim import HOLDER_VARIABLE, Holder, claim_folder, current_process, newest_claim, release_claim
from fugaku_gpt.records.metrics import MetricsWriter, last_line
from fugaku_gpt.records.run import CLAIM, FAILED, OK, Result, RunDirectory, resumes_in_same_folder


def test_a_round_trip(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "deep" / "run")
    directory.create("a: 1\n")
    assert directory.result() is None and directory.environment() is None and directory.metrics("iteration") == []
    result = Result(OK, "", 1.0, 2.0, 3, {"seconds_per_iteration": 0.5})
    assert directory.write_result(result)
    directory.write_environment({"build": {}})
    assert directory.result() == result and directory.environment() == {"version": 1, "build": {}}
    with pytest.raises(UsageError, match="already holds a run"):
        directory.create("a: 1\n")


def test_a_line_cut_short_by_a_kill_is_left_out_also_after_more_lines(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    writer = MetricsWriter(directory.metrics_file)
    writer.write("iteration", {"iteration": 1, "loss": math.nan, "lr": math.inf})
    writer.write("validation", {"loss": 2.0})
    writer.close()
    with open(directory.metrics_file, "a") as stream:
        stream.write('{"kind": "iteration", "itera')
    first = {"kind": "iteration", "iteration": 1, "loss": None, "lr": None}
    assert directory.metrics("iteration") == [first]
    for number in (2, 3):  # the second time the file ends well
        writer = MetricsWriter(directory.metrics_file)
        writer.write("iteration", {"iteration": number})
        writer.close()
    assert [line["iteration"] for line in directory.metrics("iteration")] == [1, 2, 3]


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_complete_last_line_counts_with_or_without_a_newline(tmp_path: Path, end: str) -> None:
    directory = RunDirectory(tmp_path)
    directory.metrics_file.write_text('{"kind": "iteration", "iteration": 1}' + end)
    MetricsWriter(directory.metrics_file).write("iteration", {"iteration": 2})
    assert [line["iteration"] for line in directory.metrics("iteration")] == [1, 2]


@pytest.mark.parametrize("piece", ['{"kind": "iter', "[1]", "\x00\xff"])
def test_a_damaged_line_is_not_taken_for_a_truncated_line(tmp_path: Path, piece: str) -> None:
    directory = RunDirectory(tmp_path)
    directory.metrics_file.write_bytes(piece.encode("latin-1") + b'\n{"kind": "iteration"}\n')
    with pytest.raises(UsageError, match="not JSON lines"):
        directory.metrics("iteration")


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 99, "status": "ok"}', '{"version": 1, "status": "fine"}'])
def test_a_damaged_result_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(UsageError, match="result.json"):
        RunDirectory(tmp_path).result()


def test_the_first_failure_stands_but_the_launcher_may_replace_it(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    cause = Result(FAILED, "rank 3: ValueError: no such thing", 1.0, 2.0)
    assert directory.write_result(cause, replace=False)
    assert not directory.write_result(Result(FAILED, "rank 0: connection lost", 1.0, 2.1), replace=False)
    assert directory.result() == cause
    assert directory.write_result(Result("oom", "killed by the kernel", 1.0, 2.2))
    result = directory.result()
    assert result is not None and result.status == "oom"


CREATE = """
import sys
from pathlib import Path
from fugaku_gpt.errors import UsageError
from fugaku_gpt.records.run import RunDirectory
try:
    RunDirectory(Path(sys.argv[1])).create("a: 1\\n", sys.argv[2] or None)
    print("created", flush=True)
except UsageError as error:
    print(error, flush=True)
sys.stdin.readline()
"""


class Starter:
    """Another process that creates the run directory and then waits for its end."""

    def __init__(self, out: Path, holder: str = "") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CREATE, str(out), holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.output = self.process.stdout.readline().strip()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


@pytest.fixture
def start() -> Iterator[Callable[..., Starter]]:
    """Starts processes, which end with the test at the latest."""
    started: List[Starter] = []

    def start_process(*arguments: Any) -> Starter:
        started.append(Starter(*arguments))
        return started[-1]

    yield start_process
    for starter in started:
        starter.kill()


def test_a_folder_claimed_by_a_living_process_is_refused_and_a_dead_ones_is_not(
    tmp_path: Path, start: Callable[..., Starter]
) -> None:
    out = tmp_path / "run"
    other = start(out)
    assert other.output == "created"
    with pytest.raises(UsageError, match=rf"process {other.process.pid} on .* is starting a run there.*remove {out}"):
        RunDirectory(out).create("a: 2\n")
    assert (out / "config.yaml").read_text() == "a: 1\n"
    other.kill()
    RunDirectory(out).create("a: 2\n")
    assert newest_claim(out, CLAIM)[0] == 2


@pytest.mark.slow
def test_a_starter_and_a_rank_of_the_same_run_share_a_claim(tmp_path: Path, start: Callable[..., Starter]) -> None:
    out = tmp_path / "run"
    starter = start(out, "mark")
    rank = start(out, "mark")
    stranger = start(out, "other")
    assert (starter.output, rank.output) == ("created", "created") and "is starting a run there" in stranger.output
    starter.kill()  # the rank lives: the claim is that of the rank now
    assert "is starting a run there" in start(out, "other").output
    rank.kill()
    assert start(out, "other").output == "created"


def test_a_job_restarted_on_another_node_takes_over_the_claim(tmp_path: Path) -> None:
    variables = {"SLURM_JOB_ID": "17", HOLDER_VARIABLE: "x"}
    elsewhere = Holder("a", "node1", 4711, 1.0, current_process("a", variables).job)
    (tmp_path / f"{CLAIM}.1").write_text(json.dumps(elsewhere.__dict__))
    with pytest.raises(UsageError, match="process 4711 on node1 is starting a run"):
        RunDirectory(tmp_path).create("a: 1\n")
    program = "import sys; from pathlib import Path; from fugaku_gpt.records.run import RunDirectory\n"
    program += "RunDirectory(Path(sys.argv[1])).create('a: 1')"
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], env={**os.environ, **variables}, check=False)
    assert done.returncode == 0 and (tmp_path / "config.yaml").exists()


def test_an_unreadable_claim_is_a_claim(tmp_path: Path) -> None:
    (tmp_path / f"{CLAIM}.7").write_text("")
    with pytest.raises(UsageError, match="an unknown process is starting a run there; .*remove .*claim.7"):
        RunDirectory(tmp_path).create("a: 1\n")


def test_a_result_that_cannot_be_read_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDirectory(tmp_path)
    directory.write_result(Result("ok", "", 1.0, 2.0))
    content = (tmp_path / "result.json").read_text(encoding="utf-8")

    def refused(path: Path, *_: Any) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with monkeypatch.context() as patch, pytest.raises(OSError, match=r"result\.json"):
        patch.setattr("fugaku_gpt.versioned_json.read_bytes", refused)
        directory.write_result(Result("failed", "a guess", 1.0, 2.0))
    assert (tmp_path / "result.json").read_text(encoding="utf-8") == content


def test_a_claim_that_the_file_server_does_not_return_is_named_with_the_cause(tmp_path: Path) -> None:
    (tmp_path / f"{CLAIM}.7").mkdir()
    with pytest.raises(UsageError, match=f"{tmp_path}.*Is a directory"):
        RunDirectory(tmp_path).create("a: 1\n")
    assert not release_claim(tmp_path, CLAIM, "anybody")


def _create(out: Path, barrier: Any, outcomes: Any) -> None:
    barrier.wait()
    try:
        RunDirectory(out).create("a: 1\n")
        outcomes.put("created")
    except UsageError as error:
        outcomes.put(str(error))
    barrier.wait()  # alive until all have asked


@pytest.mark.slow
def test_only_a_single_process_of_several_at_once_claims_the_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for attempt in range(10):
        out = tmp_path / str(attempt)
        if attempt % 2:  # as prepared for a job, and with the claim of a process that is gone
            out.mkdir()
            (out / "job.sh").write_text("#!/bin/sh\n")
            gone = Holder("x", current_process("x").host, 2**22 + 1, 1.0)
            (out / f"{CLAIM}.1").write_text(json.dumps(gone.__dict__))
        barrier, outcomes = context.Barrier(4), context.Queue()
        processes = [context.Process(target=_create, args=(out, barrier, outcomes)) for _ in range(4)]
        for process in processes:
            process.start()
        answers = sorted(outcomes.get(timeout=300) for _ in processes)
        for process in processes:
            process.join()
        assert answers.count("created") == 1 and all(
            "is starting a run" in text for text in answers if text != "created"
        )


def test_discard_removes_only_files_of_this_run(tmp_path: Path, start: Callable[..., Starter]) -> None:
    fresh = RunDirectory(tmp_path / "fresh")
    fresh.create("a: 1\n")
    fresh.log_file.write_text("refused")
    fresh.discard()
    assert not fresh.path.exists()
    prepared = RunDirectory(tmp_path / "prepared")
    prepared.path.mkdir()
    for name in ("config.yaml", "job.sh"):
        (prepared.path / name).write_text("a: 1\n")
    prepared.create("a: 1\n")
    prepared.discard()
    prepared.discard()
    assert sorted(os.listdir(prepared.path)) == ["config.yaml", "job.sh"]
    lost = RunDirectory(tmp_path / "lost")
    start(lost.path)
    with pytest.raises(UsageError):
        lost.create("a: 2\n")
    lost.discard()
    assert (lost.path / "config.yaml").read_text() == "a: 1\n"


def resumed(iteration: int, checkpoint: "str | None") -> Dict[str, Any]:
    return {"kind": "resumed", "iteration": iteration, "checkpoint": checkpoint}


def test_lines_of_iterations_that_were_done_again_are_left_out(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)

    def write(first: int, stop: int, loss: float) -> None:
        writer = MetricsWriter(directory.metrics_file)
        for iteration in range(first, stop):
            writer.write("iteration", {"iteration": iteration, "loss": loss})
        writer.write("validation", {"iteration": stop - 1, "loss": loss})
        writer.close()

    def record_resume(values: Dict[str, Any]) -> None:
        writer = MetricsWriter(directory.metrics_file)
        writer.write("resumed", values)
        writer.close()

    write(1, 6, 1.0)
    record_resume(resumed(3, "step-00000003"))
    assert last_line(directory.metrics_file, "iteration") == {"kind": "iteration", "iteration": 3, "loss": 1.0}
    assert directory.last_iteration() == 3 and directory.metrics("validation") == []
    write(4, 8, 2.0)
    assert [(line["iteration"], line["loss"]) for line in directory.metrics("iteration")] == [
        (1, 1.0),
        (2, 1.0),
        (3, 1.0),
        (4, 2.0),
        (5, 2.0),
        (6, 2.0),
        (7, 2.0),
    ]
    record_resume(resumed(6, "step-00000006"))
    record_resume(resumed(3, "step-00000003"))
    assert directory.last_iteration() == 3 and len(directory.metrics("iteration")) == 3
    assert [line["iteration"] for line in directory.metrics("resumed")] == [3, 3]
    record_resume(resumed(0, None))  # begun anew
    assert last_line(directory.metrics_file, "iteration") is None and directory.metrics("iteration") == []


def test_a_run_resumes_in_the_folder_of_an_ended_run_and_the_earlier_result_stays(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.create("a: 1\n", "first")
    directory.write_result(Result("interrupted", "stopped: after iteration 3", 1.0, 2.0, 3))
    directory.metrics_file.write_text("")
    with pytest.raises(UsageError, match="already holds a run.*--resume auto"):
        RunDirectory(tmp_path).create("a: 2\n", "second")
    again = RunDirectory(tmp_path)
    again.create("a: 2\n", "second", resume=True)
    assert again.result() is None and json.loads((tmp_path / "result.1.json").read_text())["iterations"] == 3
    again.discard()  # refused for some other reason: all is as it was
    assert (tmp_path / "config.yaml").read_text() == "a: 1\n" and not (tmp_path / "result.1.json").exists()
    result = again.result()
    assert result is not None and result.iterations == 3 and result.status == "interrupted"


def test_resuming_in_the_folder_of_a_living_run_is_refused(tmp_path: Path, start: Callable[..., Starter]) -> None:
    out = tmp_path / "run"
    other = start(out)
    RunDirectory(out).write_result(Result("failed", "one rank has said so, and still lives", 1.0, time.time() + 1))
    with pytest.raises(UsageError, match=rf"process {other.process.pid} on .* is writing a run there"):
        RunDirectory(out).create("a: 2\n", resume=True)
    assert (out / "result.json").exists()
    other.kill()
    RunDirectory(out).create("a: 2\n", resume=True)
    assert (out / "result.1.json").exists()


def test_a_run_on_another_host_is_over_once_a_later_result_exists(tmp_path: Path) -> None:
    elsewhere = Holder("ranks", "another-host", 17, 5.0)
    claim_folder(tmp_path, CLAIM, elsewhere)
    with pytest.raises(UsageError, match="process 17 on another-host is writing"):
        RunDirectory(tmp_path).create("a: 2\n", resume=True)
    RunDirectory(tmp_path).write_result(Result("failed", "before that claim was made", 1.0, 2.0))
    with pytest.raises(UsageError, match="process 17 on another-host is writing"):
        RunDirectory(tmp_path).create("a: 2\n", resume=True)
    RunDirectory(tmp_path).write_result(Result("interrupted", "stopped: after iteration 3", 1.0, time.time() + 1))
    RunDirectory(tmp_path).create("a: 2\n", resume=True)


@pytest.mark.parametrize("checkpoint", ["auto", "step-00000004", ".", "..", "none", "step-00000002"])
def test_in_which_folder_a_run_resumes(tmp_path: Path, checkpoint: str) -> None:
    directory = RunDirectory(tmp_path)
    for name in ("step-00000002", "step-00000004"):
        (directory.checkpoints_dir / name).mkdir(parents=True)
    path = checkpoint if checkpoint in ("auto", "none") else str(directory.checkpoints_dir / checkpoint)
    if checkpoint == "step-00000002":
        with pytest.raises(UsageError, match=r"holds a newer checkpoint, step-00000004; resume from step-00000002"):
            resumes_in_same_folder(directory, path)
    else:
        assert resumes_in_same_folder(directory, path) == (checkpoint != "none")
        assert checkpoint == "auto" or not resumes_in_same_folder(RunDirectory(tmp_path / "another"), path)


@pytest.mark.parametrize(
    "end", ['{"kind": "iteration", "itera', "[]", '{"kind": "iteration", "iteration": -1}', "\x00"]
)
def test_the_newest_line_is_the_last_that_can_be_read(tmp_path: Path, end: str) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = [{"kind": "iteration", "iteration": number} for number in (1, 2)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + end + "\n" + end, encoding="utf-8")
    assert last_line(file, "iteration") == lines[1]
    assert last_line(file, "validation") is None and last_line(tmp_path / "none", "iteration") is None


def test_the_newest_line_is_none_that_was_done_again(tmp_path: Path) -> None:
    """Resumed twice: from a checkpoint of iteration 3, and then from one of iteration 2."""
    file = tmp_path / "metrics.jsonl"
    lines = [{"kind": "iteration", "iteration": number} for number in (1, 2, 3, 4)]
    resumed = [{"kind": "resumed", "iteration": number, "checkpoint": "folder"} for number in (2, 3)]
    file.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *resumed]), encoding="utf-8")
    assert last_line(file, "iteration") == lines[1]
    anew = {"kind": "resumed", "iteration": 3, "checkpoint": None}
    file.write_text("".join(json.dumps(line) + "\n" for line in [*lines, anew]), encoding="utf-8")
    assert last_line(file, "iteration") is None
