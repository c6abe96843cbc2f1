"""``fugaku-gpt compare A B``: sides that are run now, or by a job."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, List, Optional, Tuple

import click

from fugaku_gpt.cli.compare.sides import Shared
from fugaku_gpt.config import RunConfig, config_values
from fugaku_gpt.config.values import format_duration
from fugaku_gpt.errors import EXIT_OK, UsageError

if TYPE_CHECKING:
    from fugaku_gpt.compare.pairs import Pair
    from fugaku_gpt.compare.report import Report
    from fugaku_gpt.compare.sides import LiveSide


@dataclass(frozen=True)
class Asked:
    """What the command line asks for; see its options."""

    shared: Shared
    sides: Tuple["LiveSide", "LiveSide"]
    pairs: int
    budget: Optional[float]
    at_least: int
    tolerance: float
    load: float
    reruns: int
    out: Optional[Path]
    unpacked: Optional[Path]

    def configs(self) -> Tuple[RunConfig, RunConfig]:
        """The runs of both sides.

        Raises:
            UsageError: no run is named, or the sides do not do the same work.
        """
        from fugaku_gpt.compare.sides import refuse_unlike, work_of

        a, b = (self.shared.config_of(side) for side in self.sides)
        refuse_unlike(work_of(a), work_of(b))
        return a, b

    def words(self) -> List[str]:
        """The options of the same comparison inside a job."""
        words = [f"--iterations={self.shared.iterations}", f"--warm-up={self.shared.warm_up_of_live}"]
        words += [f"--pairs={self.pairs}", f"--at-least={self.at_least}", f"--tolerance={self.tolerance:g}"]
        words += [f"--load={self.load:g}", f"--reruns={self.reruns}"]
        words += [f"--set={text}" for text in self.shared.overrides_of_timing]
        return words + ([f"--budget={format_duration(self.budget)}"] if self.budget is not None else [])


class _Progress:
    """A line for each job and each pair, on standard error."""

    def starts(self, pair: str, side: str, number: int, total: int) -> None:
        click.echo(f"{pair}: {side} runs ({number} of {total} pairs count so far)", err=True)

    def ended(self, pair: "Pair") -> None:
        if pair.a.seconds is None or pair.b.seconds is None or not pair.ended_well:
            click.echo(f"{pair.name}: a job has failed", err=True)
            return
        said = f"{pair.name}: A {pair.a.seconds:.4g} s, B {pair.b.seconds:.4g} s, B/A "
        said += f"{pair.b.seconds / pair.a.seconds:.3f}"
        click.echo(said + (f"; disturbed, left out: {'; '.join(pair.disturbed)}" if pair.disturbed else ""), err=True)


def run_live(asked: Asked, start: Tuple[str, ...]) -> "Report":
    """Run both sides in turns in ``asked.out``, and report.

    Raises:
        UsageError: it cannot be run as asked.
    """
    from fugaku_gpt.compare.environments import build_of, environment_of
    from fugaku_gpt.compare.live import Limits, SideRun, run_pairs
    from fugaku_gpt.compare.pairs import Plan, SidePlan, read_kept
    from fugaku_gpt.compare.report import report_live
    from fugaku_gpt.launch.launcher import find_launcher, launch
    from fugaku_gpt.machine.checkout import git_commit

    if asked.out is None:
        raise UsageError("where are the jobs to be kept? give --out, a folder; the same command goes on there")
    configs = asked.configs()
    profiles = [environment_of(side.environment, asked.unpacked) for side in asked.sides]
    if not start:
        for profile in profiles:
            find_launcher(profile=profile)  # says how to get one, before anything is written
    plans = [
        SidePlan(side.label, side.environment, side.settings, config_values(config), build_of(side.environment))
        for side, config in zip(asked.sides, configs)
    ]
    plan = Plan(plans[0], plans[1], asked.shared.warm_up_of_live, asked.tolerance, asked.load, git_commit())
    first, second = (SideRun(config, profile) for config, profile in zip(configs, profiles))
    limits = Limits(asked.pairs, asked.budget, asked.at_least, asked.reruns)
    run_pairs(asked.out, plan, (first, second), limits, launch, _Progress(), start=start)
    return report_live(read_kept(asked.out))


def render_job(asked: Asked) -> int:
    """Write a job's folder: its script, which runs both sides inside one allocation, and the run that they share.

    Raises:
        UsageError: one allocation cannot hold both.
    """
    from fugaku_gpt.compare.job import FOLDER, comparison_script
    from fugaku_gpt.config import dump_run_config
    from fugaku_gpt.environments.registry import with_profile_file
    from fugaku_gpt.jobs.submission import SCRIPT, refuse_a_run
    from fugaku_gpt.records.files import write_text_atomically

    run = with_profile_file(asked.shared.base(), asked.shared.run_file)
    base, script = comparison_script(asked.sides, run, asked.configs(), asked.words())
    for note in script.notes:
        click.echo(f"note: {note}", err=True)
    if asked.out is None:
        click.echo(script.text, nl=False)
        return EXIT_OK
    refuse_a_run(asked.out)
    try:
        asked.out.mkdir(parents=True, exist_ok=True)
        write_text_atomically(asked.out / "config.yaml", dump_run_config(base))
        write_text_atomically(asked.out / SCRIPT, script.text)
    except OSError as error:
        raise UsageError(f"--out {asked.out}: cannot be written: {error.strerror}") from None
    click.echo(f"{asked.out / SCRIPT}: hand it in with `fugaku-gpt job submit {asked.out}`", err=True)
    click.echo(f"the report, then: fugaku-gpt compare {asked.out / FOLDER}", err=True)
    return EXIT_OK
