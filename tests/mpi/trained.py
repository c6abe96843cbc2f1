"""Five steps of training, kept whole: what a layout is compared by with one rank."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Callable, Dict, List, Optional, Tuple

import torch

from fugaku_gpt.comm import Communicator, ProcessGrid
from fugaku_gpt.config import RunConfig
from fugaku_gpt.layout.grid import coordinates_of
from fugaku_gpt.training.health import DONE, SPIKE
from fugaku_gpt.training.trainer import Samples, Step, Trainer
from tests.support.text import ByteSamples
from tests.support.tiny import tiny_config

STEPS = 5
NOT_FINITE_STEP, SPIKE_STEP = 3, 4
NODE_REPLICAS = 2  # that are told that they share a node, for the sums that go by nodes

Tensors = Dict[str, torch.Tensor]


@dataclass
class Trained:
    """A run of a few steps. Tensors are whole ones of the model, by name: all, or those of this rank's stage.

    Attributes:
        gradients: of each step, as the optimiser saw them; of a step that was not finite, none.
        initial, weights: before and after; with 16-bit types they are rounded.
        validation: the loss of validation afterwards.
    """

    initial: Tensors
    steps: List[Step] = field(default_factory=list)
    gradients: List[Tensors] = field(default_factory=list)
    weights: Tensors = field(default_factory=dict)
    validation: float = math.nan


def trainer_of(
    world: Optional[Communicator],
    config: RunConfig,
    samples: Optional[Samples] = None,
    valid: Optional[Samples] = None,
) -> Trainer:
    """On all ranks of a world or, without one, on this rank alone; on bytes, where no samples are given."""
    samples = samples or ByteSamples(config.model.seq_len)
    if world is None:
        return Trainer(config, ProcessGrid.alone(), samples, valid or samples)
    place = coordinates_of(world.rank, config.layout, config.layout.order)
    return Trainer(config, ProcessGrid(world, config.layout, place.dp // NODE_REPLICAS), samples, valid or samples)


def train(trainer: Trainer, steps: int = STEPS) -> Trained:
    """So many steps. Where steps that are not finite are left out, the last rank's gradients of one become so; where
    spikes are undone, larger weights make one. Collective."""
    found = Trained(whole_tensors(trainer, trainer.buffers.parameters))
    summed = trainer.reducer.finish

    def spoilt() -> None:
        summed()
        trainer.buffers.gradients.fill_(math.nan)

    world, training = trainer.grid.world, trainer.config.training
    for number in range(1, steps + 1):
        if number == SPIKE_STEP and training.rollback_every is not None:
            trainer.buffers.parameters.mul_(5.0)
        spoils = number == NOT_FINITE_STEP and training.non_finite == "skip"
        trainer.reducer.finish = spoilt if spoils and world.rank == world.size - 1 else summed  # type: ignore[method-assign]
        step = trainer.step()
        found.steps.append(step)
        found.gradients.append(summed_gradients(trainer) if step.skip_reason in (DONE, SPIKE) else {})
    found.weights = whole_tensors(trainer, trainer.buffers.parameters)
    found.validation = trainer.validate()
    trainer.finish()
    return found


def judge_of(world: Communicator, *settings: str) -> Trained:
    """What one rank does by settings of the tiny run that are no layout: the first one, for all. Collective."""
    if settings not in _JUDGES:
        _JUDGES[settings] = _of_first(world, lambda: train(trainer_of(None, tiny_config(*settings))))
    return _JUDGES[settings]


_JUDGES: Dict[Tuple[str, ...], Trained] = {}


def _of_first(world: Communicator, run: Callable[[], Trained]) -> Trained:
    found = run() if world.rank == 0 else Trained({})
    groups = [found.initial, found.weights, *found.gradients]
    told = world.broadcast_json(
        {
            "steps": [asdict(step) for step in found.steps],
            "validation": found.validation,
            "tensors": [[(name, str(x.dtype), list(x.shape)) for name, x in group.items()] for group in groups],
        }
    )
    everywhere: List[Tensors] = []
    for number, group in enumerate(told["tensors"]):
        everywhere.append({})
        for name, dtype, shape in group:
            tensor = groups[number][name] if world.rank == 0 else torch.empty(shape, dtype=_TYPES[dtype])
            world.broadcast(tensor)
            everywhere[-1][name] = tensor
    steps = [Step(**step) for step in told["steps"]]
    return Trained(everywhere[0], steps, everywhere[2:], everywhere[1], told["validation"])


_TYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}


def assert_same_steps(ours: Trained, judge: Trained) -> None:
    """The same batches, learning rates and decisions."""
    told = [
        [(s.samples, s.seq_len, s.lr, bool(s.skip_reason), s.returned_to) for s in run.steps] for run in (ours, judge)
    ]
    assert told[0] == told[1]


def curve_distance(ours: Trained, judge: Trained) -> Tuple[float, float, float]:
    """Largest relative distances of losses, of norms, and of the loss of validation. A spike is made by weights that
    make roundings large, and is undone: of its step only the verdict counts."""
    pairs = [(a, b) for a, b in zip(ours.steps, judge.steps) if b.skip_reason != SPIKE]
    return (
        max(abs(a.loss / b.loss - 1) for a, b in pairs),
        max(abs(a.grad_norm / b.grad_norm - 1) for a, b in pairs if math.isfinite(b.grad_norm)),
        abs(ours.validation / judge.validation - 1),
    )


def whole_tensors(trainer: Trainer, flat: torch.Tensor) -> Tensors:
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


def summed_gradients(trainer: Trainer) -> Tensors:
    """This stage's gradients as the optimiser saw them, whole; under ZeRO each replica has its share. Collective."""
    shards = trainer.grid.dp.size if trainer.config.layout.zero else 1
    flat = torch.zeros_like(trainer.buffers.gradients)
    for owned in trainer.buffers.layout.owned(trainer.grid.replicas.rank if shards > 1 else 0, shards):
        flat[owned.parameters] = trainer.buffers.gradients[owned.gradients]
    if shards > 1:
        trainer.grid.dp.all_reduce(flat)
    return whole_tensors(trainer, flat)


def largest_difference(ours: Tensors, judge: Tensors) -> float:
    """Largest difference of any entry of our tensors, relative to the largest entry of its tensor."""
    worst = 0.0
    for name, tensor in ours.items():
        assert torch.isfinite(tensor).all() and torch.isfinite(judge[name]).all(), name
        scale = float(judge[name].abs().max())
        difference = float((tensor - judge[name]).abs().max())
        assert scale > 0 or difference == 0, name
        worst = max(worst, difference / scale if scale else 0.0)
    return worst


def largest_of_all(world: Communicator, figures: List[float]) -> List[float]:
    """The largest of each over all ranks. Collective."""
    values = torch.tensor(figures, dtype=torch.float64)
    world.all_reduce(values, "max")
    return [float(value) for value in values]
