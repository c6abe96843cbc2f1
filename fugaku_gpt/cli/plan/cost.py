"""``fugaku-gpt plan time``, ``plan days`` and ``plan ramp``: what a run will take, before it is started."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple

import click

from fugaku_gpt.cli.numbers import FiniteRange, short
from fugaku_gpt.cli.output import format_option, render_rows
from fugaku_gpt.errors import EXIT_OK, UsageError

_FIGURES = ("figure", "value", "low", "high", "unit")
_PHASES = ("nodes", "batch", "micro_batch", "dp", "micro_batches", "samples", "iterations")
_positive = click.IntRange(min=1)
_batch = click.IntRange(min=1, max=10**9)  # as of `plan topology`: their divisors are looked for
_WATTS = FiniteRange(min=0, min_open=True, max=1e9)
if TYPE_CHECKING:
    _DurationType = click.ParamType[float]
else:
    _DurationType = click.ParamType  # older clicks' is not generic


class Duration(_DurationType):
    """Seconds, or H:MM:SS."""

    name = "duration"

    def convert(self, value: Any, param: Optional[click.Parameter], ctx: Optional[click.Context]) -> float:
        """As seconds."""
        from fugaku_gpt.config.values import BadValue, parse_duration

        if isinstance(value, (int, float)):
            return float(value)
        try:
            found = parse_duration(value)
        except BadValue as error:
            self.fail(f"{value}: {error}", param, ctx)
        if not math.isfinite(found) or found < 0:
            self.fail(f"{value}: must not be below 0", param, ctx)
        return found


@click.command("time")
@click.argument("run_file", metavar="[RUN.yaml]", required=False, type=click.Path(path_type=Path))
@click.option("--preset", help="Start from a preset.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override; repeatable.")
@click.option(
    "--machine",
    "name",
    default="a64fx",
    show_default=True,
    metavar="NAME",
    help="Machine, or its file; local: machine-local.yaml, which `plan probe` makes.",
)
@click.option("--hardware", help="Kind of the machine's hardware, such as V100-16GB; default: the first.")
@click.option(
    "--torch", "build", default="", metavar="1.10", help="PyTorch build, where the machine's rows tell builds."
)
@click.option(
    "--watts",
    type=_WATTS,
    help="Of one node, for J/token; default: watts_per_node of the file.",
)
@format_option
def iteration_time(
    run_file: Optional[Path],
    preset: Optional[str],
    settings: Tuple[str, ...],
    name: str,
    hardware: Optional[str],
    build: str,
    watts: Optional[float],
    form: str,
) -> int:
    """Predict the seconds of an iteration by part, tokens/s, FLOP/s and utilisation, each with an 80 % interval.

    The figures are those of the machine's fitted rows, which other trainers ran, or, of a file of `plan probe`, of our
    own trainer by what was measured. Inputs that no such row is like, and shapes beyond what was measured, are named as
    extrapolated on standard error, and make the intervals wider.
    """
    from fugaku_gpt.config import load_run_config
    from fugaku_gpt.machine.constants import load_machine
    from fugaku_gpt.planner.run_time import figures_of_local_run, figures_of_run, row_of_run

    config = load_run_config(run_file, preset, list(settings), check=False)
    machine = load_machine(name)
    if machine.probed is not None:
        if hardware or build:
            raise UsageError(f"--machine {name}: a probed machine is as it is; leave out --hardware and --torch")
        extrapolated, figures = figures_of_local_run(config, machine, watts)
    else:
        found, figures = figures_of_run(config, machine, row_of_run(config, machine, hardware, build), watts)
        extrapolated = list(found.extrapolated)
    lines = [
        {
            "figure": one.name,
            "value": short(one.guess.value),
            "low": short(one.guess.low),
            "high": short(one.guess.high),
            "unit": one.unit,
        }
        for one in figures
    ]
    click.echo(render_rows(_FIGURES, lines, form), nl=False)
    for text in extrapolated:
        click.echo(f"extrapolated: {text}", err=True)
    return EXIT_OK


@click.command()
@click.option("--iterations", type=click.IntRange(1, 10**12), help="How many, or:")
@click.option("--tokens", type=FiniteRange(min=1, max=1e30), help="... how many tokens, or:")
@click.option("--flops", type=FiniteRange(min=1, max=1e40), help="... a budget of FLOPs at --pflops.")
@click.option("--pflops", type=FiniteRange(min=1e-9, max=1e9), help="Rate of all nodes [PFLOP/s], for --flops.")
@click.option("--tokens-per-iteration", type=_positive, help="Global batch * sequence length, for --tokens.")
@click.option("--sec-per-it", type=FiniteRange(min=1e-6, max=1e9), required=True, help="Of one iteration.")
@click.option("--nodes", type=click.IntRange(1, 10**6), required=True)
@click.option("--elapse", type=Duration(), help="Limit of one job [s or H:MM:SS]; default: none.")
@click.option("--startup", type=Duration(), default=0.0, help="From a job's begin to its first iteration.")
@click.option("--checkpoint", type=Duration(), default=0.0, help="To write a checkpoint.")
@click.option("--node-mtbf", type=Duration(), help="Mean time between failures of one node; default: none fails.")
@click.option("--watts", type=_WATTS, help="Of one node, for the energy.")
@format_option
def days(
    iterations: Optional[int],
    tokens: Optional[float],
    flops: Optional[float],
    pflops: Optional[float],
    tokens_per_iteration: Optional[int],
    sec_per_it: float,
    nodes: int,
    elapse: Optional[float],
    startup: float,
    checkpoint: float,
    node_mtbf: Optional[float],
    watts: Optional[float],
    form: str,
) -> int:
    """Days, node-hours and chained jobs of a training, the checkpoint interval that loses least, and the energy.

    The interval is Daly's: with checkpoints of C seconds and a failure every M seconds about sqrt(2 C M).
    """
    from fugaku_gpt.planner.days import DAY, Training, schedule

    if sum(one is not None for one in (iterations, tokens, flops)) != 1:
        raise UsageError("give one of --iterations, --tokens or --flops")
    if tokens is not None:
        if tokens_per_iteration is None:
            raise UsageError("--tokens needs --tokens-per-iteration")
        iterations = math.ceil(tokens / tokens_per_iteration)
    elif flops is not None:
        if pflops is None:
            raise UsageError("--flops needs --pflops")
        iterations = math.ceil(flops / (pflops * 1e15) / sec_per_it)
    assert iterations is not None
    found = schedule(Training(iterations, sec_per_it, nodes, elapse, startup, checkpoint, node_mtbf, watts))
    lines: List[Dict[str, Any]] = [
        {"figure": "iterations", "value": found.iterations},
        {"figure": "computing", "value": short(found.computing / DAY), "unit": "days"},
        {"figure": "whole", "value": short(found.whole / DAY), "unit": "days"},
        {"figure": "node-hours", "value": short(found.node_hours), "unit": "h"},
        {"figure": "jobs", "value": found.jobs},
        {"figure": "iterations per job", "value": found.iterations_per_job},
    ]
    if found.checkpoint_every is not None:
        lines += [
            {"figure": "checkpoint every", "value": short(found.checkpoint_every), "unit": "s"},
            {"figure": "checkpoint every", "value": found.iterations_between_checkpoints, "unit": "iterations"},
            {"figure": "lost to checkpoints and failures", "value": short(100 * found.lost_share), "unit": "%"},
        ]
    if found.joules is not None:
        lines.append({"figure": "energy", "value": short(found.joules / 3.6e9), "unit": "MWh"})
    click.echo(render_rows(("figure", "value", "unit"), lines, form), nl=False)
    return EXIT_OK


@click.command()
@click.option("--start", type=_positive, required=True, help="First global batch.")
@click.option("--increment", type=_positive, required=True, help="It grows by this.")
@click.option("--samples", type=_positive, required=True, help="It has grown when these are consumed.")
@click.option("--global-batch", type=_batch, required=True, help="It grows to this.")
@click.option("--iterations", type=_positive, required=True, help="Of the whole training.")
@click.option("--nodes", type=_positive, required=True, help="That there are.")
@click.option("--ranks-per-node", type=_positive, default=1, show_default=True)
@click.option("--tp", type=_positive, default=1, show_default=True)
@click.option("--pp", type=_positive, default=1, show_default=True)
@click.option("--micro-batch", type=_positive, default=1, show_default=True, help="The largest that fits.")
@format_option
def ramp(form: str, **sizes: int) -> int:
    """The phases of a growing batch: which nodes, replicas and micro-batch each size can use.

    Each phase gets the most nodes whose replicas share its batch evenly, and then the largest micro-batch.
    """
    from fugaku_gpt.planner.ramp import phases

    found = phases(full=sizes.pop("global_batch"), **sizes)
    lines = [
        {
            "nodes": one.nodes,
            "batch": one.global_batch,
            "micro_batch": one.micro_batch,
            "dp": one.dp,
            "micro_batches": one.micro_batches,
            "samples": one.samples or None,
            "iterations": one.iterations,
        }
        for one in found
    ]
    click.echo(render_rows(_PHASES, lines, form), nl=False)
    return EXIT_OK
