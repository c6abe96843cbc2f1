"""``fugaku-gpt report trace``: what the ranks of a run did when."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Optional, Tuple

import click

from fugaku_gpt.cli.numbers import round_significant
from fugaku_gpt.cli.options import PATH, format_option
from fugaku_gpt.cli.output import echo, render_rows
from fugaku_gpt.cli.trace_files import check_timeline_files, parse_ranks, write_timeline
from fugaku_gpt.errors import EXIT_OK
from fugaku_gpt.records.run import RunDirectory

if TYPE_CHECKING:
    from fugaku_gpt.report.timeline import Row

_COLUMNS = ("rank", "seconds", "forward", "backward", "sums", "optimiser", "more", "waiting", "under_way", "hidden")
_OWN_COLUMNS = ("forward", "backward", "sums", "optimiser", "waiting")


@click.command()
@click.argument("run", metavar="RUN", type=PATH)
@click.option(
    "-o",
    "--out",
    "files",
    multiple=True,
    metavar="FILE",
    type=PATH,
    help="Write the trace to this file: .json or .json.gz, which Perfetto and speedscope open, or .svg, a picture of "
    "all ranks over time; repeatable.",
)
@click.option("--ranks", metavar="LIST", help="Ranks to show, such as 0-7,64; default: all that were traced.")
@format_option()
def trace(run: Path, files: Tuple[Path, ...], ranks: Optional[str], form: str) -> int:
    """Print the time of the iterations of training.trace_iterations by what each rank of RUN did, and write when it did
    it.

    The seconds of a row add up: forward, backward, sums (the end of the gradients' sums), optimiser and more (logs,
    validation, checkpoints and the beginning of an iteration), all without waiting; and waiting for other ranks, which
    under a pipeline is its bubble. under_way has the seconds in which any communication was under way, hidden the share
    of them in which the rank did not wait.

    In the picture the upper bar of a rank is what it does, pale where it waits, and the lower bar what communication is
    under way.
    """
    from fugaku_gpt.report.timeline import timeline_of_run

    check_timeline_files("--out", files)
    timeline = timeline_of_run(RunDirectory(run).trace_dir, parse_ranks(ranks))
    write_timeline(timeline, files)
    echo(render_rows(_COLUMNS, map(_figures, timeline.rows), form), nl=False)
    for text in (timeline.title, *timeline.notes):
        echo(text, err=form != "table")
    return EXIT_OK


def _figures(row: "Row") -> Dict[str, Any]:
    seconds = row.seconds_by_kind()
    under_way, hidden = row.communication_seconds()
    own = {name: seconds.pop(name) for name in _OWN_COLUMNS}
    figures = {"seconds": sum(own.values()) + sum(seconds.values()), **own, "more": sum(seconds.values())}
    return {
        "rank": row.name,
        **{name: round_significant(value) for name, value in figures.items()},
        "under_way": round_significant(under_way),
        "hidden": round(hidden / under_way, 4) if under_way else None,
    }
