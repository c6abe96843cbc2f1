"""Builds the tables of a report about the jobs: where the time goes, memory, losses, start-up and noise."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any, List, Mapping, Optional, Sequence, Tuple

from fugaku_gpt.compare.curves import CurveDistance, compare_curves, farthest_repeat
from fugaku_gpt.compare.facts import differences
from fugaku_gpt.compare.noise import Noise, unknown_quantities
from fugaku_gpt.compare.operators import COLUMNS, explanation, operator_rows, slowdown
from fugaku_gpt.compare.samples import JobSample
from fugaku_gpt.formulas.parameters import size_name

OPERATORS = "Where the time of an iteration goes"


@dataclass(frozen=True)
class Section:
    """One table of a report with the lines above it; only the lines where it has no columns."""

    title: str
    lines: Tuple[str, ...] = ()
    columns: Tuple[str, ...] = ()
    rows: Tuple[Mapping[str, Any], ...] = ()


def run_section(job: JobSample, lines: Sequence[str] = ()) -> Section:
    """The machine and the run, by a job's own records; another table lists differences between the sides."""
    all_lines = list(lines)
    environment, config = job.environment, job.config
    if environment:
        cores = {core for rank in environment.get("ranks") or [] for core in rank.get("affinity") or []}
        limit = environment.get("memory_limit_bytes")
        memory = f"{limit / 2**30:.1f} GiB" if limit is not None else "memory unknown"
        processor, system = (environment.get(name) or f"{name} unknown" for name in ("processor", "system"))
        machine = (processor, f"{len(cores)} cores for a node's ranks", memory, system)
        all_lines.append(f"machine: {', '.join(machine)}")
    if config is not None:
        model, layout, training = config.model, config.layout, config.training
        all_lines.append(
            f"run: {size_name(model)}, {model.layers} layers of {model.hidden}, sequence {model.seq_len}, "
            f"dp {layout.dp} tp {layout.tp} pp {layout.pp}, micro-batch {training.micro_batch}, "
            f"global batch {training.global_batch}, {training.dtype}"
        )
    return Section("What was run", tuple(all_lines))


def job_sections(a: Sequence[JobSample], b: Sequence[JobSample]) -> List[Section]:
    """Sections about operators, memory, losses and start-up facts; empty where there are no run directories."""
    if not a or not b:
        return []
    return [*_operator_section(a, b), _memory_section(a, b), _curve_section(a, b), _fact_section(a, b)]


def _operator_section(a: Sequence[JobSample], b: Sequence[JobSample]) -> List[Section]:
    """The section about the time of operators; empty where a side was not profiled."""
    operators_a, operators_b = ([job.operators for job in jobs if job.operators is not None] for jobs in (a, b))
    if not operators_a or not operators_b:
        return []
    lines = (
        explanation(operators_a, operators_b),
        f"of a few iterations after the timed ones, which the profiler makes {slowdown(operators_a):.2f} (A) and "
        f"{slowdown(operators_b):.2f} (B) times as long",
    )
    return [Section(OPERATORS, lines, COLUMNS, tuple(operator_rows(operators_a, operators_b)))]


def _memory_section(a: Sequence[JobSample], b: Sequence[JobSample]) -> Section:
    rows = []
    for label, key in (("largest rank's RSS", "rss_max_bytes"), ("node used", "node_used_bytes")):
        values = [[getattr(job, key) for job in jobs if getattr(job, key) is not None] for jobs in (a, b)]
        if all(values):
            median_a, median_b = map(statistics.median, values)
            cells = (f"{median_a / 2**20:.0f}", f"{median_b / 2**20:.0f}", f"{median_b / median_a:.3f}")
            rows.append({"peak": label, "A (MiB)": cells[0], "B (MiB)": cells[1], "B/A": cells[2]})
    return Section("Memory", ("median of the jobs' peaks",), ("peak", "A (MiB)", "B (MiB)", "B/A"), tuple(rows))


def _curve_section(a: Sequence[JobSample], b: Sequence[JobSample]) -> Section:
    dtypes = [job.config.training.dtype for job in (a[0], b[0]) if job.config is not None]
    if len(dtypes) < 2:
        return Section("Loss curves", ("the runs' configurations cannot be read",))
    distance = compare_curves(a[0].losses, b[0].losses, dtypes)
    lines = [_curve_line("A and B", distance)]
    for name, jobs, dtype in (("A", a, dtypes[0]), ("B", b, dtypes[1])):
        own_distance = farthest_repeat([job.losses for job in jobs], dtype)
        if own_distance is not None:
            lines.append(_curve_line(f"{name}'s own jobs", own_distance))
    return Section("Loss curves", tuple(lines))


def _curve_line(subject: str, distance: Optional[CurveDistance]) -> str:
    if distance is None:
        return f"{subject}: no iteration in common"
    if distance.distance == 0:
        return f"{subject}: the same in all {distance.points} iterations"
    verdict = "equal" if distance.is_within_tolerance else "NOT equal"
    return (
        f"{subject}: {verdict} within {distance.tolerance:.0e}: apart by {distance.distance:.1e} of the loss at most, "
        f"in iteration {distance.iteration} of {distance.points} ({distance.loss_a:.6f} and {distance.loss_b:.6f})"
    )


def _fact_section(a: Sequence[JobSample], b: Sequence[JobSample]) -> Section:
    rows = tuple({"fact": difference.fact, "A": difference.a, "B": difference.b} for difference in differences(a, b))
    return Section("What differs at start-up", () if rows else ("nothing",), ("fact", "A", "B") if rows else (), rows)


_NOISE_ROWS = (
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
    """The section about noise during the jobs of both sides; empty where no job was watched."""
    if not a and not b:
        return []
    rows = []
    for label, key, cell_format in _NOISE_ROWS:
        cells = []
        for side in (a, b):
            values = [value for value in (getattr(noise, key) for noise in side) if value is not None]
            cells.append(cell_format.format(statistics.median(values)) if values else None)
        rows.append({"of a job, in the median": label, "A": cells[0], "B": cells[1]})
    unknown = unknown_quantities([*a, *b][0])
    lines = (f"not measured by this machine: {', '.join(unknown)}",) if unknown else ()
    return [Section("What else went on", lines, ("of a job, in the median", "A", "B"), tuple(rows))]
