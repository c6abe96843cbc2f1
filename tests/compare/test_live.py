"""Tests of pairs that run in turns: their order, disturbed pairs, when a comparison stops, and how it resumes."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import pytest

from fugaku_gpt.cli.compare.printing import report_text
from fugaku_gpt.compare import live
from fugaku_gpt.compare.live import Limits, Session, SideRun, run_pairs
from fugaku_gpt.compare.noise import Noise
from fugaku_gpt.compare.pairs import ComparisonPlan, ComparisonRecord, SidePlan, read_comparison
from fugaku_gpt.compare.report import NO_VERDICT, report_live
from fugaku_gpt.config import config_values
from fugaku_gpt.errors import UsageError
from fugaku_gpt.launch.processes import Outcome
from tests.compare.runs import TimedLaunch, tiny

pytestmark = pytest.mark.slow

QUIET = Noise(1.0, 0.01, 0.0, 0.0, 0.0, None, 0, None, 100.0, 0.0, 10.0, 1.0)
LOUD = replace(QUIET, others=0.3)
SLOW = [1.05, 1.04, 1.06, 1.05, 1.05, 1.04, 1.06, 1.05, 1.05, 1.04]
USUAL = [1.00, 1.01, 0.99, 1.00, 1.01, 0.99, 1.00, 1.01, 0.99, 1.00]


class Quiet:
    """Stands in for the noise guard: reports the given noises, one for each job, and then a quiet machine."""

    def __init__(self, noises: Sequence[Noise] = ()) -> None:
        self.left = list(noises)

    def __call__(self, descendants: bool = True) -> "Quiet":
        self.noise: Optional[Noise] = self.left.pop(0) if self.left else QUIET
        return self

    def __enter__(self) -> "Quiet":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def sample_clock(self) -> None:
        pass


class Silent:
    def __init__(self) -> None:
        self.pairs: List[str] = []

    def job_started(self, pair: str, side: str, number: int, total: int) -> None:
        self.pairs.append(f"{pair} {side}")

    def pair_ended(self, pair: Any) -> None:
        pass


def plan_of(*settings: str, **more: Any) -> ComparisonPlan:
    a, b = tiny(), tiny(*settings)
    values: Dict[str, Any] = {"warm_up": 2, "tolerance": 0.02, "load": 0.05, **more}
    sides = SidePlan("base", "", (), config_values(a)), SidePlan(",".join(settings), "", settings, config_values(b))
    return ComparisonPlan(*sides, **values)


def run(out: Path, launch: TimedLaunch, plan: Optional[ComparisonPlan] = None, **more: Any) -> str:
    plan = plan if plan is not None else plan_of("training.dtype=bfloat16")
    sides = SideRun(tiny(), None), SideRun(tiny(*plan.b.settings), None)
    limits = more.pop("limits", Limits(max_pairs=4))
    more.setdefault("new_watch", Quiet())
    return run_pairs(Session(out, plan, sides, limits, launch, more.pop("progress", Silent()), **more))


def record_in(out: Path) -> ComparisonRecord:
    return read_comparison(out)


def test_sides_take_turns_and_a_job_counts_as_the_median_of_timed_iterations(tmp_path: Path) -> None:
    launch = TimedLaunch({"a": USUAL, "b": SLOW})
    assert run(tmp_path / "out", launch) == live.ENOUGH_PAIRS
    assert "".join(launch.started) == "abbaabba"
    record = record_in(tmp_path / "out")
    assert [pair.order for pair in record.counted] == ["AB", "BA", "AB", "BA"]
    # the median of the four iterations after the warm-up
    assert record.seconds == (pytest.approx(USUAL[:4]), pytest.approx(SLOW[:4]))


def test_a_planted_slowdown_of_5_percent_is_detected_within_ten_pairs(tmp_path: Path) -> None:
    launch = TimedLaunch({"a": USUAL, "b": SLOW})
    assert run(tmp_path / "out", launch, limits=Limits(max_pairs=10)) in (live.NARROW, live.CLEAR)
    report = report_live(record_in(tmp_path / "out"))
    assert report.verdict == "slower" and report.comparison is not None
    assert report.comparison.a <= 10 and report.comparison.low < 1.05 < report.comparison.high


def test_a_side_against_itself_is_the_same(tmp_path: Path) -> None:
    launch = TimedLaunch({"a": USUAL, "b": USUAL[3:] + USUAL[:3]})
    run(tmp_path / "out", launch, limits=Limits(max_pairs=10))
    assert report_live(record_in(tmp_path / "out")).verdict == "same"


def test_a_disturbed_pair_is_recorded_left_out_and_run_again(tmp_path: Path) -> None:
    launch = TimedLaunch({"a": [1.0], "b": [1.0, 9.0, 1.0]})
    noises = [QUIET, QUIET, LOUD, QUIET]  # side B of pair 2, whose order is B A
    assert run(tmp_path / "out", launch, new_watch=Quiet(noises)) == live.ENOUGH_PAIRS
    record = record_in(tmp_path / "out")
    assert len(record.pairs) == 5 and len(record.counted) == 4
    (left_out,) = record.disturbed
    assert left_out.name == "pair-002" and left_out.disturbed == ("B: other processes took 30.0% of the machine",)
    assert [pair.order for pair in record.counted] == ["AB", "BA", "AB", "BA"]  # balanced among those that count
    text = report_text(report_live(record), "table")
    assert "4 pairs count, 1 was disturbed and left out" in text
    assert "no: B: other processes took 30.0% of the machine" in text


def test_a_machine_that_is_never_quiet_ends_the_comparison(tmp_path: Path) -> None:
    launch = TimedLaunch({"a": [1.0], "b": [1.0]})
    limits = Limits(max_pairs=4, max_reruns=2)
    assert run(tmp_path / "out", launch, limits=limits, new_watch=Quiet([LOUD] * 99)) == live.RERUNS
    assert report_live(record_in(tmp_path / "out")).verdict == NO_VERDICT
    # a higher limit of the load tolerates it
    again = tmp_path / "bearing"
    assert run(again, launch, plan_of(load=0.5), new_watch=Quiet([LOUD] * 99)) == live.ENOUGH_PAIRS


def test_the_budget_ends_the_comparison_before_a_pair_that_would_not_fit(tmp_path: Path) -> None:
    times = iter(range(0, 10_000, 10))
    launch = TimedLaunch({"a": [1.0], "b": [1.0]})
    limits = Limits(max_pairs=10, budget=100.0)
    assert run(tmp_path / "out", launch, limits=limits, clock=lambda: float(next(times))) == live.BUDGET
    assert 2 <= len(record_in(tmp_path / "out").pairs) < 10


def test_a_side_that_cannot_run_is_reported_and_tried_again_by_the_next_call(tmp_path: Path) -> None:
    launch = TimedLaunch({"a": [1.0], "b": [1.0]})
    launch.ends = {2: Outcome(137, None, False, 1.0, oom_kills=1)}
    assert run(tmp_path / "out", launch) == live.TROUBLE
    report = report_live(record_in(tmp_path / "out"))
    assert report.verdict == NO_VERDICT
    assert report.reasons[0] == "B did not run (pair-001): oom: 1 processes killed by the kernel"
    assert run(tmp_path / "out", launch) == live.ENOUGH_PAIRS
    assert len(record_in(tmp_path / "out").counted) == 4


def test_a_toggle_that_was_not_applied_gets_no_verdict(tmp_path: Path) -> None:
    launch = TimedLaunch({"a": [1.0], "b": [0.8]})
    launch.toggles = {"b": {"name": "tcmalloc", "requested": True, "applied": False, "seen": "libc"}}
    assert run(tmp_path / "out", launch, plan_of("node.tcmalloc=true")) == live.TROUBLE
    assert "".join(launch.started) == "ab"  # no further jobs are run
    report = report_live(record_in(tmp_path / "out"))
    assert report.verdict == NO_VERDICT and report.headline == "no verdict"
    assert "B: node.tcmalloc=True was not applied (seen: libc)" in report.reasons[0]
    assert "take another --out" in report.reasons[0]
    # neither JSON nor picture shows a verdict or an interval about something else
    assert report.values["comparison"] is None and report.comparison is None


def test_a_stop_within_a_pair_keeps_complete_pairs_and_the_next_call_resumes(tmp_path: Path) -> None:
    launch = TimedLaunch({"a": [1.0], "b": [1.1]})
    launch.ends = {6: Outcome(130, None, False, 1.0, 0, stopped_by=2)}
    assert run(tmp_path / "out", launch) == live.STOPPED
    record = record_in(tmp_path / "out")
    assert len(record.counted) == 2 and record.unfinished == ("pair-003",)
    report = report_live(record)
    assert report.was_stopped and report.comparison is not None
    assert run(tmp_path / "out", launch) == live.ENOUGH_PAIRS
    record = record_in(tmp_path / "out")
    assert [pair.name for pair in record.counted] == ["pair-001", "pair-002", "pair-004", "pair-005"]
    assert "1 was stopped on the way" in report_text(report_live(record), "md")


def test_another_build_or_commit_of_the_same_sides_is_refused(tmp_path: Path) -> None:
    launch, plan = TimedLaunch({"a": [1.0], "b": [1.0]}), replace(plan_of("training.dtype=bfloat16"), commit="abc")
    plan = replace(plan, b=replace(plan.b, environment="e", build={"python": "/old/python", "preload": []}))
    run(tmp_path / "out", launch, plan, limits=Limits(max_pairs=1))
    # an unknown commit is not another one
    run(tmp_path / "out", launch, replace(plan, commit=""), limits=Limits(max_pairs=1))
    run(tmp_path / "out", launch, plan, limits=Limits(max_pairs=1))
    with pytest.raises(UsageError, match="commit: abc then, abd now"):
        run(tmp_path / "out", launch, replace(plan, commit="abd"))
    other = replace(plan.b, build={"python": "/new/python", "preload": []})
    with pytest.raises(UsageError, match="B's environment's python: /old/python then, /new/python now"):
        run(tmp_path / "out", launch, replace(plan, b=other))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_comparison_stopped_by_a_scheduler_between_jobs_can_be_resumed(tmp_path: Path, number: int) -> None:
    class SignalledAfterPair(Silent):
        def pair_ended(self, pair: Any) -> None:
            os.kill(os.getpid(), number)

    inherited = signal.signal(number, signal.default_int_handler)  # under nohup it is ignored, and stays so
    try:
        launch = TimedLaunch({"a": [1.0], "b": [1.1]})
        assert run(tmp_path / "out", launch, progress=SignalledAfterPair()) == live.STOPPED
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, inherited)
    record = record_in(tmp_path / "out")
    assert len(record.counted) == 1 and report_live(record).was_stopped
    assert not list((tmp_path / "out").glob(f"{live.CLAIM}*"))
    assert run(tmp_path / "out", launch) == live.ENOUGH_PAIRS


def test_a_comparison_that_another_has_begun_before_the_claim_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, out = TimedLaunch({"a": [1.0], "b": [1.0]}), tmp_path / "out"
    claim_folder = live.claim_folder

    def claim_after_another(*arguments: Any, **more: Any) -> Path:
        monkeypatch.setattr(live, "claim_folder", claim_folder)
        run(out, launch, plan_of("training.dtype=float16"), limits=Limits(max_pairs=1))
        return claim_folder(*arguments, **more)

    monkeypatch.setattr(live, "claim_folder", claim_after_another)
    with pytest.raises(UsageError, match="float16 then, bfloat16 now"):
        run(out, launch)
    assert read_comparison(out).plan.b.settings == ("training.dtype=float16",)


def test_another_comparison_in_the_folder_is_refused(tmp_path: Path) -> None:
    launch = TimedLaunch({"a": [1.0], "b": [1.0]})
    run(tmp_path / "out", launch, limits=Limits(max_pairs=1))
    with pytest.raises(UsageError, match=r"B training.dtype: bfloat16 then, float16 now"):
        run(tmp_path / "out", launch, plan_of("training.dtype=float16"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("x")
    with pytest.raises(UsageError, match="holds files that are not a comparison's"):
        run(tmp_path / "other", launch)


def test_the_same_records_make_the_same_report(tmp_path: Path) -> None:
    run(tmp_path / "out", TimedLaunch({"a": USUAL, "b": SLOW}))
    for form in ("table", "md", "json"):
        first, second = (report_text(report_live(record_in(tmp_path / "out")), form) for _ in range(2))
        assert first == second
        assert str(tmp_path) not in first
