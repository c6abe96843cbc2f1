"""Finds the smallest change of a run that makes it fit into memory.

The smallest change is the one that slows an iteration least according to this table, in percent of its time. The table
need not be exact, because only the order counts: large differences here are large on every machine that was measured.

* ``layout.zero=1``: 0. Reduce-scatter and all-gather move the bytes of the all-reduce that they replace, and each
  replica updates its share only (Rajbhandari et al. 2020, section 7).
* ``layout.sequence_parallel``: 0. The same for the sums of tensor parallelism (Korthikanti et al. 2022, section 4.2.2).
* ``checkpoint.asynchronous=false``: 1. The run waits while a checkpoint is written, which is rare.
* ``training.recompute=selective``: 2. Masks of attention dropout are drawn again; no product is recomputed.
* ``training.micro_batch``: 3 each time it is halved, for smaller products; plus the change of the bubble.
* ``training.recompute=full``: 33, one more forward pass in addition to the three of an iteration; with a budget, with
  which each stage recomputes as little as fits, times the largest share of recomputed layers of a stage.
* ``layout.tp``: 15 each time it is doubled, for sums in the middle of each layer.
* ``layout.pp``: 5 each time it is doubled, plus the growth of the bubble of equal stages.
* ``job.nodes``: 1000 each time it is doubled, since that is another job.

Each changed setting costs 0.1 more, so that the shorter list wins among equals. The number of ranks stays the same as
long as tp and pp can grow at the expense of replicas.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace
from typing import Callable, Dict, Iterator, List, Optional, Tuple

from fugaku_gpt.config.checks import problems_of
from fugaku_gpt.config.schema import RunConfig
from fugaku_gpt.errors import UsageError
from fugaku_gpt.layout.memory import recompute_of_layers
from fugaku_gpt.layout.schedule_times import ideal_bubble
from fugaku_gpt.layout.stages import chunks_of
from fugaku_gpt.planner.trainer.run_memory import MIB, RunMemory

Change = Tuple[Tuple[str, str], ...]  # (dotted key, value as in ``--set``)
MemoryModel = Callable[[RunConfig], RunMemory]

_FACTORS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # of tp, pp and nodes
_BUDGET = "budget"
_FULL = 33.0


@dataclass(frozen=True)
class _Grid:
    """Factors of tp, pp and nodes, the divisor of replicas, and the cost."""

    tp: int
    pp: int
    nodes: int
    replica_divisor: int
    cost: float


@dataclass(frozen=True)
class _Choice:
    """One combination of all kinds of change, and its cost."""

    cost: float
    grid: _Grid
    zero: bool
    sequence_parallel: bool
    synchronous_checkpoint: bool
    recompute: str
    micro_batch: int


def smallest_change(config: RunConfig, memory: MemoryModel, limit: int, more_nodes: bool = True) -> Optional[Change]:
    """The settings to change, in the order of the schema; () if the run already fits; None if no change helps.

    Args:
        memory: returns the memory of a run on its nodes.
        limit: bytes of a node.
        more_nodes: whether the run may use more nodes than it does.
    """
    if _fits(config, memory, limit):
        return ()
    possible = [grid for grid in _grids(config) if more_nodes or grid.nodes == 1]
    grids = [grid for grid in possible if _may_fit(config, grid, memory, limit)]
    queue: List[Tuple[float, int, _Choice, Optional[RunConfig]]] = [
        (choice.cost, number, choice, None) for number, choice in enumerate(_choices(config, grids))
    ]
    heapq.heapify(queue)
    while queue:
        cost, number, choice, budgeted = heapq.heappop(queue)
        if budgeted is not None:
            return changes_between(config, budgeted)
        candidate = _apply_choice(config, choice)
        if problems_of(candidate, lambda _: ""):
            continue
        if choice.recompute == _BUDGET:  # the cost depends on the budget
            budgeted = _largest_budget(candidate, memory, limit)
            if budgeted is not None:
                extra_cost = _FULL * (_recomputed_share(budgeted) - _least_share(config))
                heapq.heappush(queue, (cost + extra_cost, number, choice, budgeted))
        elif _fits(candidate, memory, limit):
            return changes_between(config, candidate)
    return None


def changes_between(config: RunConfig, other: RunConfig) -> Change:
    """The settings that turn one run into another."""
    changes = []
    for section in ("model", "layout", "training", "data", "checkpoint", "node", "job"):
        current, changed = getattr(config, section), getattr(other, section)
        changes += [
            (f"{section}.{key}", _setting_text(getattr(changed, key)))
            for key in current.__dataclass_fields__
            if getattr(current, key) != getattr(changed, key)
        ]
    return tuple(changes)


def _setting_text(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _fits(config: RunConfig, memory: MemoryModel, limit: int) -> bool:
    try:
        return memory(config).bytes_of_node <= limit
    except UsageError:  # a budget of recompute that is too small for some stage
        return False


def _grids(config: RunConfig) -> Iterator[_Grid]:
    """The factors of tp, pp and nodes that the model allows."""
    model, layout = config.model, config.layout
    for tp in _FACTORS:
        if not model.supports_tp(layout.tp * tp) or model.ffn_size % (layout.tp * tp):
            continue
        for pp in _FACTORS:
            if layout.pp * pp * layout.chunks > model.layers:
                continue
            replica_divisor = math.gcd(layout.dp, tp * pp)
            nodes = tp * pp // replica_divisor
            cost = 15.0 * math.log2(tp) + 5.0 * math.log2(pp) + 1000.0 * math.log2(nodes)
            yield _Grid(tp, pp, nodes, replica_divisor, cost)
    for nodes in _FACTORS[1:]:  # the same ranks, with fewer ranks on each node
        if config.ranks_per_node % nodes == 0:
            yield _Grid(1, 1, nodes, 1, 1000.0 * math.log2(nodes))


def _choices(config: RunConfig, grids: List[_Grid]) -> Iterator[_Choice]:
    layout, training, checkpoint = config.layout, config.training, config.checkpoint
    copies = checkpoint.interval is not None and checkpoint.asynchronous
    before = _bubble(config, layout.pp, layout.dp, training.micro_batch)
    divisors = [size for size in range(training.micro_batch, 0, -1) if training.micro_batch % size == 0]
    for grid in grids:
        dp, tp, pp = layout.dp // grid.replica_divisor, layout.tp * grid.tp, layout.pp * grid.pp
        for micro_batch in divisors:
            bubble = _bubble(config, pp, dp, micro_batch) - before
            cost = grid.cost + 3.0 * math.log2(training.micro_batch / micro_batch) + 100.0 * bubble
            for zero in (False, True) if layout.zero == 0 and dp > 1 else (False,):
                for sequence_parallel in (False, True) if not layout.sequence_parallel and tp > 1 else (False,):
                    for synchronous_checkpoint in (False, True) if copies else (False,):
                        for recompute, extra_cost in _recompute_options(config):
                            changed = sum(
                                (
                                    zero,
                                    sequence_parallel,
                                    synchronous_checkpoint,
                                    bool(extra_cost),
                                    micro_batch != divisors[0],
                                )
                            )
                            changed += sum(
                                factor > 1 for factor in (grid.tp, grid.pp, grid.nodes, grid.replica_divisor)
                            )
                            yield _Choice(
                                cost + synchronous_checkpoint + extra_cost + 0.1 * changed,
                                grid,
                                zero,
                                sequence_parallel,
                                synchronous_checkpoint,
                                recompute,
                                micro_batch,
                            )


def _bubble(config: RunConfig, pp: int, dp: int, micro_batch: int) -> float:
    micro_batches = max(1, config.training.global_batch // (micro_batch * dp))
    return ideal_bubble(config.layout.schedule, pp, micro_batches, config.layout.chunks)


def _recompute_options(config: RunConfig) -> List[Tuple[str, float]]:
    """(value of ``training.recompute``, cost): the first leaves it unchanged."""
    training = config.training
    options = [("", 0.0)]
    if training.recompute == "none" and config.model.attention_dropout > 0:
        options.append(("selective", 2.0))
    if training.recompute != "full" or training.recompute_layers is not None:
        options += [(_BUDGET, _FULL * _least_share(config)), ("full", _FULL)]
    elif training.recompute_budget_mib is not None:  # a smaller budget
        options += [(_BUDGET, _FULL * _least_share(config))]
    return options


def _least_share(config: RunConfig) -> float:
    return 1.0 / config.model.layers


def _recomputed_share(config: RunConfig) -> float:
    """Share of recomputed layers in the stage that recomputes most."""
    chunks = chunks_of(config)
    kinds = recompute_of_layers(config, chunks)
    counts: Dict[int, List[str]] = {}
    for chunk in chunks:
        counts.setdefault(chunk.stage, []).extend(kinds[layer] for layer in chunk.layers)
    return max(stage_kinds.count("full") / len(stage_kinds) for stage_kinds in counts.values())


def _apply_choice(config: RunConfig, choice: _Choice) -> RunConfig:
    layout, training, job, grid = config.layout, config.training, config.job, choice.grid
    layout = replace(
        layout,
        dp=layout.dp // grid.replica_divisor,
        tp=layout.tp * grid.tp,
        pp=layout.pp * grid.pp,
        split=layout.split if grid.pp == 1 else (),
        zero=1 if choice.zero else layout.zero,
        sequence_parallel=layout.sequence_parallel or choice.sequence_parallel,
    )
    training = replace(training, micro_batch=choice.micro_batch)
    if choice.recompute:
        budget = math.inf if choice.recompute == _BUDGET else None
        kind = "full" if choice.recompute == _BUDGET else choice.recompute
        training = replace(training, recompute=kind, recompute_layers=None, recompute_budget_mib=budget)
    node = config.node
    if grid.nodes > 1:
        job = replace(job, nodes=job.nodes * grid.nodes, shape="", strict="")
        if layout.ranks == config.layout.ranks and node.ranks_per_node is not None:
            node = replace(node, ranks_per_node=node.ranks_per_node // grid.nodes)
    checkpoint = replace(
        config.checkpoint, asynchronous=config.checkpoint.asynchronous and not choice.synchronous_checkpoint
    )
    return replace(config, layout=layout, training=training, node=node, job=job, checkpoint=checkpoint)


def _may_fit(config: RunConfig, grid: _Grid, memory: MemoryModel, limit: int) -> bool:
    """True if a run with these factors fits when every other change that saves memory is made."""
    tp, dp = config.layout.tp * grid.tp, config.layout.dp // grid.replica_divisor
    parallel = tp > 1 and config.model.seq_len % tp == 0
    for recompute in [kind for kind, _ in _recompute_options(config) if kind != _BUDGET]:
        least = _Choice(0.0, grid, dp > 1, parallel, True, recompute, 1)
        if _fits(_apply_choice(config, least), memory, limit):
            return True
    return False


def _largest_budget(config: RunConfig, memory: MemoryModel, limit: int) -> Optional[RunConfig]:
    """The run with the largest budget of recompute, in whole MiB, that fits; None if none does."""

    def with_budget(size: Optional[float], kind: str = "full") -> RunConfig:
        return replace(config, training=replace(config.training, recompute=kind, recompute_budget_mib=size))

    def activations(candidate: RunConfig) -> int:
        return -(-max(stage["activations"] for stage in memory(candidate).stages) // MIB)

    low, high = activations(with_budget(None)), activations(with_budget(None, "none"))
    if not _fits(with_budget(low), memory, limit):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(with_budget(middle), memory, limit):
            low = middle
        else:
            high = middle
    return with_budget(float(low))
