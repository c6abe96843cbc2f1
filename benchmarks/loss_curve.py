"""Draws the loss of a run of `fugaku-gpt train`, and its validation loss, as a picture.

.venv/bin/python benchmarks/loss_curve.py runs/llama docs/images/llama-tiny.svg
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fugaku_gpt.plotting import picture
from fugaku_gpt.records.run import RunDirectory


def draw(run: Path, file: Path) -> None:
    """Draws both losses of a run over its iterations.

    Raises:
        UsageError: the run has no metrics, or the picture cannot be written.
    """
    directory = RunDirectory(run)
    with picture(file, size=(8, 4), log=False) as axes:
        for kind, label, width in (("iteration", "training", 0.7), ("validation", "validation", 2.0)):
            lines = directory.metrics(kind)
            losses = [line["loss"] for line in lines]
            axes.plot([line["iteration"] for line in lines], losses, linewidth=width, label=label)
        axes.set(xlabel="iteration", ylabel="loss of a token, in nats", title=run.resolve().name)
        axes.legend()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="Run directory.")
    parser.add_argument("picture", type=Path, help="File of the picture.")
    options = parser.parse_args()
    draw(options.run, options.picture)
