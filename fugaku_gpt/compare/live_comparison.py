"""A comparison of two sides that are run now, from what a user asks for to its report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Optional, Tuple

from fugaku_gpt.compare.environments import build_json, usable_profile
from fugaku_gpt.compare.live import Launch, Limits, PairProgress, Session, SideRun, run_pairs
from fugaku_gpt.compare.pairs import ComparisonPlan, SidePlan, read_comparison
from fugaku_gpt.compare.report import Report, report_live
from fugaku_gpt.compare.shared_run import TOLERANCE, SharedRun
from fugaku_gpt.compare.sides import LiveSide, refuse_unequal_work, work_per_iteration
from fugaku_gpt.config import RunConfig, config_values
from fugaku_gpt.errors import UsageError
from fugaku_gpt.launch.launcher import find_launcher, launch, require_rank_packages
from fugaku_gpt.machine.checkout import git_commit


@dataclass(frozen=True)
class LiveSettings:
    """How two sides are run in turns.

    Attributes:
        pairs: largest number of pairs that count.
        budget: time limit in seconds; None for no limit.
        at_least: number of pairs before it may stop because the interval is narrow or the answer clear.
        tolerance: relative difference within which the sides count as the same.
        load: share of the machine that other processes may take before a pair is run again.
        reruns: largest number of disturbed pairs that are run again.
        start: inside a job, the words of the command that starts ranks; empty for this machine's ``mpirun``.
        unpacked: inside a job, the folder that ``job.tarball`` was unpacked to.
    """

    pairs: int = 10
    budget: Optional[float] = None
    at_least: int = 6
    tolerance: float = TOLERANCE
    load: float = 0.05
    reruns: int = 10
    start: Tuple[str, ...] = ()
    unpacked: Optional[Path] = None


def configs_of_sides(shared: SharedRun, sides: Tuple[LiveSide, LiveSide]) -> Tuple[RunConfig, RunConfig]:
    """Load the runs of both sides.

    Raises:
        UsageError: no run is named, or the sides do not do the same work.
    """
    a, b = (shared.config_of(side) for side in sides)
    refuse_unequal_work(work_per_iteration(a), work_per_iteration(b))
    return a, b


def compare_live(
    shared: SharedRun,
    sides: Tuple[LiveSide, LiveSide],
    out: Optional[Path],
    settings: LiveSettings,
    progress: PairProgress,
    start_ranks: Launch = launch,
    on_signal: Callable[[int], None] = lambda number: None,
) -> Report:
    """Run both sides in turns in a folder, and report; the same call continues there.

    Args:
        start_ranks: starts the ranks of one job and waits for them; see :func:`fugaku_gpt.launch.launcher.launch`.
        on_signal: is called with the number of a signal that ends the comparison between two jobs.

    Raises:
        UsageError: it cannot be run as asked, or no folder is named.
        ModuleNotFoundError: this Python lacks a package that ranks need.
    """
    if out is None:
        raise UsageError("no folder is named for the jobs: give --out, a folder; the same command resumes there")
    configs = configs_of_sides(shared, sides)
    profiles = [usable_profile(side.environment, settings.unpacked) for side in sides]
    if not settings.start:
        for profile in profiles:
            find_launcher(profile=profile)  # both fail before anything is written, and say how to get what is missing
            if profile is None:
                require_rank_packages()
    plans = [
        SidePlan(side.label, side.environment, side.settings, config_values(config), build_json(side.environment))
        for side, config in zip(sides, configs)
    ]
    plan = ComparisonPlan(plans[0], plans[1], shared.warm_up_of_live, settings.tolerance, settings.load, git_commit())
    first, second = (SideRun(config, profile) for config, profile in zip(configs, profiles))
    limits = Limits(settings.pairs, settings.budget, settings.at_least, settings.reruns)
    session = Session(out, plan, (first, second), limits, start_ranks, progress, settings.start, on_signal=on_signal)
    run_pairs(session)
    return report_live(read_comparison(out))
