"""Tests that runs over several ranks that were saved and loaded are the runs that were not, bit for bit; and that what
one rank cannot write or read is known to all."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, List, Tuple

import pytest
import torch

from fugaku_gpt.checkpoint import file_list, file_system
from fugaku_gpt.checkpoint.directory import list_checkpoints
from fugaku_gpt.checkpoint.file_list import PartedFiles
from fugaku_gpt.checkpoint.manifest import read_manifest
from fugaku_gpt.checkpoint.retention import verify_checkpoint
from fugaku_gpt.comm import Communicator, ProcessGrid
from fugaku_gpt.errors import RunFailed
from fugaku_gpt.training.checkpoint import CheckpointSaver
from fugaku_gpt.training.health import SPIKE
from fugaku_gpt.training.resume import ResumePlan, broadcast_plan, load_checkpoint, resume_from
from fugaku_gpt.training.run import run_loop
from fugaku_gpt.training.trainer import Trainer
from tests.mpi.trained import full_tensors
from tests.support.text import ByteSamples
from tests.support.tiny import tiny_config

ROLLBACK = ("training.rollback_every=2", "training.spike_window=3", "training.spike_ratio=1.2", "training.lr=1e-2")
RUNS: List[Tuple[int, Tuple[str, ...]]] = [
    (2, ("layout.dp=2", "layout.zero=1", "training.dtype=bfloat16")),
    (2, ("layout.dp=2", "checkpoint.ranks_per_file=2")),
    (2, ("layout.tp=2", "layout.sequence_parallel=true", "training.micro_batch=2")),
    (2, ("layout.pp=2", "training.ramp_start=2", "training.ramp_increment=2", "training.ramp_samples=12")),
    (4, ("layout.dp=2", "layout.pp=2", "layout.zero=1", *ROLLBACK)),
    (
        4,
        (
            "layout.dp=2",
            "layout.tp=2",
            "layout.zero=1",
            "model.kv_heads=1",
            "training.micro_batch=2",
            "training.dtype=float16",
            "checkpoint.ranks_per_file=3",
        ),
    ),
    (4, ("layout.dp=4", "layout.zero=1", "layout.hierarchical_sum=true", "training.dtype=float64")),
]


def trainer(world: Communicator, *settings: str) -> Trainer:
    config = tiny_config(*settings)
    return Trainer(
        config, ProcessGrid(world, config.layout, world.rank // 2, config.kv_copies), ByteSamples(config.model.seq_len)
    )


def save(run: Trainer, folder: Path) -> Path:
    """Saves a run, and returns the path of the checkpoint. Collective."""
    CheckpointSaver(run, folder).save({}, wait=True)
    return list_checkpoints(folder)[0].path


@pytest.fixture
def folder(world: Communicator, tmp_path: Path) -> Path:
    """The temporary folder of rank 0, on every rank."""
    return Path(world.broadcast_json(str(tmp_path)))


@pytest.mark.parametrize(("ranks", "settings"), RUNS, ids=[f"{ranks}-{'-'.join(s[:3])}" for ranks, s in RUNS])
def test_a_run_resumed_twice_is_the_uninterrupted_run_bit_for_bit(
    world: Communicator, folder: Path, ranks: int, settings: Tuple[str, ...]
) -> None:
    if world.size != ranks:
        pytest.skip("another number of ranks")
    reference, run = trainer(world, *settings), trainer(world, *settings)
    for leg in range(3):
        if leg:
            checkpoints = CheckpointSaver(run, folder)
            checkpoints.save({})
            for _ in range(2):  # training continues, and the checkpoint does not contain it
                checkpoints.advance(run.step())
            checkpoints.finish()
            path = list_checkpoints(folder)[0].path
            assert world.rank > 0 or verify_checkpoint(path) == []
            run = trainer(world, *settings)
            assert load_checkpoint(run, path, read_manifest(path)) is None
        assert all(repr(run.step()) == repr(reference.step()) for _ in range(3 - leg))
        assert torch.equal(run.buffers.parameters, reference.buffers.parameters)
    if ROLLBACK[0] in settings:
        for each_trainer in (run, reference):
            each_trainer.buffers.parameters.mul_(10.0)
        spike = run.step()
        assert spike.skip_reason == SPIKE and spike == reference.step()
    for ours, theirs in zip(run.storages(), reference.storages()):
        assert (ours.kind, ours.first) == (theirs.kind, theirs.first) and torch.equal(ours.values, theirs.values)
    assert run.state() == reference.state()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_copies_of_heads_of_keys_survive_layouts_without_copies_bit_for_bit(
    world: Communicator, folder: Path, dtype: str
) -> None:
    if world.size != 4:
        pytest.skip("four ranks")
    model = ("model.kv_heads=2", "model.biases=qkv", f"training.dtype={dtype}")
    run = trainer(world, *model, "layout.tp=4")
    for _ in range(2):
        run.step()
    expected = full_tensors(run, run.buffers.parameters)
    assert run.grid.kv.size == 2
    path = save(run, folder / "4")
    for ranks in (1, 2):
        group = world.split(0 if world.rank < ranks else None, world.rank, f"first-{ranks}")
        if world.rank < ranks:
            other = trainer(group, *model, f"layout.tp={ranks}")
            assert load_checkpoint(other, path, read_manifest(path)) is None
            tensors = full_tensors(other, other.buffers.parameters)
            assert set(tensors) == set(expected)
            assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
            save(other, folder / str(ranks))
        world.barrier()
        path = list_checkpoints(folder / str(ranks))[0].path
        assert world.rank > 0 or verify_checkpoint(path) == []
    again = trainer(world, *model, "layout.tp=4")
    assert load_checkpoint(again, path, read_manifest(path)) is None
    for ours, theirs in zip(again.storages(), run.storages()):
        assert (ours.kind, ours.first) == (theirs.kind, theirs.first) and torch.equal(ours.values, theirs.values)
    assert again.state() == run.state() and repr(again.step()) == repr(run.step())


def test_a_full_disk_of_a_single_rank_costs_all_ranks_that_checkpoint_only(
    world: Communicator, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if world.size != 2:
        pytest.skip("two ranks")
    original, failures_left = file_system.write_at, [1 if world.rank == 1 else 0]

    def write_at(*arguments: Any) -> int:
        if failures_left[0]:
            failures_left[0] = 0
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*arguments)

    monkeypatch.setattr(file_system, "write_at", write_at)
    run = trainer(world, "layout.dp=2", "training.iterations=6", "checkpoint.interval=2")
    checkpoints = CheckpointSaver(run, folder)
    assert not run_loop(run, None, checkpoints)
    assert [info.iteration for info in list_checkpoints(folder)] == [6, 4] and checkpoints.saved_iteration == 6
    failures_left[0] = 1 if world.rank == 1 else 0
    with pytest.raises(RunFailed, match=r"iteration 6 could not be written: rank 1: .*No space left"):
        checkpoints.save({}, wait=True)
    world.barrier()
    assert [info.iteration for info in list_checkpoints(folder)] == [6, 4]


def test_a_rank_that_asks_to_stop_stops_all_after_the_same_step_with_a_checkpoint(
    world: Communicator, folder: Path
) -> None:
    if world.size != 4:
        pytest.skip("four ranks")
    run = trainer(world, "layout.dp=2", "layout.pp=2", "training.iterations=9")
    run.should_stop = lambda: world.rank == 2 and run.iteration == 2
    assert run_loop(run, None, CheckpointSaver(run, folder))
    assert run.iteration == 3 and [info.iteration for info in list_checkpoints(folder)] == [3]


def test_damage_that_a_single_rank_reads_is_reported_on_all(world: Communicator, folder: Path) -> None:
    if world.size != 2:
        pytest.skip("two ranks")
    run = trainer(world, "layout.pp=2")
    CheckpointSaver(run, folder).save({}, wait=True)
    (info,) = list_checkpoints(folder)
    if world.rank == 0:
        content = bytearray((info.path / "data-000001.safetensors").read_bytes())
        content[-3] ^= 1
        (info.path / "data-000001.safetensors").write_bytes(content)
    world.barrier()
    problem = load_checkpoint(trainer(world, "layout.pp=2"), info.path, read_manifest(info.path))
    assert problem is not None and problem.startswith("rank 1: ") and "data-000001.safetensors: damaged: " in problem


def test_a_checkpoint_of_a_layout_resumes_in_another(world: Communicator, folder: Path) -> None:
    """The pairs of two ranks; those of four take long."""
    _check_pairs(world, folder, ranks=2)


def test_a_checkpoint_with_a_split_manifest_resumes_in_another_layout(
    world: Communicator, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_list, "FILES_PER_PART", 1)
    if world.size < 2:
        pytest.skip("one rank writes one file")
    run = trainer(world, f"layout.dp={world.size}", "layout.zero=1", f"training.global_batch={world.size * 4}")
    run.step()
    path = save(run, folder)
    plan = broadcast_plan(ResumePlan((path,), read_manifest(path)) if world.rank == 0 else None, world)
    assert plan.manifest is not None and isinstance(plan.manifest.files, PartedFiles)
    assert world.rank > 0 or verify_checkpoint(path) == []
    other = trainer(world, "layout.tp=2", f"layout.dp={world.size // 2}", f"training.global_batch={world.size * 4}")
    assert resume_from(other, plan)[0] == path
    ours, theirs = (full_tensors(each, each.buffers.parameters) for each in (other, run))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.long
def test_a_checkpoint_of_each_layout_resumes_in_each_other(world: Communicator, folder: Path) -> None:
    _check_pairs(world, folder, ranks=4)  # all pairs of eight ranks: `make soak`


def _check_pairs(world: Communicator, folder: Path, ranks: int) -> None:
    from tests.mpi.reshard import LAYOUTS, TOLERANCE, reshard

    if world.size != ranks:
        pytest.skip("another number of ranks")
    fitting = sum(ranks <= world.size for ranks, _ in LAYOUTS)
    pairs, worst = reshard(world, folder, steps=2)
    assert pairs == fitting**2 and worst <= TOLERANCE
