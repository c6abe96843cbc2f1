"""The training step on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import List

import pytest
import torch

from fugaku_gpt.comm import ProcessGrid
from fugaku_gpt.errors import RunFailed
from fugaku_gpt.records.run import MetricsWriter, RunDirectory
from fugaku_gpt.training.log import TrainingLog
from fugaku_gpt.training.run import is_out_of_memory
from fugaku_gpt.training.startup import collect_environment, describe_environment, prepare_process
from fugaku_gpt.training.trainer import Trainer
from tests.support.text import ByteSamples
from tests.support.tiny import tiny_config


def trainer(*overrides: str) -> Trainer:
    config = tiny_config(*overrides)
    samples = ByteSamples(config.model.seq_len)
    return Trainer(config, ProcessGrid.alone(), samples, samples)


def losses(run: Trainer, steps: int) -> List[float]:
    return [run.step().loss for _ in range(steps)]


def test_the_loss_falls_on_real_text() -> None:
    run = trainer("training.lr=5e-3")
    before = run.validate()
    losses(run, 30)
    assert run.validate() < before - 1.0
    assert run.iteration == 30 and run.consumed_samples == 30 * 8


def test_a_seed_is_a_run_bit_for_bit_and_another_seed_another() -> None:
    assert losses(trainer(), 4) == losses(trainer(), 4)
    assert losses(trainer("training.seed=2"), 4) != losses(trainer(), 4)


def test_the_micro_batch_does_not_change_the_curve() -> None:
    one, eight = (losses(trainer("training.dtype=float64", f"training.micro_batch={size}"), 5) for size in (1, 8))
    assert one == pytest.approx(eight, rel=1e-12)


def test_gradients_are_means_and_clipped_to_the_norm() -> None:
    free, clipped = trainer("training.clip_grad=0"), trainer("training.clip_grad=0.1")
    free_step, clipped_step = free.step(), clipped.step()
    assert clipped_step.grad_norm == pytest.approx(free_step.grad_norm) and free_step.grad_norm > 0.1
    assert float(free.buffers.gradients.norm()) == pytest.approx(free_step.grad_norm, rel=1e-5)
    assert float(clipped.buffers.gradients.norm()) == pytest.approx(0.1, rel=1e-5)


def test_a_gradient_that_is_not_finite_stops_before_the_parameters_change() -> None:
    run = trainer()
    run.step()
    before = run.buffers.parameters.clone()
    before[0] = run.buffers.parameters[0] = float("inf")
    with pytest.raises(RunFailed, match="iteration 2: loss .* not finite"):
        run.step()
    assert torch.equal(run.buffers.parameters[1:], before[1:]) and run.iteration == 1


def test_validation_changes_nothing_and_repeats_itself() -> None:
    run = trainer()
    first = run.validate()
    step = run.step().loss
    assert trainer().step().loss == step
    other = trainer()
    assert other.validate() == first == other.validate()


def test_out_of_memory_is_told_from_other_failures() -> None:
    assert is_out_of_memory(MemoryError())
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("shape mismatch"))


def test_the_start_up_block_says_what_is_running() -> None:
    config = tiny_config("node.freq_mhz=2200")
    environment = collect_environment(config, ProcessGrid.alone().world, prepare_process(1))
    lines = "\n".join(describe_environment(environment))
    assert f"torch {torch.__version__}" in lines and "1 threads on cores" in lines and "MPI " in lines
    assert "toggle freq_mhz=2200: " in lines and environment["ranks"][0]["threads"] == 1


def test_a_logged_iteration_is_a_line_and_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    run = trainer("training.iterations=9")
    directory = RunDirectory(tmp_path)
    log = TrainingLog(run.config, MetricsWriter(directory.metrics_file), sys.stdout)
    step = run.step()
    log.iteration(1, step, 0.5, 3 * 2**20, 7 * 2**20)
    (record,) = directory.metrics("iteration")
    assert record["samples_per_second"] == 16 and record["tokens_per_second"] == 16 * 24
    assert record["loss"] == step.loss and record["consumed_tokens"] == 8 * 24
    assert record["tflops_exact"] > record["tflops_notes"] > 0
    line = capsys.readouterr().out
    assert line.startswith(
        "iteration 1/9 | consumed samples: 8 | consumed tokens: 192 | elapsed time per iteration (s): 0.500"
    )
    assert f"lm loss: {step.loss:.6f}" in line and "rank RSS: 3 MiB | node used: 7 MiB |" in line
