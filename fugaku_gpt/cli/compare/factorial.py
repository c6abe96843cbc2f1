"""``fugaku-gpt compare --factorial``: which toggle is worth what, and which work together."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Optional, Sequence, Tuple, Union

import click

from fugaku_gpt.cli.compare.sides import LIVE_WARM_UP, TOLERANCE, Shared
from fugaku_gpt.cli.output import render_rows
from fugaku_gpt.errors import EXIT_OK, EXIT_RESUME, EXIT_RUN_FAILED, RunFailed, UsageError
from fugaku_gpt.sweep.plan import Plan, read_plan

if TYPE_CHECKING:
    from fugaku_gpt.compare.factorial import Design, Timed
    from fugaku_gpt.compare.observations import Observed

NAME = "factorial"
_FILE = "factorial.yaml"


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for; see its options.

    Attributes:
        shared: the run that the toggles change.
        as_jobs: its runs are handed in.
    """

    toggles: str
    shared: Shared
    fraction: int
    repeats: int
    seed: int
    as_jobs: bool
    tolerance: float
    out: Optional[Path]


def tell_factorial(wanted: Wanted, recorded: Optional[Path], form: str) -> int:
    """Print a design, run it or hand it in, or tell the effects of recorded runs; the exit code.

    Raises:
        UsageError: the toggles make no design, or no run tells of them.
        RunFailed: a run has failed, or a job was not taken.
    """
    from fugaku_gpt.compare.factorial import Timed, describe, parse, plan_design, sweep_text
    from fugaku_gpt.compare.observations import of_runs, of_table

    if recorded is not None:
        if recorded.suffix == ".csv":
            return _tell(of_table(recorded, wanted.toggles), wanted.tolerance, form)
        return _tell(of_runs(recorded, wanted.toggles, wanted.shared.warm_up_of_recorded), wanted.tolerance, form)
    base = wanted.shared.base(profiled=False)
    design = plan_design(parse(wanted.toggles, base), wanted.fraction, wanted.repeats, wanted.seed)
    for line in describe(design):
        click.echo(line, err=wanted.out is not None)
    timed = Timed(wanted.shared.warm_up_of_live, wanted.tolerance)
    plan = Plan(_FILE, NAME, sweep_text(design, base, NAME, timed), (), str(Path.cwd()))
    if wanted.out is None:
        return EXIT_OK
    if wanted.as_jobs:
        return _hand_in(plan, wanted.out)
    stopped = _run_here(plan, wanted.out)
    if stopped:
        click.echo("stopped: the same command goes on", err=True)
        return EXIT_RESUME
    return tell_design(wanted.out, design, timed, form)


def tell_design(out: Path, design: "Design", timed: "Timed", form: str) -> int:
    """The effects that the runs of a design's folder tell."""
    from fugaku_gpt.compare.observations import of_runs

    return _tell(of_runs(out, design, timed.warm_up), timed.tolerance, form)


def design_in(out: Path, warm_up: Optional[int], tolerance: Optional[float]) -> Optional[Tuple["Design", "Timed"]]:
    """The design whose runs a folder holds, and how they are judged; None where it holds no design's.

    Args:
        warm_up, tolerance: in place of those that the design was made with; None: those.

    Raises:
        UsageError: it holds another sweep.
    """
    from fugaku_gpt.compare.factorial import Timed, read_design

    plan = read_plan(out)
    if plan is None:
        return None
    design, kept = read_design(plan.text, str(out))
    kept = kept or Timed(LIVE_WARM_UP, TOLERANCE)
    return design, Timed(
        kept.warm_up if warm_up is None else warm_up, kept.tolerance if tolerance is None else tolerance
    )


def _tell(observed: "Observed", tolerance: float, form: str) -> int:
    from fugaku_gpt.compare.effects import COLUMNS, as_json, attribute, effect_rows, remarks

    try:
        found = attribute(observed.observations, observed.names, observed.levels, tolerance, observed.notes)
    except UsageError as error:
        if not observed.failures:
            raise
        raise RunFailed("\n".join([str(error), *observed.failures])) from None
    code = EXIT_RUN_FAILED if observed.failures else EXIT_OK
    if form == "json":
        click.echo(json.dumps(as_json(found), indent=2, allow_nan=False))
        return code
    click.echo(render_rows(COLUMNS, effect_rows(found), form))
    mark = "* " if form == "md" else ""
    click.echo("\n".join(f"{mark}{line}" for line in remarks(found)))
    return code


def _run_here(plan: Plan, out: Path) -> bool:
    """Run what is missing on this machine; whether it was stopped.

    Raises:
        RunFailed: none has ended well; of some alone the effects are told.
    """
    from fugaku_gpt.launch.launcher import find_launcher, launch
    from fugaku_gpt.sweep.progress import LiveProgress, PlainProgress
    from fugaku_gpt.sweep.run import run_sweep

    find_launcher()  # says how to get one, before anything is written
    shown: Union[LiveProgress, PlainProgress] = LiveProgress() if sys.stderr.isatty() else PlainProgress(sys.stderr)
    with shown as progress:
        ended = run_sweep(plan.sweep(), out, launch, progress, plan=plan)
    if any(one.stopped for one in ended):
        return True
    if ended and all(one.failed for one in ended):
        raise RunFailed("\n".join(f"{one.run.name}: {one.result.status}: {one.result.reason}" for one in ended))
    return False


def _hand_in(plan: Plan, out: Path) -> int:
    from fugaku_gpt.sweep.submit import Planned, submit_sweep

    def told(number: int, total: int, planned: "Planned", said: str) -> None:
        click.echo(f"[{number}/{total}] {planned.run.name}: {said}", err=True)

    def agreed(planned: Sequence["Planned"]) -> bool:
        return not planned or not sys.stdin.isatty() or click.confirm(f"hand in {len(planned)} jobs?", err=True)

    handed = submit_sweep(plan.sweep(), out, plan, told=told, agreed=agreed)
    lines = [f"{name}: not taken: {why}" for name, why in handed.refused.items()]
    lines += [handed.stopped] if handed.stopped else []
    if lines:
        raise RunFailed("\n".join(lines))
    click.echo(f"{len(handed.taken)} handed in; to follow: fugaku-gpt sweep status {out}", err=True)
    click.echo(f"the effects, when they have run: fugaku-gpt compare {out}", err=True)
    return EXIT_OK
