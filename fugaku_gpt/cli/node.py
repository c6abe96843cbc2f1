"""``fugaku-gpt doctor node``: measure what only a real machine can tell, here or in a job, and report it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, List, Optional, Tuple

import click

from fugaku_gpt.cli.options import PATH, format_option, options_as, run_source
from fugaku_gpt.cli.output import echo, echo_script, json_document
from fugaku_gpt.config.source import RunSource
from fugaku_gpt.errors import EXIT_FINDINGS, EXIT_OK, RunFailed, UsageError

if TYPE_CHECKING:
    from fugaku_gpt.config import RunConfig

DEFAULT_PRESET = "124m"
ITERATIONS = 10
_RANKS_PER_NODE = {"pjm": 4, "slurm": 2}  # on Fugaku one for each core-memory group
_ELAPSE = "job.elapse=0:30:00"


@dataclass(frozen=True)
class NodeOptions:
    """The options of the command besides the run."""

    ranks: Optional[int]
    iterations: int
    short: bool
    job: Optional[str]
    out: Optional[Path]
    start: Tuple[str, ...]
    form: str


@click.command()
@run_source(run_option="--run", settings_help="Override a setting, such as job.nodes=2; repeatable.")
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    help="Number of ranks; default: 4 a node under PJM, 2 a node under Slurm, 2 here if there are cores for them.",
)
@click.option(
    "--iterations",
    type=click.IntRange(min=1),
    default=ITERATIONS,
    show_default=True,
    help="Timed iterations of the run's step.",
)
@click.option("--short", is_flag=True, help="Measure for moments only: a try of everything, whose figures mean little.")
@click.option("--job", type=click.Choice(["pjm", "slurm"]), help="Write a job that measures its nodes, instead.")
@click.option("--out", type=PATH, help="Folder for the report, node-report.txt and node-report.json, or for the job.")
@click.option(
    "--start",
    multiple=True,
    metavar="WORD",
    help="Inside a job: a word of the command that starts the ranks; repeatable.",
)
@format_option(("report", "json"), "report")
@options_as(NodeOptions)
def node(source: RunSource, options: NodeOptions) -> int:
    """Measure this machine, or with --job the nodes of a job, and report what deviates from a healthy A64FX node.

    The report has the checks of `fugaku-gpt doctor`, where each rank and its threads run, the kernels' trials, which
    matrix products are fastest, clock, multiply-adds and memory bandwidth by NUMA node, sums between ranks by size, the
    power knobs that PJM granted, and iterations of a run on random tokens (default: preset 124m).

    With --job and --out a folder is written for `fugaku-gpt job submit`; the report is there when the job has ended.

    Exit codes: 0 nothing deviates, 1 a check failed or the ranks did, 2 usage, 3 something deviates, 128 + N
    stopped by signal N, with a report of what was measured before.
    """
    config = node_config(source, options)
    if options.job is not None:
        return _write_job(config, source, options)
    from fugaku_gpt.doctor.node import measure_nodes
    from fugaku_gpt.launch.launcher import require_one_node
    from fugaku_gpt.planner.trainer.memory_check import local_node_limits, refuse_too_large

    if not options.start:
        require_one_node(config)
        refuse_too_large(config, local_node_limits(), range(config.layout.ranks))
    report = measure_nodes(
        config,
        options.out,
        options.iterations,
        options.start,
        lambda line: echo(line, err=True),
        is_short=options.short,
    )
    if options.form == "json":
        echo(json_document(report.values), nl=False)
    else:
        echo(report.text, nl=False)
    if report.stopped_by is not None:
        echo(f"fugaku-gpt: {report.failure}", err=True)
        return 128 + report.stopped_by
    failed = ", ".join(report.failed_checks)
    if report.failure or failed:
        raise RunFailed(report.failure or f"checks failed: {failed}")
    return EXIT_FINDINGS if report.deviates else EXIT_OK


def node_config(source: RunSource, options: NodeOptions) -> "RunConfig":
    """Load the run that is timed. Without a run file, a sequence for each rank is a global batch, and the ranks are as
    many replicas."""
    from fugaku_gpt.machine.local import usable_cores

    if source.run_file is not None:
        if options.ranks is not None:
            raise UsageError("--ranks: the run file has the layout; change it there, or with --set layout.dp=N")
        return source.load()
    scheduler = options.job if options.job is not None else "local"
    source = replace(source, preset=source.preset or DEFAULT_PRESET)
    nodes = replace(source, settings=(f"job.scheduler={scheduler}", *source.settings)).load(check=False).job.nodes
    per_node = _RANKS_PER_NODE.get(scheduler, min(2, len(usable_cores())))
    ranks = options.ranks if options.ranks is not None else per_node * nodes
    defaults: List[str] = [
        f"job.scheduler={scheduler}",
        "job.name=doctor-node",
        f"layout.dp={ranks}",
        "training.micro_batch=1",
        f"training.global_batch={ranks}",
        *([_ELAPSE] if options.job is not None else []),
    ]
    return replace(source, settings=(*defaults, *source.settings)).load()


def _write_job(config: "RunConfig", source: RunSource, options: NodeOptions) -> int:
    """Write the folder of a job, or print its script."""
    from fugaku_gpt.environments.registry import with_profile_file
    from fugaku_gpt.jobs.node_report import render_node_report
    from fugaku_gpt.jobs.submission import prepare_job
    from fugaku_gpt.planner.trainer.node_limits import refuse_job_too_large

    if options.start:
        raise UsageError("--start: goes without --job, whose script has the command that starts ranks")
    config = with_profile_file(config, source.run_file)
    refuse_job_too_large(config)

    arguments = [f"--iterations={options.iterations}", *(["--short"] if options.short else [])]
    if options.out is None:
        script = render_node_report(config, arguments)
        echo_script(script.text)
        notes = script.notes
    else:
        prepared = prepare_job(config, options.out, lambda run: render_node_report(run, arguments))
        notes = prepared.notes
    for note in notes:
        echo(f"note: {note}", err=True)
    if options.out is not None:
        echo(f"{options.out}: submit it with `fugaku-gpt job submit {options.out}`", err=True)
        echo(f"the report, then: {options.out / 'node-report.txt'}", err=True)
    return EXIT_OK
