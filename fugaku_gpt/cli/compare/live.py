"""``fugaku-gpt compare A B`` with sides that are run now, or by a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, List, Tuple

from fugaku_gpt.cli.compare.sides import CompareOptions
from fugaku_gpt.cli.output import echo, echo_script
from fugaku_gpt.compare.shared_run import SharedRun
from fugaku_gpt.config import RunConfig
from fugaku_gpt.config.values import format_duration
from fugaku_gpt.errors import EXIT_OK, UsageError

if TYPE_CHECKING:
    from fugaku_gpt.compare.pairs import Pair
    from fugaku_gpt.compare.report import Report
    from fugaku_gpt.compare.sides import LiveSide


@dataclass(frozen=True)
class LiveComparison:
    """A comparison of two sides that are run now, or by a job."""

    shared: SharedRun
    sides: Tuple["LiveSide", "LiveSide"]
    options: CompareOptions

    def configs(self) -> Tuple[RunConfig, RunConfig]:
        """Load the runs of both sides.

        Raises:
            UsageError: no run is named, or the sides do not do the same work.
        """
        from fugaku_gpt.compare.live_comparison import configs_of_sides

        return configs_of_sides(self.shared, self.sides)

    def arguments(self) -> List[str]:
        """The command-line arguments of the same comparison inside a job."""
        options = self.options
        arguments = [f"--iterations={self.shared.iterations}", f"--warm-up={self.shared.warm_up_of_live}"]
        arguments += [f"--pairs={options.pairs}", f"--at-least={options.at_least}"]
        arguments += [f"--tolerance={options.tolerance_or_default:g}"]
        arguments += [f"--load={options.load:g}", f"--reruns={options.reruns}"]
        arguments += [f"--set={text}" for text in self.shared.overrides_of_timing]
        return arguments + ([f"--budget={format_duration(options.budget)}"] if options.budget is not None else [])


class _Progress:
    """Prints a line for each job and each pair on standard error."""

    def job_started(self, pair: str, side: str, number: int, total: int) -> None:
        echo(f"{pair}: {side} runs ({number} of {total} pairs count so far)", err=True)

    def pair_ended(self, pair: "Pair") -> None:
        if pair.a.seconds is None or pair.b.seconds is None or not pair.has_both_times:
            echo(f"{pair.name}: a job has failed", err=True)
            return
        line = f"{pair.name}: A {pair.a.seconds:.4g} s, B {pair.b.seconds:.4g} s, B/A "
        line += f"{pair.b.seconds / pair.a.seconds:.3f}"
        echo(line + (f"; disturbed, left out: {'; '.join(pair.disturbed)}" if pair.disturbed else ""), err=True)


def run_live(comparison: LiveComparison) -> "Report":
    """Run both sides in turns in the folder ``--out``, and report.

    Raises:
        UsageError: it cannot be run as asked.
    """
    from fugaku_gpt.compare.live_comparison import LiveSettings, compare_live

    options = comparison.options
    settings = LiveSettings(
        options.pairs,
        options.budget,
        options.at_least,
        options.tolerance_or_default,
        options.load,
        options.reruns,
        options.start,
        options.unpacked,
    )
    return compare_live(comparison.shared, comparison.sides, options.out, settings, _Progress())


def render_job(comparison: LiveComparison) -> int:
    """Write a job's folder: its script, which runs both sides inside one allocation, and the run that they share.

    Raises:
        UsageError: one allocation cannot hold both.
    """
    from fugaku_gpt.compare.job import FOLDER, comparison_script
    from fugaku_gpt.config import dump_run_config
    from fugaku_gpt.environments.registry import with_profile_file
    from fugaku_gpt.jobs.submission import SCRIPT, require_no_run
    from fugaku_gpt.records.files import write_text_atomically

    run = with_profile_file(comparison.shared.base(), comparison.shared.source.run_file)
    base, script = comparison_script(comparison.sides, run, comparison.configs(), comparison.arguments())
    for note in script.notes:
        echo(f"note: {note}", err=True)
    out = comparison.options.out
    if out is None:
        echo_script(script.text)
        return EXIT_OK
    require_no_run(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_text_atomically(out / "config.yaml", dump_run_config(base))
        write_text_atomically(out / SCRIPT, script.text)
    except OSError as error:
        raise UsageError(f"--out {out}: cannot be written: {error.strerror}") from None
    echo(f"{out / SCRIPT}: submit it with `fugaku-gpt job submit {out}`", err=True)
    echo(f"the report, then: fugaku-gpt compare {out / FOLDER}", err=True)
    return EXIT_OK
