"""Tests of skipped steps, loss spikes, skipped samples and growing batches, on one rank."""

from __future__ import annotations

import math
from typing import Any, List, Tuple

import numpy as np
import pytest
import torch

from fugaku_gpt.comm import ProcessGrid
from fugaku_gpt.config import TrainingConfig
from fugaku_gpt.errors import ConfigError, RunFailed
from fugaku_gpt.training.health import DONE, NOT_FINITE, SPIKE, Health, LossWindow
from fugaku_gpt.training.schedule import learning_rate
from fugaku_gpt.training.trainer import Trainer
from fugaku_gpt.training.workload import Samples
from tests.support.text import ByteSamples
from tests.support.tiny import tiny_config
from tests.training.trainers import tiny_trainer

FAST = ("training.micro_batch=8", "training.lr=1e-2")
RAMP = ("training.ramp_start=2", "training.ramp_increment=2", "training.ramp_samples=18")
LENGTHS = ("training.seq_ramp_start=8", "training.seq_ramp_increment=8", "training.seq_ramp_iterations=4")
ROLLBACK = ("training.rollback_every=2", "training.spike_window=3", "training.spike_ratio=1.2")


class Recorded:
    """Samples that record which of them have been read."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self.read: List[int] = []

    def batch(self, first: int, count: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
        self.read += range(first, first + count)
        return self._samples.batch(first, count)


def poison(run: Trainer) -> None:
    """Take a step in which a gradient is not finite, although the loss is."""
    handle = run.model_chunks[0].final_norm.bias.register_hook(lambda gradient: gradient * math.nan)
    run.step()
    handle.remove()


def follow(run: Trainer, other: Trainer) -> None:
    """Give ``run`` the iteration and the consumed samples of ``other``, without any step."""
    run.iteration, run.consumed_samples = other.iteration, other.consumed_samples


def test_a_ramp_up_uses_each_sample_once_and_counts_samples_and_tokens() -> None:
    config = tiny_config(*RAMP, *LENGTHS)
    samples = Recorded(ByteSamples(config.model.seq_len))
    run = Trainer(config, ProcessGrid.alone(), samples)
    steps = [run.step() for _ in range(7)]
    assert [step.samples for step in steps] == [2, 2, 2, 4, 4, 6, 8]
    assert [step.seq_len for step in steps] == [8, 8, 16, 16, 24, 24, 24]
    assert samples.read == list(range(28)) and run.consumed_samples == 28
    assert run.consumed_tokens == sum(step.samples * step.seq_len for step in steps)


def test_the_micro_batch_does_not_change_a_curve_with_growing_batches_and_skipped_samples() -> None:
    settings = ("training.dtype=float64", *RAMP, *LENGTHS, "training.skip_samples=[3, 9-12]")
    single, pairs = (tiny_trainer(*settings, f"training.micro_batch={size}") for size in (1, 2))
    for _ in range(5):
        a, b = single.step(), pairs.step()
        assert (a.samples, a.seq_len) == (b.samples, b.seq_len)
        assert (a.loss, a.grad_norm) == pytest.approx((b.loss, b.grad_norm), rel=1e-12)


def test_a_shorter_sample_is_the_beginning_of_the_same_sample() -> None:
    run = tiny_trainer("training.dtype=float64", "model.dropout=0", "model.attention_dropout=0", *LENGTHS)
    tokens = torch.from_numpy(ByteSamples(24).batch(0, 8))
    with torch.no_grad():
        expected = float(run.model_chunks[0](tokens[:, :8], tokens[:, 1:9])) / (8 * 8)
    assert run.step().loss == pytest.approx(expected, rel=1e-12)


def test_validation_uses_full_batches_during_a_ramp_up() -> None:
    assert tiny_trainer(*RAMP, *LENGTHS).validate() == tiny_trainer().validate()


def test_skipped_samples_are_not_read_and_count_as_consumed() -> None:
    config = tiny_config("training.skip_samples=[5-9, 2, 16-30]", "training.micro_batch=4")
    samples = Recorded(ByteSamples(config.model.seq_len))
    run = Trainer(config, ProcessGrid.alone(), samples)
    run.step()
    assert samples.read == [0, 1, 3, 4, 10, 11, 12, 13] and run.consumed_samples == 14
    run.step()
    assert samples.read[8:] == [14, 15, 31, 32, 33, 34, 35, 36] and run.consumed_samples == 37
    assert run.consumed_tokens == 16 * config.model.seq_len


def test_skipping_samples_that_are_already_consumed_changes_no_later_batch() -> None:
    config = tiny_config("training.skip_samples=[2-5]")
    samples = Recorded(ByteSamples(config.model.seq_len))
    run = Trainer(config, ProcessGrid.alone(), samples)
    run.consumed_samples = 40
    run.step()
    assert samples.read == list(range(40, 48))


def test_a_step_that_is_not_finite_is_skipped_and_nothing_else_changes() -> None:
    run, judge = tiny_trainer(*FAST, "training.non_finite=skip"), tiny_trainer(*FAST)
    run.step()
    judge.step()
    before = run.buffers.parameters.clone()
    poison(run)
    assert torch.equal(run.buffers.parameters, before)
    assert (run.iteration, run.consumed_samples, run.health.skipped_steps) == (2, 16, 1)
    follow(judge, run)
    assert run.step() == judge.step()  # moments, their count of steps and the learning rate too
    assert torch.equal(run.buffers.parameters, judge.buffers.parameters)


def test_a_skipped_step_is_reported() -> None:
    run = tiny_trainer(*FAST, "training.non_finite=skip")
    run.step()
    before = run.buffers.parameters.clone()
    run.buffers.parameters[0] = math.nan
    step = run.step()
    assert (step.skip_reason, step.lost_samples, step.lr) == (NOT_FINITE, "8-15", learning_rate(run.config.training, 1))
    assert not math.isfinite(step.loss)
    run.buffers.parameters[0] = before[0]
    assert run.step().skip_reason == DONE


def test_too_many_steps_in_a_row_that_are_not_finite_stop_the_run() -> None:
    run = tiny_trainer(*FAST, "training.non_finite=skip", "training.max_skips=3")
    run.buffers.parameters[0] = math.nan
    run.step()
    run.step()
    with pytest.raises(RunFailed, match="iteration 3: loss nan, .* not finite, 3 times in a row"):
        run.step()


def test_a_spike_restores_weights_and_optimiser_and_skips_the_samples_since_the_copy() -> None:
    run, judge = tiny_trainer(*FAST, *ROLLBACK), tiny_trainer(*FAST)
    for _ in range(4):
        run.step()
        judge.step()
    run.step()  # one more, which will be undone
    run.buffers.parameters.mul_(10.0)
    spike = run.step()
    assert (spike.skip_reason, spike.returned_to, spike.lost_samples) == (SPIKE, 4, "32-47")
    assert torch.equal(run.buffers.parameters, judge.buffers.parameters)
    assert (run.iteration, run.consumed_samples) == (6, 48)
    follow(judge, run)
    for _ in range(3):
        assert run.step() == judge.step()
    assert torch.equal(run.buffers.parameters, judge.buffers.parameters)
    assert run.copy_bytes >= 3 * 4 * run.buffers.parameters.numel()


def test_too_many_rollbacks_to_the_same_copy_stop_the_run() -> None:
    run = tiny_trainer(*FAST, *ROLLBACK, "training.max_skips=2")
    for _ in range(4):
        run.step()
    for _ in range(2):
        run.buffers.parameters.mul_(10.0)
        assert run.step().returned_to == 4
    run.buffers.parameters.mul_(10.0)
    with pytest.raises(RunFailed, match="iteration 7: loss .* is above .* gone back 2 times"):
        run.step()


def test_without_rollback_no_copy_is_made_and_no_loss_is_a_spike() -> None:
    run = tiny_trainer(*FAST, "training.spike_window=2", "training.spike_ratio=1.1")
    for _ in range(3):
        run.step()
    run.buffers.parameters.mul_(10.0)
    assert run.step().skip_reason == DONE and run.copy_bytes == 0


@pytest.mark.parametrize(
    "deviations, ratio, limit", [(3.0, None, 4.0 + 3.0 * math.sqrt(2.0)), (None, 1.5, 6.0), (3.0, 1.5, 6.0)]
)
def test_the_limit_is_by_deviations_or_by_ratio_of_the_last_losses(
    deviations: "float | None", ratio: "float | None", limit: float
) -> None:
    window = LossWindow(4, deviations, ratio)
    for loss in (100.0, 2.0, 4.0, 4.0):
        assert window.limit() is None
        window.add(loss)
    window.add(6.0)  # 100 is forgotten
    assert window.limit() == pytest.approx(limit)


def test_losses_of_steps_that_were_undone_are_forgotten() -> None:
    window = LossWindow(3, 6.0, None)
    for loss in (1.0, 2.0, 3.0):
        window.add(loss)
    window.save()
    before = window.limit()
    window.add(50.0)
    window.restore()
    assert window.limit() == before


def test_a_bad_gradient_on_any_rank_makes_the_step_not_finite() -> None:
    health = Health(TrainingConfig(non_finite="skip"))
    assert health.judge(1, 2.0, 1.0, bad_ranks=0) == DONE
    assert health.judge(2, 2.0, 1.0, bad_ranks=1) == NOT_FINITE


@pytest.mark.parametrize(
    "overrides, message",
    [
        (("training.rollback_every=101",), "rollback_every: 101: must be at most training.spike_window.* 1 to 100"),
        (("training.rollback_every=5", "training.spike_deviations=null"), "needs training.spike_deviations or"),
        (("training.decay_fraction=1.5",), "decay_fraction: 1.5: is a share"),
    ],
)
def test_settings_that_cannot_work_are_refused(overrides: Tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_config(*overrides)
