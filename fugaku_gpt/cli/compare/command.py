"""``fugaku-gpt compare``: which of two ways to run is faster, by how much, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Optional, Tuple

import click

from fugaku_gpt.cli.compare.printing import FORMATS, report_text
from fugaku_gpt.cli.compare.sides import LIVE_WARM_UP, RECORDED_WARM_UP, TOLERANCE, Shared
from fugaku_gpt.cli.numbers import FiniteRange, seconds_of_option
from fugaku_gpt.config import preset_names
from fugaku_gpt.config.schema import SCHEDULERS
from fugaku_gpt.errors import EXIT_FINDINGS, EXIT_OK, EXIT_RESUME, EXIT_RUN_FAILED, UsageError

if TYPE_CHECKING:
    from fugaku_gpt.compare.report import Report


@click.command()
@click.argument("sides", metavar="A B | DIR | FILE.csv", nargs=-1)
@click.option("--run", "run_file", metavar="RUN.yaml", type=click.Path(path_type=Path), help="The run that is timed.")
@click.option("--preset", help=f"Start from a preset: {', '.join(preset_names())}.")
@click.option("--data", help="Folder made by `data prepare`, or prefix of a Megatron .bin/.idx pair (sets data.paths).")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override on both sides; repeatable.")
@click.option("--ranks", type=click.IntRange(min=1), help="Ranks of either side; more of them are more replicas.")
@click.option("--iterations", type=click.IntRange(min=1), default=20, show_default=True, help="Timed in each job.")
@click.option(
    "--warm-up",
    type=click.IntRange(min=0),
    help=f"Iterations before these; default: {LIVE_WARM_UP}, of recorded runs {RECORDED_WARM_UP}.",
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
    help=f"Within which the sides are the same; default: {TOLERANCE}, of a design's folder its own.",
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
    "--factorial",
    metavar="TOGGLES",
    help="Which of these is worth what: a design of all combinations, such as freq,tcmalloc,ranks=1|4.",
)
@click.option("--fraction", type=click.IntRange(min=0), default=0, show_default=True, help="Run one in 2^N of them.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Blocks of a design.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the order in each block.")
@click.option("--scheduler", type=click.Choice(SCHEDULERS), help="Hand a design's runs in as jobs; default: run here.")
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
    tolerance: Optional[float],
    load: float,
    reruns: int,
    out: Optional[Path],
    form: str,
    plot: Optional[Path],
    fail_on: Tuple[str, ...],
    job: Optional[str],
    factorial: Optional[str],
    fraction: int,
    repeats: int,
    seed: int,
    scheduler: Optional[str],
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
    all the rest of their configuration. One configuration with one run each makes no verdict; several make one
    together, from how far their ratios lie apart.

    DIR is the --out of an earlier comparison or design: its report is printed again.

    With --factorial, no sides: the design of these toggles is printed; with --out its runs are run here, or handed in
    with --scheduler, and main effects and interactions are told. With a FILE.csv: what its rows tell of these toggles.

    Exit codes: 0 a report, 1 a job failed or a toggle was not applied, 2 usage, 3 --fail-on, 75 stopped and can go on.
    """
    from fugaku_gpt.compare.recorded import compare_recorded
    from fugaku_gpt.compare.report import report_recorded
    from fugaku_gpt.compare.sides import LiveSide, RecordedSide, parse_side
    from fugaku_gpt.plotting import check_plot

    if plot is not None:
        check_plot(plot)
    within = tolerance if tolerance is not None else TOLERANCE
    shared = Shared(run_file, preset, overrides_of(data, settings, scheduler or job), ranks, iterations, warm_up)
    if factorial is not None:
        from fugaku_gpt.cli.compare.factorial import Wanted, tell_factorial

        if len(sides) > 1 or plot is not None or job is not None:
            raise UsageError(
                "--factorial: goes with nothing, a folder of runs or a FILE.csv, and without --plot or --job"
            )
        if fail_on:
            raise UsageError("--fail-on: goes with two sides, not with --factorial, whose effects have no one verdict")
        wanted = Wanted(factorial, shared, fraction, repeats, seed, scheduler is not None, within, out)
        return tell_factorial(wanted, Path(sides[0]) if sides else None, form)
    if scheduler is not None:
        raise UsageError("--scheduler: goes with --factorial; two sides are run inside one job by --job")
    if not 1 <= len(sides) <= 2:
        raise UsageError(f"{len(sides)} sides: valid: two sides, or the folder of an earlier comparison")
    if len(sides) == 1:
        return _again(Path(sides[0]), form, plot, fail_on, warm_up, tolerance)
    from fugaku_gpt.environments.registry import is_profile

    a, b = (parse_side(text, is_profile) for text in sides)
    if isinstance(a, RecordedSide) and isinstance(b, RecordedSide):
        if job is not None:
            raise UsageError("--job: goes with sides that are run; these were run before")
        recorded = compare_recorded(a, b, shared.warm_up_of_recorded, within)
        report = report_recorded(a.text, b.text, recorded, within)
        return _tell(report, form, plot, fail_on)
    if not isinstance(a, LiveSide) or not isinstance(b, LiveSide):
        raise UsageError(f"{a.text} and {b.text}: one is recorded and one would be run now; valid: two of a kind")
    from fugaku_gpt.cli.compare.live import Asked, render_job, run_live

    asked = Asked(shared, (a, b), pairs, budget, at_least, within, load, reruns, out, unpacked)
    if job is not None:
        return render_job(asked)
    return _tell(run_live(asked, start), form, plot, fail_on)


def overrides_of(data: Optional[str], settings: Tuple[str, ...], scheduler: Optional[str]) -> Tuple[str, ...]:
    """What is set on both sides, over the run file: the user's own, and who runs the job."""
    paths = (f"data.paths=[{json.dumps(data)}]",) if data is not None else ()
    jobs = (f"job.scheduler={scheduler}",) if scheduler is not None else ()
    return (*paths, *settings, *jobs)


def _again(
    out: Path,
    form: str,
    plot: Optional[Path],
    fail_on: Tuple[str, ...],
    warm_up: Optional[int],
    tolerance: Optional[float],
) -> int:
    from fugaku_gpt.cli.compare.factorial import design_in, tell_design
    from fugaku_gpt.compare.job import FOLDER
    from fugaku_gpt.compare.pairs import FILE, read_kept
    from fugaku_gpt.compare.report import report_live
    from fugaku_gpt.sweep.plan import FILE as PLAN_FILE

    if not out.is_dir():
        raise UsageError(f"{out}: no such folder; valid: two sides to compare, or the --out of an earlier comparison")
    found = design_in(out, warm_up, tolerance) if (out / PLAN_FILE).exists() else None
    if found is not None:
        return tell_design(out, *found, form)
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
