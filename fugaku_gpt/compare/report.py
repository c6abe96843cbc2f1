"""What a comparison says: the verdict in words, and the tables behind it. The same records make the same report."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, replace
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from fugaku_gpt.compare.live import STOPPED, comparison_of
from fugaku_gpt.compare.pairs import A_FIRST, Kept
from fugaku_gpt.compare.recorded import Block, Recorded
from fugaku_gpt.compare.samples import SETTLED, Job, builds_of
from fugaku_gpt.compare.sections import OPERATORS, Section, about_jobs, noise_section, run_section
from fugaku_gpt.compare.statistics import Comparison

NO_VERDICT = "none"
UNDECIDED = "undecided"
_MANY = 100  # pairs that nobody will run


@dataclass(frozen=True)
class Point:
    """One ratio of a picture: of a pair, or of a configuration."""

    name: str
    ratio: float
    counts: bool


@dataclass(frozen=True)
class Report:
    """A finished comparison.

    Attributes:
        a, b: the sides as they were written.
        verdict: of the statistics, or ``none`` where there can be none.
        headline: the verdict in a line.
        why: lines about the verdict.
        values: everything as JSON can hold it.
        operators: seconds of an iteration by class of operators; empty where it was not profiled.
        stopped: somebody has stopped it: it can go on.
    """

    a: str
    b: str
    verdict: str
    headline: str
    why: Tuple[str, ...]
    sections: Tuple[Section, ...]
    comparison: Optional[Comparison]
    points: Tuple[Point, ...]
    values: Mapping[str, Any]
    operators: Tuple[Mapping[str, Any], ...] = ()
    stopped: bool = False


def report_live(kept: Kept) -> Report:
    """Of a live comparison, as far as it has come."""
    plan, counted = kept.plan, kept.counted
    troubles, found = kept.troubles(), comparison_of(kept)
    jobs_a, jobs_b = [pair.a for pair in counted], [pair.b for pair in counted]
    for name, jobs in (("A", jobs_a), ("B", jobs_b)):
        builds = builds_of(jobs)
        if len(builds) > 1:
            troubles.append(f"{name}'s jobs ran with different builds: {'; '.join(builds)}")
    conclusion = _conclusion(found, plan.tolerance, troubles, "pairs")
    first = sum(pair.order == A_FIRST for pair in counted)
    why = [
        *troubles,
        *([f"no more pairs were run: {kept.why_stopped}"] if kept.why_stopped else []),
        f"order: A was first in {first} of {len(counted)} pairs that count",
        *_unsettled(jobs_a, jobs_b),
    ]
    rows = [
        {
            "pair": pair.name,
            "order": " ".join(pair.order),
            "A (s)": _seconds(pair.a.seconds),
            "B (s)": _seconds(pair.b.seconds),
            "B/A": _ratio(pair.a.seconds, pair.b.seconds),
            "counts": _why_not(pair.ended_well, pair.disturbed),
        }
        for pair in kept.pairs
    ]
    sections = [
        *([run_section(jobs_a[0], _timed(jobs_a[0], plan.warm_up))] if jobs_a else []),
        Section("Seconds per iteration", (), _JOBS, _spread(*kept.seconds)),
        Section("Pairs", (_told(kept),), ("pair", "order", "A (s)", "B (s)", "B/A", "counts"), tuple(rows)),
        *about_jobs(jobs_a, jobs_b),
        *noise_section(
            [pair.noise_a for pair in kept.pairs if pair.noise_a], [pair.noise_b for pair in kept.pairs if pair.noise_b]
        ),
    ]
    points = [
        Point(pair.name, pair.b.seconds / pair.a.seconds, pair.counts)
        for pair in kept.pairs
        if pair.a.seconds is not None and pair.b.seconds is not None
    ]
    values: Dict[str, Any] = {
        "pairs": [
            {
                "pair": pair.name,
                "order": pair.order,
                "a": pair.a.seconds,
                "b": pair.b.seconds,
                "counts": pair.counts,
                "disturbed": list(pair.disturbed),
                "noise_a": asdict(pair.noise_a) if pair.noise_a else None,
                "noise_b": asdict(pair.noise_b) if pair.noise_b else None,
            }
            for pair in kept.pairs
        ],
        "broken_off": list(kept.broken_off),
        "warm_up": plan.warm_up,
        "tolerance": plan.tolerance,
    }
    report = _report((plan.a.text, plan.b.text), conclusion, why, sections, points, values)
    return replace(report, stopped=kept.why_stopped == STOPPED)


def report_recorded(a: str, b: str, recorded: Recorded, tolerance: float) -> Report:
    """Of runs that were made before."""
    blocks, found = recorded.blocks, recorded.comparison
    why = []
    if not blocks:
        why.append("no configuration was run on both sides: nothing can be told")
    single = sum(block.comparison is None for block in blocks)
    if single:
        which = f"{single} of {len(blocks)} configurations have" if len(blocks) > 1 else "the configuration has"
        why.append(f"{which} one run alone on a side: what a repeat would have changed there is not known")
    if len(blocks) > 1:
        why.append(
            "over all: one ratio of each configuration, whatever the number of its runs, one included; how far "
            "these ratios lie apart tells the noise (a blocked comparison)"
        )
    why.append("these runs were not made in turns: what else has changed between them is in the ratio, too")
    conclusion = _conclusion(found, tolerance, [] if blocks else why[:1], "configurations")
    rows = [
        {
            "configuration": block.words,
            "A": ", ".join(run.name for run in block.a),
            "B": ", ".join(run.name for run in block.b),
            "A (s)": _seconds(block.seconds[0]),
            "B (s)": _seconds(block.seconds[1]),
            "B/A": f"{block.ratio:.3f}",
            "memory B/A": f"{block.memory_ratio:.3f}" if block.memory_ratio is not None else None,
            "verdict": _of_block(block),
        }
        for block in blocks
    ]
    columns = ("configuration", "A", "B", "A (s)", "B (s)", "B/A", "memory B/A", "verdict")
    sections = [Section("Configurations that both sides have", (), columns, tuple(rows))]
    if recorded.left_out:
        sections.append(Section("Left out", recorded.left_out))
    if recorded.jobs_a:
        sections.append(run_section(recorded.jobs_a[0]))
    sections += about_jobs(recorded.jobs_a, recorded.jobs_b)
    points = [Point(block.words, block.ratio, True) for block in blocks]
    values = {
        "configurations": [
            {
                "configuration": block.words,
                "a": {run.name: run.seconds for run in block.a},
                "b": {run.name: run.seconds for run in block.b},
                "ratio": block.ratio,
                "memory_ratio": block.memory_ratio,
                "comparison": _finite(block.comparison),
            }
            for block in blocks
        ],
        "left_out": list(recorded.left_out),
        "tolerance": tolerance,
    }
    return _report((a, b), conclusion, why, sections, points, values)


def _report(
    sides: Tuple[str, str],
    conclusion: "_Conclusion",
    why: Sequence[str],
    sections: Sequence[Section],
    points: Sequence[Point],
    more: Mapping[str, Any],
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
        "why": list(why),
        "comparison": _finite(comparison),
        **more,
        "tables": {one.title: {"lines": list(one.lines), "rows": [dict(row) for row in one.rows]} for one in sections},
    }
    operators = [row for one in sections if one.title == OPERATORS for row in one.rows]
    return Report(
        a, b, verdict, headline, tuple(why), tuple(sections), comparison, tuple(points), values, tuple(operators)
    )


class _Conclusion(NamedTuple):
    """The verdict, in one word and in a line, and the statistics that it is from; None where there are none."""

    verdict: str
    headline: str
    comparison: Optional[Comparison]


def _conclusion(found: Optional[Comparison], tolerance: float, troubles: Sequence[str], noun: str) -> _Conclusion:
    return _Conclusion(*_headline(found, tolerance, troubles, noun), found)


def _headline(found: Optional[Comparison], tolerance: float, troubles: Sequence[str], noun: str) -> Tuple[str, str]:
    """(verdict, in words)."""
    if found is None or troubles:
        return NO_VERDICT, "no verdict"
    interval = f"95 % interval {found.low:.3f} to {found.high:.3f}, p {found.p:.3g}"
    count = f"{found.a} {noun}" if found.paired else f"{found.a} and {found.b} runs"
    if found.paired and found.a == 1:
        count = f"1 {noun[:-1]}"
    said = f"B takes {found.ratio:.3f} of A's seconds per iteration ({interval}, {count})"
    if found.verdict == "same":
        return found.verdict, f"same within {tolerance:.0%}: {said}"
    if found.verdict != UNDECIDED:
        return found.verdict, f"B is {found.verdict}: {said}"
    more = f"{found.more}" if found.more is not None and found.more <= _MANY else f"more than {_MANY}"
    if found.more is None:
        return UNDECIDED, f"undecided: B takes {found.ratio:.3f} of A's seconds, and one run each cannot tell why"
    return UNDECIDED, f"undecided ({more} more {noun if found.paired else 'runs of each'} needed): {said}"


def _finite(found: Optional[Comparison]) -> Optional[Dict[str, Any]]:
    """As JSON can hold it: an end of the interval that is not known is null."""
    if found is None:
        return None
    values = asdict(found)
    if not math.isfinite(found.high):
        values.update(low=None, high=None)
    return values


def _of_block(block: Block) -> str:
    found = block.comparison
    if found is None:
        alone = [name for name, runs in (("A", block.a), ("B", block.b)) if len(runs) == 1]
        return "none by itself: one run each" if len(alone) == 2 else f"none by itself: one run of {alone[0]}"
    interval = f"{found.low:.3f} to {found.high:.3f}"
    more = f", {found.more} more runs of each needed" if found.verdict == UNDECIDED and found.more is not None else ""
    return f"{found.verdict} ({interval}{more})"


_JOBS = ("side", "jobs", "mean (s)", "smallest (s)", "largest (s)", "spread between jobs")


def _spread(a: Sequence[float], b: Sequence[float]) -> Tuple[Mapping[str, Any], ...]:
    rows = []
    for name, values in (("A", a), ("B", b)):
        logs = [math.log(value) for value in values]
        rows.append(
            {
                "side": name,
                "jobs": len(values),
                "mean (s)": _seconds(math.exp(statistics.fmean(logs))) if logs else None,
                "smallest (s)": _seconds(min(values)) if logs else None,
                "largest (s)": _seconds(max(values)) if logs else None,
                "spread between jobs": f"{statistics.stdev(logs):.1%}" if len(logs) > 1 else None,
            }
        )
    return tuple(rows)


def _timed(job: Job, warm_up: int) -> Tuple[str]:
    return (f"each job: {warm_up} iterations of warm-up, then the median of {job.timed}",)


def _told(kept: Kept) -> str:
    counted, disturbed = len(kept.counted), len(kept.disturbed)
    failed, broken_off = sum(not pair.ended_well for pair in kept.pairs), len(kept.broken_off)
    words = [
        f"{counted} {'pair counts' if counted == 1 else 'pairs count'}",
        f"{disturbed} {'was' if disturbed == 1 else 'were'} disturbed and left out",
    ]
    words += [f"{failed} failed"] if failed else []
    words += [f"{broken_off} {'was' if broken_off == 1 else 'were'} stopped on the way"] if broken_off else []
    return ", ".join(words)


def _why_not(ended_well: bool, disturbed: Sequence[str]) -> str:
    if not ended_well:
        return "no: a job has failed"
    return "no: " + "; ".join(disturbed) if disturbed else "yes"


def _unsettled(a: Sequence[Job], b: Sequence[Job]) -> List[str]:
    found = []
    for name, jobs in (("A", a), ("B", b)):
        values = [job.settling for job in jobs if job.settling is not None]
        if values and statistics.median(values) > SETTLED:
            found.append(
                f"{name}: the first half of the timed iterations takes {statistics.median(values):.2f} times as long "
                "as the second: it had not settled; raise --warm-up"
            )
    return found


def _seconds(value: Optional[float]) -> Optional[str]:
    return f"{value:.4g}" if value is not None else None


def _ratio(a: Optional[float], b: Optional[float]) -> Optional[str]:
    return f"{b / a:.3f}" if a is not None and b is not None else None
