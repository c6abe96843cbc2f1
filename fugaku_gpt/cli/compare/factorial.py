"""``fugaku-gpt compare --factorial``: the effect of each toggle, and which toggles interact."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Optional, Tuple

from fugaku_gpt.cli.compare.sides import CompareOptions
from fugaku_gpt.cli.output import echo, json_document, render_rows
from fugaku_gpt.cli.sweep_runs import follow_text, refusal_lines, run_on_this_machine, submit_jobs
from fugaku_gpt.compare.shared_run import LIVE_WARM_UP, TOLERANCE, SharedRun
from fugaku_gpt.errors import EXIT_OK, EXIT_RESUME, EXIT_RUN_FAILED, RunFailed, UsageError
from fugaku_gpt.sweep.plan import SweepPlan, read_plan

if TYPE_CHECKING:
    from fugaku_gpt.compare.factorial import AnalysisSettings, Design
    from fugaku_gpt.compare.observations import ToggleObservations

NAME = "factorial"
_FILE = "factorial.yaml"


def run_factorial(options: CompareOptions, shared: SharedRun, recorded: Optional[Path]) -> int:
    """Print a design, run or submit it, or report the effects that recorded runs show; returns the exit code.

    Args:
        options: the options of the command; ``factorial`` has the toggles of the design.
        shared: the run that the toggles change.
        recorded: a folder of runs, or a CSV; None to design runs.

    Raises:
        UsageError: the toggles make no design, or no run has them.
        RunFailed: a run has failed, or a scheduler has refused a job.
    """
    from fugaku_gpt.compare.factorial import AnalysisSettings, describe, parse_factors, plan_design, sweep_text
    from fugaku_gpt.compare.observations import observe_runs, observe_table

    assert options.factorial is not None
    toggles, out, tolerance = options.factorial, options.out, options.tolerance_or_default
    if recorded is not None:
        is_table = recorded.suffix == ".csv"
        observed = (
            observe_table(recorded, toggles)
            if is_table
            else observe_runs(recorded, toggles, shared.warm_up_of_recorded)
        )
        return _print_effects(observed, tolerance, options.form)
    base = shared.base(profiled=False)
    design = plan_design(parse_factors(toggles, base), options.fraction, options.repeats, options.seed)
    for line in describe(design):
        echo(line, err=out is not None)
    timed = AnalysisSettings(shared.warm_up_of_live, tolerance)
    plan = SweepPlan(_FILE, NAME, sweep_text(design, base, NAME, timed), (), str(Path.cwd()))
    if out is None:
        return EXIT_OK
    if options.scheduler is not None:
        return _submit(plan, out)
    if _run_locally(plan, out):
        echo("stopped: the same command resumes", err=True)
        return EXIT_RESUME
    return print_effects_of_design(out, design, timed, options.form)


def print_effects_of_design(out: Path, design: "Design", timed: "AnalysisSettings", form: str) -> int:
    """Print the effects that the runs in a design's folder show; returns the exit code."""
    from fugaku_gpt.compare.observations import observe_runs

    return _print_effects(observe_runs(out, design, timed.warm_up), timed.tolerance, form)


def design_in(out: Path, options: CompareOptions) -> Optional[Tuple["Design", "AnalysisSettings"]]:
    """The design whose runs a folder contains, and how they are judged; None if the folder has no plan.

    Args:
        options: a warm-up or tolerance in them replaces that of the design.

    Raises:
        UsageError: the folder contains another sweep.
    """
    from fugaku_gpt.compare.factorial import AnalysisSettings, read_design

    plan = read_plan(out)
    if plan is None:
        return None
    design, recorded_timing = read_design(plan.text, str(out))
    recorded_timing = recorded_timing or AnalysisSettings(LIVE_WARM_UP, TOLERANCE)
    warm_up = options.warm_up if options.warm_up is not None else recorded_timing.warm_up
    return design, AnalysisSettings(
        warm_up, options.tolerance if options.tolerance is not None else recorded_timing.tolerance
    )


def _print_effects(observed: "ToggleObservations", tolerance: float, form: str) -> int:
    from fugaku_gpt.compare.effects import COLUMNS, as_json, effect_rows, estimate_effects, remarks

    try:
        effects = estimate_effects(observed.observations, observed.names, observed.levels, tolerance, observed.notes)
    except UsageError as error:
        if not observed.failures:
            raise
        raise RunFailed("\n".join([str(error), *observed.failures])) from None
    code = EXIT_RUN_FAILED if observed.failures else EXIT_OK
    if form == "json":
        echo(json_document(as_json(effects)), nl=False)
        return code
    echo(render_rows(COLUMNS, effect_rows(effects), form))
    mark = "* " if form == "md" else ""
    echo("\n".join(f"{mark}{line}" for line in remarks(effects)))
    return code


def _run_locally(plan: SweepPlan, out: Path) -> bool:
    """Run the missing runs on this machine; returns whether that was stopped.

    Raises:
        RunFailed: every run has failed; if some have ended well, their effects can be reported.
    """
    ended = run_on_this_machine(plan.sweep(), out, plan)
    if any(ended_run.was_stopped for ended_run in ended):
        return True
    if ended and all(ended_run.has_failed for ended_run in ended):
        raise RunFailed(
            "\n".join(
                f"{ended_run.run.name}: {ended_run.result.status}: {ended_run.result.reason}" for ended_run in ended
            )
        )
    return False


def _submit(plan: SweepPlan, out: Path) -> int:
    submission = submit_jobs(plan, out)
    lines = refusal_lines(submission)
    lines += [submission.stop_reason] if submission.stop_reason else []
    if lines:
        raise RunFailed("\n".join(lines))
    echo(f"{len(submission.job_ids)} submitted; {follow_text(out)}", err=True)
    echo(f"the effects, when they have run: fugaku-gpt compare {shlex.quote(str(out))}", err=True)
    return EXIT_OK
