"""``fugaku-gpt plan topology``: search the fastest layouts of a run on a number of nodes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Sequence, Tuple

import click

from fugaku_gpt.cli.numbers import round_significant
from fugaku_gpt.cli.options import PATH, MachineChoice, format_option, machine_choice, options_as, run_source
from fugaku_gpt.cli.output import echo, render_rows
from fugaku_gpt.config.source import RunSource
from fugaku_gpt.errors import EXIT_OK, EXIT_RUN_FAILED

if TYPE_CHECKING:
    from fugaku_gpt.planner.search.best import RankedLayout
    from fugaku_gpt.planner.search.plan import TopologyRequest

_COLUMNS = (
    "rank", "nodes", "ranks_per_node", "dp", "tp", "pp", "chunks", "micro_batch", "global_batch", "recompute", "zero",
    "sequence_parallel", "sec_per_it", "low", "high", "tflops", "mem_rows", "mem_ours", "mem_unit", "extrapolated",
)  # fmt: skip
_ROW = _COLUMNS[1:12]
_ONLY_JSON = ("parts", "waste", "torus")
_SHORT = {
    "ranks_per_node": "ppn",
    "micro_batch": "mbs",
    "global_batch": "gbs",
    "sequence_parallel": "sp",
}  # table headings
_PROGRESS_SECONDS = 2.0
_positive = click.IntRange(min=1, max=10**6)


@dataclass(frozen=True)
class TopologyOptions:
    """The options of the command, without those of the run and the machine."""

    nodes: Optional[int]
    max_nodes: Optional[int]
    ranks_per_node: Tuple[int, ...]
    batches: Tuple[str, ...]
    constraints: Tuple[str, ...]
    fit: str
    measured: bool
    variants: bool
    top: int
    out: Optional[Path]
    iterations: int
    plot: Optional[Path]
    form: str

    def request(self) -> "TopologyRequest":
        """The request that the options make."""
        from fugaku_gpt.planner.search.plan import TopologyRequest

        return TopologyRequest(
            self.nodes,
            self.max_nodes,
            self.ranks_per_node,
            self.batches,
            self.constraints,
            self.fit,
            self.measured,
            self.variants,
            self.top,
        )


@click.command()
@run_source(preset_flags=("--model", "--preset"))
@machine_choice
@click.option("--nodes", type=_positive, help="Number of nodes; or give --max-nodes.")
@click.option("--max-nodes", type=_positive, help="Largest number of nodes.")
@click.option(
    "--ranks-per-node",
    type=_positive,
    multiple=True,
    help="Number of ranks on a node; repeatable, to choose from several; default: 1, 2 and 4, on GPUs one for each.",
)
@click.option(
    "--global-batch",
    "batches",
    multiple=True,
    metavar="N|A-B",
    help="Global batch, or a range of them to choose from, ranked by seconds per sequence; default: the run's.",
)
@click.option(
    "--constraint",
    "constraints",
    multiple=True,
    metavar="EXPR",
    help="Condition that layouts must meet, such as 'GBS % 32 == 0 and TP <= 8'; repeatable.",
)
@click.option(
    "--fit",
    type=click.Choice(("both", "rows", "ours")),
    default="both",
    show_default=True,
    help="Estimate of memory that must fit: mem_rows of the measured trainers, mem_ours of this one, or both.",
)
@click.option("--measured", is_flag=True, help="Keep only layouts whose inputs all lie within the measured rows.")
@click.option(
    "--variants", is_flag=True, help="Show all layouts, not only the fastest for each nodes, ranks, DP, TP and PP."
)
@click.option(
    "--top", type=_positive, default=10, show_default=True, help="Number of layouts that are shown and written."
)
@click.option("--out", type=PATH, metavar="DIR", help="Write run files, rank maps and a sweep into this folder.")
@click.option(
    "--iterations",
    type=_positive,
    default=10,
    show_default=True,
    help="Number of iterations of each run of that sweep.",
)
@click.option("--plot", type=PATH, metavar="FILE.svg|png", help="Draw seconds against memory into this file.")
@format_option()
@options_as(TopologyOptions)
def topology(source: RunSource, machine_choice: MachineChoice, options: TopologyOptions) -> int:
    """Find the layouts with the fewest seconds per iteration among all that fit.

    The search covers every combination of nodes, ranks per node, DP, TP, PP, chunks, micro-batch, full recompute, ZeRO
    and sequence parallelism that the sizes of the run, and its growing batch if it has one, allow. Time and mem_rows
    come from the cost model, fitted to rows of other trainers; mem_rows is the memory of the fullest node, on GPUs of
    the fullest rank. mem_ours is the memory of this trainer (see `plan memory`). TFLOPs are per node, by the formula of
    the notes. Inputs that are unlike every measured row are listed as extrapolated: they are estimated by rules, and
    may be further off than the interval says.

    Constraints may use nodes, ranks, ranks_per_node, dp, tp, pp, chunks, micro_batch, micro_batches, global_batch,
    recompute, zero, sequence_parallel, and the abbreviations NODES, DP, TP, PP, MBS and GBS.

    Exit codes: 0 layouts were found, 1 no layout fits, 2 usage or config error.
    """
    from fugaku_gpt.cli.corpus_settings import load_with_vocabulary
    from fugaku_gpt.machine.constants import load_machine
    from fugaku_gpt.planner.search.constraints import parsed
    from fugaku_gpt.planner.search.plan import plan_topology, require_searchable, with_searched_clock
    from fugaku_gpt.planner.search.plot import draw_search
    from fugaku_gpt.planner.search.write import MISSING_CORPUS, write_layouts
    from fugaku_gpt.plotting import check_plot

    started = time.monotonic()
    request = options.request()
    request.check()
    if options.plot is not None:
        check_plot(options.plot)
    machine = load_machine(machine_choice.name)
    parsed(options.constraints)  # before the run is loaded, which prints notes
    require_searchable(machine_choice.name, machine)
    base, notes = with_searched_clock(load_with_vocabulary(source), machine)
    hardware, build = machine_choice.hardware, machine_choice.build
    plan = plan_topology(base, machine, request, hardware, build, _progress_printer(started))
    best, layouts, space = plan.best, plan.layouts, plan.space
    notes.append(f"{plan.summary}; {time.monotonic() - started:.1f} s")
    if plan.failure:
        echo("\n".join([*notes, plan.failure]), err=True)
        return EXIT_RUN_FAILED
    if plan.dropped:
        notes.append(f"{plan.dropped} faster layouts do not fit this trainer (mem_ours): left out")
    form = options.form
    lines = [_layout_row(number, candidate, form) for number, candidate in enumerate(best, 1)]
    columns: Tuple[str, ...] = (*_COLUMNS, *_ONLY_JSON) if form == "json" else _COLUMNS
    if form == "table":
        columns, lines = (
            tuple(_SHORT.get(key, key) for key in columns),
            [{_SHORT.get(key, key): value for key, value in line.items()} for line in lines],
        )
    echo(render_rows(columns, lines, form), nl=False)
    messages = _explanation(best) + notes
    if options.out is not None:
        written = write_layouts(best, options.out, f"topology-{source.preset or 'run'}", options.iterations)
        maps = sum(file.suffix == ".rankmap" for file in written)
        messages.append(f"written: {len(best)} run files, {maps} rank maps and {written[-1]}")
        messages += [MISSING_CORPUS] if not base.data.paths else []
    if options.plot is not None:
        title = f"{base.model.name or 'run'} on {space.nodes[1]} nodes of {machine.name}"
        draw_search(layouts, space, title, options.plot)
        messages.append(f"written: {options.plot}")
    for text in messages:  # with formats for programs, standard output has the rows alone
        echo(text, err=form != "table")
    return EXIT_OK


def _progress_printer(started: float) -> Callable[[int, int], None]:
    """Return a callback that prints on standard error how far the search is, once it takes long."""
    due = started + _PROGRESS_SECONDS

    def print_progress(costed: int, total: int) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + _PROGRESS_SECONDS
            echo(f"{costed} of {total} layouts costed", err=True)

    return print_progress


def _layout_row(number: int, best: "RankedLayout", form: str) -> Dict[str, Any]:
    from fugaku_gpt.machine.constants import UNIT_BYTES

    prediction, row = best.prediction, best.prediction.row
    unit = UNIT_BYTES[prediction.memory_unit]
    line: Dict[str, Any] = {
        "rank": number,
        **{key: getattr(row, key) for key in _ROW},
        "sec_per_it": round_significant(prediction.seconds.value),
        "low": round_significant(prediction.seconds.low),
        "high": round_significant(prediction.seconds.high),
        "tflops": round(best.tflops, 2),
        "mem_rows": round(prediction.peak, 1),
        "mem_ours": None if best.trainer_bytes is None else round(best.trainer_bytes / unit, 1),
        "mem_unit": prediction.memory_unit,
    }
    if form == "json":
        line["torus"] = (
            None
            if best.node_box is None or best.rank_map is None
            else {
                "shape": best.node_box.shape,
                "allocated": best.node_box.allocated,
                "tp_inside_nodes": best.rank_map.groups_within_nodes,
                "stage_hops": best.rank_map.stage_hops,
            }
        )
        line["extrapolated"] = list(prediction.extrapolated)
        line["parts"] = {name: round_significant(guess.value) for name, guess in prediction.components.items()}
        line["waste"] = list(best.waste)
        return line
    if form == "table":  # a terminal has room for the names only
        line.update({key: "yes" if line[key] else "-" for key in ("recompute", "sequence_parallel")})
        names = dict.fromkeys(text.partition(" ")[0].rstrip(":") for text in prediction.extrapolated)
        line["extrapolated"] = ", ".join(names) or None
    else:
        line["extrapolated"] = "; ".join(prediction.extrapolated) or None
    return line


def _explanation(best: "Sequence[RankedLayout]") -> List[str]:
    from fugaku_gpt.planner.search.best import compare_components, explain_ranking

    lines = []
    if len(best) > 1:
        first, second = best[0].prediction, best[1].prediction
        rows = [
            {key: round_significant(value) if isinstance(value, float) else value for key, value in line.items()}
            for line in compare_components(first, second)
        ]
        lines += [
            "",
            render_rows(("part", "first", "second", "difference"), rows, "table"),
            explain_ranking(first, second),
        ]
    for number, candidate in enumerate(best[:2], 1):
        lines += [f"waste in {number}: {text}" for text in candidate.waste]
    return lines
