"""Pictures as SVG or PNG, drawn by matplotlib, which is an extra: the same bytes for the same figures."""

from __future__ import annotations

from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Iterator, Tuple

from fugaku_gpt.errors import UsageError

FORMATS = (".svg", ".png")


def check_plot(file: Path) -> None:
    """Refuse a picture that cannot be drawn, before work is done for it.

    Raises:
        UsageError: its name ends in another form, or matplotlib is missing.
    """
    if file.suffix not in FORMATS:
        raise UsageError(f"--plot {file}: its name must end in {' or '.join(FORMATS)}")
    if find_spec("matplotlib") is None:
        raise UsageError(f"--plot {file}: needs matplotlib: pip install 'fugaku_gpt[plot]'")


@contextmanager
def picture(file: Path, panels: int = 1, size: Tuple[float, float] = (8, 5), log: bool = True) -> Iterator[Any]:
    """The axes of an empty picture (a sequence of them where there are several panels), written at the end.

    Both axes of each panel are logarithmic where ``log`` says so. The form is told by the end of the file's name.

    Raises:
        UsageError: as :func:`check_plot`, or the file cannot be written.
    """
    check_plot(file)
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams.update({"svg.hashsalt": "fugaku_gpt", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(1, panels, figsize=size)
    try:
        yield axes
        for panel in figure.axes if log else ():
            panel.set(xscale="log", yscale="log")
            for axis in (panel.xaxis, panel.yaxis):
                axis.set_major_formatter(ticker.FuncFormatter(_tick_label))
                axis.set_minor_formatter(ticker.FuncFormatter(_tick_label))
        figure.tight_layout()
        metadata = {"Date": None, "Creator": None} if file.suffix == ".svg" else {"Software": None}
        figure.savefig(str(file), metadata=metadata)
    except OSError as error:
        raise UsageError(f"--plot {file}: cannot be written: {error}") from None
    finally:
        pyplot.close(figure)


def _tick_label(value: float, _: object) -> str:
    """Of 1, 2 and 5 times a power of ten the number itself, not the power; nothing of what is between."""
    return f"{value:g}" if f"{value:e}"[0] in "125" else ""
