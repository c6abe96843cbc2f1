"""The log's lines and the records beside them."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest

from fugaku_gpt.formulas.flops import exact_flops, notes_flops
from fugaku_gpt.records.run import MetricsWriter
from fugaku_gpt.training.log import TrainingLog
from fugaku_gpt.training.trainer import Step
from tests.support.tiny import tiny_config

CONFIG = tiny_config("training.iterations=1000", "job.nodes=2", "layout.dp=2")
STEP = Step(loss=2.345678901, grad_norm=0.98765, lr=6e-4)


@pytest.fixture
def opened(tmp_path: Path) -> Tuple[TrainingLog, io.StringIO, Path]:
    stream, file = io.StringIO(), tmp_path / "metrics.jsonl"
    return TrainingLog(CONFIG, MetricsWriter(file), stream), stream, file


def records(file: Path) -> List[Dict[str, Any]]:
    """The lines of the file, each of which must be whole."""
    text = file.read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def test_an_iteration_is_one_line_with_everything_in_its_place(opened: Tuple[TrainingLog, io.StringIO, Path]) -> None:
    log, stream, _ = opened
    log.iteration(7, STEP, 0.25, 300 * 2**20, 2 * 2**30)
    fields = [field.strip() for field in stream.getvalue().rstrip("\n").split(" | ")]
    tokens = 8 * CONFIG.model.seq_len
    notes = notes_flops(CONFIG.model, 8, CONFIG.padded_vocab) / 0.25 / 2 / 1e12
    exact = exact_flops(CONFIG.model, 8, CONFIG.padded_vocab) / 0.25 / 2 / 1e12
    assert fields == [
        "iteration    7/1000",
        "consumed samples: 56",
        f"consumed tokens: {7 * tokens}",
        "elapsed time per iteration (s): 0.250",
        "learning rate: 6.000E-04",
        "global batch size: 8",
        "lm loss: 2.345679",
        "grad norm: 0.988",
        "samples per second: 32.00",
        f"tokens per second: {tokens * 4}",
        f"TFLOPs: {notes:.3f} (exact {exact:.3f})",
        "rank RSS: 300 MiB",
        "node used: 2048 MiB |",
    ]


def test_the_record_of_an_iteration_has_unrounded_values(opened: Tuple[TrainingLog, io.StringIO, Path]) -> None:
    log, _, file = opened
    log.iteration(7, STEP, 0.25, 300, 4000)
    (record,) = records(file)
    assert record == {
        "kind": "iteration",
        "iteration": 7,
        "consumed_samples": 56,
        "consumed_tokens": 56 * CONFIG.model.seq_len,
        "seconds": 0.25,
        "lr": 6e-4,
        "global_batch": 8,
        "loss": 2.345678901,
        "grad_norm": 0.98765,
        "samples_per_second": 32.0,
        "tokens_per_second": 32.0 * CONFIG.model.seq_len,
        "tflops_notes": pytest.approx(notes_flops(CONFIG.model, 8, CONFIG.padded_vocab) / 0.5e12),
        "tflops_exact": pytest.approx(exact_flops(CONFIG.model, 8, CONFIG.padded_vocab) / 0.5e12),
        "rss_max_bytes": 300,
        "node_used_bytes": 4000,
    }


def test_validations_tell_the_change_from_the_one_before(opened: Tuple[TrainingLog, io.StringIO, Path]) -> None:
    log, stream, file = opened
    log.validation(0, 5.5, 192, None)
    log.validation(10, 5.25, 192, 5.5)
    assert stream.getvalue().splitlines() == [
        "validation at iteration 0 | lm loss: 5.500000 | tokens: 192 |",
        "validation at iteration 10 | lm loss: 5.250000 | tokens: 192 | change: -0.250000 |",
    ]
    assert records(file) == [
        {"kind": "validation", "iteration": 0, "loss": 5.5, "tokens": 192},
        {"kind": "validation", "iteration": 10, "loss": 5.25, "tokens": 192},
    ]


def test_a_number_that_json_cannot_hold_is_null(opened: Tuple[TrainingLog, io.StringIO, Path]) -> None:
    log, _, file = opened
    log.validation(1, math.nan, 1, None)
    log.validation(2, math.inf, 1, None)
    assert [record["loss"] for record in records(file)] == [None, None]


def test_each_record_is_on_disk_when_its_line_is_said(opened: Tuple[TrainingLog, io.StringIO, Path]) -> None:
    log, _, file = opened
    for iteration in range(1, 4):
        log.iteration(iteration, STEP, 1.0, 1, 1)
        assert len(records(file)) == iteration
