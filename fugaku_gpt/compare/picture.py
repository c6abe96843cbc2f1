"""A comparison as a picture: the ratio of each pair with the interval over all, and what operators take."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Sequence

from fugaku_gpt.compare.report import Report
from fugaku_gpt.plotting import picture

_LEFT_OUT, _COUNTS, _A, _B = "#b0b0b0", "#1f77b4", "#7f7f7f", "#d62728"
_LONGEST = 40  # characters of a name


def draw(report: Report, file: Path) -> None:
    """Write the picture; the same bytes for the same report.

    Raises:
        UsageError: it cannot be drawn or written.
    """
    panels = 2 if report.operators else 1
    rows = max(len(report.points), len(report.operators), 6)
    with picture(file, panels, (6.0 * panels, 1.5 + 0.28 * rows), log=False) as axes:
        first, *others = list(axes) if panels > 1 else [axes]
        _ratios(first, report)
        for panel in others:
            _operators(panel, report)


def _ratios(panel: Any, report: Report) -> None:
    names = [_short(point.name) for point in report.points]
    places = range(len(names))
    found = report.comparison
    if found is not None and math.isfinite(found.high):
        panel.axvspan(found.low, found.high, color=_COUNTS, alpha=0.15, linewidth=0, label="95 % interval")
        panel.axvline(found.ratio, color=_COUNTS, linewidth=1)
    panel.axvline(1.0, color="black", linewidth=0.8)
    for counts, color, words in ((True, _COUNTS, "counts"), (False, _LEFT_OUT, "left out")):
        chosen = [(point.ratio, place) for place, point in zip(places, report.points) if point.counts == counts]
        if chosen:
            panel.plot([x for x, _ in chosen], [y for _, y in chosen], "o", color=color, label=words)
    panel.set_yticks(list(places))
    panel.set_yticklabels(names)
    panel.invert_yaxis()
    panel.set_xlabel("seconds per iteration, B / A")
    panel.set_title(f"A: {_short(report.a)}\nB: {_short(report.b)}", loc="left")
    panel.legend(loc="best", frameon=False)


def _operators(panel: Any, report: Report) -> None:
    names = [row["class"] for row in report.operators]
    places = range(len(names))
    _bars(panel, [place - 0.2 for place in places], [row["seconds a"] for row in report.operators], _A, "A")
    _bars(panel, [place + 0.2 for place in places], [row["seconds b"] for row in report.operators], _B, "B")
    panel.set_yticks(list(places))
    panel.set_yticklabels(names)
    panel.invert_yaxis()
    panel.set_xlabel("seconds of an iteration")
    panel.legend(loc="best", frameon=False)


def _bars(panel: Any, places: Sequence[float], values: Sequence[float], color: str, words: str) -> None:
    panel.barh(places, values, height=0.38, color=color, label=words)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
