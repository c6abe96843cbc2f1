"""Reports a comparison: the verdict, and the tables behind it. The same records make the same report."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, replace
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from fugaku_gpt.compare.live import STOPPED, comparison_of
from fugaku_gpt.compare.pairs import A_FIRST, ComparisonRecord
from fugaku_gpt.compare.recorded import Block, Recorded
from fugaku_gpt.compare.samples import MAX_SETTLING, JobSample, builds_of
from fugaku_gpt.compare.sections import OPERATORS, Section, job_sections, noise_section, run_section
from fugaku_gpt.compare.statistics import Comparison

NO_VERDICT = "none"
UNDECIDED = "undecided"
_MAX_MORE_PAIRS = 100  # a larger number of pairs is not given exactly


@dataclass(frozen=True)
class Point:
    """One ratio in a picture, of a pair or of a configuration."""

    name: str
    ratio: float
    is_counted: bool


@dataclass(frozen=True)
class Report:
    """A finished comparison.

    Attributes:
        a, b: the sides as they were written.
        verdict: the verdict of the statistics, or ``none`` where there can be none.
        headline: the verdict in a line.
        reasons: lines about the verdict.
        values: the complete report as JSON values.
        operators: seconds of an iteration by class of operators; empty where it was not profiled.
        was_stopped: True if the comparison was interrupted, so that it can be resumed.
    """

    a: str
    b: str
    verdict: str
    headline: str
    reasons: Tuple[str, ...]
    sections: Tuple[Section, ...]
    comparison: Optional[Comparison]
    points: Tuple[Point, ...]
    values: Mapping[str, Any]
    operators: Tuple[Mapping[str, Any], ...] = ()
    was_stopped: bool = False


def report_live(record: ComparisonRecord) -> Report:
    """Reports a live comparison, from the pairs run up to now."""
    plan, counted = record.plan, record.counted
    troubles, comparison = record.troubles(), comparison_of(record)
    jobs_a, jobs_b = [pair.a for pair in counted], [pair.b for pair in counted]
    for name, jobs in (("A", jobs_a), ("B", jobs_b)):
        builds = builds_of(jobs)
        if len(builds) > 1:
            troubles.append(f"{name}'s jobs ran with different builds: {'; '.join(builds)}")
    conclusion = _conclude(comparison, plan.tolerance, troubles, "pairs")
    first = sum(pair.order == A_FIRST for pair in counted)
    reasons = [
        *troubles,
        *([f"no more pairs were run: {record.stop_reason}"] if record.stop_reason else []),
        f"order: A was first in {first} of {len(counted)} pairs that count",
        *_warm_up_warnings(jobs_a, jobs_b),
    ]
    rows = [
        {
            "pair": pair.name,
            "order": " ".join(pair.order),
            "A (s)": _seconds_cell(pair.a.seconds),
            "B (s)": _seconds_cell(pair.b.seconds),
            "B/A": _ratio_cell(pair.a.seconds, pair.b.seconds),
            "counts": _counts_cell(pair.has_both_times, pair.disturbed),
        }
        for pair in record.pairs
    ]
    sections = [
        *([run_section(jobs_a[0], _timing_lines(jobs_a[0], plan.warm_up))] if jobs_a else []),
        Section("Seconds per iteration", (), _SPREAD_COLUMNS, _spread_rows(*record.seconds)),
        Section(
            "Pairs", (_pair_counts_line(record),), ("pair", "order", "A (s)", "B (s)", "B/A", "counts"), tuple(rows)
        ),
        *job_sections(jobs_a, jobs_b),
        *noise_section(
            [pair.noise_a for pair in record.pairs if pair.noise_a],
            [pair.noise_b for pair in record.pairs if pair.noise_b],
        ),
    ]
    points = [
        Point(pair.name, pair.b.seconds / pair.a.seconds, pair.is_counted)
        for pair in record.pairs
        if pair.a.seconds is not None and pair.b.seconds is not None
    ]
    values: Dict[str, Any] = {
        "pairs": [
            {
                "pair": pair.name,
                "order": pair.order,
                "a": pair.a.seconds,
                "b": pair.b.seconds,
                "counts": pair.is_counted,
                "disturbed": list(pair.disturbed),
                "noise_a": asdict(pair.noise_a) if pair.noise_a else None,
                "noise_b": asdict(pair.noise_b) if pair.noise_b else None,
            }
            for pair in record.pairs
        ],
        "broken_off": list(record.unfinished),
        "warm_up": plan.warm_up,
        "tolerance": plan.tolerance,
    }
    report = _assemble((plan.a.text, plan.b.text), conclusion, reasons, sections, points, values)
    return replace(report, was_stopped=record.stop_reason == STOPPED)


def report_recorded(a: str, b: str, recorded: Recorded, tolerance: float) -> Report:
    """Reports a comparison of recorded runs."""
    blocks, comparison = recorded.blocks, recorded.comparison
    reasons = []
    if not blocks:
        reasons.append("no configuration was run on both sides: nothing can be compared")
    single = sum(block.comparison is None for block in blocks)
    if single:
        subject = f"{single} of {len(blocks)} configurations have" if len(blocks) > 1 else "the configuration has"
        reasons.append(f"{subject} one run alone on a side: what a repeat would have changed there is not known")
    if len(blocks) > 1:
        reasons.append(
            "over all: one ratio of each configuration, whatever the number of its runs, one included; the spread "
            "of these ratios is the noise (a blocked comparison)"
        )
    reasons.append("these runs were not made in turns: what else has changed between them is in the ratio, too")
    conclusion = _conclude(comparison, tolerance, [] if blocks else reasons[:1], "configurations")
    rows = [
        {
            "configuration": block.summary,
            "A": ", ".join(run.name for run in block.a),
            "B": ", ".join(run.name for run in block.b),
            "A (s)": _seconds_cell(block.seconds[0]),
            "B (s)": _seconds_cell(block.seconds[1]),
            "B/A": f"{block.ratio:.3f}",
            "memory B/A": f"{block.memory_ratio:.3f}" if block.memory_ratio is not None else None,
            "verdict": _block_verdict(block),
        }
        for block in blocks
    ]
    columns = ("configuration", "A", "B", "A (s)", "B (s)", "B/A", "memory B/A", "verdict")
    sections = [Section("Configurations that both sides have", (), columns, tuple(rows))]
    if recorded.left_out:
        sections.append(Section("Left out", recorded.left_out))
    if recorded.jobs_a:
        sections.append(run_section(recorded.jobs_a[0]))
    sections += job_sections(recorded.jobs_a, recorded.jobs_b)
    points = [Point(block.summary, block.ratio, True) for block in blocks]
    values = {
        "configurations": [
            {
                "configuration": block.summary,
                "a": {run.name: run.seconds for run in block.a},
                "b": {run.name: run.seconds for run in block.b},
                "ratio": block.ratio,
                "memory_ratio": block.memory_ratio,
                "comparison": _comparison_json(block.comparison),
            }
            for block in blocks
        ],
        "left_out": list(recorded.left_out),
        "tolerance": tolerance,
    }
    return _assemble((a, b), conclusion, reasons, sections, points, values)


def _assemble(
    sides: Tuple[str, str],
    conclusion: "_Conclusion",
    reasons: Sequence[str],
    sections: Sequence[Section],
    points: Sequence[Point],
    extra_values: Mapping[str, Any],
) -> Report:
    (a, b), (verdict, headline, comparison) = sides, conclusion
    if verdict == NO_VERDICT:  # the times are in the tables; a ratio of them would be about something else
        comparison = None
    values = {
        "version": 1,
        "a": a,
        "b": b,
        "verdict": verdict,
        "headline": headline,
        "why": list(reasons),
        "comparison": _comparison_json(comparison),
        **extra_values,
        "tables": {
            section.title: {"lines": list(section.lines), "rows": [dict(row) for row in section.rows]}
            for section in sections
        },
    }
    operators = [row for section in sections if section.title == OPERATORS for row in section.rows]
    return Report(
        a, b, verdict, headline, tuple(reasons), tuple(sections), comparison, tuple(points), values, tuple(operators)
    )


class _Conclusion(NamedTuple):
    """The verdict in one word and in a line, and its statistics; None where there are none."""

    verdict: str
    headline: str
    comparison: Optional[Comparison]


def _conclude(comparison: Optional[Comparison], tolerance: float, troubles: Sequence[str], noun: str) -> _Conclusion:
    return _Conclusion(*_verdict_and_headline(comparison, tolerance, troubles, noun), comparison)


def _verdict_and_headline(
    comparison: Optional[Comparison], tolerance: float, troubles: Sequence[str], noun: str
) -> Tuple[str, str]:
    """Returns the verdict and its headline."""
    if comparison is None or troubles:
        return NO_VERDICT, "no verdict"
    interval = f"95 % interval {comparison.low:.3f} to {comparison.high:.3f}, p {comparison.p:.3g}"
    count = f"{comparison.a} {noun}" if comparison.paired else f"{comparison.a} and {comparison.b} runs"
    if comparison.paired and comparison.a == 1:
        count = f"1 {noun[:-1]}"
    summary = f"B takes {comparison.ratio:.3f} of A's seconds per iteration ({interval}, {count})"
    if comparison.verdict == "same":
        return comparison.verdict, f"same within {tolerance:.0%}: {summary}"
    if comparison.verdict != UNDECIDED:
        return comparison.verdict, f"B is {comparison.verdict}: {summary}"
    more_text = (
        f"{comparison.more}"
        if comparison.more is not None and comparison.more <= _MAX_MORE_PAIRS
        else f"more than {_MAX_MORE_PAIRS}"
    )
    if comparison.more is None:
        return UNDECIDED, f"undecided: B takes {comparison.ratio:.3f} of A's seconds, and one run each cannot tell why"
    return UNDECIDED, f"undecided ({more_text} more {noun if comparison.paired else 'runs of each'} needed): {summary}"


def _comparison_json(comparison: Optional[Comparison]) -> Optional[Dict[str, Any]]:
    """A comparison as JSON values; unknown ends of the interval are null."""
    if comparison is None:
        return None
    values = asdict(comparison)
    if not math.isfinite(comparison.high):
        values.update(low=None, high=None)
    return values


def _block_verdict(block: Block) -> str:
    comparison = block.comparison
    if comparison is None:
        single_sides = [name for name, runs in (("A", block.a), ("B", block.b)) if len(runs) == 1]
        return (
            "none by itself: one run each"
            if len(single_sides) == 2
            else f"none by itself: one run of {single_sides[0]}"
        )
    interval = f"{comparison.low:.3f} to {comparison.high:.3f}"
    more_text = (
        f", {comparison.more} more runs of each needed"
        if comparison.verdict == UNDECIDED and comparison.more is not None
        else ""
    )
    return f"{comparison.verdict} ({interval}{more_text})"


_SPREAD_COLUMNS = ("side", "jobs", "mean (s)", "smallest (s)", "largest (s)", "spread between jobs")


def _spread_rows(a: Sequence[float], b: Sequence[float]) -> Tuple[Mapping[str, Any], ...]:
    rows = []
    for name, values in (("A", a), ("B", b)):
        logs = [math.log(value) for value in values]
        rows.append(
            {
                "side": name,
                "jobs": len(values),
                "mean (s)": _seconds_cell(math.exp(statistics.fmean(logs))) if logs else None,
                "smallest (s)": _seconds_cell(min(values)) if logs else None,
                "largest (s)": _seconds_cell(max(values)) if logs else None,
                "spread between jobs": f"{statistics.stdev(logs):.1%}" if len(logs) > 1 else None,
            }
        )
    return tuple(rows)


def _timing_lines(job: JobSample, warm_up: int) -> Tuple[str]:
    return (f"each job: {warm_up} iterations of warm-up, then the median of {job.timed_count}",)


def _pair_counts_line(record: ComparisonRecord) -> str:
    counted, disturbed = len(record.counted), len(record.disturbed)
    failed, broken_off = sum(not pair.has_both_times for pair in record.pairs), len(record.unfinished)
    phrases = [
        f"{counted} {'pair counts' if counted == 1 else 'pairs count'}",
        f"{disturbed} {'was' if disturbed == 1 else 'were'} disturbed and left out",
    ]
    phrases += [f"{failed} failed"] if failed else []
    phrases += [f"{broken_off} {'was' if broken_off == 1 else 'were'} stopped on the way"] if broken_off else []
    return ", ".join(phrases)


def _counts_cell(has_both_times: bool, disturbed: Sequence[str]) -> str:
    if not has_both_times:
        return "no: a job has failed"
    return "no: " + "; ".join(disturbed) if disturbed else "yes"


def _warm_up_warnings(a: Sequence[JobSample], b: Sequence[JobSample]) -> List[str]:
    warnings = []
    for name, jobs in (("A", a), ("B", b)):
        values = [job.settling_ratio for job in jobs if job.settling_ratio is not None]
        if values and statistics.median(values) > MAX_SETTLING:
            warnings.append(
                f"{name}: the first half of the timed iterations takes {statistics.median(values):.2f} times as long "
                "as the second: it had not settled; raise --warm-up"
            )
    return warnings


def _seconds_cell(value: Optional[float]) -> Optional[str]:
    return f"{value:.4g}" if value is not None else None


def _ratio_cell(a: Optional[float], b: Optional[float]) -> Optional[str]:
    return f"{b / a:.3f}" if a is not None and b is not None else None
