"""Tests of training on grids on one rank: batches, validation, and a run that continues with another global batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from fugaku_gpt.comm import ProcessGrid
from fugaku_gpt.config import RunConfig
from fugaku_gpt.data.grid_samples import open_grid_samples
from fugaku_gpt.training.trainer import Trainer
from tests.support.grids import grid_config, write_tasks

pytestmark = [pytest.mark.slow, pytest.mark.torch]


def trainer_of(config: RunConfig) -> Trainer:
    return Trainer(config, ProcessGrid.alone(), open_grid_samples(config, "train"), open_grid_samples(config, "valid"))


def test_a_trainer_learns_the_classes(tmp_path: Path) -> None:
    settings = ["training.lr=1e-2", "training.clip_grad=0", "data.permute_colors=false", "model.dropout=0"]
    trainer = trainer_of(grid_config(write_tasks(tmp_path / "tasks.json"), *settings, "training.micro_batch=8"))
    before = trainer.validate()
    steps = [trainer.step() for _ in range(60)]
    assert trainer.validate() < before
    first, last = (sum(step.correct for step in part) for part in (steps[:10], steps[-10:]))
    assert last > 2 * first


def test_validation_has_sums_of_each_size(tmp_path: Path) -> None:
    config = grid_config(write_tasks(tmp_path / "tasks.json"), "training.eval_batches=6")
    trainer = trainer_of(config)
    trainer.step()
    loss = trainer.validate()
    assert [size.seq_len for size in trainer.validated] == [16, 49]
    assert sum(size.samples for size in trainer.validated) == 6 * 8
    small, large = trainer.validated
    counts = open_grid_samples(config, "valid").counts
    assert (small.distinct, large.distinct) == (min(small.samples, counts[0]), min(large.samples, counts[1]))
    assert small.distinct < small.samples or large.distinct < large.samples  # six batches have some grids twice
    assert sum(size.losses for size in trainer.validated) / 48 == pytest.approx(loss)
    correct = [size.correct for size in trainer.validated]
    trainer.validate()
    assert [size.correct for size in trainer.validated] == correct  # nothing is left over from a step


def test_a_run_continues_with_another_global_batch_at_the_next_full_batch(tmp_path: Path) -> None:
    file = write_tasks(tmp_path / "tasks.json")
    trainer = trainer_of(grid_config(file, "training.global_batch=16"))
    trainer.finish_loading({"iteration": 3, "consumed_samples": 24})
    source = open_grid_samples(trainer.config, "train")
    assert [trainer.step().seq_len for _ in range(4)] == [source.cells(first) for first in (32, 48, 64, 80)]
    assert trainer.consumed_samples == 24 + 4 * 16
