"""``fugaku-gpt report export``: the metrics of runs for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Optional, Tuple

import click

from fugaku_gpt.cli.options import PATH
from fugaku_gpt.cli.output import echo
from fugaku_gpt.errors import EXIT_OK, UsageError

CSV, PARQUET, TENSORBOARD = "csv", "parquet", "tensorboard"


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=PATH)
@click.option(
    "--to",
    "form",
    type=click.Choice((CSV, PARQUET, TENSORBOARD)),
    required=True,
    help="Form of the export; parquet needs the package pyarrow.",
)
@click.option(
    "-o",
    "--out",
    metavar="FILE",
    type=PATH,
    help="File of the table, or folder below which each run gets a folder of event files; default: standard output, "
    "for csv alone.",
)
def export(runs: Tuple[Path, ...], form: str, out: Optional[Path]) -> int:
    """Write the metrics of each RUN, a run directory or a folder of them, for other tools.

    csv and parquet are one table of all runs, with a row for each line of metrics.jsonl of the kinds iteration,
    validation and evaluation; what a resumed run has done again is there once. tensorboard is what a run with
    training.tensorboard writes itself. Memory does not grow with the files.
    """
    from fugaku_gpt.report.collect import find_runs, name_runs
    from fugaku_gpt.report.export import exported_rows, write_csv, write_csv_file, write_parquet_file

    if out is None and form != CSV:
        raise UsageError(f"--to {form}: needs -o {'FILE' if form == PARQUET else 'FOLDER'}")
    named = name_runs(find_runs(runs), runs)
    if form == TENSORBOARD:
        from fugaku_gpt.report.export_events import write_event_folders

        assert out is not None
        for folder in write_event_folders(named, out):
            echo(folder)
        return EXIT_OK
    rows = exported_rows(named)
    if out is None:
        write_csv(rows, lambda text: echo(text, nl=False))
    else:
        (write_csv_file if form == CSV else write_parquet_file)(rows, out)
    return EXIT_OK
