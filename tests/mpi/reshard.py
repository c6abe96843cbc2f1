"""Loads checkpoints of each layout into each other: does the run continue as if it had not been interrupted?

    mpirun -n 8 python -m tests.mpi.reshard            # all ordered pairs of the layouts below
    mpirun -n 2 python -m tests.mpi.reshard --steps 2  # the pairs that fit on two ranks

Each layout trains three iterations in float64 and saves; then each layout loads each of these checkpoints and trains
on. All losses and all weights must be those of one rank that was never interrupted; where the layout is the same, its
own bit for bit. A layout of fewer ranks runs on the first ranks of the world, while the others wait.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Tuple

import torch

from fugaku_gpt.checkpoint.directory import list_checkpoints
from fugaku_gpt.checkpoint.manifest import read_manifest
from fugaku_gpt.checkpoint.retention import verify_checkpoint
from fugaku_gpt.comm import Communicator, ProcessGrid, open_world
from fugaku_gpt.training.checkpoint import CheckpointSaver
from fugaku_gpt.training.resume import load_checkpoint
from fugaku_gpt.training.trainer import Trainer
from tests.mpi.trained import full_tensors
from tests.support.text import ByteSamples
from tests.support.tiny import tiny_config

RUN = ("model.layers=4", "model.kv_heads=2", "training.micro_batch=2", "training.dtype=float64", "training.eps=1e-5")
BEFORE = 3  # iterations before the checkpoint
TOLERANCE = 1e-12
# (ranks, settings); the vocabulary is padded otherwise where tp is another
LAYOUTS: List[Tuple[int, Tuple[str, ...]]] = [
    (1, ()),
    (2, ("dp=2", "zero=1")),
    (2, ("pp=2", "schedule=interleaved", "chunks=2")),
    (3, ("pp=3", "split=[1,2,1]")),
    (4, ("dp=2", "tp=2", "zero=1", "sequence_parallel=true", "order=dp,tp,pp")),
    (4, ("dp=4", "zero=1", "hierarchical_sum=true")),
    (4, ("tp=4", "sequence_parallel=true")),  # two copies of each head of keys
    (6, ("tp=2", "pp=3", "schedule=gpipe")),
    (8, ("dp=2", "tp=2", "pp=2", "zero=1", "schedule=interleaved", "chunks=2")),
]


class Curve(NamedTuple):
    """Losses of some steps, and the full weights after them."""

    losses: List[float]
    weights: Dict[str, torch.Tensor]


def trainer_of(world: Optional[Communicator], settings: Tuple[str, ...]) -> Trainer:
    """Returns a trainer of the tiny run in a layout; without a world, on this rank alone. Nodes have two ranks."""
    per_file = ("checkpoint.ranks_per_file=3",) if len(settings) % 2 else ()
    config = tiny_config(*RUN, *per_file, *(f"layout.{setting}" for setting in settings))
    grid = (
        ProcessGrid(world, config.layout, world.rank // 2, config.kv_copies)
        if world is not None
        else ProcessGrid.alone()
    )
    return Trainer(config, grid, ByteSamples(config.model.seq_len))


def curve(trainer: Trainer, steps: int) -> Curve:
    """Trains ``steps`` steps; the weights of the curve are those of this rank's stage."""
    losses = [trainer.step().loss for _ in range(steps)]
    return Curve(losses, full_tensors(trainer, trainer.buffers.parameters))


def difference(ours: Curve, reference: Curve) -> float:
    """Returns the largest relative difference of losses and weights; the scale of a tensor is at least 1e-3."""
    worst = max(abs(a / b - 1) for a, b in zip(ours.losses, reference.losses))
    for name, tensor in ours.weights.items():
        scale = max(float(reference.weights[name].abs().max()), 1e-3)
        worst = max(worst, float((tensor - reference.weights[name]).abs().max()) / scale)
    return worst


def reshard(world: Communicator, folder: Path, steps: int) -> Tuple[int, float]:
    """Returns (pairs, largest difference); collective over the world.

    Raises:
        AssertionError: a pair differs by more than the tolerance, or the same layout at all.
    """
    fitting = [(ranks, settings) for ranks, settings in LAYOUTS if ranks <= world.size]
    reference_run = trainer_of(None, ())
    curve(reference_run, BEFORE)
    reference = curve(reference_run, steps)
    uninterrupted: List[Optional[Curve]] = []
    groups = [world.split(0 if world.rank < ranks else None, world.rank, f"first-{ranks}") for ranks, _ in fitting]
    for index, (ranks, settings) in enumerate(fitting):
        uninterrupted.append(None)
        if world.rank < ranks:
            run = trainer_of(groups[index], settings)
            curve(run, BEFORE)
            checkpoints = CheckpointSaver(run, folder / str(index))
            checkpoints.save({})
            uninterrupted[-1] = curve(run, steps)
            checkpoints.finish()
            assert checkpoints.saved_iteration == BEFORE
        world.barrier()
    worst, pairs = 0.0, 0
    for source in range(len(fitting)):
        path = list_checkpoints(folder / str(source))[0].path
        assert world.rank > 0 or verify_checkpoint(path) == []
        for index, (ranks, settings) in enumerate(fitting):
            pairs += 1
            if world.rank < ranks:
                run = trainer_of(groups[index], settings)
                assert load_checkpoint(run, path, read_manifest(path)) is None
                assert (run.iteration, run.consumed_samples) == (BEFORE, BEFORE * 8)
                resumed, expected = curve(run, steps), uninterrupted[index]
                distance = difference(resumed, reference)
                pair = f"{fitting[source]} -> {fitting[index]}"
                assert distance <= TOLERANCE, f"{pair}: {distance:.1e}: {resumed.losses}, not {reference.losses}"
                if source == index and expected is not None:
                    equal = all(torch.equal(resumed.weights[name], expected.weights[name]) for name in resumed.weights)
                    assert equal and resumed.losses == expected.losses, f"{pair}: not the same to the last bit"
                worst = max(worst, distance)
            world.barrier()
    figure = torch.tensor([worst], dtype=torch.float64)
    world.all_reduce(figure, "max")
    return pairs, float(figure)


def main() -> None:
    """Runs all pairs and reports."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5, help="Iterations after each load.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    world = open_world()
    folder = Path(world.broadcast_json(tempfile.mkdtemp(prefix="reshard-") if world.rank == 0 else ""))
    began = time.monotonic()
    try:
        pairs, worst = reshard(world, folder, options.steps)
    except BaseException as error:
        print(f"rank {world.rank}: {type(error).__name__}: {error}", flush=True)
        world.abort(1)
        raise
    finally:
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if world.rank == 0:
        print(
            f"{pairs} ordered pairs of layouts on up to {world.size} ranks: {options.steps} steps after each load "
            f"equal the uninterrupted run to {worst:.1e}; {time.monotonic() - began:.0f} s"
        )


if __name__ == "__main__":
    main()
