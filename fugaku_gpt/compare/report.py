"""What a comparison says: the verdict in words, and the tables behind it. The same records make the same report."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, replace
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from fugaku_gpt.compare.curves import Curves, compare_curves, farthest_of
from fugaku_gpt.compare.facts import differences
from fugaku_gpt.compare.live import STOPPED, comparison_of
from fugaku_gpt.compare.noise import Noise, unknown_of
from fugaku_gpt.compare.operators import COLUMNS, explanation, operator_rows, slowdown
from fugaku_gpt.compare.pairs import A_FIRST, Kept
from fugaku_gpt.compare.recorded import Block, Recorded
from fugaku_gpt.compare.samples import SETTLED, Job, builds_of
from fugaku_gpt.compare.statistics import Comparison

NO_VERDICT = "none"
OPERATORS = "Where the time of an iteration goes"
UNDECIDED = "undecided"
_MANY = 100  # pairs that nobody will run


@dataclass(frozen=True)
class Section:
    """One table of a report with the lines above it; without columns, the lines alone."""

    title: str
    lines: Tuple[str, ...] = ()
    columns: Tuple[str, ...] = ()
    rows: Tuple[Mapping[str, Any], ...] = ()


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
    verdict, headline = _headline(found, plan.tolerance, troubles, "pairs")
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
        Section("Seconds per iteration", (), _JOBS, _spread(*kept.seconds)),
        Section("Pairs", (_told(kept),), ("pair", "order", "A (s)", "B (s)", "B/A", "counts"), tuple(rows)),
        *_about_jobs(jobs_a, jobs_b),
        _noise_section(
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
    report = _report(plan.a.text, plan.b.text, verdict, headline, why, sections, found, points, values)
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
        why.append("over all: one ratio of each configuration, whatever the number of its runs (a blocked comparison)")
    why.append("these runs were not made in turns: what else has changed between them is in the ratio, too")
    verdict, headline = _headline(found, tolerance, [] if blocks else why[:1], "configurations")
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
    sections += _about_jobs(recorded.jobs_a, recorded.jobs_b)
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
    return _report(a, b, verdict, headline, why, sections, found, points, values)


def _report(
    a: str,
    b: str,
    verdict: str,
    headline: str,
    why: Sequence[str],
    sections: Sequence[Section],
    found: Optional[Comparison],
    points: Sequence[Point],
    more: Mapping[str, Any],
) -> Report:
    values = {
        "version": 1,
        "a": a,
        "b": b,
        "verdict": verdict,
        "headline": headline,
        "why": list(why),
        "comparison": _finite(found),
        **more,
        "tables": {one.title: {"lines": list(one.lines), "rows": [dict(row) for row in one.rows]} for one in sections},
    }
    operators = [row for one in sections if one.title == OPERATORS for row in one.rows]
    return Report(a, b, verdict, headline, tuple(why), tuple(sections), found, tuple(points), values, tuple(operators))


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
        return "undecided: one run each" if len(alone) == 2 else f"undecided: one run of {alone[0]}"
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


def _about_jobs(a: Sequence[Job], b: Sequence[Job]) -> List[Section]:
    """Memory, losses and start-up facts; nothing where there are no run directories."""
    if not a or not b:
        return []
    return [*_operator_section(a, b), _memory_section(a, b), _curve_section(a, b), _fact_section(a, b)]


def _operator_section(a: Sequence[Job], b: Sequence[Job]) -> List[Section]:
    """Where an iteration's time goes; nothing where one of the sides was not profiled."""
    ours, theirs = ([job.operators for job in jobs if job.operators is not None] for jobs in (a, b))
    if not ours or not theirs:
        return []
    lines = (
        explanation(ours, theirs),
        f"of a few iterations after the timed ones, which the profiler makes {slowdown(ours):.2f} (A) and "
        f"{slowdown(theirs):.2f} (B) times as long",
    )
    return [Section(OPERATORS, lines, COLUMNS, tuple(operator_rows(ours, theirs)))]


def _memory_section(a: Sequence[Job], b: Sequence[Job]) -> Section:
    rows = []
    for what, key in (("largest rank's RSS", "rss_max_bytes"), ("node used", "node_used_bytes")):
        values = [[getattr(job, key) for job in jobs if getattr(job, key) is not None] for jobs in (a, b)]
        if all(values):
            ours, theirs = map(statistics.median, values)
            cells = (f"{ours / 2**20:.0f}", f"{theirs / 2**20:.0f}", f"{theirs / ours:.3f}")
            rows.append({"peak": what, "A (MiB)": cells[0], "B (MiB)": cells[1], "B/A": cells[2]})
    return Section("Memory", ("median of the jobs' peaks",), ("peak", "A (MiB)", "B (MiB)", "B/A"), tuple(rows))


def _curve_section(a: Sequence[Job], b: Sequence[Job]) -> Section:
    dtypes = [job.config.training.dtype for job in (a[0], b[0]) if job.config is not None]
    if len(dtypes) < 2:
        return Section("Loss curves", ("the runs' configurations cannot be read",))
    found = compare_curves(a[0].losses, b[0].losses, dtypes)
    lines = [_curve_words("A and B", found)]
    for name, jobs, dtype in (("A", a, dtypes[0]), ("B", b, dtypes[1])):
        own = farthest_of([job.losses for job in jobs], dtype)
        if own is not None:
            lines.append(_curve_words(f"{name}'s own jobs", own))
    return Section("Loss curves", tuple(lines))


def _curve_words(who: str, found: Optional[Curves]) -> str:
    if found is None:
        return f"{who}: no iteration in common"
    if found.distance == 0:
        return f"{who}: the same in all {found.points} iterations"
    verdict = "equal" if found.equal else "NOT equal"
    return (
        f"{who}: {verdict} within {found.tolerance:.0e}: apart by {found.distance:.1e} of the loss at most, in "
        f"iteration {found.iteration} of {found.points} ({found.loss_a:.6f} and {found.loss_b:.6f})"
    )


def _fact_section(a: Sequence[Job], b: Sequence[Job]) -> Section:
    rows = tuple({"fact": one.fact, "A": one.a, "B": one.b} for one in differences(a, b))
    return Section("What differs at start-up", () if rows else ("nothing",), ("fact", "A", "B") if rows else (), rows)


_NOISE = (
    ("other processes, during", "others", "{:.1%}"),
    ("other processes, just before", "others_before", "{:.0%}"),
    ("other processes, just after", "others_after", "{:.0%}"),
    ("stolen by the host", "stolen", "{:.1%}"),
    ("clock (MHz)", "mhz", "{:.0f}"),
    ("throttled (events)", "throttled", "{:.0f}"),
    ("pages touched first or mapped (1/s)", "minor_faults", "{:.0f}"),
    ("pages read from a disk (1/s)", "major_faults", "{:.1f}"),
    ("waits (1/s)", "yields", "{:.0f}"),
    ("switches by force (1/s)", "switches", "{:.0f}"),
)


def _noise_section(a: Sequence[Noise], b: Sequence[Noise]) -> Section:
    rows = []
    for what, key, form in _NOISE:
        cells = []
        for side in (a, b):
            values = [value for value in (getattr(noise, key) for noise in side) if value is not None]
            cells.append(form.format(statistics.median(values)) if values else None)
        rows.append({"of a job, in the median": what, "A": cells[0], "B": cells[1]})
    unknown = unknown_of(a[0]) if a else []
    lines = (f"not told by this machine: {', '.join(unknown)}",) if unknown else ()
    return Section("What else went on", lines, ("of a job, in the median", "A", "B"), tuple(rows))


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
