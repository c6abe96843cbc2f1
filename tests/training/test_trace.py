"""Tests of when a trace begins and ends, and of what happens if it cannot be written."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Optional

import numpy as np
import pytest

from fugaku_gpt.comm import FlightRecorder, ProcessGrid, open_world
from fugaku_gpt.data.scored_text import ScoredText
from fugaku_gpt.errors import RunFailed
from fugaku_gpt.layout import trace_room
from fugaku_gpt.layout.trace_room import records_of_iteration
from fugaku_gpt.records.metrics import MetricsWriter
from fugaku_gpt.records.trace import read_trace, traced_ranks
from fugaku_gpt.training.eval_files import EvalFiles
from fugaku_gpt.training.log import TrainingLog
from fugaku_gpt.training.run import run_loop
from fugaku_gpt.training.trace import NEVER, StepTracer
from fugaku_gpt.training.trainer import Trainer
from fugaku_gpt.training.validation import Validation
from tests.support.text import ByteSamples
from tests.support.tiny import tiny_config


def traced_trainer(flight: Optional[Path], *settings: str) -> Trainer:
    """Returns a trainer of one rank; without ``flight`` it has no recorder."""
    config = tiny_config("model.layers=1", "training.iterations=5", "training.trace_iterations=2-3", *settings)
    samples = ByteSamples(config.model.seq_len)
    return Trainer(config, ProcessGrid(open_world(flight), config.layout), samples, samples)


def test_the_loop_traces_the_iterations_that_were_asked_for_and_their_validation(tmp_path: Path) -> None:
    trainer = traced_trainer(tmp_path / "flight", "training.eval_interval=2")
    stream = io.StringIO()
    log = TrainingLog(trainer.config, MetricsWriter(tmp_path / "metrics.jsonl"), stream)
    directory = tmp_path / "a run" / "trace"
    tracer = StepTracer(trainer, directory, log)
    assert tracer.due == 1
    run_loop(trainer, log, tracer=tracer)
    assert tracer.due == NEVER and traced_ranks(directory) == [0]
    trace = read_trace(directory, 0)
    assert sorted(set(trace.phases["step"].tolist())) == [2, 3]
    validation, passes = (trace.phases["phase"] == 6), records_of_iteration(trainer.config, 0)[1]
    assert validation.sum() == 1 + trainer.config.micro_batches
    assert 0 < (~validation).sum() <= 2 * passes
    assert f"iterations 2-3 traced: fugaku-gpt report trace '{tmp_path}/a run'\n" in stream.getvalue()


def test_a_trace_has_room_for_the_evaluation_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_room, "MORE_RECORDS", 16)
    trainer = traced_trainer(tmp_path / "flight", "training.eval_interval=2", "training.eval_batches=1")
    files = EvalFiles(["many"], [[ScoredText("", np.arange(2 + number % 7), 1, 1) for number in range(120)]])
    batches = files.batches(trainer.config)
    assert batches == 120
    tracer = StepTracer(trainer, tmp_path / "trace", None, batches)
    run_loop(trainer, validation=Validation(trainer, None, files), tracer=tracer)
    trace = read_trace(tmp_path / "trace", 0)
    assert not trace.head.is_cut and sorted(set(trace.phases["step"].tolist())) == [2, 3]
    assert (trace.phases["phase"] == 6).sum() > batches


def test_a_trace_begins_late_in_a_run_that_was_resumed_within_it_and_never_after_it(tmp_path: Path) -> None:
    trainer = traced_trainer(tmp_path / "flight")
    trainer.iteration = 2
    assert StepTracer(trainer, tmp_path, None).due == 2
    trainer.iteration = 3
    tracer = StepTracer(trainer, tmp_path, None)
    assert tracer.due == NEVER
    tracer.finish()
    assert traced_ranks(tmp_path) == []


def test_a_run_that_stops_within_the_trace_leaves_the_iterations_before(tmp_path: Path) -> None:
    trainer = traced_trainer(tmp_path / "flight")
    tracer = StepTracer(trainer, tmp_path / "trace", None)
    trainer.should_stop = lambda: trainer.iteration == 1
    assert run_loop(trainer, tracer=tracer)
    trainer.finish()
    tracer.finish()
    trace = read_trace(tmp_path / "trace", 0)
    assert set(trace.phases["step"].tolist()) == {2} and (trace.head.first, trace.head.last) == (2, 2)


def test_the_rest_of_a_trace_after_a_resume_has_the_numbers_of_its_iterations(tmp_path: Path) -> None:
    trainer = traced_trainer(tmp_path / "flight")
    trainer.iteration = 2
    run_loop(trainer, tracer=StepTracer(trainer, tmp_path / "trace", None))
    trace = read_trace(tmp_path / "trace", 0)
    assert set(trace.phases["step"].tolist()) == {3} and (trace.head.first, trace.head.last) == (3, 3)


def test_a_trace_that_cannot_be_written_is_logged_and_no_failure_of_the_run(tmp_path: Path) -> None:
    trainer = traced_trainer(tmp_path / "flight")
    stream = io.StringIO()
    log = TrainingLog(trainer.config, MetricsWriter(tmp_path / "metrics.jsonl"), stream)
    (tmp_path / "trace").write_text("a file in the place of the folder")
    run_loop(trainer, log, tracer=StepTracer(trainer, tmp_path / "trace", log))
    assert trainer.iteration == 5
    assert f"the trace of iterations 2-3 could not be written: rank 0: {tmp_path}/trace" in stream.getvalue()


def test_a_run_that_fails_within_the_trace_leaves_nothing_traced(tmp_path: Path) -> None:
    methods = (FlightRecorder.mark_phase, FlightRecorder.leave)
    trainer = traced_trainer(tmp_path / "flight")
    tracer = StepTracer(trainer, tmp_path / "trace", None)
    tracer.close()
    trainer.iteration = 1
    tracer.advance()
    assert (FlightRecorder.mark_phase, FlightRecorder.leave) != methods
    tracer.close()
    assert (FlightRecorder.mark_phase, FlightRecorder.leave) == methods and traced_ranks(tmp_path / "trace") == []


def test_a_trainer_without_a_recorder_cannot_be_traced(tmp_path: Path) -> None:
    trainer = traced_trainer(None)
    with pytest.raises(RunFailed, match="no flight recorder"):
        StepTracer(trainer, tmp_path, None).advance()
