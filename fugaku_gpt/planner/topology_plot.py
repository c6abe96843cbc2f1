"""The picture of a search: seconds against memory of all layouts, those that do not fit, and the frontier."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from fugaku_gpt.errors import UsageError
from fugaku_gpt.planner.topology import Found, Wanted

FORMATS = (".svg", ".png")
_MOST_POINTS = 20_000  # of each kind: an SVG of a million points opens nowhere


def check_plot(file: Path) -> None:
    """Refuse a picture that cannot be drawn, before work is done for it.

    Raises:
        UsageError: its name ends in another form, or matplotlib is missing.
    """
    if file.suffix not in FORMATS:
        raise UsageError(f"--plot {file}: its name must end in {' or '.join(FORMATS)}")
    if find_spec("matplotlib") is None:
        raise UsageError(f"--plot {file}: needs matplotlib: pip install 'fugaku_gpt[plot]'")


def draw_search(found: Found, wanted: Wanted, title: str, file: Path) -> None:
    """Write the picture; its form is told by the end of the file's name.

    Raises:
        UsageError: as :func:`check_plot`, or the file cannot be written.
    """
    check_plot(file)
    import matplotlib

    matplotlib.use("agg")
    # the same text for the same figures, whoever draws it
    matplotlib.rcParams.update({"svg.hashsalt": "topology", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot, ticker

    machine = wanted.machine
    capacity = machine.capacity(wanted.hardware)
    figure, axes = pyplot.subplots(figsize=(8, 5))
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
    axes.set(xscale="log", yscale="log", xlabel=f"memory of the fullest {machine.memory_of} [{machine.memory_unit}]")
    axes.set(ylabel="seconds per iteration", title=title)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(ticker.FuncFormatter(_plainly))
        axis.set_minor_formatter(ticker.FuncFormatter(_plainly))
    axes.legend(fontsize=8, loc="upper right")
    figure.tight_layout()
    try:
        metadata = {"Date": None, "Creator": None} if file.suffix == ".svg" else {"Software": None}
        figure.savefig(str(file), metadata=metadata)
    except OSError as error:
        raise UsageError(f"--plot {file}: cannot be written: {error}") from None
    finally:
        pyplot.close(figure)


def _thinned(places: "np.ndarray") -> "np.ndarray":
    chosen: "np.ndarray" = places[:: -(-len(places) // _MOST_POINTS) or 1]
    return chosen


def _plainly(value: float, _: object) -> str:
    """Of 1, 2 and 5 times a power of ten the number itself, not the power; nothing of what is between."""
    return f"{value:g}" if f"{value:e}"[0] in "125" else ""
