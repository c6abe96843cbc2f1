"""Tests of training schedules: days, chained jobs, checkpoint intervals, and phases of a growing batch."""

from __future__ import annotations

import math

import pytest

from fugaku_gpt.errors import UsageError
from fugaku_gpt.planner.ramp import BatchRamp, ramp_phases
from fugaku_gpt.planner.training_schedule import (
    DAY,
    TrainingPlan,
    checkpoint_interval,
    lost_time_share,
    schedule_training,
)

RAMP = {
    "start": 192,
    "increment": 16,
    "samples": 20000,
    "global_batch": 256,
    "nodes": 12,
    "ranks_per_node": 4,
    "tp": 2,
    "pp": 2,
    "micro_batch": 4,
    "iterations": 1000,
}


def test_the_days_of_the_notes_are_reproduced() -> None:
    """362,000 iterations at 0.5 s: 2.09 days."""
    schedule = schedule_training(TrainingPlan(362_000, 0.5, 512))
    assert round(schedule.computing / DAY, 2) == 2.09 and schedule.total == schedule.computing
    assert schedule.jobs is None is schedule.iterations_per_job, "nothing is known of the limit of a job"
    assert schedule.node_hours == pytest.approx(362_000 * 0.5 / 3600 * 512)


def test_the_checkpoint_interval_is_about_youngs_and_loses_least() -> None:
    checkpoint, mtbf = 60.0, 6 * 3600.0
    best = checkpoint_interval(checkpoint, mtbf)
    assert best == pytest.approx(math.sqrt(2 * checkpoint * mtbf), rel=0.05)
    least = lost_time_share(best, checkpoint, mtbf, 0)
    assert least <= min(lost_time_share(best * factor, checkpoint, mtbf, 0) for factor in (0.8, 1.25))
    assert checkpoint_interval(1000, 100) == 100


def test_a_chain_has_room_for_start_up_and_checkpoint() -> None:
    schedule = schedule_training(
        TrainingPlan(1000, 10, 2, elapse=3600, startup=300, checkpoint=100, watts_per_node=200)
    )
    assert schedule.iterations_per_job == 320 and schedule.jobs == 4
    assert schedule.total == 1000 * 10 + 4 * 400 and schedule.joules == schedule.total * 400


def test_failures_of_more_nodes_cost_more() -> None:
    small, large = (schedule_training(TrainingPlan(10_000, 5, n, checkpoint=30, node_mtbf=5e7)) for n in (64, 4096))
    assert large.lost_share > small.lost_share > 0
    assert (large.checkpoint_every or 0) < (small.checkpoint_every or 0)


def test_impossible_plans_are_refused_with_a_remedy() -> None:
    with pytest.raises(UsageError, match="--elapse 400 s: start-up 300 s.*valid: more than 410 s"):
        schedule_training(TrainingPlan(10, 10, 1, elapse=400, startup=300, checkpoint=100))
    with pytest.raises(UsageError, match="use fewer nodes"):
        schedule_training(TrainingPlan(10, 10, 100_000, checkpoint=600, node_mtbf=1e6, startup=600))
    with pytest.raises(UsageError, match="--node-mtbf 0: a mean time between failures must be above 0"):
        schedule_training(TrainingPlan(10, 10, 1, checkpoint=600, node_mtbf=0.0))
    with pytest.raises(UsageError, match="1e[+]39 iterations: valid: 1e[+]12 at most"):
        schedule_training(TrainingPlan(10**39, 10, 1))


def test_each_phase_uses_nodes_that_share_the_batch_evenly() -> None:
    phases = ramp_phases(BatchRamp(**RAMP))
    assert [phase.global_batch for phase in phases] == [192, 208, 224, 240, 256]
    for phase in phases:
        assert phase.dp * phase.micro_batch * phase.micro_batches == phase.global_batch
        assert phase.dp * 4 == phase.nodes * 4 and phase.nodes <= 12 and phase.micro_batch <= 4
    assert [phase.nodes for phase in phases] == [12, 8, 8, 12, 8]
    assert sum(phase.iterations for phase in phases) == 1000
    assert 20000 <= sum(phase.samples for phase in phases) < 20000 + 4 * 256


def test_a_ramp_that_does_not_end_at_the_full_batch_is_refused() -> None:
    with pytest.raises(UsageError, match="batch from 192 in steps of 16 does not reach 250"):
        ramp_phases(BatchRamp(**{**RAMP, "global_batch": 250}))
    with pytest.raises(UsageError, match="need more than 12 nodes"):
        ramp_phases(BatchRamp(**{**RAMP, "tp": 64}))
    with pytest.raises(UsageError, match="in 99999999 steps; valid: fewer than 10000"):
        ramp_phases(BatchRamp(**{**RAMP, "start": 1, "increment": 1, "global_batch": 10**8}))
    with pytest.raises(
        UsageError, match="batch 31: no number of replicas that divides it fills whole nodes of 4 ranks"
    ):
        ramp_phases(BatchRamp(**{**RAMP, "start": 31, "increment": 1, "global_batch": 32, "tp": 1, "pp": 1}))
