"""``fugaku-gpt plan memory``: predict the memory of a run on every stage, and whether it fits."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Sequence

import click

from fugaku_gpt.cli.options import format_option, run_source, torch_option
from fugaku_gpt.cli.output import echo, render_rows
from fugaku_gpt.config.source import RunSource
from fugaku_gpt.errors import EXIT_FINDINGS, EXIT_OK, UsageError

if TYPE_CHECKING:
    from fugaku_gpt.config.schema import RunConfig
    from fugaku_gpt.layout.stages import Chunk
    from fugaku_gpt.planner.trainer.generation_memory import GenerationSize
    from fugaku_gpt.planner.trainer.memory_check import NodeLimits


@click.command()
@run_source()
@click.option(
    "--machine",
    metavar="NAME",
    help="Machine, its file, or local for this one; default: that of job.scheduler, a64fx for pjm.",
)
@click.option(
    "--node-memory",
    metavar="SIZE",
    help="Memory that the ranks of a node may use, such as 23Gi, in place of the machine's.",
)
@click.option(
    "--generate",
    "generation",
    metavar="TEXTSxTOKENS",
    help="Report the memory of `generate --dtype` training.dtype instead, for texts that grow together: 8x1024.",
)
@torch_option("PyTorch build; default: that of the machine.")
@format_option()
def memory(
    source: RunSource,
    machine: Optional[str],
    node_memory: Optional[str],
    generation: Optional[str],
    build: str,
    form: str,
) -> int:
    """Report the memory of a run by category, on a rank of each stage and on the fullest node, and whether it fits.

    Figures are MiB at the peak of a step. If the run does not fit, the change that slows it down least is suggested, as
    options for the command line. The limit is the smallest of the machine's, node.memory_limit and job.node_memory,
    minus what the memory guard keeps free.

    Exit codes: 0 the run fits, or no limit is known, 2 usage or config error, 3 it does not fit.
    """
    from fugaku_gpt.cli.corpus_settings import load_with_vocabulary
    from fugaku_gpt.layout.memory import recompute_of_layers
    from fugaku_gpt.layout.stages import chunks_by_stage, chunks_of
    from fugaku_gpt.planner.trainer.memory_check import set_options
    from fugaku_gpt.planner.trainer.memory_plan import chosen_node_limits, plan_memory
    from fugaku_gpt.planner.trainer.run_memory import CATEGORIES, MIB

    config = load_with_vocabulary(source, check=True)
    node = chosen_node_limits(config, machine, node_memory, build)
    if generation is not None:
        return _report_generation(config, node, generation, form)
    plan = plan_memory(config, node)
    usage = plan.memory
    chunks = chunks_of(config)
    kinds = recompute_of_layers(config, chunks)
    rows: List[Dict[str, Any]] = []
    for stage, (sizes, stage_chunks) in enumerate(zip(usage.stages, chunks_by_stage(chunks, config.layout.pp))):
        labels = {"part": f"stage {stage}", "layers": _layers(stage_chunks), "recompute": _kinds(stage_chunks, kinds)}
        rows.append({**labels, **_mib(sizes)})
    rows.append({"part": f"node of {config.ranks_per_node}", **_mib(usage.node)})
    echo(render_rows(("part", "layers", "recompute", *CATEGORIES, "total"), rows, form), nl=False)

    needed = plan.needed_bytes
    lines = [
        f"peak stage  {usage.peak_stage}: {_mib_rounded_up(usage.bytes_of_rank)} MiB a rank",
        f"base        {_base(node)}",
    ]
    if plan.limit is None:
        lines.append("node        no limit is known: give --node-memory")
    else:
        size, limited_by = plan.limit
        lines.append(f"node        {_mib_rounded_up(needed)} of {_mib_rounded_up(size)} MiB ({limited_by})")
        if plan.does_fit:
            lines.append(f"fits: {(size - needed) // MIB} MiB are left")
        else:
            lines.append(f"does not fit: {-(-(needed - size) // MIB)} MiB too much; {_advice(plan.change)}")
    for line in lines:  # with formats for programs, standard output has the rows alone
        echo(line, err=form != "table")
    for argument in set_options(plan.change):
        echo(argument, err=form != "table")
    return EXIT_OK if plan.does_fit else EXIT_FINDINGS


def _report_generation(config: "RunConfig", node: "NodeLimits", text: str, form: str) -> int:
    """Print the memory of `generate` on a rank of each stage, and whether the ranks of a node fit."""
    from fugaku_gpt.planner.trainer.generation_memory import (
        GENERATION_CATEGORIES,
        bytes_of_node,
        generation_memory,
    )

    stages = generation_memory(config, _generation_size(text, config.model.seq_len), node.framework)
    rows = [{"part": f"stage {number}", **_mib(sizes)} for number, sizes in enumerate(stages)]
    echo(render_rows(("part", *GENERATION_CATEGORIES, "total"), rows, form), nl=False)
    largest = max(range(len(stages)), key=lambda number: sum(stages[number].values()))
    needed = bytes_of_node(stages, [largest] * config.ranks_per_node, node.framework)
    limit = node.smallest_limit(config)
    fits = limit is None or needed <= limit[0]
    verdict = " MiB; no limit is known: give --node-memory"
    if limit is not None:
        verdict = f" of {_mib_rounded_up(limit[0])} MiB ({limit[1]}): {'fits' if fits else 'does not fit'}"
    echo(f"node        {_mib_rounded_up(needed)}{verdict}", err=form != "table")
    return EXIT_OK if fits else EXIT_FINDINGS


def _generation_size(text: str, seq_len: int) -> "GenerationSize":
    from fugaku_gpt.planner.trainer.generation_memory import GenerationSize

    matched = re.fullmatch(r"([1-9]\d{0,6})x([1-9]\d{0,6})", text)
    if matched is None:
        raise UsageError(f"--generate {text}: valid: TEXTSxTOKENS, such as 8x{seq_len}")
    if int(matched[2]) > seq_len:
        raise UsageError(f"--generate {text}: valid: at most {seq_len} tokens of a text, model.seq_len")
    return GenerationSize(int(matched[1]), int(matched[2]))


def _mib(sizes: Mapping[str, int]) -> Dict[str, float]:
    """Sizes in MiB, and their sum, each rounded by itself."""
    return {name: round(size / 2**20, 1) for name, size in [*sizes.items(), ("total", sum(sizes.values()))]}


def _mib_rounded_up(size: int) -> int:
    return -(-size // 2**20)


def _layers(chunks: "Sequence[Chunk]") -> str:
    return "+".join(str(len(chunk.layers)) for chunk in chunks)


def _kinds(chunks: "Sequence[Chunk]", kinds: Sequence[str]) -> str:
    """``none``, or the number of layers that are recomputed in each way: ``2 full, 1 selective``."""
    layer_kinds = [kinds[layer] for chunk in chunks for layer in chunk.layers]
    counted: List[str] = [f"{layer_kinds.count(kind)} {kind}" for kind in ("full", "selective") if kind in layer_kinds]
    return ", ".join(counted) or "none"


def _base(node: "NodeLimits") -> str:
    size = _mib_rounded_up(node.framework.private_bytes + node.framework.shared_bytes)
    return f"{size} MiB a rank, by {node.framework.source}"


def _advice(change: Any) -> str:
    return "the smallest change that fits:" if change else "no change of layout, batch and recompute fits"
