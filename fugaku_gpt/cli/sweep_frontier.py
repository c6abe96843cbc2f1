"""``fugaku-gpt sweep frontier``: the largest batch that fits into memory, for each combination of settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, List, Optional, Sequence, Tuple

import click

from fugaku_gpt.cli.numbers import seconds_of_option
from fugaku_gpt.cli.options import PATH, format_option, options_as, run_source
from fugaku_gpt.cli.output import echo, render_rows
from fugaku_gpt.config.schema import SCHEDULERS
from fugaku_gpt.config.source import RunSource
from fugaku_gpt.errors import RunFailed, UsageError
from fugaku_gpt.records.files import write_text_atomically
from fugaku_gpt.sweep.frontier_plan import MICRO_BATCH, OUT_OF_MEMORY_ONLY, FrontierOptions, FrontierPlan, frontier_plan
from fugaku_gpt.sweep.progress import describe_result

if TYPE_CHECKING:
    from fugaku_gpt.sweep.frontier import Edge, Trial
    from fugaku_gpt.sweep.frontier_plan import FrontierRow

_DEFAULTS = FrontierOptions()


@dataclass(frozen=True)
class SearchOptions:
    """The subject of a search, and how its trials are made and shown.

    Attributes:
        matrix: texts ``FIELD=V1,V2``.
        scheduler: where trials run; only local is valid.
        out: folder of the trials and the tables.
        timeout: time limit of each trial in seconds; None for none.
        retry_failed: whether trials that did not end well are made again.
        curve: whether all powers of two below the largest batch are tried.
        plot: file of the picture, or None.
        form: format of the edges on standard output.
    """

    matrix: Tuple[str, ...]
    scheduler: str
    out: Path
    timeout: Optional[float]
    retry_failed: bool
    curve: bool
    plot: Optional[Path]
    form: str


@click.command()
@run_source(settings_help="Override a setting in every combination; repeatable.")
@click.option("--out", required=True, type=PATH, help="Folder for the run directories of the trials and the tables.")
@click.option(
    "--over",
    type=click.Choice([MICRO_BATCH]),
    default=MICRO_BATCH,
    show_default=True,
    expose_value=False,  # names what is searched; a choice only where there is another
    help="Setting that grows, the only one so far; the global batch grows with it.",
)
@click.option(
    "--until",
    type=click.Choice([OUT_OF_MEMORY_ONLY]),
    default=OUT_OF_MEMORY_ONLY,
    show_default=True,
    expose_value=False,
    help="Where it ends, so far only where memory does.",
)
@click.option(
    "--matrix",
    multiple=True,
    metavar="FIELD=V1,V2",
    help="Values of a setting, every combination of which is searched, such as training.dtype=float32,bfloat16; "
    "repeatable.",
)
@click.option(
    "--most",
    type=click.IntRange(1, 2**14),
    default=_DEFAULTS.most,
    show_default=True,
    help="Largest micro-batch that is tried.",
)
@click.option(
    "--exact",
    "is_exact",
    is_flag=True,
    help="Find the edge to one sample; default: 1 to 16, and eight batches in each doubling above.",
)
@click.option(
    "--micro-batches",
    type=click.IntRange(min=1),
    help="Micro-batches of each replica per iteration; default: as many as pipeline stages.",
)
@click.option(
    "--iterations",
    type=click.IntRange(min=2),  # memory is at its most in the second one at the earliest
    default=_DEFAULTS.iterations,
    show_default=True,
    help="Iterations of each trial; the first two are not timed if there are more.",
)
@click.option("--curve", is_flag=True, help="Trial every power of two below the largest batch, too, for the picture.")
@click.option(
    "--timeout", metavar="H:MM:SS", callback=seconds_of_option, help="Time limit of each trial; default: none."
)
@click.option("--retry-failed", is_flag=True, help="Make the recorded trials again that did not end well.")
@click.option("--plot", type=PATH, metavar="FILE.svg|png", help="Draw the rates against the batches into this file.")
@click.option(
    "--scheduler",
    type=click.Choice(SCHEDULERS),
    default="local",
    show_default=True,
    help="Only local: each trial decides which one is next, so trials are no jobs that wait one for another.",
)
@format_option()
@options_as(FrontierOptions, "batches")
@options_as(SearchOptions, "search")
def frontier(source: RunSource, batches: FrontierOptions, search: SearchOptions) -> None:
    """Find the largest batch that fits into memory, and the fastest, for each combination of settings of RUN.yaml.

    Each trial really runs a few iterations here. A trial whose ranks use more than node.memory_limit is a row: OOM. The
    planner's estimate is the first trial; from there steps double up to the edge, then halve. The largest batch is not
    always the fastest: halves of it are tried as long as they are faster. Ctrl-C stops the search; the same command
    resumes it. OUT gets the runs, their table, frontier.md with the bullets, frontier.csv and frontier.json.

    Exit codes: 0 every edge is known, 1 stopped, or an edge is that of a failure other than memory.
    """
    if search.scheduler != "local":
        raise UsageError(
            f"--scheduler {search.scheduler}: the search runs on this machine only, since each trial decides which is "
            "next; valid: local"
        )
    if source.run_file is None and source.preset is None:
        raise UsageError("name a RUN.yaml, or a --preset")
    if search.plot is not None:
        from fugaku_gpt.plotting import check_plot

        check_plot(search.plot)
    plan = frontier_plan(source.run_file, source.preset, source.settings, search.matrix, batches)
    _print_results(plan, _run_search(plan, search), search)


class _Lines:
    """Prints a line at the start of each combination, and at the start and the end of each trial."""

    def row_started(self, row: "FrontierRow", planned: Optional[int]) -> None:
        """See :class:`fugaku_gpt.sweep.frontier.FrontierProgress`."""
        echo(f"{row.name}: planned to fit: {f'micro-batch {planned}' if planned else 'nothing'}", err=True)

    def trial_started(self, row: "FrontierRow", batch: int) -> None:
        """See :class:`fugaku_gpt.sweep.frontier.FrontierProgress`."""
        echo(f"{row.name}, micro-batch {batch}: started", err=True)

    def trial_ended(self, row: "FrontierRow", ended: "Trial") -> None:
        """See :class:`fugaku_gpt.sweep.frontier.FrontierProgress`."""
        prefix = "kept: " if ended.is_earlier else ""
        echo(f"{row.name}, micro-batch {ended.batch}: {prefix}{describe_result(ended.result)}", err=True)


def _run_search(plan: FrontierPlan, search: SearchOptions) -> "List[Edge]":
    """Search on this machine.

    Raises:
        UsageError: there is no launcher (nothing is written then), or the folder holds other runs.
    """
    from fugaku_gpt.launch.launcher import find_launcher, launch, require_rank_packages
    from fugaku_gpt.planner.trainer.memory_check import local_node_limits
    from fugaku_gpt.sweep.frontier import find_frontier

    find_launcher()  # both fail before anything is written, and say how to get what is missing
    require_rank_packages()
    limits = local_node_limits()
    if not all(row.value("node.memory_limit") for row in plan.rows):
        size = min(size for size, _ in limits.limits)
        echo(f"note: no node.memory_limit: trials may use this machine's {size / 2**30:.1f} GiB", err=True)
    return find_frontier(
        plan,
        search.out,
        launch,
        _Lines(),
        limits,
        timeout=search.timeout,
        retry_failed=search.retry_failed,
        is_full_curve=search.curve,
    )


def _print_results(plan: FrontierPlan, edges: "Sequence[Edge]", search: SearchOptions) -> None:
    """Print and write bullets, edges, the table of the trials, and the picture.

    Raises:
        RunFailed: the search was stopped, or an edge is that of a failure other than memory.
    """
    from fugaku_gpt.cli.report import print_table, write_tables
    from fugaku_gpt.sweep.frontier_text import bullets, edge_columns, edge_rows, setting_text

    lines, columns, rows = bullets(edges), edge_columns(edges), edge_rows(edges)
    closing = [f"{len(edges)} of {len(plan.rows)} combinations, {sum(len(edge.trials) for edge in edges)} trials"]
    if any(edge.trials for edge in edges):
        merged = write_tables([search.out / trial.run.name for edge in edges for trial in edge.trials], search.out)
        texts = {form: render_rows(columns, rows, form) for form in ("md", "csv", "json")}
        texts["md"] = "".join(f"{line}\n" for line in lines) + "\n" + texts["md"]
        for form, text in texts.items():
            write_text_atomically(search.out / f"frontier.{form}", text)
        closing.append(f"tables: {search.out / 'frontier.md'}, {search.out / 'table.md'}")
        if search.form == "table":
            echo("\n".join(lines) + "\n")
        echo(render_rows(columns, rows, search.form), nl=False)
        if search.form == "table":
            echo()
            print_table(merged, "table")
        if search.plot is not None:
            from fugaku_gpt.sweep.frontier_plot import draw_frontier

            limits = sorted({str(row.value("node.memory_limit")) for row in plan.rows} - {""})
            title = f"{plan.name} within {limits[0]}" if len(limits) == 1 else plan.name
            draw_frontier(edges, title, search.plot)
    if not edges or not edges[-1].is_complete:
        raise RunFailed("\n".join([*closing, "stopped; the same command continues"]))
    failed = [setting_text(edge.row) for edge in edges if edge.has_failed]
    if failed:
        raise RunFailed("\n".join([*closing, f"edges of failures other than memory: {'; '.join(failed)}"]))
    echo("\n".join(closing), err=True)
