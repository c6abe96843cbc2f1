"""Steps that are left out, loss spikes, samples that are named to be left out, and growing batches, on one rank."""

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
from fugaku_gpt.training.trainer import Samples, Trainer
from tests.support.text import ByteSamples
from tests.support.tiny import tiny_config

FAST = ("training.micro_batch=8", "training.lr=1e-2")
RAMP = ("training.ramp_start=2", "training.ramp_increment=2", "training.ramp_samples=18")
LENGTHS = ("training.seq_ramp_start=8", "training.seq_ramp_increment=8", "training.seq_ramp_iterations=4")
ROLLBACK = ("training.rollback_every=2", "training.spike_window=3", "training.spike_ratio=1.2")


class Recorded:
    """Samples that remember who has been read."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self.read: List[int] = []

    def batch(self, first: int, count: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
        self.read += range(first, first + count)
        return self._samples.batch(first, count)


def trainer(*overrides: str) -> Trainer:
    config = tiny_config(*overrides)
    samples = ByteSamples(config.model.seq_len)
    return Trainer(config, ProcessGrid.alone(), samples, samples)


def poison(run: Trainer) -> None:
    """One gradient of the next step is not finite, although the loss is."""
    handle = run.model_chunks[0].final_norm.bias.register_hook(lambda gradient: gradient * math.nan)
    run.step()
    handle.remove()


def follow(run: Trainer, other: Trainer) -> None:
    """Give ``run`` the place of ``other`` in iterations and samples, without any step."""
    run.iteration, run.consumed_samples = other.iteration, other.consumed_samples


def test_a_ramp_up_uses_each_sample_once_and_counts_what_it_uses() -> None:
    config = tiny_config(*RAMP, *LENGTHS)
    samples = Recorded(ByteSamples(config.model.seq_len))
    run = Trainer(config, ProcessGrid.alone(), samples)
    steps = [run.step() for _ in range(7)]
    assert [step.samples for step in steps] == [2, 2, 2, 4, 4, 6, 8]
    assert [step.seq_len for step in steps] == [8, 8, 16, 16, 24, 24, 24]
    assert samples.read == list(range(28)) and run.consumed_samples == 28
    assert run.consumed_tokens == sum(step.samples * step.seq_len for step in steps)


def test_the_micro_batch_does_not_change_a_curve_whose_batch_grows_and_whose_samples_are_left_out() -> None:
    settings = ("training.dtype=float64", *RAMP, *LENGTHS, "training.skip_samples=[3, 9-12]")
    one, two = (trainer(*settings, f"training.micro_batch={size}") for size in (1, 2))
    for _ in range(5):
        a, b = one.step(), two.step()
        assert (a.samples, a.seq_len) == (b.samples, b.seq_len)
        assert (a.loss, a.grad_norm) == pytest.approx((b.loss, b.grad_norm), rel=1e-12)


def test_a_shorter_sample_is_the_beginning_of_the_same_sample() -> None:
    run = trainer("training.dtype=float64", "model.dropout=0", "model.attention_dropout=0", *LENGTHS)
    tokens = torch.from_numpy(ByteSamples(24).batch(0, 8))
    with torch.no_grad():
        expected = float(run.model_chunks[0](tokens[:, :8], tokens[:, 1:9])) / (8 * 8)
    assert run.step().loss == pytest.approx(expected, rel=1e-12)


def test_validation_has_its_full_batch_whatever_training_has() -> None:
    assert trainer(*RAMP, *LENGTHS).validate() == trainer().validate()


def test_samples_that_are_named_are_not_read_and_their_numbers_stay() -> None:
    config = tiny_config("training.skip_samples=[5-9, 2, 16-30]", "training.micro_batch=4")
    samples = Recorded(ByteSamples(config.model.seq_len))
    run = Trainer(config, ProcessGrid.alone(), samples)
    run.step()
    assert samples.read == [0, 1, 3, 4, 10, 11, 12, 13] and run.consumed_samples == 14
    run.step()
    assert samples.read[8:] == [14, 15, 31, 32, 33, 34, 35, 36] and run.consumed_samples == 37
    assert run.consumed_tokens == 16 * config.model.seq_len


def test_naming_samples_that_are_behind_changes_no_later_choice() -> None:
    config = tiny_config("training.skip_samples=[2-5]")
    samples = Recorded(ByteSamples(config.model.seq_len))
    run = Trainer(config, ProcessGrid.alone(), samples)
    run.consumed_samples = 40
    run.step()
    assert samples.read == list(range(40, 48))


def test_a_step_that_is_not_finite_is_left_out_and_nothing_else_changes() -> None:
    run, judge = trainer(*FAST, "training.non_finite=skip"), trainer(*FAST)
    run.step()
    judge.step()
    before = run.buffers.parameters.clone()
    poison(run)
    assert torch.equal(run.buffers.parameters, before)
    assert (run.iteration, run.consumed_samples, run.health.skipped_steps) == (2, 16, 1)
    follow(judge, run)
    assert run.step() == judge.step()  # moments, their count of steps and the learning rate too
    assert torch.equal(run.buffers.parameters, judge.buffers.parameters)


def test_what_was_left_out_is_told() -> None:
    run = trainer(*FAST, "training.non_finite=skip")
    run.step()
    before = run.buffers.parameters.clone()
    run.buffers.parameters[0] = math.nan
    step = run.step()
    assert (step.skip_reason, step.lost_samples, step.lr) == (NOT_FINITE, "8-15", learning_rate(run.config.training, 1))
    assert not math.isfinite(step.loss)
    run.buffers.parameters[0] = before[0]
    assert run.step().skip_reason == DONE


def test_too_many_steps_in_a_row_that_are_not_finite_stop_the_run() -> None:
    run = trainer(*FAST, "training.non_finite=skip", "training.max_skips=3")
    run.buffers.parameters[0] = math.nan
    run.step()
    run.step()
    with pytest.raises(RunFailed, match="iteration 3: loss nan, .* not finite, 3 times in a row"):
        run.step()


def test_a_spike_brings_back_weights_and_optimiser_and_its_samples_are_behind() -> None:
    run, judge = trainer(*FAST, *ROLLBACK), trainer(*FAST)
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


def test_a_run_that_goes_back_to_the_same_copy_again_and_again_stops() -> None:
    run = trainer(*FAST, *ROLLBACK, "training.max_skips=2")
    for _ in range(4):
        run.step()
    for _ in range(2):
        run.buffers.parameters.mul_(10.0)
        assert run.step().returned_to == 4
    run.buffers.parameters.mul_(10.0)
    with pytest.raises(RunFailed, match="iteration 7: loss .* is above .* gone back 2 times"):
        run.step()


def test_without_rollback_no_copy_is_kept_and_no_loss_is_a_spike() -> None:
    run = trainer(*FAST, "training.spike_window=2", "training.spike_ratio=1.1")
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


def test_every_rank_is_asked_also_one_whose_gradients_nobody_counts() -> None:
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
