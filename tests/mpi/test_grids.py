"""Tests that a classifier of grids trains alike in every layout, and makes the calls of MPI that are planned."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import DefaultDict, Dict, List, Tuple

import pytest
import torch

from fugaku_gpt.comm import Communicator, ProcessGrid
from fugaku_gpt.config import RunConfig
from fugaku_gpt.data.grid_samples import open_grid_samples
from fugaku_gpt.layout.communications import is_calibration_step, plan_of, program
from fugaku_gpt.parallel.cross_entropy import CorrectCount, LossOptions, vocab_parallel_cross_entropy
from fugaku_gpt.training.trainer import Trainer
from tests.mpi.test_communications import Call, Recording, assert_same, calls_of
from tests.mpi.test_precision import BOUND
from tests.mpi.trained import (
    Trained,
    assert_same_steps,
    curve_distance,
    largest_difference,
    largest_of_all,
    of_first,
    train,
    trainer_of,
)
from tests.support.grids import LIKE_LLAMA, grid_config, write_tasks

TOLERANCE = {"float64": 1e-12, "float32": 1e-5}
TYPES = {
    "float64": ("training.dtype=float64",),
    "float32": ("training.dtype=float32", "training.eps=1e-4"),
    "bfloat16": ("training.dtype=bfloat16",),
    "float16": ("training.dtype=float16", "training.loss_scale=256"),
}
LLAMA = " ".join(LIKE_LLAMA)
EVEN = "data.buckets=[4,6] model.seq_len=36"  # two ranks share their cells
CASES: List[Tuple[str, str]] = [
    ("layout.dp=2 layout.zero=1 training.recompute=full", ""),
    ("layout.dp=2 layout.hierarchical_sum=true training.micro_batch=2", LLAMA),
    ("layout.tp=2 training.micro_batch=2 training.recompute=selective", ""),
    ("layout.tp=2 training.micro_batch=4", f"{LLAMA} model.kv_heads=1 model.qk_norm=true"),
    ("layout.pp=2", ""),
    ("layout.tp=2 layout.sequence_parallel=true training.micro_batch=2", EVEN),
    ("layout.tp=2 layout.sequence_parallel=true training.recompute=full", f"{EVEN} {LLAMA} model.qk_norm=true"),
    ("layout.tp=2 layout.pp=2 layout.sequence_parallel=true training.micro_batch=2", f"{EVEN} {LLAMA}"),
    ("layout.pp=2 layout.schedule=zero_bubble training.micro_batch=2", LLAMA),
    ("layout.pp=2 layout.schedule=interleaved layout.chunks=2 training.recompute=full", "model.layers=4"),
    ("layout.dp=2 layout.tp=2 layout.zero=1", LLAMA),
    ("layout.dp=2 layout.pp=2 layout.schedule=gpipe layout.zero=1", LLAMA),
    ("layout.tp=2 layout.pp=2 layout.order=pp,tp,dp training.micro_batch=2", ""),
    ("layout.dp=2 layout.tp=2 layout.pp=2 layout.sequence_parallel=true layout.zero=1", f"{EVEN} {LLAMA}"),
]
SHORT = (0, 3, 6, 8, 10)  # numbers of the cases that are not long tests: each kind of parallelism in float64
_REFERENCES: Dict[Tuple[str, str], Trained] = {}


def grids_trainer(world: Communicator, config: RunConfig) -> Trainer:
    """Returns a trainer of the grids of a run on all ranks of a world."""
    return trainer_of(world, config, open_grid_samples(config, "train"), open_grid_samples(config, "valid"))


def config_of(folder: Path, *settings: str) -> RunConfig:
    """Returns the configuration of the tiny classifier; each rank has a file of its own with the same tasks."""
    return grid_config(write_tasks(folder / "tasks.json"), *settings)


def reference_of(world: Communicator, folder: Path, model: str, dtype: str) -> Trained:
    """Returns the run of one rank, on all ranks; collective."""
    if (model, dtype) not in _REFERENCES:
        config = config_of(folder, *TYPES[dtype], *model.split(), "training.micro_batch=8")
        _REFERENCES[model, dtype] = of_first(world, lambda: train(grids_trainer(Communicator.alone(), config)))
    return _REFERENCES[model, dtype]


def counts_of(trained: Trained) -> List[Tuple[int, int, float]]:
    """Returns size, number, and number of correct ones of the grids of a validation, by their size."""
    return [(size.seq_len, size.samples, size.correct) for size in trained.validated]


@pytest.mark.parametrize(
    ("layout", "model", "dtype"),
    [
        pytest.param(layout, model, dtype, marks=[pytest.mark.long] * (dtype == "float32" or number not in SHORT))
        for number, (layout, model) in enumerate(CASES)
        for dtype in TOLERANCE
    ],
)
def test_a_layout_trains_like_a_single_rank(
    world: Communicator, layout: str, model: str, dtype: str, tmp_path: Path
) -> None:
    config = config_of(tmp_path, *TYPES[dtype], *model.split(), *layout.split())
    if config.layout.ranks != world.size:
        pytest.skip("another number of ranks")
    if dtype == "float32" and world.size > 2:
        pytest.skip("two ranks try the kernels")
    ours, reference = train(grids_trainer(world, config)), reference_of(world, tmp_path, model, dtype)
    assert_same_steps(ours, reference)
    assert [step.correct for step in ours.steps] == [step.correct for step in reference.steps]
    assert {step.seq_len for step in ours.steps} == {side * side for side in config.data.buckets}
    assert counts_of(ours) == counts_of(reference)  # on every rank, whose steps before have left nothing to count
    figures = largest_of_all(
        world,
        [
            *curve_distance(ours, reference),
            max(largest_difference(ours.gradients[i], reference.gradients[i]) for i in range(len(ours.gradients))),
            largest_difference(ours.weights, reference.weights),
        ],
    )
    if world.rank == 0:
        print(f"\ngrids {layout} {model}, {dtype}: {' '.join(f'{figure:.1e}' for figure in figures)}")
    assert max(figures) <= TOLERANCE[dtype] * (4 if config.model.qk_norm and dtype == "float32" else 1)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "layout",
    ["layout.dp=2 layout.zero=1", "layout.tp=2 layout.sequence_parallel=true training.micro_batch=2", "layout.pp=2"],
)
def test_layouts_in_16_bits_stay_close_to_a_single_rank(
    world: Communicator, layout: str, dtype: str, tmp_path: Path
) -> None:
    model = f"{EVEN} {LLAMA}"
    config = config_of(tmp_path, *TYPES[dtype], *model.split(), *layout.split())
    if config.layout.ranks != world.size:
        pytest.skip("another number of ranks")
    ours, reference = train(grids_trainer(world, config)), reference_of(world, tmp_path, model, dtype)
    assert_same_steps(ours, reference)
    loss, norm, validation = largest_of_all(world, list(curve_distance(ours, reference)))
    if world.rank == 0:
        print(f"\ngrids {layout}, {dtype}: loss {loss:.1e} norm {norm:.1e} validation {validation:.1e}")
    assert loss <= BOUND[dtype]["loss"] and norm <= BOUND[dtype]["norm"] and validation <= BOUND[dtype]["validation"]


@pytest.mark.parametrize(
    "layout",
    [
        f"layout.tp=2 training.micro_batch=2 {LLAMA}",
        "layout.pp=2 training.recompute=full",
        f"layout.tp=2 layout.sequence_parallel=true training.recompute=full {EVEN}",
        pytest.param("layout.dp=2 layout.tp=2 layout.zero=1", marks=pytest.mark.long),
        pytest.param("layout.tp=2 layout.pp=2", marks=pytest.mark.long),
    ],
)
def test_a_step_makes_the_calls_of_the_plan(world: Communicator, layout: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, *layout.split())
    if config.layout.ranks != world.size:
        pytest.skip("another number of ranks")
    calls: DefaultDict[str, List[Call]] = defaultdict(list)
    grid = ProcessGrid(Recording(world, calls), config.layout, kv_copies=config.kv_copies)
    trainer = Trainer(config, grid, open_grid_samples(config, "train"))
    lengths = []
    for number in range(4):
        trainer.finish()
        calls.clear()
        step = trainer.step()
        trainer.finish()
        plan = replace(plan_of(config), seq_len=step.seq_len)
        assert_same(calls, calls_of(program(plan, grid.coordinates.pp, 1, is_calibration_step(number))))
        lengths.append(step.seq_len)
    assert set(lengths) == {side * side for side in config.data.buckets}


@pytest.mark.parametrize("padding", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_targets_with_the_largest_logit_of_all_ranks_are_counted(
    world: Communicator, dtype: torch.dtype, padding: int
) -> None:
    """The first of equal logits counts, whichever ranks have them, and padding never does; a rank may have nothing
    else."""
    rows = 4
    classes = rows * world.size - padding
    if classes < 1:
        pytest.skip("needs two ranks: the last one has padding alone")
    generator = torch.Generator().manual_seed(3)
    # few values, so that logits are exact, and many of them equal
    hidden = torch.randint(-2, 3, (64, 3), generator=generator).to(dtype).requires_grad_()
    weight = torch.randint(-2, 3, (world.size * rows, 3), generator=generator).to(dtype)
    targets = torch.randint(0, classes, (64,), generator=generator)
    logits = hidden.detach().double().matmul(weight[:classes].double().t())
    largest = torch.from_numpy(logits.numpy().argmax(1))  # the first of equal ones
    targets[:16] = largest[:16]
    local = weight[world.rank * rows : (world.rank + 1) * rows].clone().requires_grad_()
    correct = CorrectCount()
    vocab_parallel_cross_entropy(hidden, local, targets, world, classes, 10, options=LossOptions(correct=correct))
    assert correct.take() == int((largest == targets).sum()) >= 16
