"""``fugaku-gpt plan``: predictions and checks of runs before they are started."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import click

from fugaku_gpt.cli.options import PATH, format_option, run_source
from fugaku_gpt.cli.output import echo, render_rows
from fugaku_gpt.cli.plan.cost import days, iteration_time, ramp
from fugaku_gpt.cli.plan.memory import memory
from fugaku_gpt.cli.plan.probe import probe
from fugaku_gpt.cli.plan.rows import fit, predict
from fugaku_gpt.cli.plan.topology import topology
from fugaku_gpt.cli.trace_files import check_timeline_files, write_timeline
from fugaku_gpt.config.source import RunSource
from fugaku_gpt.errors import EXIT_OK, EXIT_RUN_FAILED, UsageError

if TYPE_CHECKING:
    from fugaku_gpt.config.schema import RunConfig
    from fugaku_gpt.layout.communication_check import GridReport
    from fugaku_gpt.layout.communications import CommunicationPlan
    from fugaku_gpt.layout.schedule_check import ScheduleReport
    from fugaku_gpt.layout.schedule_times import Times

_COLUMNS = ("stage", "layers", "busy", "idle_share", "in_flight", "arrived", "messages", "communications")
_MANY_RANKS = 50_000  # whose check takes more than a second
_positive = click.IntRange(min=1)


@click.group()
def plan() -> None:
    """Predict and check runs before they are started."""


for _command in (days, fit, iteration_time, memory, predict, probe, ramp, topology):
    plan.add_command(_command)


@plan.command()
@run_source()
@click.option("--ranks", type=_positive, help="Number of ranks; without --dp, dp is ranks / (tp * pp).")
@click.option("--dp", type=_positive, help="Number of replicas, in place of layout.dp.")
@click.option(
    "--micro-batches",
    type=_positive,
    help="Number of micro-batches per iteration and replica, in place of what the global batch gives; no ramp.",
)
@click.option(
    "--every-rank", is_flag=True, help="Run the communications of every rank instead of one rank of each stage."
)
@click.option(
    "--trace",
    "trace_files",
    multiple=True,
    metavar="FILE",
    type=PATH,
    help="Write the planned step over time to this file, a row for each pipeline stage: .json or .json.gz, which "
    "Perfetto and speedscope open, or .svg, a picture; repeatable.",
)
@format_option()
def check(
    source: RunSource,
    ranks: Optional[int],
    dp: Optional[int],
    micro_batches: Optional[int],
    every_rank: bool,
    trace_files: Tuple[Path, ...],
    form: str,
) -> int:
    """Prove, without a cluster, that the ranks of a run fit together and cannot deadlock.

    The grid, every rank's groups and every rank's communications of one training step are built and run under the
    strictest semantics of message passing; if batch size or sequence length grows, this is done for every size. A row
    is printed for each pipeline stage, at the full size: the time it is busy per step [forward passes of a layer], the
    share of the step that it is idle, the largest number of (micro-batch, chunk) pairs whose activations it holds, the
    largest number of messages that wait for their use, the messages that it sends, and the communications of one of its
    ranks.

    With layout.hierarchical_sum, ranks are assumed to fill one node after the other (round-robin with job.rank_map
    bynode): node.ranks_per_node on each node, or as many as follow from job.nodes.

    With --trace, the step at the full size is drawn over time. All ranks of a stage do the same, so that a row stands
    for any number of them; messages and sums take no time in it.

    Exit codes: 0 everything fits, 1 something does not (the first mismatch is named), 2 usage or config error.
    """
    from fugaku_gpt.cli.corpus_settings import load_with_vocabulary

    started = time.monotonic()
    check_timeline_files("--trace", trace_files)
    config = load_with_vocabulary(source)
    try:
        plans = _plans(config, _replicas(config, ranks, dp), micro_batches)
    except ValueError as error:
        raise UsageError(f"{source.run_file or source.preset or 'plan check'}: {error}") from None
    code = _check_plans(plans, every_rank, form, started)
    if trace_files and code == EXIT_OK:
        from fugaku_gpt.report.planned_timeline import planned_timeline

        write_timeline(planned_timeline(plans[-1]), trace_files)
    return code


def _replicas(config: "RunConfig", ranks: Optional[int], dp: Optional[int]) -> int:
    tp, pp = config.layout.tp, config.layout.pp
    if dp is None and ranks is not None:
        if ranks % (tp * pp):
            below = ranks // (tp * pp) * tp * pp
            valid = f"{below} or {below + tp * pp}" if below else str(tp * pp)
            raise UsageError(f"--ranks {ranks}: must be a multiple of tp {tp} * pp {pp} = {tp * pp}; valid: {valid}")
        dp = ranks // (tp * pp)
    dp = dp if dp is not None else config.layout.dp
    if ranks is not None and dp * tp * pp != ranks:
        raise UsageError(f"--ranks {ranks}: dp {dp} * tp {tp} * pp {pp} = {dp * tp * pp}; leave --dp or --ranks out")
    return dp


def _plans(config: "RunConfig", dp: int, micro_batches: Optional[int]) -> List["CommunicationPlan"]:
    """The plans for every batch size and sequence length that occurs, the full size last."""
    from fugaku_gpt.config.checks import check_ramps
    from fugaku_gpt.layout.batch import batch_sizes
    from fugaku_gpt.layout.communications import plan_of

    training = config.training
    share = training.micro_batch * dp
    if micro_batches is not None:
        training = replace(
            training, global_batch=micro_batches * share, ramp_start=None, ramp_increment=None, ramp_samples=None
        )
    elif training.global_batch % share:
        raise UsageError(
            f"training.global_batch {training.global_batch} must be a multiple of training.micro_batch "
            f"{training.micro_batch} * dp {dp} = {share}; change it with --set, or give --micro-batches"
        )
    config = replace(config, training=training, layout=replace(config.layout, dp=dp))
    problems: List[str] = []
    check_ramps(config, lambda key, value, why: problems.append(f"{key}: {value}: {why}"))
    if problems:
        raise UsageError("\n".join(problems))
    plan = plan_of(config)
    return [replace(plan, micro_batches=batch // share, seq_len=seq_len) for batch, seq_len in batch_sizes(config)]


@contextlib.contextmanager
def _progress_bar(plans: Sequence["CommunicationPlan"]) -> Iterator[Callable[[], None]]:
    """Show the share that is done, and the time that it still takes, at a terminal."""
    from fugaku_gpt.layout.group_check import groups_of

    if plans[0].layout.ranks < _MANY_RANKS or not sys.stderr.isatty():
        yield lambda: None
        return
    groups = len(groups_of(plans[0]))
    with click.progressbar(length=groups + groups * len(plans), label="checking", file=sys.stderr) as bar:
        yield lambda: bar.update(1)


def _check_plans(plans: Sequence["CommunicationPlan"], every_rank: bool, form: str, started: float) -> int:
    from fugaku_gpt.layout.communication_check import GridCheck
    from fugaku_gpt.layout.communications import chunk_times, schedule_of
    from fugaku_gpt.layout.group_check import GridError
    from fugaku_gpt.layout.schedule_check import ScheduleError, check_schedules
    from fugaku_gpt.layout.schedule_times import simulate

    bubbles, plan = [], plans[-1]
    try:
        with _progress_bar(plans) as on_kind:
            grid_check = GridCheck(plan, on_kind=on_kind)
            for plan in plans:
                schedules = [schedule_of(plan, stage) for stage in range(plan.layout.pp)]
                schedule_report = check_schedules(schedules, plan.micro_batches, plan.chunks)
                grid = grid_check.check(plan, run_all=every_rank)
                times = simulate(schedules, chunk_times(plan))
                bubbles.append(times.mean_bubble)
    except (ScheduleError, GridError) as error:
        size = f" ({plan.micro_batches} micro-batches of {plan.tokens} tokens)" if len(plans) > 1 else ""
        echo(f"does not fit: {error}{size}", err=True)
        return EXIT_RUN_FAILED
    echo(render_rows(_COLUMNS, _rows(plan, schedule_report, grid, times), form), nl=False)
    checked_ranks = "every rank" if grid.ran == grid.ranks else "one rank of each stage"
    groups = ", ".join(f"{count} {kind}" for kind, count in grid.groups.items() if count) or "none"
    idle = sum(times.idle_share) / len(times.idle_share)
    layout, first = plan.layout, plans[0]
    summary = [
        f"ranks           {grid.ranks}: dp {layout.dp} * tp {layout.tp} * pp {layout.pp}, order {plan.order}",
        f"schedule        {plan.schedule}: {plan.micro_batches} micro-batches, {plan.chunks} chunks each",
        f"groups          {groups}",
        f"communications  {grid.communications} of all ranks, {grid.programs} different programs; ran {checked_ranks}",
        f"actions         {schedule_report.actions} of all stages, {schedule_report.messages} messages",
        f"bubble          {bubbles[-1]:.1%} of the busy time, {idle:.1%} of the step",
    ]
    if len(plans) > 1:
        summary.append(
            f"sizes           {len(plans)}: from {first.micro_batches} micro-batches of {first.tokens} tokens (bubble "
            f"{bubbles[0]:.1%} of the busy time) to {plan.micro_batches} of {plan.tokens}"
        )
    summary.append(f"all fits: equal order of calls in every group, no deadlock; {time.monotonic() - started:.1f} s")
    for line in summary:  # with formats for programs, standard output has the rows alone
        echo(line, err=form != "table")
    return EXIT_OK


def _rows(
    plan: "CommunicationPlan", schedule_report: "ScheduleReport", grid: "GridReport", times: "Times"
) -> List[Dict[str, Any]]:
    from fugaku_gpt.layout.communications import schedule_of
    from fugaku_gpt.layout.schedules import Exchange

    rows: List[Dict[str, Any]] = []
    for stage in range(plan.layout.pp):
        exchanges = [action for action in schedule_of(plan, stage) if isinstance(action, Exchange)]
        rows.append(
            {
                "stage": stage,
                "layers": "+".join(str(len(part.layers)) for part in plan.model_chunks if part.stage == stage),
                "busy": round(times.busy[stage], 2),
                "idle_share": round(times.idle_share[stage], 4),
                "in_flight": schedule_report.peak_in_flight[stage],
                "arrived": schedule_report.peak_arrived[stage],
                "messages": sum(len(exchange.sends) for exchange in exchanges),
                "communications": grid.of_stage[stage],
            }
        )
    return rows
