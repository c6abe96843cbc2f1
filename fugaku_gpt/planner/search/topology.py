"""Every layout that a run can have on a number of nodes, and its predicted cost.

A layout is an entry of all columns at the same index: nodes, ranks per node, dp, tp, pp, chunks (virtual stages),
micro-batch, global batch, full recompute, ZeRO, sequence parallelism. Layouts are generated and costed as arrays, since
a large machine has a million of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Callable, Dict, FrozenSet, List, Sequence, Tuple

import numpy as np

from fugaku_gpt.config.checks import problems_of
from fugaku_gpt.config.schema import ModelConfig, RunConfig, TrainingConfig
from fugaku_gpt.errors import UsageError
from fugaku_gpt.formulas.divisors import divisors_of
from fugaku_gpt.machine.constants import FittedModel, Machine
from fugaku_gpt.planner.extrapolation import CATEGORICAL_INPUTS, NUMERIC_INPUTS, RANKS_ON_NODES
from fugaku_gpt.planner.run_time import run_to_row
from fugaku_gpt.planner.tables.footprint import footprint
from fugaku_gpt.planner.tables.rows import ConfigRow
from fugaku_gpt.planner.tables.seconds import iteration_seconds
from fugaku_gpt.planner.tables.work import count_work_of_columns

Columns = Dict[str, "np.ndarray"]
LAYOUT_COLUMNS = (
    "nodes", "ranks_per_node", "dp", "tp", "pp", "chunks", "micro_batch", "global_batch", "recompute", "zero",
    "sequence_parallel",
)  # fmt: skip
# layouts that are equal in these are variants of each other
SHAPE_COLUMNS = ("nodes", "ranks_per_node", "dp", "tp", "pp", "global_batch")
FLAG_COLUMNS = ("recompute", "sequence_parallel")
_BATCH_SIZE = 100_000  # layouts costed at once
_MAX_LAYOUTS = 10_000_000  # layouts: a gigabyte of columns


@dataclass(frozen=True)
class SearchSpace:
    """The run and the machine whose layouts are searched.

    Args:
        config: the run; the search varies its layout, micro-batch, recompute, ranks per node and nodes, and leaves
            all other settings as they are.
        hardware: value of a row's column ``hardware``.
        torch: the PyTorch build, such as 1.10; empty if none is given.
        nodes: (fewest, most) nodes.
        ranks_per_node: numbers of ranks per node to choose from.
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
class LayoutRule:
    """A condition that layouts have to meet.

    Args:
        names: columns that the rule reads, which may be ``ranks`` and ``micro_batches`` as well.
        is_met: returns for these columns [N] which layouts [N] meet the rule; called for 1 layout or more.
    """

    names: FrozenSet[str]
    is_met: "Callable[[Columns], np.ndarray]"


@dataclass(frozen=True)
class CostedLayouts:
    """All layouts that meet the rules, with their predicted time and memory.

    Args:
        seconds: [N] seconds per iteration.
        memory: [N] memory of the fullest stage, in the machine's unit.
        fits: [N] whether a job may ask for that memory.
        ranking: [M] indices of the ranked layouts, the one with the least time per sequence first.
    """

    columns: Columns
    seconds: "np.ndarray"
    memory: "np.ndarray"
    fits: "np.ndarray"
    ranking: "np.ndarray"

    def frontier(self) -> "np.ndarray":
        """Indices of the Pareto-optimal layouts in time and memory, the fastest first."""
        seconds_per_sequence = (self.seconds / self.columns["global_batch"])[self.ranking]
        memory = self.memory[self.ranking]
        ordered = np.lexsort((memory, seconds_per_sequence))
        memory = memory[ordered]
        least = np.minimum.accumulate(memory)
        first = np.concatenate(([True], memory[1:] < least[:-1])) if len(memory) else np.zeros(0, bool)
        chosen: "np.ndarray" = self.ranking[ordered[first]]
        return chosen


def candidate_layouts(space: SearchSpace, rules: Sequence[LayoutRule] = ()) -> Columns:
    """Every layout that the settings of a run allow together; stages and chunks hold equally many layers.

    ``recompute`` is none or full; the cost model does not cover ``selective``.

    Args:
        rules: further conditions. Each is applied as soon as its columns exist, in the given order.

    Raises:
        UsageError: there are too many layouts for the memory of this machine.
    """
    model, training = space.config.model, space.config.training
    low, high = space.nodes
    apply_rules = _RuleFilter(rules)
    columns = apply_rules({"global_batch": np.array(space.batches, dtype=np.int64)})
    columns = _with_divisors(columns, "dp", columns["global_batch"])
    columns = apply_rules(_select(columns, columns["dp"] <= high * max(space.ranks_per_node)))
    columns = apply_rules(_cross(columns, "tp", _tensor_ranks(model)))
    columns = apply_rules(_cross(columns, "pp", divisors_of(model.layers)))
    columns = apply_rules(_cross(columns, "ranks_per_node", space.ranks_per_node))
    ranks = columns["dp"] * columns["tp"] * columns["pp"]
    nodes = columns["nodes"] = ranks // columns["ranks_per_node"]
    columns = apply_rules(_select(columns, (ranks % columns["ranks_per_node"] == 0) & (nodes >= low) & (nodes <= high)))
    columns = _with_divisors(columns, "micro_batch", columns["global_batch"] // columns["dp"])
    columns = apply_rules(_select(columns, _fits_ramps(training, columns["dp"] * columns["micro_batch"])))
    columns = apply_rules(
        _with_divisors(columns, "chunks", np.where(columns["pp"] > 1, model.layers // columns["pp"], 1))
    )
    columns = apply_rules(_cross(columns, "recompute", (0, 1)))
    columns = _cross(columns, "zero", (0, 1))
    columns = apply_rules(_select(columns, (columns["zero"] == 0) | (columns["dp"] > 1)))
    columns = _cross(columns, "sequence_parallel", (0, 1))
    can_split_sequence = (columns["tp"] > 1) & (model.seq_len % columns["tp"] == 0)
    for length in (training.seq_ramp_start, training.seq_ramp_increment):
        if length is not None:
            can_split_sequence &= length % columns["tp"] == 0
    columns = apply_rules(_select(columns, (columns["sequence_parallel"] == 0) | can_split_sequence))
    return {name: columns[name] for name in LAYOUT_COLUMNS}


def search_layouts(
    space: SearchSpace,
    rules: Sequence[LayoutRule] = (),
    rank_all: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, of: None,
) -> CostedLayouts:
    """The layouts that meet the rules, with their predicted cost.

    Args:
        rank_all: also rank layouts that do not fit according to the rows' footprint.
        on_progress: called with the number of costed layouts and the number of all layouts.
    """
    columns = candidate_layouts(space, rules)
    count = len(columns["dp"])
    machine = space.machine
    capacity = machine.capacity(space.hardware)
    seconds_per_iteration, memory = np.empty(count), np.empty(count)
    for start in range(0, count, _BATCH_SIZE):
        on_progress(start, count)
        batch = slice(start, start + _BATCH_SIZE)
        work = count_work_of_columns(_column(space, columns, batch), (space.torch,), machine.facts)
        of_node = machine.memory_of == "node"
        memory[batch] = footprint(work, machine.memory.values, machine.facts, machine.memory_unit, of_node)[1]
        work = replace(work, fullness=memory[batch] / capacity)
        seconds_per_iteration[batch] = iteration_seconds(work, machine.time.values, machine.facts)
    fits = memory <= machine.job_capacity(space.hardware)
    indices = np.arange(count) if rank_all else np.flatnonzero(fits)
    # a stable sort prefers the simplest of equals: columns are crossed so that additional machinery comes later
    ranking = indices[np.argsort((seconds_per_iteration / columns["global_batch"])[indices], kind="stable")]
    return CostedLayouts(columns, seconds_per_iteration, memory, fits, ranking)


def measured_range_rules(fitted: FittedModel) -> List[LayoutRule]:
    """Rules that admit only layouts whose inputs lie in the ranges of a model's fitted rows."""

    def between(name: str, least: int, most: int) -> LayoutRule:
        return LayoutRule(frozenset((name,)), lambda columns: (columns[name] >= least) & (columns[name] <= most))

    def among(name: str, values: Sequence[int]) -> LayoutRule:
        return LayoutRule(frozenset((name,)), lambda columns: np.isin(columns[name], values))

    rules = [between("chunks", 1, 1), between("sequence_parallel", 0, 0)]
    if "pipeline_distance" in fitted.values:  # the tables have distant stages only
        rules.append(LayoutRule(frozenset(("pp", "dp")), lambda columns: (columns["pp"] == 1) | (columns["dp"] == 1)))
    ranges = fitted.input_ranges

    def on_nodes(ranks: int, least: int, most: int) -> LayoutRule:
        def meets_range(columns: Columns) -> "np.ndarray":
            inside = (columns["nodes"] >= least) & (columns["nodes"] <= most)
            is_met: "np.ndarray" = (columns["ranks_per_node"] != ranks) | inside
            return is_met

        return LayoutRule(frozenset(("nodes", "ranks_per_node")), meets_range)

    rules += [on_nodes(*ranks_and_nodes) for ranks_and_nodes in ranges.get(RANKS_ON_NODES, ())]
    rules += [between(name, *ranges[name]) for name in NUMERIC_INPUTS if name in LAYOUT_COLUMNS and name in ranges]
    return rules + [
        among(name, list(map(int, ranges[name])))
        for name in CATEGORICAL_INPUTS
        if name in LAYOUT_COLUMNS and name in ranges
    ]


def layout_run(space: SearchSpace, columns: Columns, index: int) -> RunConfig:
    """The run in one of the layouts.

    Raises:
        UsageError: other settings of the run contradict the layout.
    """
    chosen = {name: int(values[index]) for name, values in columns.items()}
    config = space.config
    layout = replace(
        config.layout,
        dp=chosen["dp"],
        tp=chosen["tp"],
        pp=chosen["pp"],
        order="tp,pp,dp",
        chunks=chosen["chunks"],
        schedule="interleaved" if chosen["chunks"] > 1 else _plain_schedule(config.layout.schedule),
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


def layout_rows(space: SearchSpace, configs: Sequence[RunConfig]) -> List[ConfigRow]:
    """The layouts as rows of the cost model."""
    return [run_to_row(config, space.machine, space.hardware, space.torch) for config in configs]


class _RuleFilter:
    """Applies each rule once, as soon as its columns exist."""

    def __init__(self, rules: Sequence[LayoutRule]) -> None:
        self._pending = list(rules)

    def __call__(self, columns: Columns) -> Columns:
        for rule in list(self._pending):
            available = _with_derived(columns)
            if not rule.names <= available.keys():
                continue
            self._pending.remove(rule)
            if len(columns["global_batch"]):
                columns = _select(columns, rule.is_met(available))
        return columns


def _with_derived(columns: Columns) -> Columns:
    """The columns, and those that follow from them."""
    extended = dict(columns)
    if {"dp", "tp", "pp"} <= extended.keys():
        extended["ranks"] = extended["dp"] * extended["tp"] * extended["pp"]
    if {"dp", "micro_batch"} <= extended.keys():
        extended["micro_batches"] = extended["global_batch"] // (extended["dp"] * extended["micro_batch"])
    return extended


def _plain_schedule(schedule: str) -> str:
    return "1f1b" if schedule == "interleaved" else schedule


def _tensor_ranks(model: ModelConfig) -> List[int]:
    return [
        ranks
        for ranks in divisors_of(model.heads)
        if model.supports_tp(ranks) and model.ffn_size % ranks == 0 and model.padded_vocab(ranks) % ranks == 0
    ]


def _fits_ramps(training: TrainingConfig, share: "np.ndarray") -> "np.ndarray":
    """True [N] if the micro-batches of all replicas divide all sizes of a growing batch."""
    is_divisible = np.ones(len(share), dtype=bool)
    for size in (training.ramp_start, training.ramp_increment):
        if size is not None:
            is_divisible &= size % share == 0
    return is_divisible


def _cross(columns: Columns, name: str, values: Sequence[int]) -> Columns:
    """The cross product of the columns with the values of a new column, which changes fastest."""
    count = len(next(iter(columns.values())))
    crossed = _repeat(columns, np.full(count, len(values)))
    crossed[name] = np.tile(np.array(values, dtype=np.int64), count)
    return crossed


def _with_divisors(columns: Columns, name: str, dividends: "np.ndarray") -> Columns:
    """Every entry with every divisor of its own entry of ``dividends`` [N]."""
    numbers, number_of_entry = np.unique(dividends, return_inverse=True)
    divisors = [divisors_of(int(number)) for number in numbers]
    counts = np.array([len(entry) for entry in divisors], dtype=np.int64)
    first = np.cumsum(counts) - counts  # index of the first divisor of each number in the list of all divisors
    counts, first = counts[number_of_entry], first[number_of_entry]
    crossed = _repeat(columns, counts)
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    flat = np.array([divisor for entry in divisors for divisor in entry], dtype=np.int64)
    crossed[name] = flat[np.repeat(first, counts) + offsets]
    return crossed


def _repeat(columns: Columns, counts: "np.ndarray") -> Columns:
    if counts.sum() > _MAX_LAYOUTS:
        raise UsageError(
            f"more than {_MAX_LAYOUTS} layouts: give constraints, or fewer global batches, nodes or ranks per node"
        )
    return {key: np.repeat(column, counts) for key, column in columns.items()}


def _select(columns: Columns, mask: "np.ndarray") -> Columns:
    return {name: column[mask] for name, column in columns.items()}


def _column(space: SearchSpace, columns: Columns, batch: slice) -> "Callable[[str], np.ndarray]":
    """The columns of :class:`ConfigRow` for a batch of the layouts."""
    batch_columns = {name: column[batch].astype(float) for name, column in columns.items()}
    config, count = space.config, len(batch_columns["dp"])
    model, node = config.model, config.node
    multiple = model.vocab_multiple * batch_columns["tp"]
    vocab = np.ceil(model.vocab_size / multiple) * multiple
    fixed_values = {
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "seq_len": model.seq_len,
        "freq_ghz": (node.freq_mhz or 0) / 1000,
        "tcmalloc": float(node.tcmalloc),
        "retention_off": float(node.retention_state == 0),
    }
    batch_columns["vocab"] = (
        vocab if model.padded_vocab_size is None else np.full(count, float(model.padded_vocab_size))
    )
    batch_columns["stage_stride"] = batch_columns["tp"]  # order tp,pp,dp
    batch_columns["processes"] = batch_columns["nodes"] * batch_columns["ranks_per_node"]
    batch_columns["micro_batches"] = batch_columns["global_batch"] / (
        batch_columns["dp"] * batch_columns["micro_batch"]
    )
    return lambda name: batch_columns[name] if name in batch_columns else np.full(count, float(fixed_values[name]))
