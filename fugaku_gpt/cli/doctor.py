"""``fugaku-gpt doctor``: check this machine, and explain how a run ended or why it hangs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Dict, List

import click

from fugaku_gpt.cli.node import node
from fugaku_gpt.cli.options import PATH, format_option
from fugaku_gpt.cli.output import echo, json_document, render_rows
from fugaku_gpt.doctor.hang import HangReport, hang_report, report_lines
from fugaku_gpt.doctor.machine import FAIL, check_machine
from fugaku_gpt.doctor.run import diagnose
from fugaku_gpt.errors import EXIT_FINDINGS, RunFailed
from fugaku_gpt.launch.lost_run import conclude_lost_run
from fugaku_gpt.machine.shared_memory import SHARED_MEMORY, leftover_segments, remove_segments
from fugaku_gpt.machine.system import this_system


class _Doctor(click.Group):
    """A group that takes a first argument that is no command as a run directory."""

    def parse_args(self, ctx: click.Context, args: List[str]) -> List[str]:
        names = [
            argument
            for index, argument in enumerate(args)
            if not argument.startswith("-") and args[max(0, index - 1)] != "--format"
        ]
        if args[:1] not in (["-h"], ["--help"]) and (not names or names[0] not in self.commands):
            args = [_RUN if names else _MACHINE, *args]
        return super().parse_args(ctx, args)


_RUN, _MACHINE = "run", "machine"
_NAMED_FILES = 8  # at most, in one message


@click.group(cls=_Doctor, options_metavar="[RUN_DIR]", subcommand_metavar="| COMMAND [ARGS]...")
def doctor() -> None:
    """Check whether this machine can train; with RUN_DIR, report what happened to that run.

    For a run that hangs, or hung before it was ended, `doctor hang` reports which rank waits for which, and the cause.
    `doctor node` measures this machine, or the nodes of a job. `doctor clean` removes what killed ranks have left.

    Exit codes: 0 this machine can train, or the run is reported, 1 a check of the machine failed, 2 usage.
    """


@doctor.command(_MACHINE)
@format_option()
def machine(form: str) -> None:
    """Check whether this machine can train.

    Exit codes: 0 it can, 1 a check failed.
    """
    checks = check_machine()
    rows = [asdict(check) for check in checks]
    echo(render_rows(("name", "status", "seen", "mend"), rows, form), nl=False)
    failed = [check.name for check in checks if check.status == FAIL]
    if failed:
        raise RunFailed(f"{len(failed)} checks failed: {', '.join(failed)}")


@doctor.command(_RUN)
@click.argument("run_directory", metavar="RUN_DIR", type=PATH)
@format_option(("table", "json"))
def run(run_directory: Path, form: str) -> None:
    """Report how a run ended, what it measured last, and what its ranks were doing."""
    conclude_lost_run(run_directory)
    diagnosis = diagnose(run_directory)
    if form == "json":
        echo(json_document(asdict(diagnosis)), nl=False)
        return
    lines = [f"result: {diagnosis.result}", f"last: {diagnosis.last}"]
    if diagnosis.node:
        lines.append(f"node: {diagnosis.node}")
    if diagnosis.last_checkpoint:
        lines.append(f"last checkpoint: {diagnosis.last_checkpoint}")
    echo("\n".join([*lines, *diagnosis.findings]))


@doctor.command()
@click.argument("run_directory", metavar="RUN_DIR", type=PATH)
@format_option(("table", "json"))
def hang(run_directory: Path, form: str) -> None:
    """Report which rank is the cause of a hang, and which rank waits for which in which call.

    Only files of the run directory are read, so the processes of the run need not exist any more; on the machine of the
    ranks, their processes are checked as well: they may be gone, or stopped.

    Exit codes: 0 no cause was found, 2 usage, 3 a cause was found.
    """
    report = hang_report(run_directory)
    if form == "json":
        echo(json_document(_report_json(report)), nl=False)
    else:
        echo("\n".join(report_lines(report)))
    if report.hang is not None and report.hang.culprits:
        raise click.exceptions.Exit(EXIT_FINDINGS)


@doctor.command()
def clean() -> None:
    """Remove the files that killed ranks have left in this machine's shared memory.

    Only files of MPI libraries are removed that belong to you and that no living process has open or mapped. Those of
    which that cannot be judged, as in a container, are left and counted.
    """
    directory = this_system().path(SHARED_MEMORY)
    leftovers = leftover_segments(directory)
    files, size = remove_segments(leftovers.dead)
    echo(f"{directory}: {files} files of dead ranks removed, {size / 2**20:.0f} MiB")
    if leftovers.unjudged:
        echo(
            f"{len(leftovers.unjudged)} files are left, which may be in use: {leftovers.reason}; where no run of yours "
            f"is under way on this machine, remove them: rm {' '.join(map(str, leftovers.unjudged[:_NAMED_FILES]))}"
        )


doctor.add_command(node)


def _report_json(report: HangReport) -> Dict[str, Any]:
    """The report as JSON values; the other suspects have the key ``others``, which scripts read."""
    values = asdict(report)
    if report.hang is not None:
        values["hang"]["others"] = values["hang"].pop("other_suspects")
    return values
