"""Plots a fit: predictions for rows that were left out of it against their measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np

from fugaku_gpt.planner.tables.fitting import LeftOutPrediction, Refit
from fugaku_gpt.planner.tables.rows import table_name
from fugaku_gpt.planner.tables.score import interval_factor
from fugaku_gpt.plotting import picture

_MARKS = "osD^v<>pPX*"
_CROSS = "#101010"  # of a run that ran out of memory


def draw_fit(refit: Refit, by: str, file: Path) -> None:
    """Draws seconds and memory, predicted against measured, with a mark for each table; runs that ran out of memory are
    crossed.

    A run that ran out of memory has no reading, or none that means much. It is drawn at the capacity of the hardware
    and at the predicted memory of the fullest stage, so a correct prediction lies above the line.

    Args:
        by: how rows were left out, one of :data:`fugaku_gpt.planner.tables.fitting.GROUPS`.

    Raises:
        UsageError: see :func:`fugaku_gpt.plotting.picture`.
    """
    machine = refit.machine
    tables = list(
        dict.fromkeys(table_name(prediction.row.id) for prediction in [*refit.seconds[by], *refit.memory[by]])
    )
    styles = {
        table: {"color": f"C{number}", "marker": _MARKS[number % len(_MARKS)], "label": table}
        for number, table in enumerate(tables)
    }
    with picture(file, 2, (12, 5.5)) as (left, right):
        timed = [prediction for prediction in refit.seconds[by] if not prediction.repeated]
        points = [
            (prediction, prediction.measured.seconds or 0.0, prediction.predicted, interval_factor(prediction, refit))
            for prediction in timed
        ]
        _draw(left, points, styles)
        left.set(xlabel="measured seconds per iteration", ylabel="predicted seconds per iteration, with 80 % intervals")
        left.set_title(f"{machine.name}: left out by {by}")
        judged = [prediction for prediction in refit.memory[by] if not prediction.repeated]
        points = [
            (prediction, machine.job_capacity(prediction.row.hardware), prediction.peak, 1.0)
            if prediction.measured.out_of_memory
            else (prediction, prediction.measured.memory or 0.0, prediction.predicted, 1.0)
            for prediction in judged
            if prediction.measured.out_of_memory or prediction.measured.memory
        ]
        _draw(right, points, styles)
        for hardware in machine.hardware:
            right.axhline(machine.job_capacity(hardware), color="black", linestyle=":", linewidth=1)
        unit = f"memory of a {machine.memory_of} [{machine.memory_unit}]"
        right.set(xlabel=f"measured {unit}", ylabel=f"predicted {unit}")
        right.set_title("dotted: what there is; crossed: ran out of it")
        handles = {
            mark.get_label(): mark for panel in (left, right) for mark in panel.lines if mark.get_label() in styles
        }
        right.legend(handles=[handles[table] for table in tables if table in handles], fontsize=7, ncol=2)


def _draw(
    axes: Any, points: Sequence[Tuple[LeftOutPrediction, float, float, float]], styles: Dict[str, Dict[str, str]]
) -> None:
    """Draws points (left-out row, measured, predicted, factor of its interval)."""
    drawn_values: List[float] = []
    for prediction, measured, predicted, reach in points:
        drawn_values += [measured, predicted]
        if reach > 1:
            axes.plot([measured] * 2, [predicted / reach, predicted * reach], color="lightgrey", linewidth=1, zorder=1)
        axes.plot(measured, predicted, linestyle="", ms=5, alpha=0.8, **styles[table_name(prediction.row.id)])
        if prediction.measured.out_of_memory:
            axes.plot(measured, predicted, linestyle="", marker="x", ms=11, color=_CROSS, zorder=3)
    if drawn_values:
        ends = np.array([min(drawn_values) / 1.1, max(drawn_values) * 1.1])
        axes.plot(ends, ends, color="black", linewidth=0.8, zorder=1)
