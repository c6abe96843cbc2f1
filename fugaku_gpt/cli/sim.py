"""``fugaku-gpt sim``: a simulated PJM on this machine, to try job scripts without Fugaku."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Optional, Tuple

import click

from fugaku_gpt.cli.output import echo

BANNER = "This is a simulated PJM on this machine, not Fugaku."

_directory_option: Callable[[Any], Any] = click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="FUGAKU_GPT_SIM_DIR",
    show_envvar=True,
    help="Folder of the simulator; default: one for each user under the temporary folder.",
)


@click.group()
def sim() -> None:
    """Run a simulated PJM on this machine, not Fugaku: its pjsub, pjstat, pjdel, pjhold, pjrls, pjwait and pjacl really
    run job scripts here.

    \b
    fugaku-gpt sim start       starts it and prints a line for your shell
    fugaku-gpt sim stop        stops it and ends all of its jobs
    """


@sim.command()
@_directory_option
@click.option("--nodes", type=click.IntRange(1), help="Number of simulated compute nodes.  [default: 158976]")
@click.option("--slots", type=click.IntRange(1), help="Number of jobs that run at once.  [default: 1]")
@click.option("--grace", type=click.FloatRange(0), help="Seconds between SIGTERM and SIGKILL.  [default: 5]")
@click.option(
    "--transition", type=click.FloatRange(0), help="Seconds in each of the states RNA, RNP, RNE, RNO.  [default: 0]"
)
@click.option("--min-elapse", type=click.FloatRange(0), help="Lower limit of elapse= in seconds.  [default: 60]")
@click.option("--sampling", type=click.FloatRange(0), help="Seconds before energy is measured.  [default: 60]")
@click.option("--strict-groups/--any-group", default=None, help="Refuse jobs without -g, as Fugaku does.")
@click.option("--shell", is_flag=True, help="Open a shell with its commands; the simulator stops when the shell exits.")
def start(directory: Optional[Path], shell: bool, **chosen: Any) -> None:
    """Start a simulated PJM (not Fugaku). It keeps running after this command, and remembers earlier jobs."""
    from fugaku_gpt.simulator.session import export_line, find_spool, start_simulator, stored_settings

    root = find_spool(directory).root
    given = {name: value for name, value in chosen.items() if value is not None}
    spool = start_simulator(root, replace(stored_settings(root), owner=os.getpid() if shell else 0, **given))
    echo(BANNER, err=True)
    if shell:
        _open_shell(spool.bin)
        return
    echo(f"It runs in {spool.root}; `fugaku-gpt sim stop` ends it. For this shell's pjsub, paste:", err=True)
    echo(export_line(spool))


def _open_shell(folder: Path) -> None:
    """Open the user's shell with the commands first on PATH; the simulator ends with it."""
    import subprocess

    from fugaku_gpt.simulator.session import stop_simulator
    from fugaku_gpt.simulator.spool import Spool

    program = os.environ.get("SHELL", "/bin/sh")
    echo(f"pjsub, pjstat, pjdel, ... are on PATH in this {program}; leave it with `exit`.", err=True)
    path = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"
    try:
        subprocess.run([program], env={**os.environ, "PATH": path})
    finally:
        stop_simulator(Spool(folder.parent))


@sim.command()
@_directory_option
def stop(directory: Optional[Path]) -> None:
    """Stop the simulated PJM (not Fugaku) and end all of its jobs."""
    from fugaku_gpt.simulator.session import stop_simulator

    spool = _spool(directory)
    stop_simulator(spool)
    echo(f"The simulated PJM in {spool.root} has ended.", err=True)


@sim.command()
@_directory_option
def env(directory: Optional[Path]) -> None:
    """Print the line that puts the commands of the simulated PJM (not Fugaku) on PATH."""
    from fugaku_gpt.simulator.session import export_line, simulator_status

    spool = _spool(directory)
    simulator_status(spool)  # fails where none runs
    echo(BANNER, err=True)
    echo(export_line(spool))


@sim.command("status")
@_directory_option
def show_status(directory: Optional[Path]) -> None:
    """Report whether the simulated PJM (not Fugaku) is running, with how many jobs, and which faults are pending."""
    from fugaku_gpt.simulator.session import simulator_status

    spool = _spool(directory)
    report = simulator_status(spool)
    jobs = ", ".join(f"{count} {state}" for state, count in sorted(report["jobs"].items()))
    echo(BANNER, err=True)
    echo(f"folder  {spool.root}")
    echo(f"daemon  {spool.daemon_pid()}")
    echo(f"jobs    {jobs or 'none'}")
    echo(f"faults  {report['faults'] or 'none'}")


@sim.command(context_settings={"ignore_unknown_options": True})
@_directory_option
@click.option("--code", type=click.IntRange(0, 9999), help="Number of the message, for refuse.")
@click.argument("fault_arguments", metavar="FAULT [ARGUMENT]...", nargs=-1, required=True)
def fault(directory: Optional[Path], code: Optional[int], fault_arguments: Tuple[str, ...]) -> None:
    """Inject a fault into the simulated PJM (not Fugaku).

    \b
    refuse [--code 0071] [TIMES]   pjsub refuses the next job
    lose JOB|next                  a job becomes unknown
    unanswered [TIMES]             pjsub fails, though the job was accepted
    node-down [JOB|next]           a running job loses a node
    node-down JOB NODE [SECONDS]   its node NODE (from 0) dies, which PJM notices after SECONDS
    slow-pjstat SECONDS            every pjstat answers late; 0 turns it off
    pjstat-fails TIMES             the next calls of pjstat fail
    garbage [TIMES]                the next pjstat prints nonsense
    clear                          remove all faults
    """
    from fugaku_gpt.errors import UsageError
    from fugaku_gpt.simulator.session import send_order

    if code is not None and fault_arguments[0] != "refuse":
        raise UsageError("--code: only with refuse")
    if fault_arguments[0] == "refuse":
        fault_arguments = ("refuse", str(code if code is not None else 71), *fault_arguments[1:])
    send_order(_spool(directory), ["fault", *fault_arguments])
    echo(f"set: {' '.join(fault_arguments)}", err=True)


def _spool(directory: Optional[Path]) -> Any:
    from fugaku_gpt.simulator.session import find_spool

    return find_spool(directory)
