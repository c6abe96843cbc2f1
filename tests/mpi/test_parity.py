"""Every layout is the same training: weights, losses, norms and every gradient equal those of one rank."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Dict, List, Optional, Tuple

import pytest
import torch

from fugaku_gpt.comm import Communicator, ProcessGrid
from fugaku_gpt.config import LayoutConfig
from fugaku_gpt.model import attention
from fugaku_gpt.parallel import cross_entropy
from fugaku_gpt.records.run import MetricsWriter, RunDirectory
from fugaku_gpt.training.log import TrainingLog
from fugaku_gpt.training.run import run_loop
from fugaku_gpt.training.trainer import Step, Trainer
from tests.support.text import ByteSamples
from tests.support.tiny import tiny_config

STEPS = 5
# dp, tp, pp and what else is switched on; sequence parallelism and recompute are in test_sequence_recompute.py
LAYOUTS: List[Tuple[int, int, int, Tuple[str, ...]]] = [
    (1, 1, 1, ()),
    (1, 1, 1, ("schedule=interleaved", "chunks=4")),
    (2, 1, 1, ()),
    (2, 1, 1, ("zero=1",)),
    (1, 2, 1, ()),
    (1, 1, 2, ()),
    (1, 1, 2, ("schedule=gpipe", "split=[3,1]")),
    (1, 1, 2, ("schedule=interleaved", "chunks=2")),
    (2, 2, 1, ("zero=1",)),
    (4, 1, 1, ()),
    (4, 1, 1, ("zero=1",)),
    (4, 1, 1, ("hierarchical_sum=true",)),
    (4, 1, 1, ("zero=1", "hierarchical_sum=true")),
    (1, 4, 1, ()),
    (2, 1, 2, ("zero=1", "order=pp,dp,tp")),
    (1, 2, 2, ("order=dp,pp,tp",)),
    (1, 1, 4, ("schedule=gpipe",)),
    (1, 1, 4, ()),
    (4, 2, 1, ("order=pp,dp,tp",)),
    (2, 4, 1, ("zero=1",)),
    (2, 2, 2, ()),
    (2, 2, 2, ("zero=1", "schedule=interleaved", "chunks=2", "order=dp,tp,pp")),
    (4, 1, 2, ("zero=1", "schedule=gpipe")),
    (2, 1, 4, ("zero=1",)),
    (4, 2, 1, ("zero=1", "hierarchical_sum=true", "order=dp,tp,pp")),
    (8, 1, 1, ("hierarchical_sum=true",)),
    (1, 2, 4, ()),
]
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}


def trainer_of(world: Optional[Communicator], dtype: str, *settings: str) -> Trainer:
    """The tiny run, on all ranks of a world or, without one, on this rank alone."""
    # AdamW divides by the root of a gradient's square: with its usual epsilon, what is rounding in a near-zero gradient
    # is a whole step of the weight
    config = tiny_config("model.layers=4", "training.eps=1e-5", f"training.dtype={dtype}", *settings)
    # nodes of two ranks, for the sums that go by nodes
    grid = ProcessGrid(world, config.layout, world.rank // 2) if world is not None else ProcessGrid.alone()
    samples = ByteSamples(config.model.seq_len)
    return Trainer(config, grid, samples, samples)


def whole_tensors(trainer: Trainer, flat: torch.Tensor) -> Dict[str, torch.Tensor]:
    """The logical tensors of the model that ``flat`` holds slices of, without vocabulary padding; collective."""
    tp = trainer.grid.tp
    whole = {}
    for placement in trainer.buffers.placements:
        spec = placement.spec
        part = flat[placement.start : placement.start + placement.size].view(spec.local_shape(tp.size)).clone()
        if spec.tp_dim is None:
            whole[spec.name] = part
        else:
            parts = tp.all_gather(part)
            whole[spec.name] = torch.cat([parts[rank] for rank in range(tp.size)], dim=spec.tp_dim)[: spec.rows]
    return whole


def largest_difference(ours: Dict[str, torch.Tensor], judge: Dict[str, torch.Tensor]) -> float:
    """Largest difference of any entry, relative to the largest entry of its tensor."""
    assert set(ours) == set(judge)
    worst = 0.0
    for name, tensor in ours.items():
        assert torch.isfinite(tensor).all() and torch.isfinite(judge[name]).all(), name
        scale = float(judge[name].abs().max())
        difference = float((tensor - judge[name]).abs().max())
        assert scale > 0 or difference == 0, name
        worst = max(worst, difference / scale if scale else 0.0)
    return worst


def summed_gradients(trainer: Trainer) -> Dict[str, torch.Tensor]:
    """This stage's gradients as the optimiser saw them, whole; under ZeRO each replica has its share. Collective."""
    return whole_tensors(trainer, assembled(trainer))


def assembled(trainer: Trainer) -> torch.Tensor:
    """The flat gradients with every replica's share in its place."""
    shards = trainer.grid.dp.size if trainer.config.layout.zero else 1
    flat = torch.zeros_like(trainer.buffers.gradients)
    for owned in trainer.buffers.layout.owned(trainer.grid.replicas.rank if shards > 1 else 0, shards):
        flat[owned.parameters] = trainer.buffers.gradients[owned.gradients]
    if shards > 1:
        trainer.grid.dp.all_reduce(flat)
    return flat


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    "layout", LAYOUTS, ids=lambda layout: f"dp{layout[0]}-tp{layout[1]}-pp{layout[2]}-" + "-".join(layout[3])
)
def test_a_layout_trains_as_one_rank_does(
    world: Communicator, layout: Tuple[int, int, int, Tuple[str, ...]], dtype: str
) -> None:
    dp, tp, pp, more = layout
    if dp * tp * pp != world.size:
        pytest.skip("another number of ranks")
    words = [f"dp={dp}", f"tp={tp}", f"pp={pp}", *more]
    ours = trainer_of(world, dtype, *(f"layout.{word}" for word in words))
    judge = trainer_of(None, dtype)
    theirs = whole_tensors(judge, judge.buffers.parameters)
    for name, tensor in whole_tensors(ours, ours.buffers.parameters).items():
        assert torch.equal(tensor, theirs[name]), name
    errors: List[Tuple[float, float, float]] = []
    for _ in range(STEPS):
        step, judged = ours.step(), judge.step()
        gradients, theirs = summed_gradients(ours), summed_gradients(judge)
        worst = largest_difference(gradients, {name: theirs[name] for name in gradients})
        errors.append((abs(step.loss / judged.loss - 1), abs(step.grad_norm / judged.grad_norm - 1), worst))
    theirs = whole_tensors(judge, judge.buffers.parameters)
    mine = whole_tensors(ours, ours.buffers.parameters)
    weights = largest_difference(mine, {name: theirs[name] for name in mine})
    validation = abs(ours.validate() / judge.validate() - 1)
    figures = torch.tensor([*(max(column) for column in zip(*errors)), weights, validation], dtype=torch.float64)
    world.all_reduce(figures, "max")
    if world.rank == 0:
        loss, norm, gradient, weights, validation = figures.tolist()
        print(
            f"\nparity {' '.join(words)} {dtype}: loss {loss:.1e} norm {norm:.1e} gradients {gradient:.1e} "
            f"weights {weights:.1e} validation {validation:.1e}"
        )
    assert float(figures.max()) <= TOLERANCE[dtype]


@pytest.mark.parametrize("layout", [(1, 2), (2, 2), (1, 4)], ids=lambda layout: f"dp{layout[0]}-tp{layout[1]}")
def test_long_sequences_and_ranks_of_padding_alone_train_as_one_rank_does(
    world: Communicator, layout: Tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    dp, tp = layout
    if dp * tp != world.size:
        pytest.skip("another number of ranks")
    monkeypatch.setattr(attention, "FUSED_FROM_TOKENS", 1)  # the kernel of long sequences, where this PyTorch has it
    monkeypatch.setattr(
        cross_entropy.vocab_parallel_cross_entropy, "__defaults__", (5,)
    )  # several chunks, the last short
    settings = ["training.dtype=float64", "model.attention_dropout=0", "model.vocab_multiple=256"]
    trainers = []
    for grid in (ProcessGrid(world, LayoutConfig(dp=dp, tp=tp)), ProcessGrid.alone()):
        config = tiny_config(*settings, f"layout.dp={grid.layout.dp}", f"layout.tp={grid.layout.tp}")
        trainers.append(Trainer(config, grid, ByteSamples(config.model.seq_len)))
    ours, judge = trainers
    for _ in range(2):
        assert abs(ours.step().loss / judge.step().loss - 1) <= 1e-12
        gradients = [whole_tensors(t, t.buffers.gradients) for t in (ours, judge)]
        assert largest_difference(gradients[0], gradients[1]) <= 1e-12


def test_the_slowest_rank_s_time_is_the_iteration_s(world: Communicator, tmp_path: Path) -> None:
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
