"""Every layout that a run can have on a number of nodes, and what the cost model says of each.

A layout is a set of columns' entries at one place: nodes, ranks per node, dp, tp, pp, chunks (virtual stages),
micro-batch, global batch, full recompute, ZeRO, sequence parallelism. They are made and costed as arrays: a large
machine has a million of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Callable, Dict, FrozenSet, List, Sequence, Tuple

import numpy as np

from fugaku_gpt.config.checks import problems_of
from fugaku_gpt.config.schema import ModelConfig, RunConfig, TrainingConfig
from fugaku_gpt.errors import UsageError
from fugaku_gpt.formulas.divisors import divisors_of
from fugaku_gpt.machine.constants import Fitted, Machine
from fugaku_gpt.planner.extrapolation import KINDS, RANGES, RANKS_ON_NODES
from fugaku_gpt.planner.run_time import row_of_run
from fugaku_gpt.planner.tables.footprint import footprint
from fugaku_gpt.planner.tables.rows import ConfigRow
from fugaku_gpt.planner.tables.seconds import seconds
from fugaku_gpt.planner.tables.work import work_of_columns

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
class Rule:
    """What layouts have to meet.

    Args:
        names: columns that it asks for, ``ranks`` and ``micro_batches`` among them.
        holds: of these columns [N], which layouts [N] meet it; asked for 1 layout or more.
    """

    names: FrozenSet[str]
    holds: "Callable[[Columns], np.ndarray]"


@dataclass(frozen=True)
class Found:
    """All layouts that meet the rules, and what the model says of them.

    Args:
        seconds: [N] per iteration; ``memory`` [N] of the fullest stage, in the machine's unit.
        fits: [N] whether that is what the hardware has.
        order: [M] places of those that are ranked, the fastest for a sequence first.
    """

    columns: Columns
    seconds: "np.ndarray"
    memory: "np.ndarray"
    fits: "np.ndarray"
    order: "np.ndarray"

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


def candidates(wanted: Wanted, rules: Sequence[Rule] = ()) -> Columns:
    """Every layout that the settings of a run allow together; stages and chunks hold equally many layers.

    ``recompute`` is none or full: what ``selective`` does is not in the cost model.

    Args:
        rules: that they have to meet besides. Each thins out what there is as soon as its columns are there, in the
            order in which they stand here.

    Raises:
        UsageError: they are too many to hold.
    """
    model, training = wanted.config.model, wanted.config.training
    low, high = wanted.nodes
    thin = _Thinning(rules)
    columns = thin({"global_batch": np.array(wanted.batches, dtype=np.int64)})
    columns = _with_divisors(columns, "dp", columns["global_batch"])
    columns = thin(_kept(columns, columns["dp"] <= high * max(wanted.ranks_per_node)))
    columns = thin(_crossed(columns, "tp", _tensor_ranks(model)))
    columns = thin(_crossed(columns, "pp", divisors_of(model.layers)))
    columns = thin(_crossed(columns, "ranks_per_node", wanted.ranks_per_node))
    ranks = columns["dp"] * columns["tp"] * columns["pp"]
    nodes = columns["nodes"] = ranks // columns["ranks_per_node"]
    columns = thin(_kept(columns, (ranks % columns["ranks_per_node"] == 0) & (nodes >= low) & (nodes <= high)))
    columns = _with_divisors(columns, "micro_batch", columns["global_batch"] // columns["dp"])
    columns = thin(_kept(columns, _ramps(training, columns["dp"] * columns["micro_batch"])))
    columns = thin(_with_divisors(columns, "chunks", np.where(columns["pp"] > 1, model.layers // columns["pp"], 1)))
    columns = thin(_crossed(columns, "recompute", (0, 1)))
    columns = _crossed(columns, "zero", (0, 1))
    columns = thin(_kept(columns, (columns["zero"] == 0) | (columns["dp"] > 1)))
    columns = _crossed(columns, "sequence_parallel", (0, 1))
    cut = (columns["tp"] > 1) & (model.seq_len % columns["tp"] == 0)
    for length in (training.seq_ramp_start, training.seq_ramp_increment):
        if length is not None:
            cut &= length % columns["tp"] == 0
    columns = thin(_kept(columns, (columns["sequence_parallel"] == 0) | cut))
    return {name: columns[name] for name in COLUMNS}


def search(
    wanted: Wanted,
    rules: Sequence[Rule] = (),
    rank_all: bool = False,
    told: Callable[[int, int], None] = lambda done, of: None,
) -> Found:
    """The layouts that meet the rules, costed.

    Args:
        rank_all: those too that do not fit by the rows' footprint.
        told: called with how many of them are done.
    """
    columns = candidates(wanted, rules)
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
    return Found(columns, taken, memory, fits, order)


def like_measured(fitted: Fitted) -> List[Rule]:
    """Rules that leave the layouts which have no input outside of what a model's fitted rows have."""

    def between(name: str, least: int, most: int) -> Rule:
        return Rule(frozenset((name,)), lambda columns: (columns[name] >= least) & (columns[name] <= most))

    def among(name: str, values: Sequence[int]) -> Rule:
        return Rule(frozenset((name,)), lambda columns: np.isin(columns[name], values))

    found = [between("chunks", 1, 1), between("sequence_parallel", 0, 0)]
    if "pipeline_distance" in fitted.values:  # tables have stages far apart
        found.append(Rule(frozenset(("pp", "dp")), lambda columns: (columns["pp"] == 1) | (columns["dp"] == 1)))
    seen = fitted.seen

    def on_nodes(ranks: int, least: int, most: int) -> Rule:
        def holds(columns: Columns) -> "np.ndarray":
            inside = (columns["nodes"] >= least) & (columns["nodes"] <= most)
            kept: "np.ndarray" = (columns["ranks_per_node"] != ranks) | inside
            return kept

        return Rule(frozenset(("nodes", "ranks_per_node")), holds)

    found += [on_nodes(*one) for one in seen.get(RANKS_ON_NODES, ())]
    found += [between(name, *seen[name]) for name in RANGES if name in COLUMNS and name in seen]
    return found + [among(name, list(map(int, seen[name]))) for name in KINDS if name in COLUMNS and name in seen]


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


def rows_of(wanted: Wanted, configs: Sequence[RunConfig]) -> List[ConfigRow]:
    """The layouts as rows of the cost model."""
    return [row_of_run(config, wanted.machine, wanted.hardware, wanted.torch) for config in configs]


class _Thinning:
    """Drops layouts by those rules whose columns are there, each rule once."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._waiting = list(rules)

    def __call__(self, columns: Columns) -> Columns:
        for rule in list(self._waiting):
            known = _derived(columns)
            if not rule.names <= known.keys():
                continue
            self._waiting.remove(rule)
            if len(columns["global_batch"]):
                columns = _kept(columns, rule.holds(known))
        return columns


def _derived(columns: Columns) -> Columns:
    """With what follows from columns."""
    found = dict(columns)
    if {"dp", "tp", "pp"} <= found.keys():
        found["ranks"] = found["dp"] * found["tp"] * found["pp"]
    if {"dp", "micro_batch"} <= found.keys():
        found["micro_batches"] = found["global_batch"] // (found["dp"] * found["micro_batch"])
    return found


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
            f"more than {_MOST} layouts: give constraints, or fewer global batches, nodes or ranks per node"
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
