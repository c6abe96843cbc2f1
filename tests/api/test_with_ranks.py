"""Tests of what the interface does with real ranks: training, a job, a sweep, a comparison, texts."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Callable, Dict, List

import pytest

from fugaku_gpt import api
from fugaku_gpt.records.run import INTERRUPTED, OK
from tests.support import tokenizers
from tests.support.checkpoints import save_model
from tests.support.corpus import write_byte_corpus
from tests.support.models import model_of_kind
from tests.support.waiting import until

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("forked_starts")]

MINI: Dict[str, object] = {
    "model.layers": 1, "model.hidden": 16, "model.heads": 2, "model.seq_len": 16, "model.vocab_size": 256,
    "training.iterations": 4, "training.global_batch": 4, "training.micro_batch": 1, "training.eval_interval": 2,
    "training.log_interval": 1, "node.threads_per_rank": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> api.Run:
    corpus = write_byte_corpus(tmp_path_factory.mktemp("corpus") / "bytes")
    return api.load_run(preset="tiny", settings={**MINI, "data.paths": [corpus]})


def test_a_run_is_trained_and_not_overwritten(run: api.Run, tmp_path: Path) -> None:
    lines: List[str] = []
    trained = api.train(run, tmp_path / "run", ranks=2, on_line=lines.append)
    result = trained.result
    assert result is not None and (result.status, result.iterations) == (OK, 4)
    assert trained.config.layout.dp == 2 and trained.environment is not None
    assert [line["iteration"] for line in trained.metrics()] == [1, 2, 3, 4]
    assert [line["iteration"] for line in trained.metrics("validation")] == [0, 2, 4]
    assert any(line.startswith("iteration") for line in lines) and trained.log_file.exists()
    with pytest.raises(api.UsageError, match="already holds a run; choose another --out"):
        api.train(run, tmp_path / "run", ranks=2)
    lines.clear()
    assert api.train(run, tmp_path / "run", ranks=2, resume="auto", on_line=lines.append).path == trained.path
    assert lines == [], "it was complete"


def endless(run: api.Run) -> api.Run:
    return run.with_settings({"training.iterations": 1000000, "training.eval_interval": None})


def signal_once(number: signal.Signals) -> Callable[[str], None]:
    """A function that sends a signal to this process at the first iteration's line."""
    numbers = [number]
    return lambda line: os.kill(os.getpid(), numbers.pop()) if numbers and line.startswith("iteration") else None


def test_ctrl_c_reaches_the_caller_once_the_run_has_stopped(run: api.Run, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        api.train(endless(run), tmp_path / "run", ranks=1, on_line=signal_once(signal.SIGINT))
    result = api.RecordedRun(tmp_path / "run").result
    assert result is not None and result.is_resumable


@pytest.mark.long
@pytest.mark.parametrize("number, times", [(signal.SIGTERM, 1), (signal.SIGUSR1, 0)])
def test_a_signal_calls_the_handler_of_the_caller(
    run: api.Run, tmp_path: Path, number: signal.Signals, times: int
) -> None:
    received: List[int] = []
    former = signal.signal(number, lambda number, frame: received.append(number))
    try:
        result = api.train(endless(run), tmp_path / "run", ranks=1, on_line=signal_once(number)).result
    finally:
        signal.signal(number, former)
    assert result is not None and result.is_resumable and received == [number] * times


@pytest.mark.long
def test_an_interrupted_sweep_interrupts_the_caller(run: api.Run, tmp_path: Path) -> None:
    file = tmp_path / "sweep.json"
    defaults = {**MINI, "data.paths": list(run.config.data.paths), "training.iterations": 1000000}
    file.write_text(json.dumps({"defaults": defaults, "matrix": {"training.lr": [1e-3, 1e-2]}}))
    metrics = tmp_path / "out"

    def interrupt() -> None:
        until(lambda: any(path.stat().st_size for path in metrics.rglob("metrics.jsonl")))
        os.kill(os.getpid(), signal.SIGINT)

    killer = threading.Thread(target=interrupt)
    killer.start()
    with pytest.raises(KeyboardInterrupt):
        api.Sweep(file, metrics).run()
    killer.join()
    assert len(list(metrics.rglob("result.json"))) == 1


@pytest.mark.long
def test_a_run_is_continued_from_a_checkpoint(run: api.Run, tmp_path: Path) -> None:
    api.train(run, tmp_path / "run", ranks=1)
    again = api.train(run.with_settings({"training.iterations": 6}), tmp_path / "run", ranks=2, resume="auto")
    assert [line["iteration"] for line in again.metrics()] == [1, 2, 3, 4, 5, 6]
    with api.Checkpoint(again.path) as checkpoint:
        assert checkpoint.iteration == 6


def test_a_refused_and_a_failed_run_raise_their_reasons(run: api.Run, tmp_path: Path) -> None:
    without = run.with_settings({"data.paths": [tmp_path / "gone"]})
    with pytest.raises(api.UsageError, match="gone"):
        api.train(without, tmp_path / "refused", ranks=1)
    assert not (tmp_path / "refused").exists()
    diverging = run.with_settings({"training.lr": 1e30, "training.lr_schedule": "constant"})
    with pytest.raises(api.RunFailed, match="diverging: failed: rank 0: iteration [2-4]: loss nan.*: not finite"):
        api.train(diverging, tmp_path / "diverging", ranks=1)
    result = api.RecordedRun(tmp_path / "diverging").result
    assert result is not None and result.status == "failed"


@pytest.fixture
def local_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()


JOB: Dict[str, object] = {"job.elapse": "10:00", "job.volumes": []}


@pytest.mark.usefixtures("local_queue")
def test_the_result_of_a_submitted_job_is_awaited(run: api.Run, tmp_path: Path) -> None:
    job = api.submit(run.with_settings(JOB), tmp_path / "job", scheduler="local")
    assert len(job.ids) == 1 and api.Job.in_directory(tmp_path / "job").ids == job.ids
    result = job.result(timeout=300)
    assert (result.status, result.iterations) == (OK, 4) and job.outcome().status == OK
    assert job.output() and api.RecordedRun(job.directory).metrics()[-1]["iteration"] == 4


@pytest.mark.usefixtures("local_queue")
def test_a_script_is_submitted_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "theirs.sh"
    script.write_text("#!/bin/sh\npwd > where\nexit 3\n")
    job = api.submit("theirs.sh", "record", scheduler="local")
    outcome = job.wait(timeout=300)
    assert (outcome.status, outcome.cause) == ("failed", "exit code 3")
    assert Path("where").read_text().strip() == str(tmp_path) and job.directory == Path("record")
    with pytest.raises(api.UsageError, match="record: already holds a run"):
        api.submit("theirs.sh", "record", scheduler="local")
    script.write_text("#!/bin/sh\n#PJM -L node=0\n")
    with pytest.raises(api.UsageError, match="PJM"):
        api.submit("theirs.sh", "another")
    assert not Path("another").exists()


@pytest.mark.long
@pytest.mark.usefixtures("local_queue")
def test_a_job_that_is_cancelled_raises_that_it_was(run: api.Run, tmp_path: Path) -> None:
    endless = run.with_settings({**JOB, "training.iterations": 1000000})
    cancelled = api.submit(endless, tmp_path / "endless", scheduler="local")
    assert list(cancelled.cancel().values()) == [""]
    with pytest.raises(api.RunFailed, match=f"endless: {INTERRUPTED}: "):
        cancelled.result(timeout=300)


@pytest.mark.long
def test_a_sweep_is_run_and_tabulated(run: api.Run, tmp_path: Path) -> None:
    file = tmp_path / "sweep.json"
    defaults = {**MINI, "data.paths": list(run.config.data.paths)}
    file.write_text(json.dumps({"defaults": defaults, "matrix": {"layout.tp": [1, 2], "training.lr": [1e-3, 1e-2]}}))
    sweep = api.Sweep(file, tmp_path / "out", settings={"training.iterations": 2})
    assert [standing.status for standing in sweep.status()] == ["missing"] * 4
    ended: List[str] = []
    results = sweep.run(on_end=lambda run, result: ended.append(f"{run.name} {result.status}"))
    assert ended == [f"{entry.run.name} ok" for entry in results] and len(ended) == 4
    assert [standing.status for standing in sweep.status(ask=False)] == ["ok"] * 4
    table = sweep.table()
    assert len(table.rows()) == 4 and table.markdown.count("\n|") >= 5
    assert len(api.Runs(tmp_path / "out").where("layout.tp == 2")) == 2


@pytest.mark.long
def test_two_ways_to_run_are_compared(run: api.Run, tmp_path: Path) -> None:
    settings = api.LiveSettings(pairs=1, at_least=2, load=1.0)
    report = api.compare("base", "training.recompute=full", run=run, out=tmp_path, iterations=3, settings=settings)
    assert report.values["pairs"] and report.verdict == api.earlier_comparison(tmp_path).verdict


@pytest.mark.long
def test_texts_are_those_of_every_number_of_ranks(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed: make install")
    (tmp_path / "run").mkdir()
    checkpoint = save_model(tmp_path / "run" / "checkpoints", model_of_kind("llama", "model.vocab_size=330"))
    tokenizers.make_tokenizer(tokenizers.BYTE_LEVEL, checkpoint / "tokenizer.json")
    settings = api.GenerationSettings(max_tokens=6, temperature=1.0, seed=3, threads=1)
    texts = api.generate(tmp_path / "run", ["def f(x)", "It's"], settings=settings)
    assert [text.prompt for text in texts] == ["def f(x)", "It's"] and all(text.tokens <= 6 for text in texts)
    shared = api.GenerationSettings(max_tokens=6, temperature=1.0, seed=3, threads=1, ranks=2, tp=2)
    assert api.generate(tmp_path / "run", ["def f(x)", "It's"], settings=shared) == texts
    with pytest.raises(api.UsageError, match="nowhere"):
        api.generate(tmp_path / "nowhere", "x")
