"""Draws the rate against the batch, one line for each combination, with the edge of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List, Sequence

from fugaku_gpt.plotting import picture
from fugaku_gpt.sweep.edge_search import Verdict
from fugaku_gpt.sweep.frontier import SAMPLES, Edge, Trial
from fugaku_gpt.sweep.frontier_text import setting_text

_MARKERS = "osD^v<>P*"


def draw_frontier(edges: Sequence[Edge], title: str, file: Path) -> None:
    """Writes the picture; the suffix of the file name chooses its format.

    Raises:
        UsageError: see :func:`fugaku_gpt.plotting.picture`.
    """
    with picture(file, size=(8, 5), log=False) as axes:
        batches: List[int] = []
        units = [unit for edge in edges for trial in edge.trials for unit in list(trial.rates)[:1]]
        for number, edge in enumerate(edges):
            batches += _draw_edge(axes, edge, f"C{number}", _MARKERS[number % len(_MARKERS)])
        axes.set(xlabel="global batch (samples)", ylabel=next(iter(units), SAMPLES), title=title)
        if batches:
            _label_batches(axes, batches)
            for marker, label in (
                ("*", "fastest"),
                ("|", "edge: the largest that fits"),
                ("x", "does not fit, or failed"),
            ):
                axes.plot([], [], marker, color="black", ms=8, label=label)
            axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))
        axes.set_ylim(bottom=0)


def _draw_edge(axes: Any, edge: Edge, color: str, marker: str) -> List[int]:
    """Draws one combination; returns the batches that it has shown."""
    points = [(trial.global_batch, trial.samples_per_second, trial) for trial in edge.trials]
    fitting = [(batch, rate) for batch, rate, _ in points if batch is not None and rate is not None]
    failed = [trial for batch, rate, trial in points if rate is None and batch is not None]
    label = setting_text(edge.row) + ("" if fitting else ": nothing fits")
    axes.plot([x for x, _ in fitting], [y for _, y in fitting], color=color, marker=marker, ms=5, label=label)
    fastest = edge.fastest
    if fastest is not None:
        axes.plot([fastest.global_batch], [fastest.samples_per_second], "*", color="black", ms=9, zorder=5)
    return [batch for batch, _ in fitting] + _draw_failures(axes, edge, failed, color)


def _draw_failures(axes: Any, edge: Edge, failed: Sequence[Trial], color: str) -> List[int]:
    """Marks the trials that do not fit at the rate of the largest that does; a dotted line leads to the edge."""
    largest = edge.largest
    height = largest.samples_per_second or 0.0 if largest is not None else 0.0
    shown = []
    for trial in failed:
        batch = trial.global_batch
        if batch is None or trial.verdict is Verdict.FITS:
            continue
        axes.plot([batch], [height], "x", color=color, ms=7, mew=1.5)
        shown.append(batch)
    if largest is not None and edge.above is not None:
        axes.plot([largest.global_batch], [height], "|", color=color, ms=18, mew=2)
        axes.plot([largest.global_batch, edge.above.global_batch], [height, height], ":", color=color, linewidth=1)
    return shown


def _label_batches(axes: Any, batches: Sequence[int]) -> None:
    """Makes the axis of batches one of powers of two, with plain numbers."""
    axes.set_xscale("log", base=2)
    low, high = min(batches).bit_length() - 1, (max(batches) - 1).bit_length()
    powers = [2**exponent for exponent in range(low, max(high, low + 1) + 1)]
    axes.set_xticks(powers)
    axes.set_xticklabels([str(power) for power in powers])
    axes.minorticks_off()
