"""Reproducible pictures as SVG or PNG, drawn by matplotlib, which is an optional dependency."""

from __future__ import annotations

import re
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Iterator, Tuple

from fugaku_gpt.errors import UsageError
from fugaku_gpt.harmless import harmless

FORMATS = (".svg", ".png")
# of Okabe and Ito: told apart also by those who confuse red and green; their yellow, pale on white, is grey here
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
BLUE, VERMILLION = PALETTE[:2]
_LEGEND_INCHES = 0.45  # from the axis down to the legend, past its labels


def check_plot(file: Path) -> None:
    """Refuses a picture that cannot be drawn, before any work is done for it.

    Raises:
        UsageError: the file name has another suffix, or matplotlib is missing.
    """
    if file.suffix not in FORMATS:
        raise UsageError(f"--plot {file}: its name must end in {' or '.join(FORMATS)}")
    if find_spec("matplotlib") is None:
        raise UsageError(f"--plot {file}: needs matplotlib: pip install 'fugaku_gpt[plot]'")


@contextmanager
def picture(file: Path, panels: int = 1, size: Tuple[float, float] = (8, 5), log: bool = True) -> Iterator[Any]:
    """Yields the axes of an empty picture (a sequence of them for several panels), and writes the picture at the end.

    Both axes of each panel are logarithmic if ``log`` is true. The suffix of the file name chooses the format.

    Raises:
        UsageError: see :func:`check_plot`, or the file cannot be written.
    """
    check_plot(file)
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams.update({"svg.hashsalt": "fugaku_gpt", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot, rcsetup, text, ticker

    matplotlib.rcParams["axes.prop_cycle"] = rcsetup.cycler(color=PALETTE)

    figure, axes = pyplot.subplots(1, panels, figsize=size)
    try:
        yield axes
        for panel in figure.axes if log else ():
            panel.set(xscale="log", yscale="log")
            for axis in (panel.xaxis, panel.yaxis):
                low, high = axis.get_view_interval()
                form = ticker.FuncFormatter(_tick_label if high > 10 * low else _tick_label_of_decade)
                axis.set_major_formatter(form)
                axis.set_minor_formatter(form)
        for label in figure.findobj(text.Text):
            label.set_text(_label(label.get_text()))
        figure.tight_layout()
        metadata = {"Date": None, "Creator": None} if file.suffix == ".svg" else {"Software": None}
        figure.savefig(str(file), metadata=metadata)
    except OSError as error:
        raise UsageError(f"--plot {file}: cannot be written: {error}") from None
    finally:
        pyplot.close(figure)


def add_legend_below(panel: Any, columns: int = 3) -> None:
    """Adds the legend of a panel below its axis, where it hides no point."""
    from matplotlib.transforms import offset_copy

    below = offset_copy(panel.transAxes, fig=panel.figure, y=-_LEGEND_INCHES, units="inches")
    panel.legend(loc="upper center", bbox_to_anchor=(0.5, 0.0), bbox_transform=below, ncol=columns, frameon=False)


def _label(text: str) -> str:
    """A text without characters that XML lacks, and whose dollars are no formulas, which may not be valid."""
    return re.sub(r"(?<!\\)\$", r"\\$", harmless(text))


def _tick_label(value: float, _: object) -> str:
    """Label of a tick: the plain number for 1, 2 and 5 times a power of ten, else none."""
    return f"{value:g}" if f"{value:e}"[0] in "125" else ""


def _tick_label_of_decade(value: float, _: object) -> str:
    """Label of a tick of an axis that has less than a decade, of which 1, 2 and 5 may be a single tick or none."""
    return f"{value:g}"
