"""The picture of a fit: what was predicted for rows that were left out of it, against what they measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np

from fugaku_gpt.planner.tables.fitting import Refit, SkippedSamples
from fugaku_gpt.planner.tables.rows import table_name
from fugaku_gpt.planner.tables.score import reach_of
from fugaku_gpt.plotting import picture

_MARKS = "osD^v<>pPX*"


def draw_fit(refit: Refit, by: str, file: Path) -> None:
    """Seconds and memory, predicted against measured, with a mark for each table; what died of memory is crossed.

    A run that died has no reading, or none that means much: it stands at the memory that there is, as high as the
    fullest stage was predicted to be, so that it is right above the line.

    Args:
        by: how rows were left out, one of :data:`fugaku_gpt.planner.tables.fitting.GROUPS`.

    Raises:
        UsageError: as :func:`fugaku_gpt.plotting.picture`.
    """
    machine = refit.machine
    tables = list(dict.fromkeys(table_name(one.row.id) for one in [*refit.seconds[by], *refit.memory[by]]))
    styles = {
        table: {"color": f"C{number % 10}", "marker": _MARKS[number % len(_MARKS)], "label": table}
        for number, table in enumerate(tables)
    }
    with picture(file, 2, (12, 5.5)) as (left, right):
        timed = [one for one in refit.seconds[by] if not one.repeated]
        points = [(one, one.measured.seconds or 0.0, one.predicted, reach_of(one, refit)) for one in timed]
        _draw(left, points, styles)
        left.set(xlabel="measured seconds per iteration", ylabel="predicted, with 80 % intervals")
        left.set_title(f"{machine.name}: left out by {by}")
        held = [one for one in refit.memory[by] if not one.repeated]
        points = [
            (one, machine.capacity(one.row.hardware), one.peak, 1.0)
            if one.measured.out_of_memory
            else (one, one.measured.memory or 0.0, one.predicted, 1.0)
            for one in held
            if one.measured.out_of_memory or one.measured.memory
        ]
        _draw(right, points, styles)
        for capacity in machine.hardware.values():
            right.axhline(capacity, color="black", linestyle=":", linewidth=1)
        unit = f"memory of a {machine.memory_of} [{machine.memory_unit}]"
        right.set(xlabel=f"measured {unit}", ylabel=f"predicted {unit}")
        right.set_title("dotted: what there is; crossed: ran out of it")
        handles = {
            mark.get_label(): mark for panel in (left, right) for mark in panel.lines if mark.get_label() in styles
        }
        right.legend(handles=[handles[table] for table in tables if table in handles], fontsize=7, ncol=2)


def _draw(axes: Any, points: Sequence[Tuple[SkippedSamples, float, float, float]], styles: Dict[str, Dict[str, str]]) -> None:
    """Points (row, measured, predicted, factor of its interval)."""
    known: List[float] = []
    for one, measured, predicted, reach in points:
        known += [measured, predicted]
        if reach > 1:
            axes.plot([measured] * 2, [predicted / reach, predicted * reach], color="lightgrey", linewidth=1, zorder=1)
        axes.plot(measured, predicted, linestyle="", ms=5, alpha=0.8, **styles[table_name(one.row.id)])
        if one.measured.out_of_memory:
            axes.plot(measured, predicted, linestyle="", marker="x", ms=11, color="red", zorder=3)
    if known:
        ends = np.array([min(known) / 1.1, max(known) * 1.1])
        axes.plot(ends, ends, color="black", linewidth=0.8, zorder=1)
