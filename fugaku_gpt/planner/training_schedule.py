"""How long a training takes: days, node-hours, jobs in a chain, the checkpoint interval, energy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional

from fugaku_gpt.errors import UsageError

DAY = 86400.0
HOUR = 3600.0
MAX_ITERATIONS = 10**12


@dataclass(frozen=True)
class TrainingPlan:
    """The work of a training run and what interrupts it; times in seconds.

    Args:
        elapse: limit of one job; None if it is not known, and the time is that of a single job for all iterations.
        startup: from a job's start to its first iteration, including the time to load the checkpoint.
        checkpoint: time to write a checkpoint.
        node_mtbf: mean time between failures of one node; None: no node fails.
        billed_nodes: nodes that are paid for; None: those that compute.
        watts_per_node: power of a node; None if it is not known.
    """

    iterations: int
    seconds_per_iteration: float
    nodes: int
    elapse: Optional[float] = None
    startup: float = 0.0
    checkpoint: float = 0.0
    node_mtbf: Optional[float] = None
    watts_per_node: Optional[float] = None
    billed_nodes: Optional[int] = None


@dataclass(frozen=True)
class TrainingSchedule:
    """A training run as a chain of jobs; times in seconds.

    ``computing`` covers the iterations alone; ``total`` adds start-ups, checkpoints and repeated work. ``node_hours``
    are those of all nodes that are paid for. ``jobs`` and ``iterations_per_job`` are None without a limit of one job.
    """

    iterations: int
    computing: float
    total: float
    jobs: Optional[int]
    iterations_per_job: Optional[int]
    checkpoint_every: Optional[float]
    iterations_between_checkpoints: Optional[int]
    lost_share: float
    node_hours: float
    joules: Optional[float]


def checkpoint_interval(checkpoint: float, mtbf: float) -> float:
    """Seconds of computing between checkpoints for which the least time is lost.

    Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps", eq. 37, which is Young's
    sqrt(2 C M) of 1974 to first order.

    Args:
        checkpoint: C, seconds to write a checkpoint.
        mtbf: M, mean seconds between failures of the whole job.
    """
    if checkpoint >= 2 * mtbf:
        return mtbf
    ratio = checkpoint / (2 * mtbf)
    return math.sqrt(2 * checkpoint * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint


def lost_time_share(interval: float, checkpoint: float, mtbf: float, restart: float) -> float:
    """Share of the time that is spent on checkpoints, repeated work and restarts, to first order: C/(T + C) for
    writing, and for each failure half an interval and the restart."""
    return checkpoint / (interval + checkpoint) + ((interval + checkpoint) / 2 + restart) / mtbf


def schedule_training(training: TrainingPlan) -> TrainingSchedule:
    """Schedules a training run: jobs, checkpoints, total time, node-hours and energy.

    Raises:
        UsageError: a job's limit leaves no time for an iteration, failures come faster than work gets done, or there
            are too many iterations.
    """
    t = training
    if t.iterations > MAX_ITERATIONS:
        raise UsageError(f"{float(t.iterations):.3g} iterations: valid: {MAX_ITERATIONS:.0e} at most")
    if t.node_mtbf == 0:
        raise UsageError(
            "--node-mtbf 0: a mean time between failures must be above 0; valid: more than 0, or leave it out"
        )
    computing = t.iterations * t.seconds_per_iteration
    interval: Optional[float] = None
    interval_iterations: Optional[int] = None
    lost = 0.0
    if t.node_mtbf is not None and t.checkpoint > 0:
        mtbf = t.node_mtbf / t.nodes
        interval = checkpoint_interval(t.checkpoint, mtbf)
        interval_iterations = max(1, round(interval / t.seconds_per_iteration))
        lost = lost_time_share(interval_iterations * t.seconds_per_iteration, t.checkpoint, mtbf, t.startup)
        if lost >= 1:
            raise UsageError(
                f"a failure every {mtbf:.0f} s leaves no time to compute with checkpoints of {t.checkpoint:g} s and "
                f"{t.startup:g} s to start again; use fewer nodes, or make --checkpoint or --startup shorter"
            )
    jobs: Optional[int] = None
    per_job: Optional[int] = None
    if t.elapse is not None:
        usable = (t.elapse - t.startup - t.checkpoint) * (1 - lost)
        per_job = int(usable / t.seconds_per_iteration)
        if per_job < 1:
            raise UsageError(
                f"--elapse {t.elapse:g} s: start-up {t.startup:g} s, a checkpoint {t.checkpoint:g} s and an iteration "
                f"{t.seconds_per_iteration:g} s do not fit into one job; valid: more than "
                f"{t.startup + t.checkpoint + t.seconds_per_iteration / (1 - lost):.0f} s"
            )
        jobs = math.ceil(t.iterations / per_job)
    total = computing / (1 - lost) + (jobs or 1) * (t.startup + t.checkpoint)
    return TrainingSchedule(
        iterations=t.iterations,
        computing=computing,
        total=total,
        jobs=jobs,
        iterations_per_job=min(per_job, t.iterations) if per_job is not None else None,
        checkpoint_every=interval,
        iterations_between_checkpoints=interval_iterations,
        lost_share=lost,
        node_hours=total / HOUR * (t.billed_nodes or t.nodes),
        joules=None if t.watts_per_node is None else total * t.nodes * t.watts_per_node,
    )
