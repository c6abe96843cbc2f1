"""Tests of the event files of a run, as TensorBoard itself reads them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Dict, Mapping

import pytest

from fugaku_gpt.records.metrics import _FIGURES, read_lines, without_superseded
from fugaku_gpt.records.tensorboard import (
    BY_TOKENS,
    FIGURES_BY_GROUP,
    EventsWriter,
    MetricsAndEventsWriter,
    scalars_of_line,
)
from tests.support.events import has_reader_of_events, read_curves

pytestmark = pytest.mark.skipif(not has_reader_of_events(), reason="the package tensorboard is not installed")


def iteration(number: int, **more: Any) -> Dict[str, Any]:
    return {"kind": "iteration", "iteration": number, "consumed_tokens": 64 * number, "loss": 4.0 / number, **more}


def write_events(directory: Path, *lines: Mapping[str, Any]) -> None:
    writer = EventsWriter(directory, 100.0)
    for time, line in enumerate(lines):
        writer.write(line, 101.0 + time)
    writer.close()


RESUMED = {"kind": "resumed", "iteration": 2, "checkpoint": "step-00000002", "consumed_tokens": 128}
ANEW = {"kind": "resumed", "iteration": 0, "checkpoint": None, "consumed_tokens": 0}


def test_every_figure_of_a_run_has_a_tag_in_a_group() -> None:
    tagged = [name for names in FIGURES_BY_GROUP.values() for name in names]
    assert len(tagged) == len(set(tagged))
    assert set(tagged) == _FIGURES - {"tokens", "bits_per_byte"}  # those of validations and evaluations


def test_lines_become_scalars_by_iteration_and_losses_by_tokens_too(tmp_path: Path) -> None:
    write_events(
        tmp_path,
        {"kind": "validation", "iteration": 0, "loss": 5.5, "tokens": 192, "consumed_tokens": 0},
        iteration(1, lr=0.5, grad_norm=0.25, tokens_per_second=2**20, compute_max_node="n1", buckets={"16": {}}),
        {"kind": "left_out", "iteration": 2, "loss": 9.0, "why": "spike"},
        {"kind": "checkpoint", "iteration": 2, "bytes": 7},
        {"kind": "evaluation", "iteration": 2, "name": "news", "loss": 3.0, "consumed_tokens": 128, "tokens": 9,
         "bits_per_byte": 1.5},
        {"kind": "evaluation", "iteration": 2, "name": "code", "loss": 2.0, "consumed_tokens": 128, "tokens": 9,
         "bits_per_byte": None},
    )  # fmt: skip
    assert read_curves(tmp_path) == {
        "validation/loss": [(0, 5.5)],
        "train/loss": [(1, 4.0)],
        "train/consumed_tokens": [(1, 64.0)],
        "train/lr": [(1, 0.5)],
        "train/grad_norm": [(1, 0.25)],
        "speed/tokens_per_second": [(1, 2.0**20)],
        "evaluation/news/loss": [(2, 3.0)],
        "evaluation/news/bits_per_byte": [(2, 1.5)],
        "evaluation/code/loss": [(2, 2.0)],
    }
    assert read_curves(tmp_path / BY_TOKENS) == {
        "by_tokens/validation/loss": [(0, 5.5)],
        "by_tokens/train/loss": [(64, 4.0)],
        "by_tokens/evaluation/news/loss": [(128, 3.0)],
        "by_tokens/evaluation/code/loss": [(128, 2.0)],
    }


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, None])
def test_a_figure_that_is_not_finite_is_a_nan_like_null(loss: Any, tmp_path: Path) -> None:
    write_events(tmp_path, iteration(3, loss=loss))
    ((step, value),) = read_curves(tmp_path)["train/loss"]
    assert step == 3 and math.isnan(value)


def test_a_run_that_resumes_has_each_step_once(tmp_path: Path) -> None:
    write_events(tmp_path, *map(iteration, range(1, 6)))
    write_events(tmp_path, RESUMED, *(iteration(number, lr=1.0) for number in range(3, 7)))
    curves, by_tokens = read_curves(tmp_path), read_curves(tmp_path / BY_TOKENS)
    assert [step for step, _ in curves["train/loss"]] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in curves["train/lr"]] == [3, 4, 5, 6]  # those of the later session
    assert [step for step, _ in by_tokens["by_tokens/train/loss"]] == [64 * number for number in range(1, 7)]


def test_a_run_without_checkpoint_starts_over(tmp_path: Path) -> None:
    first = {"kind": "validation", "iteration": 0, "loss": 5.5, "tokens": 192, "consumed_tokens": 0}
    write_events(tmp_path, first, iteration(1), iteration(2))
    write_events(tmp_path, ANEW, {**first, "loss": 5.0}, iteration(1))
    assert read_curves(tmp_path)["validation/loss"] == [(0, 5.0)]
    assert read_curves(tmp_path)["train/loss"] == [(1, 4.0)]
    assert read_curves(tmp_path / BY_TOKENS)["by_tokens/validation/loss"] == [(0, 5.0)]


def test_a_kill_at_any_byte_costs_the_last_event_alone(tmp_path: Path) -> None:
    write_events(tmp_path / "whole", *map(iteration, range(1, 4)))
    (file,) = (path for path in (tmp_path / "whole").iterdir() if path.is_file())
    content = file.read_bytes()
    for size in [*range(0, len(content), 7), len(content)]:
        cut = tmp_path / f"cut-{size}"
        cut.mkdir()
        (cut / file.name).write_bytes(content[:size])
        steps = [step for step, _ in read_curves(cut).get("train/loss", [])]
        assert steps == [1, 2, 3][: len(steps)], size
        assert len(steps) >= _complete_records(content[:size]) - 1, size  # the first states the version
        write_events(cut, RESUMED, iteration(3))
        assert read_curves(cut)["train/loss"][-1] == (3, pytest.approx(4 / 3)), size


def _complete_records(content: bytes) -> int:
    """The number of complete TFRecords at the beginning of a file."""
    count = position = 0
    while position + 12 <= len(content):
        position += 16 + int.from_bytes(content[position : position + 8], "little")
        count += position <= len(content)
    return count


def test_the_lines_of_metrics_are_the_events(tmp_path: Path) -> None:
    for lines in ([iteration(1), iteration(2), iteration(3)], [RESUMED, iteration(3, loss=1.0)]):
        writer = MetricsAndEventsWriter(tmp_path / "metrics.jsonl", tmp_path / "tensorboard")
        for line in lines:
            writer.write(line["kind"], {name: value for name, value in line.items() if name != "kind"})
        writer.close()
    valid = [line for line in without_superseded(read_lines(tmp_path / "metrics.jsonl")) if line["kind"] == "iteration"]
    curves = read_curves(tmp_path / "tensorboard")
    assert curves["train/loss"] == [(line["iteration"], pytest.approx(line["loss"])) for line in valid]
    assert [len(scalars_of_line(line)) for line in valid] == [len(curves)] * 3
