"""Every layout that a run can have on a number of nodes, and what the cost model says of each.

A layout is a set of columns' entries at one place: nodes, ranks per node, dp, tp, pp, chunks (virtual stages),
micro-batch, global batch, full recompute, ZeRO, sequence parallelism. They are made and costed as arrays: a large
machine has a million of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from fugaku_gpt.config.checks import problems_of
from fugaku_gpt.config.schema import ModelConfig, RunConfig, TrainingConfig
from fugaku_gpt.errors import UsageError
from fugaku_gpt.machine.constants import Fitted, Machine
from fugaku_gpt.planner.footprint import footprint
from fugaku_gpt.planner.of_run import row_of_run
from fugaku_gpt.planner.rows import Row
from fugaku_gpt.planner.seconds import seconds
from fugaku_gpt.planner.work import work_of_columns

Columns = Dict[str, "np.ndarray"]
COLUMNS = (
    "nodes", "ranks_per_node", "dp", "tp", "pp", "chunks", "micro_batch", "global_batch", "recompute", "zero",
    "sequence_parallel",
)  # fmt: skip
SHAPE = ("nodes", "ranks_per_node", "dp", "tp", "pp", "global_batch")  # layouts that are equal in these are variants
FLAGS = ("recompute", "sequence_parallel")
_BLOCK = 100_000  # layouts costed at once
_MOST = 10_000_000  # layouts: a gigabyte of columns


@dataclass(frozen=True)
class Wanted:
    """What is looked for.

    Args:
        config: the run; its layout, micro-batch, recompute, ranks per node and nodes are what is looked for, all else
            is kept.
        hardware: as in a row's column.
        torch: the PyTorch build, such as 1.10; empty where none is given.
        nodes: (fewest, most).
        ranks_per_node: to choose from.
        batches: global batches to choose from.
    """

    config: RunConfig
    machine: Machine
    hardware: str
    torch: str
    nodes: Tuple[int, int]
    ranks_per_node: Tuple[int, ...]
    batches: Tuple[int, ...]


@dataclass(frozen=True)
class Found:
    """All layouts that meet the constraints, and what the model says of them.

    Args:
        seconds: [N] per iteration; ``memory`` [N] of the fullest stage, in the machine's unit.
        fits: [N] whether that is what the hardware has.
        order: [M] places of those that are ranked, the fastest for a sequence first.
        enumerated: layouts there were before the constraints.
    """

    columns: Columns
    seconds: "np.ndarray"
    memory: "np.ndarray"
    fits: "np.ndarray"
    order: "np.ndarray"
    enumerated: int

    def frontier(self) -> "np.ndarray":
        """Places of the layouts than which none is both faster and smaller, the fastest first."""
        per = (self.seconds / self.columns["global_batch"])[self.order]
        memory = self.memory[self.order]
        ordered = np.lexsort((memory, per))
        memory = memory[ordered]
        least = np.minimum.accumulate(memory)
        first = np.concatenate(([True], memory[1:] < least[:-1])) if len(memory) else np.zeros(0, bool)
        chosen: "np.ndarray" = self.order[ordered[first]]
        return chosen


def candidates(wanted: Wanted) -> Columns:
    """Every layout that the rules between a run's settings allow; stages and chunks hold equally many layers.

    ``recompute`` is none or full: what ``selective`` does is not in the cost model.

    Raises:
        UsageError: they are too many to hold.
    """
    model, training = wanted.config.model, wanted.config.training
    low, high = wanted.nodes
    columns: Columns = {"global_batch": np.array(wanted.batches, dtype=np.int64)}
    columns = _with_divisors(columns, "dp", columns["global_batch"])
    columns = _kept(columns, columns["dp"] <= high * max(wanted.ranks_per_node))
    columns = _crossed(columns, "tp", _tensor_ranks(model))
    columns = _crossed(columns, "pp", divisors_of(model.layers))
    columns = _crossed(columns, "ranks_per_node", wanted.ranks_per_node)
    ranks = columns["dp"] * columns["tp"] * columns["pp"]
    nodes = columns["nodes"] = ranks // columns["ranks_per_node"]
    columns = _kept(columns, (ranks % columns["ranks_per_node"] == 0) & (nodes >= low) & (nodes <= high))
    columns = _with_divisors(columns, "micro_batch", columns["global_batch"] // columns["dp"])
    columns = _kept(columns, _ramps(training, columns["dp"] * columns["micro_batch"]))
    columns = _with_divisors(columns, "chunks", np.where(columns["pp"] > 1, model.layers // columns["pp"], 1))
    columns = _crossed(columns, "recompute", (0, 1))
    columns = _crossed(columns, "zero", (0, 1))
    columns = _kept(columns, (columns["zero"] == 0) | (columns["dp"] > 1))
    columns = _crossed(columns, "sequence_parallel", (0, 1))
    cut = (columns["tp"] > 1) & (model.seq_len % columns["tp"] == 0)
    for length in (training.seq_ramp_start, training.seq_ramp_increment):
        if length is not None:
            cut &= length % columns["tp"] == 0
    columns = _kept(columns, (columns["sequence_parallel"] == 0) | cut)
    return {name: columns[name] for name in COLUMNS}


def search(
    wanted: Wanted,
    meets: "Optional[Callable[[Columns], np.ndarray]]" = None,
    rank_all: bool = False,
    told: Callable[[int, int], None] = lambda done, of: None,
) -> Found:
    """The layouts that meet the constraints, costed.

    Args:
        meets: of columns, which layouts [N] are wanted.
        rank_all: those too that do not fit by the rows' footprint.
        told: called with how many of them are done.
    """
    columns = candidates(wanted)
    enumerated = len(columns["dp"])
    if meets is not None and enumerated:
        columns = _kept(columns, meets(columns))
    count = len(columns["dp"])
    machine = wanted.machine
    capacity = machine.capacity(wanted.hardware)
    taken, memory = np.empty(count), np.empty(count)
    for start in range(0, count, _BLOCK):
        told(start, count)
        block = slice(start, start + _BLOCK)
        work = work_of_columns(_column(wanted, columns, block), (wanted.torch,), machine.facts)
        of_node = machine.memory_of == "node"
        memory[block] = footprint(work, machine.memory.values, machine.facts, machine.memory_unit, of_node)[1]
        work = replace(work, fullness=memory[block] / capacity)
        taken[block] = seconds(work, machine.time.values, machine.facts)
    fits = memory <= capacity
    places = np.arange(count) if rank_all else np.flatnonzero(fits)
    # of equals the plainest: columns are crossed so that what adds machinery comes later
    order = places[np.argsort((taken / columns["global_batch"])[places], kind="stable")]
    return Found(columns, taken, memory, fits, order, enumerated)


def like_measured(columns: Columns, fitted: Fitted) -> "np.ndarray":
    """Which layouts [N] have no input outside of what a model's fitted rows have."""
    good: "np.ndarray" = (columns["chunks"] == 1) & (columns["sequence_parallel"] == 0)
    if "pipeline_distance" in fitted.values:  # tables have stages far apart
        good &= (columns["pp"] == 1) | (columns["dp"] == 1)
    for name in ("nodes", "dp", "tp", "pp", "micro_batch", "global_batch"):
        if name in fitted.seen:
            good &= (columns[name] >= fitted.seen[name][0]) & (columns[name] <= fitted.seen[name][1])
    for name in ("ranks_per_node", "zero", "recompute"):
        if name in fitted.seen:
            good &= np.isin(columns[name], [int(one) for one in fitted.seen[name]])
    return good


def config_of(wanted: Wanted, columns: Columns, place: int) -> RunConfig:
    """The run in one of the layouts.

    Raises:
        UsageError: other settings of the run do not go with it.
    """
    chosen = {name: int(values[place]) for name, values in columns.items()}
    config = wanted.config
    layout = replace(
        config.layout,
        dp=chosen["dp"],
        tp=chosen["tp"],
        pp=chosen["pp"],
        order="tp,pp,dp",
        chunks=chosen["chunks"],
        schedule="interleaved" if chosen["chunks"] > 1 else _plain(config.layout.schedule),
        split=(),
        zero=chosen["zero"],
        sequence_parallel=bool(chosen["sequence_parallel"]),
    )
    training = replace(
        config.training,
        micro_batch=chosen["micro_batch"],
        global_batch=chosen["global_batch"],
        recompute="full" if chosen["recompute"] else "none",
        recompute_layers=None,
        recompute_budget_mib=None,
    )
    node = replace(config.node, ranks_per_node=chosen["ranks_per_node"], threads_per_rank=None)
    job = config.job
    if job.shape and job.nodes != chosen["nodes"]:
        job = replace(job, shape="", strict="", rank_map="", rank_map_file="")
    job = replace(job, nodes=chosen["nodes"])
    config = replace(config, layout=layout, training=training, node=node, job=job)
    problems = problems_of(config, lambda key: "")
    if problems:
        raise UsageError("\n".join(problems))
    return config


def rows_of(wanted: Wanted, configs: Sequence[RunConfig]) -> List[Row]:
    """The layouts as rows of the cost model."""
    return [row_of_run(config, wanted.machine, wanted.hardware, wanted.torch) for config in configs]


def divisors_of(number: int) -> List[int]:
    """All divisors, ascending."""
    low = [one for one in range(1, int(number**0.5) + 1) if number % one == 0]
    return low + [number // one for one in reversed(low) if one * one != number]


def _plain(schedule: str) -> str:
    return "1f1b" if schedule == "interleaved" else schedule


def _tensor_ranks(model: ModelConfig) -> List[int]:
    return [one for one in divisors_of(model.heads) if model.ffn_size % one == 0 and model.padded_vocab(one) % one == 0]


def _ramps(training: TrainingConfig, share: "np.ndarray") -> "np.ndarray":
    """Whether all sizes of a growing batch divide by the micro-batches of all replicas."""
    good = np.ones(len(share), dtype=bool)
    for size in (training.ramp_start, training.ramp_increment):
        if size is not None:
            good &= size % share == 0
    return good


def _crossed(columns: Columns, name: str, values: Sequence[int]) -> Columns:
    """Every entry with every value; the new one changes fastest."""
    count = len(next(iter(columns.values())))
    crossed = _repeated(columns, np.full(count, len(values)))
    crossed[name] = np.tile(np.array(values, dtype=np.int64), count)
    return crossed


def _with_divisors(columns: Columns, name: str, of: "np.ndarray") -> Columns:
    """Every entry with every divisor of its own number of ``of`` [N]."""
    numbers, which = np.unique(of, return_inverse=True)
    divisors = [divisors_of(int(number)) for number in numbers]
    counts = np.array([len(one) for one in divisors], dtype=np.int64)
    first = np.cumsum(counts) - counts  # of each number, in all divisors one after the other
    counts, first = counts[which], first[which]
    crossed = _repeated(columns, counts)
    place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    flat = np.array([one for of_one in divisors for one in of_one], dtype=np.int64)
    crossed[name] = flat[np.repeat(first, counts) + place]
    return crossed


def _repeated(columns: Columns, counts: "np.ndarray") -> Columns:
    if counts.sum() > _MOST:
        raise UsageError(
            f"more than {_MOST} layouts: give fewer global batches (a constraint on these alone counts here), nodes or "
            "ranks per node"
        )
    return {key: np.repeat(column, counts) for key, column in columns.items()}


def _kept(columns: Columns, chosen: "np.ndarray") -> Columns:
    return {name: column[chosen] for name, column in columns.items()}


def _column(wanted: Wanted, columns: Columns, block: slice) -> "Callable[[str], np.ndarray]":
    """The columns of :class:`Row` for some of the layouts."""
    part = {name: column[block].astype(float) for name, column in columns.items()}
    config, count = wanted.config, len(part["dp"])
    model, node = config.model, config.node
    multiple = model.vocab_multiple * part["tp"]
    vocab = np.ceil(model.vocab_size / multiple) * multiple
    same = {
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "seq_len": model.seq_len,
        "freq_ghz": (node.freq_mhz or 0) / 1000,
        "tcmalloc": float(node.tcmalloc),
        "retention_off": float(node.retention_state == 0),
    }
    part["vocab"] = vocab if model.padded_vocab_size is None else np.full(count, float(model.padded_vocab_size))
    part["stage_stride"] = part["tp"]  # order tp,pp,dp
    part["processes"] = part["nodes"] * part["ranks_per_node"]
    part["micro_batches"] = part["global_batch"] / (part["dp"] * part["micro_batch"])
    return lambda name: part[name] if name in part else np.full(count, float(same[name]))
