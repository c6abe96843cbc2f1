"""``fugaku-gpt plan probe``: measure this machine for half a minute, and write its machine file."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Tuple

import click

from fugaku_gpt.cli.machine_file import check_machine_file, write_machine
from fugaku_gpt.cli.numbers import FiniteRange, round_significant
from fugaku_gpt.cli.options import PATH, format_option
from fugaku_gpt.cli.output import echo, render_rows
from fugaku_gpt.errors import EXIT_OK, RunFailed, UsageError

if TYPE_CHECKING:
    from fugaku_gpt.launch.launcher import Launcher
    from fugaku_gpt.machine.probed import ProbeResults
    from fugaku_gpt.planner.trainer.fitting import LeftOutRun

DTYPES = ("float32", "bfloat16")
_MODULE = "fugaku_gpt.training.probe"
_WITH_CORES, _WITHOUT = 3.0, 1.0  # shares of the time: ranks that have cores of their own measure products and passes
_START_SECONDS = 60.0  # for starting processes on a busy machine, on top of the time for measuring
_positive = click.IntRange(min=1)


@click.command()
@click.option(
    "--ranks", type=_positive, help="Largest number of ranks; 1, 2, 4 and so on are measured too; default: cores."
)
@click.option("--threads", type=_positive, help="Number of threads of each rank; default: usable cores / ranks.")
@click.option(
    "--seconds", type=FiniteRange(min=0.1), default=30.0, show_default=True, help="Seconds to spend on measuring."
)
@click.option(
    "--dtype", "dtypes", multiple=True, type=click.Choice(DTYPES), help="Type to measure; repeatable; default: both."
)
@click.option("--out", required=True, type=PATH, metavar="FILE.yaml", help="Machine file to write.")
@format_option()
def probe(
    ranks: Optional[int], threads: Optional[int], seconds: float, dtypes: Tuple[str, ...], out: Path, form: str
) -> int:
    """Measure this machine, for `plan time --machine FILE.yaml`; with --out machine-local.yaml, for --machine local.

    The measurements are made with 1, 2, 4 ... ranks at once: matrix products of GPT layers by shape and type, passes
    over activations and parameters, memory bandwidth, sums and messages between ranks, and steps of small runs, to
    which the factors of the model are fitted. Each of these steps is printed beside the prediction of a model fitted
    to the others. Do not use the machine for other work meanwhile.
    """
    from fugaku_gpt.launch.launcher import find_launcher, require_rank_packages
    from fugaku_gpt.machine import local
    from fugaku_gpt.planner.trainer.fitting import machine_from_probe

    check_machine_file(out)
    launcher = find_launcher()
    require_rank_packages()
    cores = len(local.usable_cores())
    counts = rank_counts(ranks or cores)
    threads_of_count = {count: threads or max(1, cores // count) for count in counts}
    shares = {count: _WITH_CORES if count * threads_of_count[count] <= cores else _WITHOUT for count in counts}
    if max(shares.values()) < _WITH_CORES:
        raise UsageError(f"--threads {threads}: this machine has {cores} usable cores; valid: up to {cores}")
    probed: "Optional[ProbeResults]" = None
    for count in counts:
        share = seconds * shares[count] / sum(shares.values())
        measured = _measure(launcher, count, threads_of_count[count], share, tuple(dict.fromkeys(dtypes)) or DTYPES)
        probed = measured if probed is None else probed.merged_with(measured)
    assert probed is not None
    machine, left_out = machine_from_probe(probed, local.memory_limit())
    write_machine(machine, out)
    print_left_out(left_out, form)
    echo(f"written: {out}", err=True)
    return EXIT_OK


def print_left_out(left_out: "Sequence[LeftOutRun]", form: str) -> None:
    """Print each measured run beside its prediction by a fit to the other runs [s]."""
    lines: List[Dict[str, Any]] = [
        {
            "run": run.name,
            "measured": round_significant(run.measured),
            "predicted": round_significant(run.predicted),
            "off_percent": round(100 * run.relative_error, 1),
        }
        for run in left_out
    ]
    echo(render_rows(("run", "measured", "predicted", "off_percent"), lines, form), nl=False)
    if left_out:
        median = 100 * statistics.median(abs(run.relative_error) for run in left_out)
        echo(f"runs left out of the fit: {median:.1f} % off in the median", err=True)


def rank_counts(most: int) -> List[int]:
    """The powers of two below ``most``, and ``most``."""
    counts = [1]
    while counts[-1] * 2 < most:
        counts.append(counts[-1] * 2)
    return counts if most == 1 else [*counts, most]


def _measure(launcher: "Launcher", ranks: int, threads: int, seconds: float, dtypes: Tuple[str, ...]) -> "ProbeResults":
    """Run the measuring module on a number of ranks, and print its progress."""
    from fugaku_gpt.config.schema import NodeConfig
    from fugaku_gpt.launch.processes import run_command
    from fugaku_gpt.launch.rank_variables import rank_environment
    from fugaku_gpt.machine.probed import probe_from_data

    argv = [*launcher.command_prefix(ranks), *rank_environment(NodeConfig(), threads)]
    argv += [sys.executable, "-m", _MODULE, "--threads", str(threads), "--seconds", f"{seconds:g}", "--dtypes", *dtypes]
    probes: List["ProbeResults"] = []
    other_lines: List[str] = []

    def on_line(line: str) -> None:
        if line.startswith('{"progress"'):
            echo(f"{ranks} ranks of {threads} threads: {json.loads(line)['progress']}", err=True)
        elif line.startswith('{"probed"'):
            probes.append(probe_from_data(json.loads(line)["probed"]))
        else:
            other_lines.append(line)

    outcome = run_command(argv, launcher.environment, timeout=_START_SECONDS + 10 * seconds, on_line=on_line)
    if not outcome.ok or not probes:
        ending = "did not end in time" if outcome.timed_out else f"ended with exit code {outcome.exit_code}"
        raise RunFailed(
            "\n".join([*other_lines[-20:], f"the probe of {ranks} ranks {ending}; `fugaku-gpt doctor` checks the MPI"])
        )
    return probes[0]
