"""``fugaku-gpt plan predict`` and ``plan fit``: predict rows of a CSV with the cost model, and fit it to them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Tuple

import click

from fugaku_gpt.cli.machine_file import check_machine_file, write_machine
from fugaku_gpt.cli.numbers import round_significant
from fugaku_gpt.cli.options import PATH, format_option
from fugaku_gpt.cli.output import echo, render_rows
from fugaku_gpt.errors import EXIT_OK, UsageError

if TYPE_CHECKING:
    from fugaku_gpt.machine.constants import Machine

_PREDICTED = (
    "id",
    "sec_per_it",
    "sec_per_it_low",
    "sec_per_it_high",
    "mem_value",
    "mem_unit",
    "fits",
    "refused",
    "extrapolated",
)
_CONSTANTS = ("model", "constant", "value", "low", "high", "prior", "told_by_rows", "meaning")
_rows_option = click.option(
    "--rows",
    "rows_file",
    required=True,
    metavar="FILE.csv",
    type=PATH,
    help="Configurations to predict, with the columns of benchmarks/reference/measurements.csv.",
)


@click.command()
@_rows_option
@format_option()
def predict(rows_file: Path, form: str) -> int:
    """Predict seconds per iteration and memory for every row of a CSV.

    For each row, these are printed: seconds per iteration with an 80 % interval, memory as the row's kind of reading
    would show it, whether the run fits, why an impossible row is refused, and the inputs that are unlike every fitted
    row. Measured values of a row (sec_per_it, tflops, mem_value, status) are not read. The column hardware selects the
    machine.
    """
    from fugaku_gpt.planner.tables.predict import predict_table
    from fugaku_gpt.planner.tables.rows import RefusedRow, read_table

    lines: List[Dict[str, Any]] = []
    for prediction in predict_table(read_table(rows_file)):
        if isinstance(prediction, RefusedRow):
            lines.append(
                {"id": prediction.id, "refused": prediction.reason, "extrapolated": [] if form == "json" else ""}
            )
            continue
        lines.append(
            {
                "id": prediction.row.id,
                "sec_per_it": round_significant(prediction.seconds.value, 6),
                "sec_per_it_low": round_significant(prediction.seconds.low, 6),
                "sec_per_it_high": round_significant(prediction.seconds.high, 6),
                "mem_value": round_significant(prediction.memory, 6),
                "mem_unit": prediction.row.mem_unit
                if prediction.row.mem_unit.startswith(prediction.memory_unit)
                else prediction.memory_unit,
                "fits": prediction.fits,
                "extrapolated": list(prediction.extrapolated)
                if form == "json"
                else "; ".join(prediction.extrapolated) or None,
            }
        )
    echo(render_rows(_PREDICTED, lines, form), nl=False)
    return EXIT_OK


@click.command()
@click.option(
    "--rows",
    "rows_file",
    metavar="FILE.csv",
    type=PATH,
    help="Measured rows of any trainer, with the columns of benchmarks/reference/measurements.csv; or give --runs.",
)
@click.option(
    "--runs",
    multiple=True,
    metavar="FOLDER",
    type=PATH,
    help="Run directories of this trainer, or folders of them, for a machine of `plan probe`; repeatable.",
)
@click.option(
    "--machine", "name", required=True, metavar="NAME", help="Machine whose constants are fitted, or its file."
)
@click.option("--out", type=PATH, metavar="FILE.yaml", help="Write the fitted machine to this file.")
@click.option(
    "--plot",
    type=PATH,
    metavar="FILE.svg|png",
    help="Draw predicted against measured seconds into this file.",
)
@click.option("--constants", is_flag=True, help="Print the fitted constants instead of the errors.")
@format_option()
def fit(
    rows_file: Optional[Path],
    runs: Tuple[Path, ...],
    name: str,
    out: Optional[Path],
    plot: Optional[Path],
    constants: bool,
    form: str,
) -> int:
    """Fit the constants of a machine to measured rows, and show the error on rows that were left out of the fit.

    Every row is predicted by a fit to others: once to all rows of other configurations, once to the rows of other
    tables with configurations that its table does not have. A measurement that appears in several tables counts once,
    except for the order within tables. Errors are relative to the measured value. The baseline runs everything at the
    median FLOPs per second of the other rows. The plot shows the rows left out by configuration. With --runs, each run,
    and each step of the machine's probe, is predicted by a fit to the others.
    """
    from fugaku_gpt.machine.constants import load_machine
    from fugaku_gpt.planner.tables.fit_plot import draw_fit
    from fugaku_gpt.planner.tables.fitting import refit
    from fugaku_gpt.planner.tables.rows import parse_measured_rows, read_table
    from fugaku_gpt.planner.tables.score import FIGURES, score_figures
    from fugaku_gpt.plotting import check_plot

    machine = load_machine(name)
    if plot is not None:
        if rows_file is None:
            raise UsageError(f"--plot {plot}: goes with --rows")
        check_plot(plot)
    if out is not None:
        check_machine_file(out)
    if (rows_file is None) == (not runs):
        raise UsageError("give one of --rows and --runs")
    if rows_file is None:
        return _fit_runs(machine, runs, out, constants, form)
    machine_rows = [row for row in parse_measured_rows(read_table(rows_file)) if machine.has_hardware(row[0].hardware)]
    if not any(measured.seconds and measured.status == "ok" for _, measured in machine_rows):
        covered = ", ".join(machine.hardware)
        raise UsageError(f"{rows_file}: no row with sec_per_it and status ok whose hardware begins with {covered}")
    fitted = refit(machine, machine_rows)
    if out is not None:
        write_machine(fitted.machine, out)
    if plot is not None:
        draw_fit(fitted, "configuration", plot)
    if constants:
        echo(render_rows(_CONSTANTS, _constant_lines(fitted.machine), form), nl=False)
    else:
        echo(render_rows(FIGURES, [score_figures(fitted, by) for by in fitted.seconds], form), nl=False)
    return EXIT_OK


def _fit_runs(machine: "Machine", folders: Sequence[Path], out: Optional[Path], constants: bool, form: str) -> int:
    from fugaku_gpt.cli.plan.probe import print_left_out
    from fugaku_gpt.planner.trainer.fitting import refit_local, usable_runs
    from fugaku_gpt.report.collect import find_runs

    if machine.probed is None:
        raise UsageError(f"machine {machine.name}: --runs is for a file of `plan probe`; for this one: --rows FILE.csv")
    runs, skipped = usable_runs(find_runs(folders), machine.probed)
    for text in skipped:
        echo(f"skipped: {text}", err=True)
    if not runs:
        raise UsageError("no run to fit to: see above")
    fitted, left_out = refit_local(machine, runs)
    if out is not None:
        write_machine(fitted, out)
    if constants:
        echo(render_rows(_CONSTANTS, _constant_lines(fitted), form), nl=False)
    else:
        print_left_out(left_out, form)
    return EXIT_OK


def _constant_lines(machine: "Machine") -> List[Dict[str, Any]]:
    """Constants with their 80 % intervals; ``told_by_rows`` is the share of the prior's width that the rows removed."""
    from fugaku_gpt.planner.intervals import Estimate

    lines = []
    for model, fitted in (("time", machine.time), ("memory", machine.memory)):
        for constant in fitted.constants:
            guess = Estimate.from_log_width(constant.value, constant.width)
            narrowing = 1 - constant.width / constant.prior_width if constant.prior_width else None
            lines.append(
                {
                    "model": model,
                    "constant": constant.name,
                    "value": round_significant(guess.value),
                    "low": round_significant(guess.low),
                    "high": round_significant(guess.high),
                    "prior": round_significant(constant.prior),
                    "told_by_rows": None if narrowing is None else round(narrowing, 2),
                    "meaning": constant.meaning,
                }
            )
    return lines
