"""Runs both sides alternately (A B, B A, A B, ...), each job a start of its own, until the interval is narrow enough.

Slow changes of the machine (it warms up, another user arrives) then affect both sides alike, and the first and the
second job of a pair equally often. The width of the interval decides whether more pairs are needed
(:func:`fugaku_gpt.compare.statistics.stop_reason`): stopping as soon as a difference looks certain would find
differences where there are none.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Protocol, Sequence, Tuple

from fugaku_gpt.compare import statistics
from fugaku_gpt.compare.noise import NoiseWatch, disturbances
from fugaku_gpt.compare.pairs import (
    A_FIRST,
    B_FIRST,
    ComparisonPlan,
    ComparisonRecord,
    Pair,
    next_pair_folder,
    read_comparison,
    read_plan,
    write_ending,
    write_noise,
    write_pair,
    write_plan,
)
from fugaku_gpt.compare.statistics import Comparison, compare_pairs
from fugaku_gpt.config import RunConfig, dotted_settings, dump_run_config
from fugaku_gpt.config.profile import Profile
from fugaku_gpt.errors import UsageError
from fugaku_gpt.launch.launch_result import result_of_launch
from fugaku_gpt.launch.processes import Outcome
from fugaku_gpt.machine.clock import steady_time
from fugaku_gpt.planner.trainer.memory_check import local_node_limits, refuse_too_large
from fugaku_gpt.records.claim import AlreadyClaimed, claim_folder, current_process, release_claim
from fugaku_gpt.records.files import is_temporary
from fugaku_gpt.records.run import INTERRUPTED, REFUSED, Result, RunDirectory

CLAIM = ".compare.claim"
MIN_PAIRS = 6  # with fewer pairs, p is above 5 % whatever the times are

Launch = Callable[..., Outcome]  # as fugaku_gpt.launch.launcher.launch

# reasons for running no more pairs
NARROW = "the interval is narrow enough"
CLEAR = "the difference is far beyond the noise"
ENOUGH_PAIRS = "all pairs that were asked for are there"
BUDGET = "the budget is spent"
RERUNS = "too many pairs were disturbed"
TROUBLE = "there can be no verdict"
STOPPED = "it was stopped"
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True)
class Limits:
    """When to stop.

    Attributes:
        max_pairs: maximum number of pairs that count.
        budget: seconds of this call; None for no limit.
        min_pairs: number of pairs that count before the interval is examined.
        max_reruns: maximum number of disturbed pairs that are run again, over all calls.
    """

    max_pairs: int = 10
    budget: Optional[float] = None
    min_pairs: int = MIN_PAIRS
    max_reruns: int = 10


@dataclass(frozen=True)
class SideRun:
    """How one side's jobs are started."""

    config: RunConfig
    profile: Optional[Profile]


class PairProgress(Protocol):
    """Reports the progress of a comparison."""

    def job_started(self, pair: str, side: str, number: int, total: int) -> None:
        """Reports that a job of the pair begins; ``number`` of ``total`` pairs count so far."""

    def pair_ended(self, pair: Pair) -> None:
        """Reports that both jobs of a pair have ended."""


@dataclass(frozen=True)
class Session:
    """One call's work at a comparison: what is compared, where, within which limits, and by which means.

    Attributes:
        out: folder of the comparison.
        plan: what is compared.
        sides: A and B.
        limits: when to stop.
        launch: starts the ranks of one job and waits for them; see :func:`fugaku_gpt.launch.launcher.launch`.
        progress: reports jobs and pairs.
        start: command that starts ranks inside a job; see that function.
        new_watch: makes the noise guard around a job.
        clock: returns seconds.
        mark: identifies this call's claim and processes.
    """

    out: Path
    plan: ComparisonPlan
    sides: Tuple[SideRun, SideRun]
    limits: Limits
    launch: Launch
    progress: PairProgress
    start: Sequence[str] = ()
    new_watch: Callable[..., NoiseWatch] = NoiseWatch
    clock: Callable[[], float] = time.monotonic
    on_signal: Callable[[int], None] = lambda number: None
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)


def run_pairs(session: Session) -> str:
    """Runs the missing pairs; returns why no more are run. Pairs that ``session.out`` already holds count.

    Raises:
        UsageError: ``out`` holds something else, or another process is using it.
    """
    with _signals_as_interrupt(session.on_signal):
        _claim_comparison(session.out, session.plan, session.mark)
        return _run_claimed_pairs(session)


def _run_claimed_pairs(session: Session) -> str:
    out, plan, clock = session.out, session.plan, session.clock
    try:
        # checked again: another comparison may have begun and ended before the claim
        if _existing_plan(out, plan) is None:
            write_plan(out, plan)
        write_ending(out, "")
        started, pairs_before = clock(), len(read_comparison(out).pairs)
        stop_reason = ""
        while not stop_reason:
            record = read_comparison(out)
            # failures of an earlier call are tried again: their cause may be gone
            if record.not_applied() or (len(record.pairs) > pairs_before and record.failures()):
                stop_reason = TROUBLE
            else:
                stop_reason = _stop_reason(record, session.limits, clock() - started)
            if not stop_reason and not _run_pair(session, record):
                stop_reason = STOPPED
        write_ending(out, stop_reason)
        return stop_reason
    except KeyboardInterrupt:  # between jobs: the pair that had begun does not count
        write_ending(out, STOPPED)
        return STOPPED
    finally:
        release_claim(out, CLAIM, session.mark)


@contextlib.contextmanager
def _signals_as_interrupt(on_signal: Callable[[int], None]) -> Iterator[None]:
    """Makes the signals of schedulers act like Ctrl-C between jobs, once: the ending must not be interrupted again."""

    def stop(number: int, _frame: object) -> None:
        for ignored in previous_handlers:
            signal.signal(ignored, signal.SIG_IGN)
        on_signal(number)
        raise KeyboardInterrupt

    previous_handlers: Dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in _STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup: stays ignored
                previous_handlers[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for caught_signal, handler in previous_handlers.items():
            signal.signal(caught_signal, handler)


def next_order(counted: Sequence[Pair]) -> str:
    """Order of the next pair: the side that was first in fewer of the counted pairs runs first, A if they are equal."""
    first = sum(pair.order == A_FIRST for pair in counted)
    return B_FIRST if first > len(counted) - first else A_FIRST


def comparison_of(record: ComparisonRecord) -> Optional[Comparison]:
    """The comparison of the pairs that count; None where there is none."""
    a, b = record.seconds
    return compare_pairs(a, b, record.plan.tolerance) if a else None


def _stop_reason(record: ComparisonRecord, limits: Limits, elapsed: float) -> str:
    """Why no more pairs are to be run; empty while more are needed."""
    counted = record.counted
    if len(counted) >= limits.max_pairs:
        return ENOUGH_PAIRS
    if len(record.disturbed) > limits.max_reruns:
        return RERUNS
    longest = max((pair.seconds for pair in record.pairs), default=0.0)
    if limits.budget is not None and elapsed + longest > limits.budget:
        return BUDGET
    comparison = comparison_of(record)
    if comparison is None or len(counted) % 2:  # the order is balanced after every second pair
        return ""
    return {"": "", statistics.NARROW: NARROW, statistics.CLEAR: CLEAR}[
        statistics.stop_reason(comparison, record.plan.tolerance, limits.min_pairs, None)
    ]


def _run_pair(session: Session, record: ComparisonRecord) -> bool:
    """Runs one pair; returns whether it was run to its end."""
    folder, order, started = next_pair_folder(session.out), next_order(record.counted), session.clock()
    disturbed: List[str] = []
    for letter in order:
        session.progress.job_started(folder.name, letter, len(record.counted), session.limits.max_pairs)
        directory = RunDirectory(folder / letter.lower())
        result, job_disturbances, stopped = _run_job(session, directory, session.sides["AB".index(letter)])
        if stopped:
            # the ranks may have left a large checkpoint, from which nobody will resume
            shutil.rmtree(directory.checkpoints_dir, ignore_errors=True)
            return False
        disturbed += [f"{letter}: {line}" for line in job_disturbances]
        if result.status != "ok":  # the other side would have nothing to be compared with
            break
    write_pair(folder, order, disturbed, session.clock() - started)
    session.progress.pair_ended(read_comparison(session.out).pairs[-1])
    return True


def _run_job(session: Session, directory: RunDirectory, side: SideRun) -> Tuple[Result, List[str], bool]:
    """Starts a side once; returns the result, what disturbed it, and whether the comparison was stopped meanwhile."""
    config, is_inside_job = side.config, bool(session.start)
    directory.create(dump_run_config(config), session.mark)
    log, started = directory.log_file, steady_time()
    disturbed: List[str] = []
    stopped = False
    try:
        if not is_inside_job:  # ranks inside a job are on other nodes, too, and judge that themselves
            refuse_too_large(config, local_node_limits(), range(config.layout.ranks))
        with session.new_watch(descendants=not is_inside_job) as watch:
            outcome = session.launch(
                config,
                directory,
                timeout=config.job.elapse if not is_inside_job else None,
                on_line=lambda _: watch.sample_clock(),
                mark=session.mark,
                profile=side.profile,
                start=session.start,
            )
        if watch.noise is not None:
            write_noise(directory.path, watch.noise)
            disturbed = disturbances(watch.noise, session.plan.load)
        result = result_of_launch(directory, config, outcome, log, started)
        stopped = outcome.stopped_by is not None or result.status == INTERRUPTED
    except UsageError as error:
        result = Result(REFUSED, " ".join(str(error).splitlines()), started, steady_time())
    directory.write_result(result)
    return result, disturbed, stopped


def _claim_comparison(out: Path, plan: ComparisonPlan, mark: str) -> None:
    """Claims the folder for this comparison.

    Raises:
        UsageError: it holds another comparison or other files, or another process is using it.
    """
    if _existing_plan(out, plan) is None and out.exists() and any(not is_temporary(path) for path in out.iterdir()):
        raise UsageError(f"{out}: holds files that are not a comparison's; choose another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        claim_folder(out, CLAIM, current_process(mark), same_process=False)
    except AlreadyClaimed as claimed:
        raise UsageError(
            f"{out}: a comparison is running there ({claimed}); wait for its end, or, if that process is gone, remove "
            f"{claimed.file}"
        ) from None
    except OSError as error:
        raise UsageError(f"{out}: cannot be written: {error.strerror}; choose another --out") from None


def _existing_plan(out: Path, plan: ComparisonPlan) -> Optional[ComparisonPlan]:
    """The plan that the folder holds; None where there is none.

    Raises:
        UsageError: it is the plan of another comparison.
    """
    existing = read_plan(out)
    changes = _changes(existing, plan) if existing is not None else []
    if changes:
        shown = "; ".join(changes[:3])
        raise UsageError(f"{out}: holds a comparison of something else ({shown}); choose another --out")
    return existing


def _changes(existing: ComparisonPlan, plan: ComparisonPlan) -> List[str]:
    """Differences between two plans, such as ``["B training.dtype: float32 then, bfloat16 now"]``."""
    existing_values, values = _flattened(existing), _flattened(plan)
    if existing.commit and plan.commit:  # nodes of a job may have no git
        existing_values["commit"], values["commit"] = existing.commit, plan.commit
    names = {**existing_values, **values}
    return [
        f"{name}: {existing_values.get(name)} then, {values.get(name)} now"
        for name in names
        if existing_values.get(name) != values.get(name)
    ]


def _flattened(plan: ComparisonPlan) -> Dict[str, object]:
    values: Dict[str, object] = {"warm-up": plan.warm_up, "tolerance": plan.tolerance, "load": plan.load}
    for letter, side in zip("AB", plan.sides):
        values[f"{letter}'s environment"] = side.environment
        values.update({f"{letter}'s environment's {key}": value for key, value in side.build.items()})
        values.update({f"{letter} {key}": value for key, value in dotted_settings(side.config).items()})
    return values
