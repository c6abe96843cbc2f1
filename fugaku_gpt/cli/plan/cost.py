"""``fugaku-gpt plan time``, ``plan days`` and ``plan ramp``: predict what a run will take, before it is started."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple

import click

from fugaku_gpt.cli.numbers import FiniteRange, round_significant
from fugaku_gpt.cli.options import MachineChoice, format_option, machine_choice, options_as, run_source
from fugaku_gpt.cli.output import echo, render_rows
from fugaku_gpt.config.source import RunSource
from fugaku_gpt.errors import EXIT_OK, UsageError

_FIGURES = ("figure", "value", "low", "high", "unit")
_COUNTED = ("component", "seconds", "share", "cores", "memory", "bound_by", "not_overlapped", "share_of_peak", "lost")
_PHASES = ("nodes", "batch", "micro_batch", "dp", "micro_batches", "samples", "iterations")
_positive = click.IntRange(min=1)
_batch = click.IntRange(min=1, max=10**9)  # as in `plan topology`, which searches divisors of it
_WATTS = FiniteRange(min=0, min_open=True, max=1e9)
if TYPE_CHECKING:
    from fugaku_gpt.config.schema import JobConfig, RunConfig
    from fugaku_gpt.machine.constants import Machine
    from fugaku_gpt.planner.training_schedule import TrainingPlan, TrainingSchedule

    _DurationType = click.ParamType[float]
else:
    _DurationType = click.ParamType  # older clicks' is not generic


class Duration(_DurationType):
    """A duration in seconds, or as H:MM:SS."""

    name = "duration"

    def convert(self, value: Any, param: Optional[click.Parameter], ctx: Optional[click.Context]) -> float:
        """Convert a value to seconds."""
        from fugaku_gpt.config.values import BadValue, parse_duration

        if isinstance(value, (int, float)):
            return float(value)
        try:
            seconds = parse_duration(value)
        except BadValue as error:
            self.fail(f"{value}: {error}", param, ctx)
        if not math.isfinite(seconds) or seconds < 0:
            self.fail(f"{value}: must not be below 0", param, ctx)
        return seconds


@dataclass(frozen=True)
class DaysOptions:
    """The options of ``plan days``; times are in seconds, and None stands for an option that was not given."""

    iterations: Optional[int]
    tokens: Optional[float]
    flops: Optional[float]
    pflops: Optional[float]
    tokens_per_iteration: Optional[int]
    sec_per_it: Optional[float]
    nodes: Optional[int]
    elapse: Optional[float]
    startup: float
    checkpoint: float
    node_mtbf: Optional[float]
    watts: Optional[float]

    def count_iterations(self) -> int:
        """The number of iterations, as given or from tokens or FLOPs.

        Raises:
            UsageError: none of these is given, more than one is, or what converts it is missing.
        """
        if sum(amount is not None for amount in (self.iterations, self.tokens, self.flops)) != 1:
            raise UsageError("give one of --iterations, --tokens or --flops")
        if self.tokens is not None:
            if self.tokens_per_iteration is None:
                raise UsageError("--tokens needs --tokens-per-iteration")
            return math.ceil(self.tokens / self.tokens_per_iteration)
        if self.flops is not None:
            if self.pflops is None:
                raise UsageError("--flops needs --pflops")
            assert self.sec_per_it is not None  # else training() has refused
            return math.ceil(self.flops / (self.pflops * 1e15) / self.sec_per_it)
        assert self.iterations is not None
        return self.iterations

    def training(self, billed_nodes: Optional[int] = None) -> "TrainingPlan":
        """The training for the planner.

        Raises:
            UsageError: as :meth:`count_iterations`, or the time of an iteration or the nodes are not given.
        """
        from fugaku_gpt.planner.training_schedule import TrainingPlan

        if self.sec_per_it is None or self.nodes is None:
            raise UsageError("give --sec-per-it and --nodes, or a RUN.yaml whose time is predicted")
        return TrainingPlan(
            self.count_iterations(),
            self.sec_per_it,
            self.nodes,
            self.elapse,
            self.startup,
            self.checkpoint,
            self.node_mtbf,
            self.watts,
            billed_nodes,
        )


@click.command("time")
@run_source()
@machine_choice
@click.option(
    "--watts", type=_WATTS, help="Power of one node in watts, for J/token; default: watts_per_node of the machine."
)
@format_option()
def iteration_time(source: RunSource, machine_choice: MachineChoice, watts: Optional[float], form: str) -> int:
    """Predict the seconds of an iteration by part, tokens/s or images/s, FLOP/s and utilisation, each with an 80 %
    interval.

    The model is fitted to the machine's measured rows, which are from other trainers; for a file of `plan probe`, it is
    a model of this trainer from what was measured. Inputs that are unlike every row, and shapes beyond what was
    measured, are reported as extrapolated on standard error, and widen the intervals.

    For a64fx-counted, it is a table of this trainer by counted cycles and bytes on one node, of which nothing was
    measured: each component's seconds by its cores and by its memory, which take the longer of both, operation by
    operation, if they overlap perfectly. What it assumes and leaves out is on standard error.
    """
    from fugaku_gpt.cli.corpus_settings import load_with_vocabulary
    from fugaku_gpt.machine.constants import load_machine
    from fugaku_gpt.planner.run_time import plan_time, refuse_choices

    config = load_with_vocabulary(source)
    machine, hardware, build = load_machine(machine_choice.name), machine_choice.hardware, machine_choice.build
    refuse_choices(machine_choice.name, machine, hardware, build)
    if machine.counted is not None:
        if watts is not None:
            raise UsageError(f"--watts: --machine {machine_choice.name} counts no energy")
        _print_counted(config, machine, form)
        return EXIT_OK
    plan = plan_time(config, machine, hardware, build, watts)
    lines = [
        {
            "figure": figure.name,
            "value": round_significant(figure.estimate.value),
            "low": round_significant(figure.estimate.low),
            "high": round_significant(figure.estimate.high),
            "unit": figure.unit,
        }
        for figure in plan.figures
    ]
    echo(render_rows(_FIGURES, lines, form), nl=False)
    for text in plan.extrapolated:
        echo(f"extrapolated: {text}", err=True)
    for text in plan.notes:
        echo(f"note: {text}", err=True)
    return EXIT_OK


def _print_counted(config: "RunConfig", machine: "Machine", form: str) -> None:
    """Print an iteration by counted cycles; for programs, standard output has the table alone."""
    from fugaku_gpt.planner.trainer.counted import predict_counted

    prediction = predict_counted(config, machine)
    lines = [
        {
            "component": figures.name,
            "seconds": round_significant(figures.work.overlapped),
            "share": round(figures.share, 4),
            "cores": round_significant(figures.work.cores),
            "memory": round_significant(figures.work.memory),
            "bound_by": figures.work.bound_by,
            "not_overlapped": round_significant(figures.work.not_overlapped),
            "share_of_peak": None if figures.share_of_peak is None else round(figures.share_of_peak, 4),
            "lost": round(figures.lost, 4),
        }
        for figures in prediction.figures()
    ]
    echo(render_rows(_COUNTED, lines, form), nl=False)
    seconds, longest = prediction.total.overlapped, prediction.total.not_overlapped
    for text in (
        f"speed: {prediction.tokens_per_second(seconds):.0f} tokens/s; {prediction.rate(seconds):.2f} TFLOP/s of "
        f"{prediction.peak / 1e12:.2f} ({prediction.notes_rate(seconds):.2f} by the notes' formula)",
        f"share of peak: {prediction.share_of_peak(seconds):.1%} where memory and cores overlap perfectly, "
        f"{prediction.share_of_peak(longest):.1%} where they never do",
    ):
        echo(text, err=form != "table")
    for text in prediction.assumptions:
        echo(f"counted: {text}", err=True)


class Tokens(_DurationType):
    """A number of tokens, such as 300B, 1.4T or 3e11."""

    name = "tokens"

    def convert(self, value: Any, param: Optional[click.Parameter], ctx: Optional[click.Context]) -> float:
        """Convert a value to a number."""
        if isinstance(value, (int, float)):
            return float(value)
        text = value.strip()
        factor = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper())
        try:
            number = float(text if factor is None else text[:-1]) * (factor or 1.0)
        except ValueError:
            number = math.nan
        if not 1 <= number <= 1e30:
            self.fail(f"{value}: must be a number from 1 to 1e30, which may end in K, M, B or T", param, ctx)
        return number


@click.command()
@run_source()
@machine_choice
@click.option("--iterations", type=click.IntRange(1, 10**12), help="Number of iterations; or give --tokens or --flops.")
@click.option("--tokens", type=Tokens(), help="Number of tokens, such as 300B.")
@click.option("--flops", type=FiniteRange(min=1, max=1e40), help="Budget of floating-point operations; needs --pflops.")
@click.option("--pflops", type=FiniteRange(min=1e-9, max=1e9), help="Rate of all nodes in PFLOP/s, for --flops.")
@click.option(
    "--tokens-per-iteration", type=_positive, help="Global batch * sequence length, for --tokens; default: the run's."
)
@click.option(
    "--sec-per-it", type=FiniteRange(min=1e-6, max=1e9), help="Seconds per iteration; default: predicted for the run."
)
@click.option("--nodes", type=click.IntRange(1, 10**6), help="Number of nodes; default: the run's.")
@click.option("--elapse", type=Duration(), help="Time limit of one job, in seconds or H:MM:SS; default: the run's.")
@click.option("--startup", type=Duration(), default=0.0, help="Time from the start of a job to its first iteration.")
@click.option("--checkpoint", type=Duration(), default=0.0, help="Time to write a checkpoint.")
@click.option("--node-mtbf", type=Duration(), help="Mean time between failures of one node; default: no node fails.")
@click.option("--watts", type=_WATTS, help="Power of one node in watts, for the energy.")
@options_as(DaysOptions)
@format_option()
def days(source: RunSource, machine_choice: MachineChoice, options: DaysOptions, form: str) -> int:
    """Compute the days, node-hours and chained jobs of a training, its best checkpoint interval, and its energy.

    With RUN.yaml or --preset, the time of an iteration is predicted as `plan time` does, and tokens, nodes and time
    limit are the run's. Node-hours on Fugaku, which --machine names by default, are those of the nodes that are paid
    for: full shelves of 48 for more than 384 nodes.

    The interval is Daly's: with checkpoints of C seconds and a failure every M seconds, about sqrt(2 C M).
    """
    from fugaku_gpt.planner.training_schedule import DAY, schedule_training

    options, billed = _completed_by_run(options, source, machine_choice)
    estimate = schedule_training(options.training(billed))
    lines: List[Dict[str, Any]] = [
        {"figure": "iterations", "value": estimate.iterations},
        {"figure": "computing", "value": round_significant(estimate.computing / DAY), "unit": "days"},
        {"figure": "whole", "value": round_significant(estimate.total / DAY), "unit": "days"},
        {"figure": "node-hours", "value": round_significant(estimate.node_hours), "unit": "h"},
        {"figure": "jobs", "value": estimate.jobs},
        {"figure": "iterations per job", "value": estimate.iterations_per_job},
    ]
    if billed is not None:
        lines[3:3] = [{"figure": "nodes", "value": options.nodes}, {"figure": "nodes paid for", "value": billed}]
    if estimate.checkpoint_every is not None:
        lines += [
            {"figure": "checkpoint every", "value": round_significant(estimate.checkpoint_every), "unit": "s"},
            {"figure": "checkpoint every", "value": estimate.iterations_between_checkpoints, "unit": "iterations"},
            {
                "figure": "lost to checkpoints and failures",
                "value": round_significant(100 * estimate.lost_share),
                "unit": "%",
            },
        ]
    if estimate.joules is not None:
        lines.append({"figure": "energy", "value": round_significant(estimate.joules / 3.6e9), "unit": "MWh"})
    echo(render_rows(("figure", "value", "unit"), lines, form), nl=False)
    if estimate.jobs is None:
        echo(_unlimited_text(estimate, options.nodes, billed is not None), err=True)
    return EXIT_OK


def _unlimited_text(estimate: "TrainingSchedule", nodes: Optional[int], is_fugaku: bool) -> str:
    """Why the number of jobs is not known, and on Fugaku the least number by the limits of its groups."""
    from fugaku_gpt.config.values import format_duration
    from fugaku_gpt.pjm.groups import fugaku_limits

    text = "how many jobs it takes is not known without the time limit of one: give --elapse, or job.elapse"
    limits = fugaku_limits()
    groups = limits.groups_for(nodes) if is_fugaku else []
    longest = max(((limits.groups[name].longest(nodes) or 0, name) for name in groups), default=(0, ""))
    if not longest[0]:
        return text
    jobs = math.ceil(estimate.total / longest[0])
    return (
        f"{text}; at least {jobs}, as {longest[1]} allows {format_duration(longest[0])} (as of "
        f"{limits.groups[longest[1]].date})"
    )


def _completed_by_run(
    options: DaysOptions, source: RunSource, choice: MachineChoice
) -> Tuple[DaysOptions, Optional[int]]:
    """Complete options by what a run says, with its predicted time; also return the nodes that are paid for, if the
    machine bills others than those that compute."""
    from fugaku_gpt.cli.corpus_settings import load_with_vocabulary
    from fugaku_gpt.config.schema import JobConfig
    from fugaku_gpt.machine.constants import load_machine
    from fugaku_gpt.planner.run_time import predicted_seconds

    machine = load_machine(choice.name)
    if source.run_file is None and source.preset is None and not source.settings:
        return options, _billed_nodes(JobConfig(nodes=options.nodes), machine) if options.nodes is not None else None
    config = load_with_vocabulary(source)
    sec_per_it, nodes = options.sec_per_it, options.nodes
    if nodes is not None and nodes != config.job.nodes:
        raise UsageError(
            f"--nodes {nodes}: the run has {config.job.nodes}; give --set job.nodes={nodes} and its layout"
        )
    if sec_per_it is None:
        seconds, extrapolated = predicted_seconds(config, machine, choice.hardware, choice.build)
        sec_per_it = seconds.value
        echo(
            f"predicted: {seconds.value:.4g} s per iteration, 80 % interval {seconds.low:.4g} to {seconds.high:.4g}",
            err=True,
        )
        for text in extrapolated:
            echo(f"extrapolated: {text}", err=True)
        if len(config.data.buckets) > 1 and config.model.is_grid_classifier:
            side = config.data.buckets[-1]
            echo(f"note: every batch is counted as one of the largest grids, {side} x {side}: an upper bound", err=True)
    completed = replace(
        options,
        sec_per_it=sec_per_it,
        nodes=config.job.nodes,
        tokens_per_iteration=options.tokens_per_iteration or config.training.global_batch * config.model.seq_len,
        elapse=options.elapse if options.elapse is not None else config.job.elapse,
    )
    if options.iterations is None and options.tokens is None and options.flops is None:
        completed = replace(completed, iterations=config.training.iterations)
    return completed, _billed_nodes(config.job, machine)


def _billed_nodes(job: "JobConfig", machine: "Machine") -> Optional[int]:
    """The nodes that a job on Fugaku pays for; None for another machine, or a scheduler that bills those it uses."""
    from fugaku_gpt.jobs.billing import billed_nodes
    from fugaku_gpt.machine.constants import FUGAKU_HARDWARE

    return billed_nodes(job) if machine.has_hardware(FUGAKU_HARDWARE) and job.scheduler == "pjm" else None


@click.command()
@click.option("--start", type=_positive, required=True, help="First global batch size.")
@click.option("--increment", type=_positive, required=True, help="Step by which the global batch size grows.")
@click.option("--samples", type=_positive, required=True, help="Number of samples after which it has grown fully.")
@click.option("--global-batch", type=_batch, required=True, help="Last global batch size.")
@click.option("--iterations", type=_positive, required=True, help="Number of iterations of the whole training.")
@click.option("--nodes", type=_positive, required=True, help="Number of nodes that are available.")
@click.option("--ranks-per-node", type=_positive, default=1, show_default=True, help="Number of ranks on each node.")
@click.option("--tp", type=_positive, default=1, show_default=True, help="Number of tensor-parallel ranks.")
@click.option("--pp", type=_positive, default=1, show_default=True, help="Number of pipeline stages.")
@click.option(
    "--micro-batch", type=_positive, default=1, show_default=True, help="Largest micro-batch that fits into memory."
)
@format_option()
def ramp(form: str, **sizes: int) -> int:
    """Show the phases of a growing batch: the nodes, replicas and micro-batch that each size can use.

    Each phase gets the most nodes whose replicas share its batch evenly, and then the largest micro-batch.
    """
    from fugaku_gpt.planner.ramp import BatchRamp, ramp_phases

    phases = ramp_phases(BatchRamp(**sizes))
    lines = [
        {
            "nodes": phase.nodes,
            "batch": phase.global_batch,
            "micro_batch": phase.micro_batch,
            "dp": phase.dp,
            "micro_batches": phase.micro_batches,
            "samples": phase.samples or None,
            "iterations": phase.iterations,
        }
        for phase in phases
    ]
    echo(render_rows(_PHASES, lines, form), nl=False)
    return EXIT_OK
