"""Draws a comparison: the ratio of each pair with the overall interval, and the time of classes of operators."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any, Sequence

from fugaku_gpt.compare.report import Report
from fugaku_gpt.plotting import BLUE, VERMILLION, add_legend_below, picture

_LEFT_OUT_COLOR, _COUNTED_COLOR, _A_COLOR, _B_COLOR = "#b0b0b0", BLUE, "#7f7f7f", VERMILLION
_TITLE_WIDTH = 62  # characters of a line
_MAX_NAME_LENGTH = 40  # characters of a label


def draw_report(report: Report, file: Path) -> None:
    """Writes the picture of a report; the same report gives the same bytes.

    Raises:
        UsageError: it cannot be drawn or written.
    """
    panels = 2 if report.operators else 1
    rows = max(len(report.points), len(report.operators), 6)
    with picture(file, panels, (6.0 * panels, 1.5 + 0.28 * rows), log=False) as axes:
        ratio_panel, *operator_panels = list(axes) if panels > 1 else [axes]
        _draw_ratios(ratio_panel, report)
        for panel in operator_panels:
            _draw_operators(panel, report)


def _draw_ratios(panel: Any, report: Report) -> None:
    names = [_shortened(point.name) for point in report.points]
    positions = range(len(names))
    comparison = report.comparison
    if comparison is not None and math.isfinite(comparison.high):
        panel.axvspan(
            comparison.low, comparison.high, color=_COUNTED_COLOR, alpha=0.15, linewidth=0, label="95 % interval"
        )
        panel.axvline(comparison.ratio, color=_COUNTED_COLOR, linewidth=1)
    panel.axvline(1.0, color="black", linewidth=0.8)
    for is_counted, color, label in ((True, _COUNTED_COLOR, "counted"), (False, _LEFT_OUT_COLOR, "left out")):
        points = [
            (point.ratio, position)
            for position, point in zip(positions, report.points)
            if point.is_counted == is_counted
        ]
        if points:
            panel.plot([x for x, _ in points], [y for _, y in points], "o", color=color, label=label)
    panel.set_yticks(list(positions))
    panel.set_yticklabels(names)
    panel.invert_yaxis()
    panel.set_xlabel("seconds per iteration, B / A")
    sides = f"A: {_shortened(report.a)}\nB: {_shortened(report.b)}"
    panel.set_title("\n".join([*textwrap.wrap(report.headline, _TITLE_WIDTH), sides]), loc="left")
    add_legend_below(panel)


def _draw_operators(panel: Any, report: Report) -> None:
    names = [row["class"] for row in report.operators]
    positions = range(len(names))
    _draw_bars(
        panel, [position - 0.2 for position in positions], [row["seconds a"] for row in report.operators], _A_COLOR, "A"
    )
    _draw_bars(
        panel, [position + 0.2 for position in positions], [row["seconds b"] for row in report.operators], _B_COLOR, "B"
    )
    panel.set_yticks(list(positions))
    panel.set_yticklabels(names)
    panel.invert_yaxis()
    panel.set_xlabel("seconds of an iteration")
    add_legend_below(panel)


def _draw_bars(panel: Any, positions: Sequence[float], values: Sequence[float], color: str, label: str) -> None:
    panel.barh(positions, values, height=0.38, color=color, label=label)


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_NAME_LENGTH else text[: _MAX_NAME_LENGTH - 3] + "..."
