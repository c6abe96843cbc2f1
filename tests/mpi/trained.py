"""Records a few steps of training, by which a layout is compared with one rank."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Callable, Dict, List, Optional, Tuple

import torch

from fugaku_gpt.comm import Communicator, ProcessGrid
from fugaku_gpt.config import RunConfig
from fugaku_gpt.layout.grid import coordinates_of
from fugaku_gpt.training.health import DONE, SPIKE
from fugaku_gpt.training.trainer import SizeFigures, Step, Trainer
from fugaku_gpt.training.workload import Source
from tests.support.text import ByteSamples
from tests.support.tiny import tiny_config

STEPS = 5
SMALLEST_BATCH = 4  # samples: the first size of a batch ramp in ``cases.py``
NOT_FINITE_STEP, SPIKE_STEP = 3, 4
NODE_REPLICAS = 2  # replicas that count as sharing a node, for hierarchical sums

Tensors = Dict[str, torch.Tensor]


@dataclass
class Trained:
    """A run of a few steps. Tensors are the model's full ones, by name: all, or those of this rank's stage.

    Attributes:
        gradients: of each step, as the optimiser saw them; of a step that was not finite, none.
        initial, weights: before and after; with 16-bit types they are rounded.
        validation: the loss of validation afterwards.
        validated: its sums by the size of its samples.
    """

    initial: Tensors
    steps: List[Step] = field(default_factory=list)
    gradients: List[Tensors] = field(default_factory=list)
    weights: Tensors = field(default_factory=dict)
    validation: float = math.nan
    validated: List[SizeFigures] = field(default_factory=list)


def trainer_of(
    world: Optional[Communicator],
    config: RunConfig,
    samples: Optional[Source] = None,
    valid: Optional[Source] = None,
) -> Trainer:
    """Returns a trainer on all ranks of a world or, without one, on this rank alone; it trains on bytes by default."""
    samples = samples or ByteSamples(config.model.seq_len)
    if world is None:
        return Trainer(config, ProcessGrid.alone(), samples, valid or samples)
    coordinates = coordinates_of(world.rank, config.layout, config.layout.order)
    return Trainer(
        config,
        ProcessGrid(world, config.layout, coordinates.dp // NODE_REPLICAS, config.kv_copies),
        samples,
        valid or samples,
    )


def train(trainer: Trainer, steps: int = STEPS) -> Trained:
    """Trains ``steps`` steps. Where steps that are not finite are skipped, the last rank's gradients of one step become
    NaN; where spikes are rolled back, larger weights make one. Collective."""
    trained = Trained(full_tensors(trainer, trainer.buffers.parameters))
    finish = trainer.reducer.finish

    def finish_with_nan() -> None:
        finish()
        trainer.buffers.gradients.fill_(math.nan)

    world, training = trainer.grid.world, trainer.config.training
    for number in range(1, steps + 1):
        if number == SPIKE_STEP and training.rollback_every is not None:
            trainer.buffers.parameters.mul_(5.0)
        is_spoilt = number == NOT_FINITE_STEP and training.non_finite == "skip"
        trainer.reducer.finish = finish_with_nan if is_spoilt and world.rank == world.size - 1 else finish  # type: ignore[method-assign]
        step = trainer.step()
        trained.steps.append(step)
        trained.gradients.append(summed_gradients(trainer) if step.skip_reason in (DONE, SPIKE) else {})
    trained.weights = full_tensors(trainer, trainer.buffers.parameters)
    trained.validation = trainer.validate()
    trained.validated = trainer.validated
    trainer.finish()
    return trained


def reference_of(world: Communicator, *settings: str) -> Trained:
    """Trains the tiny run with these settings, none of a layout, on rank 0; returns it on all ranks. Collective.

    Its micro-batch is as large as the smallest batch, for the other ranks wait meanwhile; the curve is the same (see
    ``test_the_micro_batch_does_not_change_the_curve``).
    """
    if settings not in _REFERENCES:
        config = tiny_config(*settings, f"training.micro_batch={SMALLEST_BATCH}")
        _REFERENCES[settings] = of_first(world, lambda: train(trainer_of(None, config)))
    return _REFERENCES[settings]


_REFERENCES: Dict[Tuple[str, ...], Trained] = {}


def of_first(world: Communicator, run: Callable[[], Trained]) -> Trained:
    """Returns on all ranks what rank 0 has trained; collective."""
    trained = run() if world.rank == 0 else Trained({})
    groups = [trained.initial, trained.weights, *trained.gradients]
    record = world.broadcast_json(
        {
            "steps": [asdict(step) for step in trained.steps],
            "validation": trained.validation,
            "validated": trained.validated,
            "tensors": [[(name, str(x.dtype), list(x.shape)) for name, x in group.items()] for group in groups],
        }
    )
    everywhere: List[Tensors] = []
    for number, group in enumerate(record["tensors"]):
        everywhere.append({})
        for name, dtype, shape in group:
            tensor = groups[number][name] if world.rank == 0 else torch.empty(shape, dtype=_TYPES[dtype])
            world.broadcast(tensor)
            everywhere[-1][name] = tensor
    steps = [Step(**step) for step in record["steps"]]
    validated = [SizeFigures(*figures) for figures in record["validated"]]
    return Trained(everywhere[0], steps, everywhere[2:], everywhere[1], record["validation"], validated)


_TYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}


def assert_same_steps(ours: Trained, reference: Trained) -> None:
    """Asserts that both have the same batches, learning rates and decisions."""
    decisions = [
        [(s.samples, s.seq_len, s.lr, bool(s.skip_reason), s.returned_to) for s in run.steps]
        for run in (ours, reference)
    ]
    assert decisions[0] == decisions[1]


def curve_distance(ours: Trained, reference: Trained) -> Tuple[float, float, float]:
    """Returns the largest relative distances of losses, of norms, and of the loss of validation. A spike is made by
    weights that make roundings large, and is rolled back: of its step only the decision counts."""
    pairs = [(a, b) for a, b in zip(ours.steps, reference.steps) if b.skip_reason != SPIKE]
    return (
        max(abs(a.loss / b.loss - 1) for a, b in pairs),
        max(abs(a.grad_norm / b.grad_norm - 1) for a, b in pairs if math.isfinite(b.grad_norm)),
        abs(ours.validation / reference.validation - 1),
    )


def full_tensors(trainer: Trainer, flat: torch.Tensor) -> Tensors:
    """Returns the logical tensors of which ``flat`` holds slices, without padding of the vocabulary; collective.

    Raises:
        AssertionError: ranks that hold the same slice do not have the same bits.
    """
    tp = trainer.grid.tp
    tensors = {}
    for placement in trainer.buffers.placements:
        spec = placement.spec
        local = flat[placement.start : placement.start + placement.size].view(spec.local_shape(tp.size)).clone()
        if spec.tp_dim is None:
            tensors[spec.name] = local
        else:
            slices = tp.all_gather(local).split(spec.copies)
            assert all(torch.equal(copies, copies[:1].expand_as(copies)) for copies in slices), spec.name
            tensors[spec.name] = torch.cat([copies[0] for copies in slices], dim=spec.tp_dim)[: spec.rows]
    return tensors


def summed_gradients(trainer: Trainer) -> Tensors:
    """Returns this stage's full gradients as the optimiser saw them; under ZeRO replicas have shares. Collective."""
    shards = trainer.grid.dp.size if trainer.config.layout.zero else 1
    flat = torch.zeros_like(trainer.buffers.gradients)
    for owned in trainer.buffers.layout.owned(trainer.grid.replicas.rank if shards > 1 else 0, shards):
        flat[owned.parameters] = trainer.buffers.gradients[owned.gradients]
    if shards > 1:
        trainer.grid.dp.all_reduce(flat)
    return full_tensors(trainer, flat)


def largest_difference(ours: Tensors, reference: Tensors) -> float:
    """Returns the largest difference of any entry of our tensors, relative to the largest entry of its tensor."""
    worst = 0.0
    for name, tensor in ours.items():
        assert torch.isfinite(tensor).all() and torch.isfinite(reference[name]).all(), name
        scale = float(reference[name].abs().max())
        difference = float((tensor - reference[name]).abs().max())
        assert scale > 0 or difference == 0, name
        worst = max(worst, difference / scale if scale else 0.0)
    return worst


def largest_of_all(world: Communicator, figures: List[float]) -> List[float]:
    """Returns the largest value of each figure over all ranks. Collective."""
    values = torch.tensor(figures, dtype=torch.float64)
    world.all_reduce(values, "max")
    return [float(value) for value in values]
