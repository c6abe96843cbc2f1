"""Finds where a layout wastes the hardware: sizes that do not fill vectors, tiles and threads, nodes that are rounded
up, and stages that wait."""

from __future__ import annotations

import math
from typing import List, Optional

from fugaku_gpt.config.schema import RunConfig
from fugaku_gpt.layout.schedule_times import ideal_bubble
from fugaku_gpt.machine.constants import Machine
from fugaku_gpt.machine.fugaku import CORES, VECTOR_BYTES, allocation_unit
from fugaku_gpt.planner.search.rank_map import NodeBox, RankMap
from fugaku_gpt.planner.tables.rows import ConfigRow
from fugaku_gpt.planner.tables.work import GPU_TILES, count_work

_TENSOR_CORE = 8  # elements of 16 bits; sizes that are no multiple run without tensor cores, or padded
_NEGLIGIBLE_SHARE = 0.02  # share below which nothing is reported


def find_waste(
    config: RunConfig,
    machine: Machine,
    row: ConfigRow,
    node_box: Optional[NodeBox] = None,
    rank_map: Optional[RankMap] = None,
) -> List[str]:
    """One line for each waste of more than 2 %, with its size; empty if there is none.

    Args:
        node_box, rank_map: the box that the job would ask for, and the map of its ranks; None on other machines.
    """
    on_cpu = not machine.facts["tile_units"]
    lines = _vector_waste(config, machine) if on_cpu else _tile_waste(config, machine, row)
    lines += _attention_waste(config, machine, on_cpu)
    padded, true = config.padded_vocab, config.model.vocab_size
    if padded / true - 1 > _NEGLIGIBLE_SHARE:
        lines.append(f"vocabulary {true} is padded to {padded}: {padded / true - 1:.1%} more logits")
    layout = config.layout
    waiting = ideal_bubble(layout.schedule, layout.pp, config.micro_batches, layout.chunks)
    if waiting > _NEGLIGIBLE_SHARE:
        lines.append(
            f"bubble: {layout.pp} stages, {layout.chunks} chunks, {config.micro_batches} micro-batches: "
            f"{waiting:.0%} on top of the work"
        )
    return lines + (_torus_waste(config, node_box, rank_map) if node_box is not None else [])


def _vector_waste(config: RunConfig, machine: Machine) -> List[str]:
    model, tp = config.model, config.layout.tp
    lanes = VECTOR_BYTES // int(machine.facts["item_bytes"])
    lines = []
    for name, width in (
        ("hidden", model.hidden),
        ("hidden/heads", model.head_size),
        ("hidden/TP", model.hidden // tp),
        ("4*hidden/TP", model.ffn_size // tp),
        ("vocab/TP", config.padded_vocab // tp),
    ):
        wasted = math.ceil(width / lanes) * lanes / width - 1
        if wasted > _NEGLIGIBLE_SHARE:
            lines.append(f"{name} {width} is no multiple of {lanes} (512-bit vectors): {wasted:.1%} of them empty")
    return lines


def _tile_waste(config: RunConfig, machine: Machine, row: ConfigRow) -> List[str]:
    model, tp = config.model, config.layout.tp
    lines = []
    for name, width in (
        ("hidden/heads", model.head_size),
        ("hidden/TP", model.hidden // tp),
        ("vocab/TP", config.padded_vocab // tp),
    ):
        if width % _TENSOR_CORE:
            lines.append(f"{name} {width} is no multiple of {_TENSOR_CORE}: its products miss the tensor cores")
    plain = count_work([row], {**machine.facts, "tile_units": 0.0})
    tiled = count_work([row], machine.facts)
    units = int(machine.facts["tile_units"])
    for name, stretched, useful in (
        ("layers", tiled.layer_flops, plain.layer_flops),
        ("logits", tiled.head_flops, plain.head_flops),
    ):
        wasted = float(stretched[0] / useful[0]) - 1
        if wasted > _NEGLIGIBLE_SHARE:
            tile = f"{GPU_TILES[0][0]}x{GPU_TILES[0][1]}"
            lines.append(f"tiles of {tile} in waves of {units}: {wasted:.1%} of the {name}' products is no work")
    return lines


def _attention_waste(config: RunConfig, machine: Machine, on_cpu: bool) -> List[str]:
    """Waste in attention, which has one product for each head and sequence: they run in waves over threads or units."""
    products = config.model.heads // config.layout.tp * config.training.micro_batch
    products_text = f"(heads/TP)*MBS = {products}"
    if on_cpu:
        units = config.node.threads_per_rank or CORES // config.ranks_per_node
        jobs, units_text = products, f"{units} threads of a rank"
    else:
        units = int(machine.facts["tile_units"])
        height, width = GPU_TILES[0]
        jobs = products * math.ceil(config.model.seq_len / height) * math.ceil(config.model.seq_len / width)
        products_text, units_text = f"{products_text}, {jobs} tiles of scores", f"{units} units"
    idle = 1 - jobs / (math.ceil(jobs / units) * units)
    if idle <= _NEGLIGIBLE_SHARE:
        return []
    return [f"{products_text} on {units_text}: {idle:.0%} of them idle in products of attention, which are not divided"]


def _torus_waste(config: RunConfig, node_box: NodeBox, rank_map: Optional[RankMap]) -> List[str]:
    nodes, lines = config.job.nodes, []
    if node_box.allocated > nodes:
        unit = allocation_unit(nodes)
        box = "x".join(str(side) for side in unit)
        lines.append(
            f"{nodes} nodes are no whole units of {math.prod(unit)} ({box}): {node_box.shape} takes at least "
            f"{node_box.allocated}, {node_box.allocated / nodes - 1:.1%} more to pay"
        )
    if max(node_box.sides) > 4 * min(node_box.sides) and node_box.allocation == "torus":
        max_hops = sum(side // 2 for side in node_box.sides)
        lines.append(f"torus {node_box.shape} is long and thin: nodes are up to {max_hops} hops apart")
    if rank_map is not None and not rank_map.groups_within_nodes:
        lines.append(f"tensor-parallel groups span nodes up to {rank_map.group_hops} apart: TP {config.layout.tp} on "
                     f"{config.ranks_per_node} ranks a node")  # fmt: skip
    if rank_map is not None and rank_map.stage_hops > 1:
        lines.append(f"neighbouring stages are up to {rank_map.stage_hops} nodes apart")
    return lines
