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


def test_the_checkpoint_interval_is_dalys() -> None:
    """Equation 37 by hand: C / 2M = 0.0025, its root 0.05, sqrt(2 C M) = 1000."""
    assert checkpoint_interval(50, 10_000) == pytest.approx(1000 * (1 + 0.05 / 3 + 0.0025 / 9) - 50, rel=1e-12)
    assert checkpoint_interval(199.999, 100) == pytest.approx(200 * (1 + 1 / 3 + 1 / 9) - 200, rel=1e-4)
    assert checkpoint_interval(200, 100) == 100


def test_the_lost_share_is_writing_half_an_interval_and_a_restart() -> None:
    assert lost_time_share(540, 60, 6000, 100) == pytest.approx(0.1 + (300 + 100) / 6000, rel=1e-12)


def test_every_figure_of_a_chain_with_failures() -> None:
    """100 nodes fail every 10,000 s; the interval of 966.9 s is 97 iterations, of which 970 s each."""
    plan = TrainingPlan(
        1000, 10, 100, elapse=3600, startup=100, checkpoint=50, node_mtbf=1e6, watts_per_node=200, billed_nodes=120
    )
    schedule = schedule_training(plan)
    lost = 50 / 1020 + (510 + 100) / 10_000
    assert schedule.checkpoint_every == pytest.approx(966.9444444, rel=1e-9)
    assert schedule.iterations_between_checkpoints == 97 and schedule.lost_share == pytest.approx(lost, rel=1e-12)
    assert schedule.iterations_per_job == 307 and schedule.jobs == 4  # (3600 - 100 - 50) s * 0.88998 / 10 s
    assert schedule.computing == 10_000
    assert schedule.total == pytest.approx(10_000 / (1 - lost) + 4 * 150, rel=1e-12)
    assert schedule.node_hours == pytest.approx(schedule.total / 3600 * 120, rel=1e-12)
    assert schedule.joules == pytest.approx(schedule.total * 100 * 200, rel=1e-12)


def test_a_checkpoint_comes_after_an_iteration_at_least() -> None:
    schedule = schedule_training(TrainingPlan(10, 2000, 100, checkpoint=50, node_mtbf=1e6))
    assert schedule.iterations_between_checkpoints == 1
    assert schedule.lost_share == pytest.approx(50 / 2050 + 1025 / 10_000, rel=1e-12)


def test_no_time_is_lost_without_failures_or_for_checkpoints_that_take_none() -> None:
    for plan in (TrainingPlan(10, 2, 1, checkpoint=50), TrainingPlan(10, 2, 1, node_mtbf=1e6)):
        schedule = schedule_training(plan)
        assert (schedule.checkpoint_every, schedule.iterations_between_checkpoints, schedule.lost_share) == (
            None,
            None,
            0,
        )
        assert schedule.total == 20 + plan.checkpoint and schedule.joules is None


def test_a_job_may_have_room_for_a_single_iteration_or_for_more_than_there_are() -> None:
    tight = schedule_training(TrainingPlan(3, 10, 1, elapse=410, startup=300, checkpoint=100))
    assert (tight.jobs, tight.iterations_per_job) == (3, 1)
    wide = schedule_training(TrainingPlan(3, 10, 1, elapse=4000, startup=300, checkpoint=100))
    assert (wide.jobs, wide.iterations_per_job) == (1, 3)


def test_the_units_of_a_plan() -> None:
    assert schedule_training(TrainingPlan(86_400, 1, 1)).computing / DAY == 1
    assert schedule_training(TrainingPlan(10**12, 1, 1)).iterations == 10**12
    with pytest.raises(UsageError, match="iterations: valid: 1e[+]12 at most"):
        schedule_training(TrainingPlan(10**12 + 1, 1, 1))


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
    with pytest.raises(UsageError, match="valid: more than 419 s"):  # 47 % is lost: 10 s take 18.8 s
        schedule_training(TrainingPlan(10, 10, 1, elapse=400, startup=300, checkpoint=100, node_mtbf=2000))
    with pytest.raises(UsageError, match="a failure every 10 s leaves no time.* 600 s and 60 s.*use fewer nodes"):
        schedule_training(TrainingPlan(10, 10, 100_000, checkpoint=600, node_mtbf=1e6, startup=60))
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


def test_a_phase_ends_with_a_share_of_the_samples() -> None:
    """400 samples in two phases before the full batch: 200 with batches of 100, then 200 with batches of 200."""
    sizes = {"start": 100, "increment": 100, "samples": 400, "global_batch": 300, "nodes": 1, "ranks_per_node": 1}
    ramp = BatchRamp(**{**sizes, "tp": 1, "pp": 1, "micro_batch": 1, "iterations": 10})
    assert [(phase.iterations, phase.samples) for phase in ramp_phases(ramp)] == [(2, 200), (1, 200), (7, 0)]
    more = BatchRamp(**{**vars(ramp), "samples": 402})
    assert [(phase.iterations, phase.samples) for phase in ramp_phases(more)] == [(3, 300), (1, 200), (6, 0)]


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
