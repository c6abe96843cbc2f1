"""Tests of the training step on one rank."""

from __future__ import annotations

from typing import List

import pytest
import torch

from fugaku_gpt.comm import ProcessGrid
from fugaku_gpt.errors import RunFailed
from fugaku_gpt.training.failure import is_out_of_memory
from fugaku_gpt.training.schedule import learning_rate
from fugaku_gpt.training.trainer import Trainer
from tests.support.text import ByteSamples
from tests.support.tiny import tiny_config
from tests.training.trainers import tiny_trainer


def losses(run: Trainer, steps: int) -> List[float]:
    return [run.step().loss for _ in range(steps)]


def test_the_loss_falls_on_real_text() -> None:
    run = tiny_trainer("training.lr=5e-3", "training.micro_batch=8")
    before = run.validate()
    losses(run, 30)
    assert run.validate() < before - 1.0
    assert run.iteration == 30 and run.consumed_samples == 30 * 8


def test_equal_seeds_give_equal_runs_bit_for_bit_and_other_seeds_do_not() -> None:
    assert losses(tiny_trainer(), 4) == losses(tiny_trainer(), 4)
    assert losses(tiny_trainer("training.seed=2"), 4) != losses(tiny_trainer(), 4)


def test_the_micro_batch_does_not_change_the_curve() -> None:
    size_1, size_8 = (
        losses(tiny_trainer("training.dtype=float64", f"training.micro_batch={size}"), 5) for size in (1, 8)
    )
    assert size_1 == pytest.approx(size_8, rel=1e-12)


def test_gradients_are_means_and_clipped_to_the_norm() -> None:
    free, clipped = tiny_trainer("training.clip_grad=0"), tiny_trainer("training.clip_grad=0.1")
    free_step, clipped_step = free.step(), clipped.step()
    assert clipped_step.grad_norm == pytest.approx(free_step.grad_norm) and free_step.grad_norm > 0.1
    for run, norm in ((free, free_step.grad_norm), (clipped, 0.1)):  # after the first step, moments are gradients
        moments = [first / (1.0 - run.config.training.beta1) for first, _ in run._optimizer.moments]
        assert float(torch.cat(moments).norm()) == pytest.approx(norm, rel=1e-5)


def test_a_gradient_that_is_not_finite_stops_before_the_parameters_change() -> None:
    run = tiny_trainer()
    run.step()
    before = run.buffers.parameters.clone()
    before[0] = run.buffers.parameters[0] = float("inf")
    with pytest.raises(RunFailed, match="iteration 2: loss .* not finite"):
        run.step()
    assert torch.equal(run.buffers.parameters[1:], before[1:]) and run.iteration == 1


def test_validation_changes_nothing_and_repeats_itself() -> None:
    run = tiny_trainer()
    first = run.validate()
    step = run.step().loss
    assert tiny_trainer().step().loss == step
    other = tiny_trainer()
    assert other.validate() == first == other.validate()


def test_out_of_memory_is_distinguished_from_other_failures() -> None:
    assert is_out_of_memory(MemoryError())
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("shape mismatch"))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing_although_the_loss_is_finite(poison: float) -> None:
    run = tiny_trainer("training.micro_batch=8")
    run.step()
    before, seen = run.buffers.parameters.clone(), (run.iteration, run.consumed_samples)
    handle = run.model_chunks[0].final_norm.bias.register_hook(lambda gradient: gradient * poison)
    with pytest.raises(RunFailed, match=r"iteration 2: loss [0-9.]+, gradient norm (nan|inf): not finite"):
        run.step()
    assert torch.equal(run.buffers.parameters, before) and (run.iteration, run.consumed_samples) == seen
    handle.remove()
    untouched = tiny_trainer("training.micro_batch=8")
    untouched.step()
    assert run.step() == untouched.step()  # nor have the optimiser's moments seen it


@pytest.mark.parametrize("micro_batch", [2, 4])
def test_every_micro_batch_gives_the_same_gradients(micro_batch: int) -> None:
    settings = ("training.dtype=float64", "training.clip_grad=0")
    size_1, larger = tiny_trainer(*settings), tiny_trainer(*settings, f"training.micro_batch={micro_batch}")
    size_1.step()
    larger.step()
    scale = float(size_1.buffers.gradients.abs().max())
    assert float((size_1.buffers.gradients - larger.buffers.gradients).abs().max()) <= 1e-12 * scale


def test_a_step_uses_the_schedule_s_rate_and_moves_the_parameters() -> None:
    run = tiny_trainer("training.warmup_iterations=3", "training.iterations=5", "training.micro_batch=8")
    rates = []
    for _ in range(6):  # one more than the schedule is long
        before = run.buffers.parameters.clone()
        rates.append(run.step().lr)
        assert not torch.equal(run.buffers.parameters, before)
    assert rates == [learning_rate(run.config.training, iteration) for iteration in range(6)]


def test_validation_without_validation_samples_is_refused() -> None:
    config = tiny_config()
    run = Trainer(config, ProcessGrid.alone(), ByteSamples(config.model.seq_len))
    with pytest.raises(ValueError, match="without validation samples"):
        run.validate()


def test_padding_of_the_vocabulary_and_gaps_between_tensors_stay_zero() -> None:
    run = tiny_trainer("training.micro_batch=8", "training.lr=1e-2")
    losses(run, 5)
    model = run.config.model
    assert float(run.model_chunks[0].token_embedding.weight[model.vocab_size :].detach().abs().max()) == 0.0
    used = torch.zeros_like(run.buffers.parameters, dtype=torch.bool)
    for placement in run.buffers.placements:
        used[placement.start : placement.start + placement.size] = True
    assert float(run.buffers.parameters[~used].abs().sum()) == 0.0
