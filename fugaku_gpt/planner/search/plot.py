"""The picture of a search: seconds against memory of all layouts, those that do not fit, and the frontier."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fugaku_gpt.planner.search.topology import Found, Wanted
from fugaku_gpt.plotting import picture

_MOST_POINTS = 20_000  # of each kind: an SVG of a million points opens nowhere


def draw_search(found: Found, wanted: Wanted, title: str, file: Path) -> None:
    """Write the picture; its form is told by the end of the file's name.

    Raises:
        UsageError: as :func:`fugaku_gpt.plotting.picture`.
    """
    machine = wanted.machine
    capacity = machine.capacity(wanted.hardware)
    with picture(file) as axes:
        for places, colour, label in (
            (np.flatnonzero(~found.fits), "lightgrey", "does not fit"),
            (found.order, "tab:blue", "fits"),
        ):
            places = _thinned(places)
            axes.scatter(found.memory[places], found.seconds[places], s=6, color=colour, label=label, linewidths=0)
        frontier = found.frontier()
        axes.plot(found.memory[frontier], found.seconds[frontier], color="tab:red", marker="o", ms=3, label="frontier")
        axes.axvline(capacity, color="black", linestyle=":", label=f"memory of a {machine.memory_of}")
        if len(found.order):
            best = found.order[0]
            axes.plot(found.memory[best], found.seconds[best], "*", color="black", ms=12, label="fastest")
            inside = found.memory[found.order]
            axes.set_xlim(0.9 * float(inside.min()), 1.5 * capacity)
        axes.set(xlabel=f"memory of the fullest {machine.memory_of} [{machine.memory_unit}]")
        axes.set(ylabel="seconds per iteration", title=title)
        axes.legend(fontsize=8, loc="upper right")


def _thinned(places: "np.ndarray") -> "np.ndarray":
    chosen: "np.ndarray" = places[:: -(-len(places) // _MOST_POINTS) or 1]
    return chosen
