"""The tables of a report that are about the jobs themselves: where the time goes, memory, losses, start-up, noise."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any, List, Mapping, Optional, Sequence, Tuple

from fugaku_gpt.compare.curves import Curves, compare_curves, farthest_of
from fugaku_gpt.compare.facts import differences
from fugaku_gpt.compare.noise import Noise, unknown_of
from fugaku_gpt.compare.operators import COLUMNS, explanation, operator_rows, slowdown
from fugaku_gpt.compare.samples import Job
from fugaku_gpt.formulas.parameters import size_name

OPERATORS = "Where the time of an iteration goes"


@dataclass(frozen=True)
class Section:
    """One table of a report with the lines above it; without columns, the lines alone."""

    title: str
    lines: Tuple[str, ...] = ()
    columns: Tuple[str, ...] = ()
    rows: Tuple[Mapping[str, Any], ...] = ()


def run_section(job: Job, lines: Sequence[str] = ()) -> Section:
    """What was run and where, by a job's own records; what is not the same on both sides stands in another table."""
    said = list(lines)
    environment, config = job.environment, job.config
    if environment:
        cores = {core for rank in environment.get("ranks", []) for core in rank.get("affinity", [])}
        memory = f"{environment['memory_limit_bytes'] / 2**30:.1f} GiB"
        words = (environment["processor"], f"{len(cores)} cores for a node's ranks", memory, environment["system"])
        said.append(f"machine: {', '.join(words)}")
    if config is not None:
        model, layout, training = config.model, config.layout, config.training
        said.append(
            f"run: {size_name(model)}, {model.layers} layers of {model.hidden}, sequence {model.seq_len}, "
            f"dp {layout.dp} tp {layout.tp} pp {layout.pp}, micro-batch {training.micro_batch}, "
            f"global batch {training.global_batch}, {training.dtype}"
        )
    return Section("What was run", tuple(said))


def about_jobs(a: Sequence[Job], b: Sequence[Job]) -> List[Section]:
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


def noise_section(a: Sequence[Noise], b: Sequence[Noise]) -> List[Section]:
    """What else went on during the jobs of both sides; nothing where no job was watched."""
    if not a and not b:
        return []
    rows = []
    for what, key, form in _NOISE:
        cells = []
        for side in (a, b):
            values = [value for value in (getattr(noise, key) for noise in side) if value is not None]
            cells.append(form.format(statistics.median(values)) if values else None)
        rows.append({"of a job, in the median": what, "A": cells[0], "B": cells[1]})
    unknown = unknown_of([*a, *b][0])
    lines = (f"not told by this machine: {', '.join(unknown)}",) if unknown else ()
    return [Section("What else went on", lines, ("of a job, in the median", "A", "B"), tuple(rows))]
