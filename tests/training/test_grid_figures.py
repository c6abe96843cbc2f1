"""Tests of the figures of grids in the log, in the metrics and in tables."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest

from fugaku_gpt.formulas.flops import exact_flops
from fugaku_gpt.records.metrics import MetricsWriter, read_lines
from fugaku_gpt.training.log import IntervalMeasurements, TrainingLog
from fugaku_gpt.training.trainer import SizeFigures, Step
from tests.support.grids import grid_config

MEASURED = IntervalMeasurements(0.5, 300 * 2**20, 2 * 2**30)
STEPS = [
    Step(2.0, 1.0, 1e-3, 8, 16, correct=4),
    Step(4.0, 1.0, 1e-3, 8, 49, correct=1),
    Step(3.0, 1.0, 1e-3, 8, 16, correct=0),
]


@pytest.mark.parametrize("log_format", ["short", "megatron"])
def test_a_line_has_images_and_accuracy_and_the_record_each_bucket(log_format: str, tmp_path: Path) -> None:
    config = grid_config(tmp_path / "tasks.json", f"training.log_format={log_format}")
    stream, file = io.StringIO(), tmp_path / "metrics.jsonl"
    log = TrainingLog(config, MetricsWriter(file), stream)
    log.iteration(3, STEPS, (24, 100), 0, MEASURED)
    (record,) = read_lines(file)
    assert record["images_per_second"] == record["samples_per_second"] == 24 / 1.5
    assert record["accuracy"] == 5 / 24 and record["actual_seq_len"] == 16
    assert record["buckets"] == {
        "4": {"iterations": 2, "loss": 2.5, "accuracy": 0.25},
        "7": {"iterations": 1, "loss": 4.0, "accuracy": 0.125},
    }
    assert record["tokens_per_second"] == 8 * (16 + 49 + 16) / 1.5
    flops = 2 * exact_flops(_with_cells(config.model, 16), 8, config.padded_outputs)
    flops += exact_flops(_with_cells(config.model, 49), 8, config.padded_outputs)
    assert record["tflops_exact"] == pytest.approx(flops / 1.5 / 1e12)
    fields = [field.strip() for field in stream.getvalue().split("|")]
    expected = ["accuracy: 20.83%", "images/s: 16.00"]
    expected = expected if log_format == "short" else ["accuracy: 0.2083", "images per second: 16.000"]
    assert [field for field in fields if field in expected] == expected
    assert not any(field.startswith("tok/s") for field in fields)


def test_a_validation_has_accuracy_and_the_loss_of_each_size(tmp_path: Path) -> None:
    stream, file = io.StringIO(), tmp_path / "metrics.jsonl"
    log = TrainingLog(grid_config(tmp_path / "tasks.json"), MetricsWriter(file), stream)
    sizes = [SizeFigures(16, 16, 32.0, 4.0, 16), SizeFigures(49, 8, math.nan, 2.0, 8)]
    log.validation(4, 2.5, 648, 2.75, sizes, consumed_tokens=1296)
    assert stream.getvalue() == (
        "validation at iteration 4 | lm loss: 2.500000 | accuracy: 25.00% | images: 24 | 4 x 4: loss 2.0000, accuracy "
        "25.00% of 16 | 7 x 7: loss nan, accuracy 25.00% of 8 | change: -0.250000 |\n"
    )
    (record,) = [json.loads(text) for text in file.read_text(encoding="utf-8").splitlines()]
    assert record["accuracy"] == 0.25 and record["tokens"] == 648
    assert record["buckets"]["7"] == {"images": 8, "distinct_images": 8, "loss": None, "accuracy": 0.25}


def test_a_validation_says_where_grids_are_repeated(tmp_path: Path) -> None:
    stream, file = io.StringIO(), tmp_path / "metrics.jsonl"
    log = TrainingLog(grid_config(tmp_path / "tasks.json"), MetricsWriter(file), stream)
    log.validation(
        4, 2.5, 648, None, [SizeFigures(16, 16, 32.0, 4.0, 5), SizeFigures(49, 8, 16.0, 2.0, 8)], consumed_tokens=0
    )
    assert "| accuracy: 25.00% | images: 24, 13 different | 4 x 4: " in stream.getvalue()
    (record,) = read_lines(file)
    assert [bucket["distinct_images"] for bucket in record["buckets"].values()] == [5, 8]


def _with_cells(model: object, cells: int) -> object:
    from dataclasses import replace

    return replace(model, seq_len=cells)
