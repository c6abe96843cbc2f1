"""``fugaku-gpt plan topology``: the fastest layouts of a run on a number of nodes."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Sequence, Tuple

import click

from fugaku_gpt.cli.numbers import short
from fugaku_gpt.cli.output import format_option, render_rows
from fugaku_gpt.cli.plan.constraints import batches_of, parsed, rules_of
from fugaku_gpt.errors import EXIT_OK, EXIT_RUN_FAILED, UsageError

if TYPE_CHECKING:
    from fugaku_gpt.config.schema import RunConfig
    from fugaku_gpt.machine.constants import Machine
    from fugaku_gpt.planner.search.best import Best
    from fugaku_gpt.planner.search.topology import Wanted

_COLUMNS = (
    "rank", "nodes", "ranks_per_node", "dp", "tp", "pp", "chunks", "micro_batch", "global_batch", "recompute", "zero",
    "sequence_parallel", "sec_per_it", "low", "high", "tflops", "mem_rows", "mem_ours", "mem_unit", "extrapolated",
)  # fmt: skip
_ROW = _COLUMNS[1:12]
_ONLY_JSON = ("parts", "waste", "torus")
_RANKS_PER_NODE = (1, 2, 4)  # of a node without devices: one rank, one for each half, or for each core-memory group
_SHORT = {
    "ranks_per_node": "ppn",
    "micro_batch": "mbs",
    "global_batch": "gbs",
    "sequence_parallel": "sp",
}  # table headings
_TOLD_AFTER = 2.0  # s
_positive = click.IntRange(min=1, max=10**6)


@click.command()
@click.argument("run_file", metavar="[RUN.yaml]", required=False, type=click.Path(path_type=Path))
@click.option("--model", "--preset", "preset", help="Preset of the model, such as 1.3b.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override; repeatable.")
@click.option("--machine", "name", default="a64fx", show_default=True, metavar="NAME", help="Machine, or its file.")
@click.option("--hardware", help="Kind of the machine's hardware, such as V100-16GB; default: the first.")
@click.option(
    "--torch", "build", default="", metavar="1.10", help="PyTorch build, where the machine's rows tell builds."
)
@click.option("--nodes", type=_positive, help="So many nodes, or:")
@click.option("--max-nodes", type=_positive, help="... so many at most.")
@click.option(
    "--ranks-per-node", type=_positive, multiple=True, help="To choose from; default: 1, 2, 4, on GPUs one for each."
)
@click.option(
    "--global-batch",
    "batches",
    multiple=True,
    metavar="N|A-B",
    help="To choose from; default: the run's. With several, layouts are ranked by seconds per sequence.",
)
@click.option("--constraint", "constraints", multiple=True, metavar="EXPR", help="Such as 'GBS % 32 == 0 and TP <= 8'.")
@click.option(
    "--fit",
    type=click.Choice(("both", "rows", "ours")),
    default="both",
    show_default=True,
    help="Which memory must suffice: mem_rows of the measured trainers, mem_ours of this one.",
)
@click.option("--measured", is_flag=True, help="Only layouts that have no input outside of the measured rows.")
@click.option("--variants", is_flag=True, help="All layouts, not only the fastest of each nodes, ranks, DP, TP, PP.")
@click.option("--top", type=_positive, default=10, show_default=True, help="How many are shown and written.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Write run files, rank maps and a sweep.")
@click.option("--iterations", type=_positive, default=10, show_default=True, help="Of each run of that sweep.")
@click.option(
    "--plot", type=click.Path(path_type=Path), metavar="FILE.svg", help="Draw seconds against memory; or .png."
)
@format_option
def topology(
    run_file: Optional[Path],
    preset: Optional[str],
    settings: Tuple[str, ...],
    name: str,
    hardware: Optional[str],
    build: str,
    nodes: Optional[int],
    max_nodes: Optional[int],
    ranks_per_node: Tuple[int, ...],
    batches: Tuple[str, ...],
    constraints: Tuple[str, ...],
    fit: str,
    measured: bool,
    variants: bool,
    top: int,
    out: Optional[Path],
    iterations: int,
    plot: Optional[Path],
    form: str,
) -> int:
    """Find the layouts with the fewest seconds per iteration among all that fit.

    Goes through every (nodes, ranks per node, DP, TP, PP, chunks, micro-batch, full recompute, ZeRO, sequence parallel)
    that the run's sizes and its growing batch, if it has one, allow. Time and mem_rows are the cost model's, fitted to
    rows of other trainers: mem_rows is memory of the fullest node (on GPUs of the fullest rank). mem_ours is that of
    this trainer (see plan memory). TFLOPs are of a node, by the notes' formula. What no measured row is
    like is listed as extrapolated: it is counted by rules, and may be further off than the interval says.

    Constraints know nodes, ranks, ranks_per_node, dp, tp, pp, chunks, micro_batch, micro_batches, global_batch,
    recompute, zero, sequence_parallel, and NODES, DP, TP, PP, MBS, GBS for short.

    Exit codes: 0 found, 1 no layout fits, 2 usage or config error.
    """
    from fugaku_gpt.machine.constants import load_machine
    from fugaku_gpt.planner.search.best import best_of
    from fugaku_gpt.planner.search.plot import draw_search
    from fugaku_gpt.planner.search.topology import like_measured, search
    from fugaku_gpt.planner.search.write import write_best
    from fugaku_gpt.plotting import check_plot

    started = time.monotonic()
    if (nodes is None) == (max_nodes is None):
        raise UsageError("give one of --nodes or --max-nodes")
    if plot is not None:
        check_plot(plot)
    span = (nodes, nodes) if nodes is not None else (1, max_nodes or 1)
    machine, expressions = load_machine(name), parsed(constraints)
    if machine.probed is not None:
        raise UsageError(f"--machine {name}: layouts are searched with models of measured rows; see plan time for this")
    notes: List[str] = []
    base = _base(run_file, preset, settings, machine, notes)
    wanted = _wanted(
        base,
        machine,
        hardware,
        build,
        span,
        ranks_per_node,
        batches_of(batches, base.training.global_batch, expressions),
    )
    rules = [*rules_of(expressions), *(like_measured(machine.time) if measured else ())]
    found = search(wanted, rules, fit == "ours", _told(started))
    said = f"{len(found.seconds)} layouts{' meet the constraints' if rules else ''}, {found.fits.sum()} fit by mem_rows"
    notes.append(f"{said}; {time.monotonic() - started:.1f} s")
    if not len(found.order):
        what = "fits" if len(found.seconds) else "is valid"
        click.echo(
            "\n".join([*notes, f"no layout {what}: other nodes or global batch, or fewer constraints"]), err=True
        )
        return EXIT_RUN_FAILED
    best, dropped = best_of(wanted, found, top, variants, _our_memory(wanted) if fit != "rows" else None)
    if dropped:
        notes.append(f"{dropped} faster layouts do not fit this trainer (mem_ours): left out")
    if not best:
        raise UsageError(f"none of the {dropped} fastest layouts fits this trainer; see plan memory; add a constraint")
    lines = [_line(number, one, form) for number, one in enumerate(best, 1)]
    columns: Tuple[str, ...] = (*_COLUMNS, *_ONLY_JSON) if form == "json" else _COLUMNS
    if form == "table":
        columns, lines = (
            tuple(_SHORT.get(key, key) for key in columns),
            [{_SHORT.get(key, key): value for key, value in line.items()} for line in lines],
        )
    click.echo(render_rows(columns, lines, form), nl=False)
    told = _explained(best) + notes
    if out is not None:
        written = write_best(best, out, f"topology-{preset or 'run'}", iterations)
        maps = sum(file.suffix == ".rankmap" for file in written)
        told.append(f"written: {len(best)} run files, {maps} rank maps and {written[-1]}")
    if plot is not None:
        draw_search(found, wanted, f"{base.model.name or 'run'} on {span[1]} nodes of {wanted.machine.name}", plot)
        told.append(f"written: {plot}")
    for text in told:  # the rows alone go to a file or a program
        click.echo(text, err=form != "table")
    return EXIT_OK


def _base(
    run_file: Optional[Path], preset: Optional[str], settings: Sequence[str], machine: "Machine", notes: List[str]
) -> "RunConfig":
    """The run, with clock and pipes as the tables' where it leaves them to the machine: a job would get others."""
    from fugaku_gpt.config import load_run_config

    config = load_run_config(run_file, preset, list(settings), check=False)
    node = config.node
    if machine.name == "a64fx" and node.freq_mhz is None and node.eco_state is None:
        notes.append("node.freq_mhz is not set: planned and written at 2000 MHz with both pipes, as most rows ran")
        config = replace(config, node=replace(node, freq_mhz=2000, eco_state=0))
    return config


def _wanted(
    base: "RunConfig",
    machine: "Machine",
    hardware: Optional[str],
    build: str,
    span: Tuple[int, int],
    ranks_per_node: Sequence[int],
    batches: Tuple[int, ...],
) -> "Wanted":
    from fugaku_gpt.machine.fugaku import CORES
    from fugaku_gpt.planner.search.topology import Wanted

    hardware = hardware or next(iter(machine.hardware))
    if not machine.covers(hardware):
        raise UsageError(f"--hardware {hardware}: machine {machine.name} has {', '.join(machine.hardware)}")
    devices = int(machine.facts["devices_per_node"])
    usual, most = ((devices,), devices) if devices > 1 else (_RANKS_PER_NODE, CORES)
    if ranks_per_node and max(ranks_per_node) > most:
        what = "devices" if devices > 1 else "cores"
        raise UsageError(f"--ranks-per-node {max(ranks_per_node)}: a node of {machine.name} has {most} {what}")
    return Wanted(base, machine, hardware, build, span, tuple(ranks_per_node) or usual, batches)


def _our_memory(wanted: "Wanted") -> "Optional[Callable[[RunConfig], Tuple[int, bool]]]":
    """What this trainer needs on the fullest node of a run [bytes], and whether that fits; it has no GPU code."""
    from fugaku_gpt.planner.trainer.node_limits import place_of

    if wanted.machine.memory_of != "node":
        return None
    place = place_of(wanted.machine, wanted.hardware)

    def judge(config: "RunConfig") -> Tuple[int, bool]:
        needed, limit = place.memory(config).bytes_of_node, place.limit(config)
        return needed, limit is None or needed <= limit[0]

    return judge


def _told(started: float) -> Callable[[int, int], None]:
    """Says on standard error how far the search is, once it takes long."""
    due = started + _TOLD_AFTER

    def told(done: int, of: int) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + _TOLD_AFTER
            click.echo(f"{done} of {of} layouts costed", err=True)

    return told


def _line(number: int, best: "Best", form: str) -> Dict[str, Any]:
    from fugaku_gpt.machine.constants import UNIT_BYTES

    found, row = best.prediction, best.prediction.row
    unit = UNIT_BYTES[found.memory_unit]
    line: Dict[str, Any] = {
        "rank": number,
        **{key: getattr(row, key) for key in _ROW},
        "sec_per_it": short(found.seconds.value),
        "low": short(found.seconds.low),
        "high": short(found.seconds.high),
        "tflops": round(best.tflops, 2),
        "mem_rows": round(found.peak, 1),
        "mem_ours": None if best.ours is None else round(best.ours / unit, 1),
        "mem_unit": found.memory_unit,
    }
    if form == "json":
        line["torus"] = (
            None
            if best.torus is None or best.ranks is None
            else {
                "shape": best.torus.shape,
                "allocated": best.torus.allocated,
                "tp_inside_nodes": best.ranks.inside,
                "stage_hops": best.ranks.stage_hops,
            }
        )
        line["extrapolated"] = list(found.extrapolated)
        line["parts"] = {name: short(guess.value) for name, guess in found.parts.items()}
        line["waste"] = list(best.waste)
        return line
    if form == "table":  # in a terminal the names have to do
        line.update({key: "yes" if line[key] else "-" for key in ("recompute", "sequence_parallel")})
        names = dict.fromkeys(text.partition(" ")[0].rstrip(":") for text in found.extrapolated)
        line["extrapolated"] = ", ".join(names) or None
    else:
        line["extrapolated"] = "; ".join(found.extrapolated) or None
    return line


def _explained(best: "Sequence[Best]") -> List[str]:
    from fugaku_gpt.planner.search.best import compared, why_first

    said = []
    if len(best) > 1:
        first, second = best[0].prediction, best[1].prediction
        parts = [
            {key: short(value) if isinstance(value, float) else value for key, value in line.items()}
            for line in compared(first, second)
        ]
        said += ["", render_rows(("part", "first", "second", "difference"), parts, "table"), why_first(first, second)]
    for number, one in enumerate(best[:2], 1):
        said += [f"waste in {number}: {text}" for text in one.waste]
    return said
