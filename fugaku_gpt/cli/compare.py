"""``fugaku-gpt compare``: which of two ways to run is faster, by how much, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Optional, Tuple

import click

from fugaku_gpt.cli.compare_print import FORMATS, report_text
from fugaku_gpt.cli.numbers import FiniteRange, seconds_of_option
from fugaku_gpt.config import preset_names
from fugaku_gpt.errors import EXIT_FINDINGS, EXIT_OK, EXIT_RESUME, EXIT_RUN_FAILED, UsageError

if TYPE_CHECKING:
    from fugaku_gpt.compare.report import Report

_RECORDED_WARM_UP = 2
_LIVE_WARM_UP = 5
# what takes time beside iterations is left out, unless it is asked for; each iteration is told by itself
_TIMED = ("training.log_interval=1", "training.eval_interval=null", "checkpoint.interval=null")


@click.command()
@click.argument("sides", metavar="A B | DIR", nargs=-1, required=True)
@click.option("--run", "run_file", metavar="RUN.yaml", type=click.Path(path_type=Path), help="The run that is timed.")
@click.option("--preset", help=f"Start from a preset: {', '.join(preset_names())}.")
@click.option("--data", help="Folder made by `data prepare`, or prefix of a Megatron .bin/.idx pair (sets data.paths).")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override on both sides; repeatable.")
@click.option("--ranks", type=click.IntRange(min=1), help="Ranks of either side; more of them are more replicas.")
@click.option("--iterations", type=click.IntRange(min=1), default=20, show_default=True, help="Timed in each job.")
@click.option(
    "--warm-up",
    type=click.IntRange(min=0),
    help=f"Iterations before these; default: {_LIVE_WARM_UP}, of recorded runs {_RECORDED_WARM_UP}.",
)
@click.option("--pairs", type=click.IntRange(min=1), default=10, show_default=True, help="Pairs that count, at most.")
@click.option("--budget", metavar="H:MM:SS", callback=seconds_of_option, help="Time of this call, at most.")
@click.option(
    "--at-least",
    type=click.IntRange(min=2),
    default=6,
    show_default=True,
    help="Pairs before it stops because the interval is narrow enough (half the tolerance), or the difference clear.",
)
@click.option(
    "--tolerance",
    type=FiniteRange(0, 1, min_open=True),
    default=0.02,
    show_default=True,
    help="Within which the sides are the same.",
)
@click.option(
    "--load",
    type=FiniteRange(0, 1),
    default=0.05,
    show_default=True,
    help="Share of the machine that other processes may take before a pair is run again.",
)
@click.option(
    "--reruns", type=click.IntRange(min=0), default=10, show_default=True, help="Disturbed pairs run again, at most."
)
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the jobs; the same command goes on there.")
@click.option("--format", "form", type=click.Choice(FORMATS), default="table", show_default=True, help="Of the report.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE.svg|png", help="Draw ratios and operators.")
@click.option(
    "--fail-on", type=click.Choice(["slower", "faster"]), multiple=True, help="Exit code 3 where B is so; repeatable."
)
@click.option("--job", type=click.Choice(["pjm", "slurm"]), help="Write a job script that runs this in one allocation.")
@click.option(
    "--start", multiple=True, metavar="WORD", help="Inside a job: words that start ranks, {ranks} their number."
)
@click.option(
    "--unpacked",
    type=click.Path(path_type=Path),
    help="Inside a job: where job.tarball was unpacked, with the Pythons.",
)
def compare(
    sides: Tuple[str, ...],
    run_file: Optional[Path],
    preset: Optional[str],
    data: Optional[str],
    settings: Tuple[str, ...],
    ranks: Optional[int],
    iterations: int,
    warm_up: Optional[int],
    pairs: int,
    budget: Optional[float],
    at_least: int,
    tolerance: float,
    load: float,
    reruns: int,
    out: Optional[Path],
    form: str,
    plot: Optional[Path],
    fail_on: Tuple[str, ...],
    job: Optional[str],
    start: Tuple[str, ...],
    unpacked: Optional[Path],
) -> int:
    """Compare two ways to run, A and B: seconds per iteration, memory, losses, and where the time goes.

    A and B are each an environment (a name of `fugaku-gpt env list`, or its file), toggles (tcmalloc=true, threads=1,
    any key=value of a run file), both joined by commas, or `base`, the run as it is. Their jobs run in turns, A B, B A,
    and so on, each a start of its own that gives one number, the median of its iterations. Pairs that something else
    has disturbed are kept, left out and run again. The same command goes on where it has stopped.

    Or both are runs that were made before: a run directory, a folder of them, or rows of a CSV with the columns of
    benchmarks/reference/measurements.csv, selected by conditions: notes.csv:torch=1.7,nodes<=64. They are matched by
    all the rest of their configuration.

    DIR is the --out of an earlier comparison: its report is printed again.

    Exit codes: 0 a report, 1 a job failed or a toggle was not applied, 2 usage, 3 --fail-on, 75 stopped and can go on.
    """
    from fugaku_gpt.compare.recorded import compare_recorded
    from fugaku_gpt.compare.report import report_recorded
    from fugaku_gpt.compare.sides import LiveSide, RecordedSide, parse_side
    from fugaku_gpt.planner.pictures import check_plot

    if plot is not None:
        check_plot(plot)
    if len(sides) > 2:
        raise UsageError(f"{len(sides)} sides: valid: two sides, or the folder of an earlier comparison")
    if len(sides) == 1:
        return _again(Path(sides[0]), form, plot, fail_on)
    from fugaku_gpt.jobs.environments.registry import is_profile

    a, b = (parse_side(text, is_profile) for text in sides)
    if isinstance(a, RecordedSide) and isinstance(b, RecordedSide):
        before = warm_up if warm_up is not None else _RECORDED_WARM_UP
        report = report_recorded(a.text, b.text, compare_recorded(a, b, before, tolerance), tolerance)
        return _tell(report, form, plot, fail_on)
    if not isinstance(a, LiveSide) or not isinstance(b, LiveSide):
        raise UsageError(f"{a.text} and {b.text}: one is recorded and one would be run now; valid: two of a kind")
    from fugaku_gpt.cli.compare_live import Asked, render_job, run_live

    asked = Asked(
        (a, b),
        run_file,
        preset,
        overrides_of(data, settings),
        ranks,
        iterations,
        warm_up if warm_up is not None else _LIVE_WARM_UP,
        pairs,
        budget,
        at_least,
        tolerance,
        load,
        reruns,
        out,
        unpacked,
    )
    if job is not None:
        return render_job(asked, job)
    return _tell(run_live(asked, start), form, plot, fail_on)


def overrides_of(data: Optional[str], settings: Tuple[str, ...]) -> Tuple[str, ...]:
    """What is set on both sides, the user's own last."""
    paths = (f"data.paths=[{json.dumps(data)}]",) if data is not None else ()
    return (*_TIMED, *paths, *settings)


def _again(out: Path, form: str, plot: Optional[Path], fail_on: Tuple[str, ...]) -> int:
    from fugaku_gpt.compare.job import FOLDER
    from fugaku_gpt.compare.pairs import FILE, read_kept
    from fugaku_gpt.compare.report import report_live

    if not out.is_dir():
        raise UsageError(f"{out}: no such folder; valid: two sides to compare, or the --out of an earlier comparison")
    if not (out / FILE).exists() and (out / FOLDER / FILE).exists():  # the folder of a job
        out = out / FOLDER
    return _tell(report_live(read_kept(out)), form, plot, fail_on)


def _tell(report: "Report", form: str, plot: Optional[Path], fail_on: Tuple[str, ...]) -> int:
    """Print and draw a report; the exit code."""
    from fugaku_gpt.compare.picture import draw
    from fugaku_gpt.compare.report import NO_VERDICT

    click.echo(report_text(report, form), nl=False)
    if plot is not None:
        draw(report, plot)
    if report.stopped:
        return EXIT_RESUME
    if report.verdict == NO_VERDICT:
        return EXIT_RUN_FAILED
    return EXIT_FINDINGS if report.verdict in fail_on else EXIT_OK
