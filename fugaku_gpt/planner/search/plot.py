"""Plots a search: seconds against memory of all layouts, those that do not fit, and the Pareto frontier."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fugaku_gpt.planner.search.topology import CostedLayouts, SearchSpace
from fugaku_gpt.plotting import BLUE, VERMILLION, add_legend_below, picture

_MOST_POINTS = 20_000  # points of each kind: no viewer opens an SVG with a million points


def draw_search(layouts: CostedLayouts, space: SearchSpace, title: str, file: Path) -> None:
    """Writes the picture; the suffix of the file name chooses its format.

    Raises:
        UsageError: see :func:`fugaku_gpt.plotting.picture`.
    """
    machine = space.machine
    capacity = machine.job_capacity(space.hardware)
    with picture(file) as axes:
        for indices, colour, label in (
            (np.flatnonzero(~layouts.fits), "lightgrey", "does not fit"),
            (layouts.ranking, BLUE, "fits"),
        ):
            indices = _thin_out(indices)
            axes.scatter(
                layouts.memory[indices], layouts.seconds[indices], s=6, color=colour, label=label, linewidths=0
            )
        frontier = layouts.frontier()
        axes.plot(
            layouts.memory[frontier], layouts.seconds[frontier], color=VERMILLION, marker="o", ms=3, label="frontier"
        )
        axes.axvline(capacity, color="black", linestyle=":", label=f"memory of a job on a {machine.memory_of}")
        if len(layouts.ranking):
            best = layouts.ranking[0]
            axes.plot(layouts.memory[best], layouts.seconds[best], "*", color="black", ms=12, label="fastest")
            inside = layouts.memory[layouts.ranking]
            axes.set_xlim(0.9 * float(inside.min()), 1.5 * capacity)
        axes.set(xlabel=f"memory of the fullest {machine.memory_of} [{machine.memory_unit}]")
        axes.set(ylabel="seconds per iteration", title=title)
        add_legend_below(axes)


def _thin_out(indices: "np.ndarray") -> "np.ndarray":
    thinned: "np.ndarray" = indices[:: -(-len(indices) // _MOST_POINTS) or 1]
    return thinned
