"""What of a layout wastes the hardware: sizes that do not fill vectors, tiles and threads, nodes that are rounded up,
and stages that wait."""

from __future__ import annotations

import math
from typing import List, Optional

from fugaku_gpt.config.schema import RunConfig
from fugaku_gpt.layout.schedule_times import ideal_bubble
from fugaku_gpt.machine.constants import Machine
from fugaku_gpt.machine.fugaku import CORES, SHELF, TOFU_UNIT, TORUS_ABOVE, VECTOR_BYTES
from fugaku_gpt.planner.search.rank_map import RankMap, Torus
from fugaku_gpt.planner.tables.rows import ConfigRow
from fugaku_gpt.planner.tables.work import TILES, work_of

_TENSOR_CORE = 8  # elements of 16 bits; sizes that are no multiple run without tensor cores, or padded
_LITTLE = 0.02  # share below which nothing is said


def waste_of(
    config: RunConfig, machine: Machine, row: ConfigRow, torus: Optional[Torus] = None, ranks: Optional[RankMap] = None
) -> List[str]:
    """A line for each waste of more than 2 %, with its size; empty where there is none.

    Args:
        torus: that the job would ask for, and ``ranks`` where its ranks go; None off Fugaku.
    """
    on_cpu = not machine.facts["tile_units"]
    found = _of_vectors(config, machine) if on_cpu else _of_tiles(config, machine, row)
    found += _of_heads(config, machine, on_cpu)
    padded, true = config.padded_vocab, config.model.vocab_size
    if padded / true - 1 > _LITTLE:
        found.append(f"vocabulary {true} is padded to {padded}: {padded / true - 1:.1%} more logits")
    layout = config.layout
    waiting = ideal_bubble(layout.schedule, layout.pp, config.micro_batches, layout.chunks)
    if waiting > _LITTLE:
        found.append(
            f"bubble: {layout.pp} stages, {layout.chunks} chunks, {config.micro_batches} micro-batches: "
            f"{waiting:.0%} on top of the work"
        )
    return found + (_of_torus(config, torus, ranks) if torus is not None else [])


def _of_vectors(config: RunConfig, machine: Machine) -> List[str]:
    model, tp = config.model, config.layout.tp
    lanes = VECTOR_BYTES // int(machine.facts["item_bytes"])
    found = []
    for name, width in (
        ("hidden", model.hidden),
        ("hidden/heads", model.head_size),
        ("hidden/TP", model.hidden // tp),
        ("4*hidden/TP", model.ffn_size // tp),
        ("vocab/TP", config.padded_vocab // tp),
    ):
        wasted = math.ceil(width / lanes) * lanes / width - 1
        if wasted > _LITTLE:
            found.append(f"{name} {width} is no multiple of {lanes} (512-bit vectors): {wasted:.1%} of them empty")
    return found


def _of_tiles(config: RunConfig, machine: Machine, row: ConfigRow) -> List[str]:
    model, tp = config.model, config.layout.tp
    found = []
    for name, width in (
        ("hidden/heads", model.head_size),
        ("hidden/TP", model.hidden // tp),
        ("vocab/TP", config.padded_vocab // tp),
    ):
        if width % _TENSOR_CORE:
            found.append(f"{name} {width} is no multiple of {_TENSOR_CORE}: its products miss the tensor cores")
    plain = work_of([row], {**machine.facts, "tile_units": 0.0})
    tiled = work_of([row], machine.facts)
    units = int(machine.facts["tile_units"])
    for name, stretched, useful in (
        ("layers", tiled.layer_flops, plain.layer_flops),
        ("logits", tiled.head_flops, plain.head_flops),
    ):
        wasted = float(stretched[0] / useful[0]) - 1
        if wasted > _LITTLE:
            tile = f"{TILES[0][0]}x{TILES[0][1]}"
            found.append(f"tiles of {tile} in waves of {units}: {wasted:.1%} of the {name}' products is no work")
    return found


def _of_heads(config: RunConfig, machine: Machine, on_cpu: bool) -> List[str]:
    """Products of attention are one for each head and sequence: as many as there are threads or units, or in waves."""
    products = config.model.heads // config.layout.tp * config.training.micro_batch
    what = f"(heads/TP)*MBS = {products}"
    if on_cpu:
        units = config.node.threads_per_rank or CORES // config.ranks_per_node
        jobs, of = products, f"{units} threads of a rank"
    else:
        units = int(machine.facts["tile_units"])
        height, width = TILES[0]
        jobs = products * math.ceil(config.model.seq_len / height) * math.ceil(config.model.seq_len / width)
        what, of = f"{what}, {jobs} tiles of scores", f"{units} units"
    idle = 1 - jobs / (math.ceil(jobs / units) * units)
    if idle <= _LITTLE:
        return []
    return [f"{what} on {of}: {idle:.0%} of them idle in products of attention that are handed out whole"]


def _of_torus(config: RunConfig, torus: Torus, ranks: Optional[RankMap]) -> List[str]:
    nodes, found = config.job.nodes, []
    if torus.allocated > nodes:
        unit = SHELF if nodes > TORUS_ABOVE else TOFU_UNIT
        box = "x".join(str(side) for side in unit)
        found.append(
            f"{nodes} nodes are no whole units of {math.prod(unit)} ({box}): {torus.shape} takes at least "
            f"{torus.allocated}, {torus.allocated / nodes - 1:.1%} more to pay"
        )
    if max(torus.sides) > 4 * min(torus.sides) and torus.allocation == "torus":
        far = sum(side // 2 for side in torus.sides)
        found.append(f"torus {torus.shape} is long and thin: nodes are up to {far} hops apart")
    if ranks is not None and not ranks.inside:
        found.append(f"tensor-parallel groups span nodes up to {ranks.group_hops} apart: TP {config.layout.tp} on "
                     f"{config.ranks_per_node} ranks a node")  # fmt: skip
    if ranks is not None and ranks.stage_hops > 1:
        found.append(f"neighbouring stages are up to {ranks.stage_hops} nodes apart")
    return found
