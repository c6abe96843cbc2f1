"""``fugaku-gpt sim``: a PJM of this machine, for trying job scripts without Fugaku."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Optional, Tuple

import click

BANNER = "This is a simulated PJM on this machine, not Fugaku."

_directory: Callable[[Any], Any] = click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="FUGAKU_GPT_SIM_DIR",
    show_envvar=True,
    help="The simulator's own folder; default: one for each user under the temporary folder.",
)


@click.group()
def sim() -> None:
    """A simulated PJM on this machine, not Fugaku: pjsub, pjstat, pjdel, pjhold, pjrls, pjwait and pjacl that really
    run job scripts here.

    \b
    fugaku-gpt sim start       starts it and prints a line for your shell
    fugaku-gpt sim stop        ends it, and every job of it
    """


@sim.command()
@_directory
@click.option("--nodes", type=click.IntRange(1), help="Compute nodes of the simulated site.  [default: 158976]")
@click.option("--slots", type=click.IntRange(1), help="Jobs that run at once on this machine.  [default: 1]")
@click.option("--grace", type=click.FloatRange(0), help="Seconds between SIGTERM and SIGKILL.  [default: 5]")
@click.option("--transition", type=click.FloatRange(0), help="Seconds in each of RNA, RNP, RNE, RNO.  [default: 0]")
@click.option("--min-elapse", type=click.FloatRange(0), help="Seconds; lower limit of elapse=.  [default: 60]")
@click.option("--sampling", type=click.FloatRange(0), help="Seconds before energy is in the statistics.  [default: 60]")
@click.option("--strict-groups/--any-group", default=None, help="Refuse jobs without -g, as Fugaku does.")
@click.option("--shell", is_flag=True, help="Open a shell with the commands; the simulator ends with it.")
def start(directory: Optional[Path], shell: bool, **chosen: Any) -> None:
    """Start a simulated PJM (not Fugaku). It runs on when this command has ended, and knows earlier jobs."""
    from fugaku_gpt.simulator.session import export_line, find, stored_settings
    from fugaku_gpt.simulator.session import start as start_simulator

    place = find(directory).root
    given = {name: value for name, value in chosen.items() if value is not None}
    spool = start_simulator(place, replace(stored_settings(place), owner=os.getpid() if shell else 0, **given))
    click.echo(BANNER, err=True)
    if shell:
        _open_shell(spool.bin)
        return
    click.echo(f"It runs in {spool.root}; `fugaku-gpt sim stop` ends it. For this shell's pjsub, paste:", err=True)
    click.echo(export_line(spool))


def _open_shell(folder: Path) -> None:
    """The user's shell, with the commands first on PATH; the simulator ends with it."""
    import subprocess

    from fugaku_gpt.simulator.session import stop as stop_simulator
    from fugaku_gpt.simulator.spool import Spool

    program = os.environ.get("SHELL", "/bin/sh")
    click.echo(f"pjsub, pjstat, pjdel, ... are on PATH in this {program}; leave it with `exit`.", err=True)
    path = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"
    try:
        subprocess.run([program], env={**os.environ, "PATH": path})
    finally:
        stop_simulator(Spool(folder.parent))


@sim.command()
@_directory
def stop(directory: Optional[Path]) -> None:
    """End the simulated PJM (not Fugaku) and every job of it."""
    from fugaku_gpt.simulator.session import stop as stop_simulator

    spool = _spool(directory)
    stop_simulator(spool)
    click.echo(f"The simulated PJM in {spool.root} has ended.", err=True)


@sim.command()
@_directory
def env(directory: Optional[Path]) -> None:
    """Print the line that puts the commands of the simulated PJM (not Fugaku) on PATH."""
    from fugaku_gpt.simulator.session import export_line, status

    spool = _spool(directory)
    status(spool)  # says where none runs
    click.echo(BANNER, err=True)
    click.echo(export_line(spool))


@sim.command("status")
@_directory
def show_status(directory: Optional[Path]) -> None:
    """Say whether the simulated PJM (not Fugaku) runs, with how many jobs, and which faults are pending."""
    from fugaku_gpt.simulator.session import status

    spool = _spool(directory)
    found = status(spool)
    jobs = ", ".join(f"{count} {state}" for state, count in sorted(found["jobs"].items()))
    click.echo(BANNER, err=True)
    click.echo(f"folder  {spool.root}")
    click.echo(f"daemon  {spool.daemon_pid()}")
    click.echo(f"jobs    {jobs or 'none'}")
    click.echo(f"faults  {found['faults'] or 'none'}")


@sim.command(context_settings={"ignore_unknown_options": True})
@_directory
@click.option("--code", type=click.IntRange(0, 9999), help="Of a refusal: number of the message.")
@click.argument("words", nargs=-1, required=True)
def fault(directory: Optional[Path], code: Optional[int], words: Tuple[str, ...]) -> None:
    """Make something go wrong in the simulated PJM (not Fugaku).

    \b
    refuse [--code 0071] [TIMES]   pjsub refuses the next job
    lose JOB|next                  a job is unknown from now on
    unanswered [TIMES]             pjsub fails, though the job was accepted
    node-down [JOB|next]           a running job loses a node
    slow-pjstat SECONDS            every pjstat answers late; 0: no longer
    pjstat-fails TIMES             the next pjstat fail
    garbage [TIMES]                the next pjstat prints nonsense
    clear                          none of it any more
    """
    from fugaku_gpt.errors import UsageError
    from fugaku_gpt.simulator.session import send

    if code is not None and words[0] != "refuse":
        raise UsageError("--code: only with refuse")
    if words[0] == "refuse":
        words = ("refuse", str(code if code is not None else 71), *words[1:])
    send(_spool(directory), ["fault", *words])
    click.echo(f"set: {' '.join(words)}", err=True)


def _spool(directory: Optional[Path]) -> Any:
    from fugaku_gpt.simulator.session import find

    return find(directory)
