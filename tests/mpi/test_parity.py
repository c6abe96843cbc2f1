"""Tests that every layout trains alike: weights, losses, norms and every gradient equal those of one rank.

What is compared, and why AdamW's epsilon is 1e-4 in float32. Gradients are held to 1e-12 in float64 and 1e-5 in
float32, relative to the largest entry of their tensor, and so are the weights after five steps. AdamW's first steps are
close to lr * sign(gradient): where the exact gradient is 0 or nearly so, g / (|g| + eps) turns what is nothing but
rounding, some 1e-9 in float32, into a tenth of a full step with eps = 1e-8, whose sign depends on the order of sums. So
weights of float32 are up to 2e-5 apart where their gradients are 1e-6 apart, and more is no error of a layout: one rank
with another micro-batch shows the same. With eps = 1e-5 they are up to 4e-6 apart on one processor and 1.1e-5 on
another, whose products round otherwise; with 1e-4, still far below most gradients, up to 1.3e-6: there the bar of 1e-5
judges layouts and not roundings. In float64 rounding is far below any epsilon, and the usual one is kept.
"""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Tuple

import pytest
import torch

from fugaku_gpt.comm import Communicator, ProcessGrid
from fugaku_gpt.config import LayoutConfig
from fugaku_gpt.kernels import attention_tiling as blocks
from fugaku_gpt.parallel import cross_entropy
from fugaku_gpt.records.metrics import MetricsWriter
from fugaku_gpt.records.run import RunDirectory
from fugaku_gpt.training.health import NOT_FINITE, SPIKE
from fugaku_gpt.training.log import TrainingLog
from fugaku_gpt.training.run import run_loop
from fugaku_gpt.training.trainer import Step, Trainer
from tests.mpi import trained
from tests.mpi.cases import BASE, WIDE, config_of, is_long, training_of
from tests.mpi.trained import (
    NOT_FINITE_STEP,
    SPIKE_STEP,
    STEPS,
    assert_same_steps,
    curve_distance,
    full_tensors,
    largest_difference,
    largest_of_all,
    reference_of,
    train,
)
from tests.support.text import ByteSamples
from tests.support.tiny import tiny_config

TOLERANCE = {"float64": 1e-12, "float32": 1e-5}
# Norms of queries and keys make numbers of size 1 of those of size 0.1 that the small initial weights give, and of the
# roundings ten times larger ones: seen 1.6e-5 in float32 after four steps, and 3e-14 in float64.
MAGNIFIED = 4
TYPES = {"float64": ("training.dtype=float64",), "float32": ("training.dtype=float32", "training.eps=1e-4")}


def trainer_of(world: Communicator, dtype: str, *settings: str) -> Trainer:
    """Returns a trainer of the tiny run on all ranks of a world."""
    return trained.trainer_of(world, tiny_config(*BASE, f"training.dtype={dtype}", *settings))


@pytest.mark.parametrize(
    ("case", "dtype"),
    [pytest.param(case, dtype, marks=[pytest.mark.long] * is_long(case, dtype)) for case in WIDE for dtype in TYPES],
)
def test_a_layout_trains_like_a_single_rank(world: Communicator, case: str, dtype: str) -> None:
    config = config_of(case, *TYPES[dtype])
    if config.layout.ranks != world.size:
        pytest.skip("another number of ranks")
    ours = train(trained.trainer_of(world, config))
    reference = reference_of(world, *BASE, *training_of(case), *TYPES[dtype])
    assert all(torch.equal(tensor, reference.initial[name]) for name, tensor in ours.initial.items())
    assert_same_steps(ours, reference)
    assert ("rollback" in case) == (reference.steps[SPIKE_STEP - 1].skip_reason == SPIKE)
    assert ("leave-step" in case) == (reference.steps[NOT_FINITE_STEP - 1].skip_reason == NOT_FINITE)
    figures = largest_of_all(
        world,
        [
            *curve_distance(ours, reference),
            max(
                largest_difference(tensors, expected) for tensors, expected in zip(ours.gradients, reference.gradients)
            ),
            largest_difference(ours.weights, reference.weights),
        ],
    )
    if world.rank == 0:
        loss, norm, validation, gradients, weights = figures
        print(
            f"\nparity {case or 'one rank'}, {dtype}: loss {loss:.1e} norm {norm:.1e} gradients {gradients:.1e} "
            f"weights {weights:.1e} validation {validation:.1e}"
        )
    assert max(figures) <= TOLERANCE[dtype] * (MAGNIFIED if config.model.qk_norm and dtype == "float32" else 1)


@pytest.mark.parametrize("layout", [(1, 2), (2, 2), (1, 4)], ids=lambda layout: f"dp{layout[0]}-tp{layout[1]}")
def test_long_sequences_and_ranks_of_padding_alone_train_like_a_single_rank(
    world: Communicator, layout: Tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    dp, tp = layout
    if dp * tp != world.size:
        pytest.skip("another number of ranks")
    monkeypatch.setitem(blocks._QUERIES_PER_BLOCK, False, 7)  # several blocks, the last short
    monkeypatch.setattr(
        cross_entropy.vocab_parallel_cross_entropy, "__defaults__", (5,)
    )  # several chunks, the last short
    settings = ["training.dtype=float64", "model.attention_dropout=0", "model.vocab_multiple=256"]
    trainers = []
    for grid in (ProcessGrid(world, LayoutConfig(dp=dp, tp=tp)), ProcessGrid.alone()):
        config = tiny_config(*settings, f"layout.dp={grid.layout.dp}", f"layout.tp={grid.layout.tp}")
        trainers.append(Trainer(config, grid, ByteSamples(config.model.seq_len)))
    ours, reference = trainers
    for _ in range(2):
        assert abs(ours.step().loss / reference.step().loss - 1) <= 1e-12
        gradients = [full_tensors(t, t.buffers.gradients) for t in (ours, reference)]
        assert largest_difference(gradients[0], gradients[1]) <= 1e-12


def test_an_iteration_takes_the_time_of_the_slowest_rank(world: Communicator, tmp_path: Path) -> None:
    if world.size != 2:
        pytest.skip("two ranks are enough")
    delay = 0.05
    config = tiny_config("layout.dp=2", "training.iterations=4")
    trainer = Trainer(config, ProcessGrid(world, LayoutConfig(dp=2)), ByteSamples(config.model.seq_len))
    plain_step = trainer.step

    def slow_step() -> Step:
        step = plain_step()
        if world.rank == 1:
            time.sleep(delay)  # after the last collective of the step, as a slow optimiser would
        return step

    trainer.step = slow_step  # type: ignore[method-assign]
    directory = RunDirectory(tmp_path)
    log = TrainingLog(config, MetricsWriter(directory.metrics_file), io.StringIO()) if world.rank == 0 else None
    run_loop(trainer, log)
    if world.rank == 0:
        assert [line["seconds"] >= delay for line in directory.metrics("iteration")] == [True] * 4


def test_the_micro_batch_does_not_change_the_curve(world: Communicator) -> None:
    if world.size != 2:
        pytest.skip("two ranks are enough")
    small, large = (trainer_of(world, "float64", "layout.dp=2", f"training.micro_batch={size}") for size in (1, 4))
    for _ in range(STEPS):
        assert abs(small.step().loss / large.step().loss - 1) <= 1e-12


def test_replicas_hold_equal_weights_bit_for_bit_after_training(world: Communicator) -> None:
    if world.size == 1:
        pytest.skip("one rank has no replicas")
    trainer = trainer_of(world, "float32", f"layout.dp={world.size}")
    for _ in range(STEPS):
        trainer.step()
    copies = trainer.grid.dp.all_gather(trainer.buffers.parameters)
    assert all(torch.equal(copies[0], copy) for copy in copies)


def test_a_loss_that_is_not_finite_stops_every_rank_at_the_same_iteration(world: Communicator) -> None:
    from fugaku_gpt.errors import RunFailed

    trainer = trainer_of(world, "float32", f"layout.dp={world.size}")
    trainer.step()
    if world.rank == world.size - 1:
        trainer.buffers.parameters[0] = float("nan")
    with pytest.raises(RunFailed, match="iteration 2"):
        trainer.step()
