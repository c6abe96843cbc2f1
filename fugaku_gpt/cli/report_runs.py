"""``fugaku-gpt report runs``: the curves of runs as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Tuple

import click

from fugaku_gpt.cli.options import PATH, format_option
from fugaku_gpt.cli.output import echo

PAGE_FORMATS = ("html",)


@click.command()
@click.argument("directories", nargs=-1, required=True, metavar="DIR...", type=PATH)
@format_option(PAGE_FORMATS, "curves; `report table` and `runs ls` print runs as table, md, csv and json")
@click.option("-o", "--out", required=True, metavar="FILE", type=PATH, help="Write the page to this file.")
def runs(directories: Tuple[Path, ...], form: str, out: Path) -> None:
    """Write the curves of the runs in DIR as one page, which needs a browser and no network.

    DIR is a run directory, or a folder of them such as a sweep's. The page overlays losses, learning rate, gradient
    norm, throughput, memory, hidden communication, bubble and the slowest ranks; it shows the difference to a chosen
    run, smooths, zooms, and lists what differs between the runs, with the energy of their jobs and the pictures of
    their traces.

    A page of up to 20 runs has 2 MiB at most: curves for which that is too little are thinned, by the lowest and the
    highest value of each piece, which the page says.
    """
    from fugaku_gpt.report.run_page import write_run_page

    page = write_run_page(directories, out)
    for note in page.notes:
        echo(f"note: {note}", err=True)
    thinned = f", curves thinned to {page.points} points" if page.points else ""
    echo(f"{out}: {page.runs} {'run' if page.runs == 1 else 'runs'}, {page.size / 1000:.0f} kB{thinned}")
