"""Tests of growing batches, skipped steps and loss spikes over pipelines, replicas and ZeRO: all ranks do the same."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
import torch

from fugaku_gpt.comm import Communicator, ProcessGrid
from fugaku_gpt.records.metrics import MetricsWriter
from fugaku_gpt.records.run import RunDirectory
from fugaku_gpt.training.health import NOT_FINITE, SPIKE
from fugaku_gpt.training.log import TrainingLog
from fugaku_gpt.training.meter import Meter
from fugaku_gpt.training.run import run_loop
from fugaku_gpt.training.trainer import Trainer
from tests.support.text import ByteSamples
from tests.support.tiny import tiny_config

LAYOUT = ("layout.dp=2", "layout.pp=2", "layout.zero=1")
TENSORS = ("layout.dp=2", "layout.tp=2", "layout.sequence_parallel=true")
EXACT = ("training.dtype=float64", "training.lr=1e-2")
RAMP = ("training.ramp_start=2", "training.ramp_increment=2", "training.ramp_samples=12")
LENGTHS = ("training.seq_ramp_start=8", "training.seq_ramp_increment=8", "training.seq_ramp_iterations=4")
ROLLBACK = ("training.rollback_every=2", "training.spike_window=3", "training.spike_ratio=1.2")


@pytest.fixture(autouse=True)
def four_ranks(world: Communicator) -> None:
    if world.size != 4:
        pytest.skip("four ranks are what it takes")


def trainer(world: Communicator, *overrides: str, alone: bool = False) -> Trainer:
    config = tiny_config(*EXACT, *overrides)
    grid = ProcessGrid.alone() if alone else ProcessGrid(world, config.layout)
    samples = ByteSamples(config.model.seq_len)
    return Trainer(config, grid, samples, samples)


def assert_replicas_are_equal(run: Trainer) -> None:
    copies = run.grid.dp.all_gather(run.buffers.parameters)
    assert all(torch.equal(copies[0], copy) for copy in copies)


@pytest.mark.parametrize("layout", [LAYOUT, TENSORS], ids=["dp2-pp2-zero1", "dp2-tp2-sp"])
def test_the_curve_of_a_growing_batch_is_that_of_a_single_rank(world: Communicator, layout: "tuple[str, ...]") -> None:
    settings = (*RAMP, *LENGTHS, "training.skip_samples=[3, 9-12]")
    ours, reference = trainer(world, *layout, *settings), trainer(world, *settings, alone=True)
    sizes = []
    for _ in range(6):
        a, b = ours.step(), reference.step()
        sizes.append((a.samples, a.seq_len))
        assert (a.samples, a.seq_len, a.lr) == (b.samples, b.seq_len, b.lr)
        assert a.loss == pytest.approx(b.loss, rel=1e-12) and a.grad_norm == pytest.approx(b.grad_norm, rel=1e-11)
    assert sizes == [(2, 8), (2, 8), (4, 16), (6, 16), (8, 24), (8, 24)]
    assert (ours.consumed_samples, ours.consumed_tokens) == (reference.consumed_samples, reference.consumed_tokens)
    assert ours.validate() == pytest.approx(reference.validate(), rel=1e-12)


def test_a_gradient_that_is_not_finite_on_a_single_rank_is_skipped_on_all(world: Communicator) -> None:
    run = trainer(world, *LAYOUT, "training.non_finite=skip")
    run.step()
    before = run.buffers.parameters.clone()
    finish = run.reducer.finish

    def finish_with_nan() -> None:
        finish()
        if world.rank == world.size - 1:  # after all sums: no other rank sees it
            run.buffers.gradients.fill_(math.nan)

    run.reducer.finish = finish_with_nan  # type: ignore[method-assign]
    assert run.step().skip_reason == NOT_FINITE
    assert torch.equal(run.buffers.parameters, before) and (run.iteration, run.consumed_samples) == (2, 16)
    run.reducer.finish = finish  # type: ignore[method-assign]
    reference = trainer(world, *LAYOUT)
    reference.step()
    reference.iteration, reference.consumed_samples = run.iteration, run.consumed_samples
    assert run.step() == reference.step()
    assert_replicas_are_equal(run)


def test_a_nan_that_no_norm_counts_is_detected(world: Communicator) -> None:
    run = trainer(world, *TENSORS, "training.non_finite=skip")
    coordinates = run.grid.coordinates
    # counted by the first of tp and dp only
    placement = next(p for p in run.buffers.placements if p.spec.tp_dim is None)
    finish = run.reducer.finish

    def finish_with_nan() -> None:
        finish()
        if (coordinates.dp, coordinates.tp) == (1, 1):
            run.buffers.gradients[placement.start] = math.nan

    run.reducer.finish = finish_with_nan  # type: ignore[method-assign]
    step = run.step()
    assert step.skip_reason == NOT_FINITE and math.isfinite(step.loss) and math.isfinite(step.grad_norm)


@pytest.mark.parametrize("zero", [0, 1])
def test_all_ranks_roll_back_from_a_spike_together(world: Communicator, zero: int) -> None:
    layout = (*LAYOUT, f"layout.zero={zero}")
    run, reference = trainer(world, *layout, *ROLLBACK), trainer(world, *layout)
    for _ in range(4):
        run.step()
        reference.step()
    run.step()
    run.buffers.parameters.mul_(10.0)
    step = run.step()
    assert (step.skip_reason, step.returned_to, step.lost_samples) == (SPIKE, 4, "32-47")
    assert torch.equal(run.buffers.parameters, reference.buffers.parameters)
    assert_replicas_are_equal(run)
    reference.iteration, reference.consumed_samples = run.iteration, run.consumed_samples
    for _ in range(2):
        assert run.step() == reference.step()
    assert_replicas_are_equal(run)


def test_a_stage_that_finishes_early_idles_until_the_last_finishes(world: Communicator) -> None:
    run = trainer(world, *LAYOUT)
    meter = Meter(run)
    run.step()
    busy, waited = [(6.0, 3.0), (5.0, 1.0)][run.grid.coordinates.pp]  # the second stage is done 3 s before the first
    run.pipeline_seconds, run.waited_seconds = busy + waited, waited
    assert meter.read(1).bubbles == pytest.approx((9 / 6 - 1, 9 / 5 - 1))


def test_the_log_reports_bubbles_batches_and_hidden_communication(world: Communicator, tmp_path: Path) -> None:
    run = trainer(world, *LAYOUT, *RAMP, "training.iterations=6", "training.log_interval=2")
    directory = RunDirectory(tmp_path)
    log = TrainingLog(run.config, MetricsWriter(directory.metrics_file), io.StringIO()) if world.rank == 0 else None
    run_loop(run, log)
    if world.rank == 0:
        lines = directory.metrics("iteration")
        assert [line["global_batch"] for line in lines] == [2, 6, 8]
        assert [line["consumed_samples"] for line in lines] == [4, 14, 30]
        assert [line["bubble_ideal"] for line in lines] == [1 / 1, 1 / 3, 1 / 4]
        # the logits are work for the last stage alone: the other idles longer
        assert all(line["bubble_predicted"] > line["bubble_ideal"] for line in lines)
        assert all(0 <= line["bubble"] <= line["bubble_max"] for line in lines)
        # a cold step, and two that are timed without computation; the parameters of the fourth arrive in the fifth
        assert ["hidden_communication" in line for line in lines] == [False, False, True]
        assert 0 <= lines[2]["hidden_communication"] <= 1
        assert run.health.skipped_steps == 0 and directory.metrics("left_out") == []
