"""``fugaku-gpt compare``: find which of two ways to run is faster, by how much, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Tuple

import click

from fugaku_gpt.cli.compare.printing import REPORT_FORMATS, report_text
from fugaku_gpt.cli.compare.sides import CompareOptions
from fugaku_gpt.cli.numbers import FiniteRange, seconds_of_option
from fugaku_gpt.cli.options import PATH, data_option, format_option, options_as, run_source, scheduler_option
from fugaku_gpt.cli.output import echo
from fugaku_gpt.compare.shared_run import LIVE_WARM_UP, RECORDED_WARM_UP, TOLERANCE, SharedRun
from fugaku_gpt.config.source import RunSource
from fugaku_gpt.errors import EXIT_FINDINGS, EXIT_OK, EXIT_RESUME, EXIT_RUN_FAILED, UsageError

if TYPE_CHECKING:
    from fugaku_gpt.compare.report import Report


@click.command()
@click.argument("sides", metavar="A B | DIR | FILE.csv", nargs=-1)
@run_source(run_option="--run", settings_help="Override a setting on both sides, such as layout.tp=2; repeatable.")
@data_option
@click.option("--ranks", type=click.IntRange(min=1), help="Number of ranks on each side; more ranks are more replicas.")
@click.option(
    "--iterations", type=click.IntRange(min=1), default=20, show_default=True, help="Timed iterations per job."
)
@click.option(
    "--warm-up",
    type=click.IntRange(min=0),
    help=f"Iterations before the timed ones; default: {LIVE_WARM_UP}, for recorded runs {RECORDED_WARM_UP}.",
)
@click.option(
    "--pairs", type=click.IntRange(min=1), default=10, show_default=True, help="Largest number of pairs that count."
)
@click.option(
    "--budget", metavar="H:MM:SS", callback=seconds_of_option, help="Time limit of this call; default: no limit."
)
@click.option(
    "--at-least",
    type=click.IntRange(min=2),
    default=6,
    show_default=True,
    help="Number of pairs before it may stop because the interval is narrow (half the tolerance) or the answer clear.",
)
@click.option(
    "--tolerance",
    type=FiniteRange(0, 1, min_open=True),
    help=f"Relative difference within which the sides count as the same; default: {TOLERANCE}, for a design its own.",
)
@click.option(
    "--load",
    type=FiniteRange(0, 1),
    default=0.05,
    show_default=True,
    help="Share of the machine that other processes may take before a pair is run again.",
)
@click.option(
    "--reruns",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="Largest number of disturbed pairs that are run again.",
)
@click.option("--out", type=PATH, help="Folder for the jobs; the same command resumes the comparison there.")
@format_option(REPORT_FORMATS, "report")
@click.option("--plot", type=PATH, metavar="FILE.svg|png", help="Draw the ratios and the operators into this file.")
@click.option(
    "--fail-on",
    type=click.Choice(["slower", "faster"]),
    multiple=True,
    help="Exit with code 3 if B is slower, or faster; repeatable.",
)
@click.option(
    "--job", type=click.Choice(["pjm", "slurm"]), help="Write a job script that runs the comparison in one allocation."
)
@click.option(
    "--factorial",
    metavar="TOGGLES",
    help="Measure the effect of each of these toggles in a factorial design, such as freq,tcmalloc,ranks=1|4.",
)
@click.option(
    "--fraction",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Run one in 2^N of the combinations of a design.",
)
@click.option(
    "--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Number of blocks of a design."
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the order of runs in each block."
)
@scheduler_option("Submit the runs of a design as jobs to this scheduler; default: run them here.")
@click.option(
    "--start",
    multiple=True,
    metavar="WORD",
    help="Inside a job: a word of the command that starts ranks; {ranks} stands for their number; repeatable.",
)
@click.option("--unpacked", type=PATH, help="Inside a job: folder that job.tarball was unpacked to.")
@options_as(CompareOptions)
def compare(sides: Tuple[str, ...], source: RunSource, options: CompareOptions) -> int:
    """Compare two ways to run, A and B: seconds per iteration, memory, losses, and where the time goes.

    A and B are each an environment (a name of `fugaku-gpt env list`, or its file), toggles (tcmalloc=true, threads=1,
    any key=value of a run file), both joined by commas, or `base`, the run as it is. Their jobs run in turns, A B, B A,
    and so on; each job is started anew and gives one number, the median of its iterations. Pairs that were disturbed by
    other processes are recorded, left out and run again. The same command resumes where it has stopped.

    Alternatively, both are runs that were made before: a run directory, a folder of them, or rows of a CSV with the
    columns of benchmarks/reference/measurements.csv, selected by conditions: notes.csv:torch=1.7,nodes<=64. They are
    matched by everything else in their configuration. One configuration with one run on each side gives no verdict;
    several give one together, from the spread of their ratios.

    DIR is the --out of an earlier comparison or design: its report is printed again.

    With --factorial, no sides are given: the design of these toggles is printed. With --out its runs are run here, or
    submitted with --scheduler, and main effects and interactions are reported. With a FILE.csv, the effects are those
    that its rows show.

    Exit codes: 0 a report, 1 a job failed or a toggle was not applied, 2 usage, 3 --fail-on, 75 stopped and resumable.
    """
    from fugaku_gpt.plotting import check_plot

    if options.plot is not None:
        check_plot(options.plot)
    shared = options.shared_run(source)
    if options.factorial is not None:
        return _factorial(sides, shared, options)
    if options.scheduler is not None:
        raise UsageError("--scheduler: goes with --factorial; two sides are run inside one job by --job")
    if len(sides) == 1:
        return _print_again(Path(sides[0]), options)
    if len(sides) != 2:
        raise UsageError(f"{len(sides)} sides: valid: two sides, or the folder of an earlier comparison")
    return _compare_sides(sides, shared, options)


def _factorial(sides: Tuple[str, ...], shared: SharedRun, options: CompareOptions) -> int:
    from fugaku_gpt.cli.compare.factorial import run_factorial

    if len(sides) > 1 or options.plot is not None or options.job is not None:
        raise UsageError("--factorial: goes with nothing, a folder of runs or a FILE.csv, and without --plot or --job")
    if options.fail_on:
        raise UsageError("--fail-on: goes with two sides, not with --factorial, whose effects have no one verdict")
    return run_factorial(options, shared, Path(sides[0]) if sides else None)


def _compare_sides(sides: Tuple[str, ...], shared: SharedRun, options: CompareOptions) -> int:
    from fugaku_gpt.compare.recorded import compare_recorded
    from fugaku_gpt.compare.report import report_recorded
    from fugaku_gpt.compare.sides import RecordedSide, parse_sides
    from fugaku_gpt.environments.registry import is_profile

    first, second = sides
    pair = parse_sides(first, second, is_profile)
    if isinstance(pair[0], RecordedSide):
        a, b = pair
        if options.job is not None:
            raise UsageError("--job: goes with sides that are run; these were run before")
        recorded = compare_recorded(a, b, shared.warm_up_of_recorded, options.tolerance_or_default)
        return _print_report(report_recorded(a.text, b.text, recorded, options.tolerance_or_default), options)
    from fugaku_gpt.cli.compare.live import LiveComparison, render_job, run_live

    comparison = LiveComparison(shared, pair, options)
    return render_job(comparison) if options.job is not None else _print_report(run_live(comparison), options)


def _print_again(out: Path, options: CompareOptions) -> int:
    """Print the report of an earlier comparison or design once more; returns the exit code."""
    from fugaku_gpt.cli.compare.factorial import design_in, print_effects_of_design
    from fugaku_gpt.compare.job import FOLDER
    from fugaku_gpt.compare.pairs import COMPARISON_FILE, read_comparison
    from fugaku_gpt.compare.report import report_live
    from fugaku_gpt.sweep.plan import PLAN_FILE

    if not out.is_dir():
        raise UsageError(f"{out}: no such folder; valid: two sides to compare, or the --out of an earlier comparison")
    design = design_in(out, options) if (out / PLAN_FILE).exists() else None
    if design is not None:
        return print_effects_of_design(out, *design, options.form)
    if not (out / COMPARISON_FILE).exists() and (out / FOLDER / COMPARISON_FILE).exists():  # the folder of a job
        out = out / FOLDER
    return _print_report(report_live(read_comparison(out)), options)


def _print_report(report: "Report", options: CompareOptions) -> int:
    """Print and draw a report; returns the exit code."""
    from fugaku_gpt.compare.picture import draw_report
    from fugaku_gpt.compare.report import NO_VERDICT

    echo(report_text(report, options.form), nl=False)
    if options.plot is not None:
        draw_report(report, options.plot)
    if report.was_stopped:
        return EXIT_RESUME
    if report.verdict == NO_VERDICT:
        return EXIT_RUN_FAILED
    return EXIT_FINDINGS if report.verdict in options.fail_on else EXIT_OK
