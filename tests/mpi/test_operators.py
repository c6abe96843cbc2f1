"""Tests of profiling operators over several ranks: all make the same calls, and get the same profile."""

from __future__ import annotations

from typing import List, Tuple

import pytest
import torch

from fugaku_gpt import compat
from fugaku_gpt.comm import Communicator
from fugaku_gpt.records.operators import CAST, COMMUNICATION, CROSS_ENTROPY, OPTIMISER
from fugaku_gpt.training.operators import profile_operators
from tests.mpi.trained import trainer_of
from tests.support.tiny import tiny_config

RUNS: List[Tuple[int, Tuple[str, ...]]] = [
    (2, ("layout.tp=2", "layout.sequence_parallel=true", "training.dtype=bfloat16")),
    (2, ("layout.pp=2", "training.recompute=full")),
    (4, ("layout.dp=2", "layout.pp=2", "layout.zero=1", "layout.schedule=zero_bubble")),
    (4, ("layout.dp=4", "layout.zero=1", "layout.hierarchical_sum=true", "training.dtype=bfloat16")),
    (8, ("layout.dp=2", "layout.tp=2", "layout.pp=2", "layout.zero=1")),
]


@pytest.mark.parametrize(("ranks", "settings"), RUNS, ids=[f"{ranks}-{'-'.join(s)}" for ranks, s in RUNS])
def test_profiled_iterations_train_as_without_a_profile(
    world: Communicator, ranks: int, settings: Tuple[str, ...]
) -> None:
    if world.size != ranks:
        pytest.skip("another number of ranks")
    if "training.dtype=bfloat16" in settings and not compat.can_train(torch.bfloat16):
        pytest.skip("this PyTorch does not train in bfloat16")
    run, reference = (trainer_of(world, tiny_config(*settings)) for _ in range(2))
    all_reduce = Communicator.all_reduce
    profile = profile_operators(run, 1)
    assert Communicator.all_reduce is all_reduce
    reference.step()
    reference.step()
    assert run.step() == reference.step() and run.state() == reference.state()
    for ours, theirs in zip(run.storages(), reference.storages()):
        assert torch.equal(ours.values, theirs.values)
    run.finish()
    reference.finish()
    assert profile is not None and profile.ranks == ranks
    assert sum(profile.classes.values()) == pytest.approx(profile.seconds_per_iteration, rel=1e-9)
    # cross entropy is on the last stage alone, but in the profile of every rank
    assert all(profile.classes[name] > 0.0 for name in (COMMUNICATION, CROSS_ENTROPY, OPTIMISER))
    assert profile.classes[CAST] > 0.0 or "training.dtype=bfloat16" not in settings
    everywhere = world.all_gather(torch.tensor(list(profile.classes.values()), dtype=torch.float64))
    assert all(torch.equal(everywhere[0], seconds) for seconds in everywhere)
