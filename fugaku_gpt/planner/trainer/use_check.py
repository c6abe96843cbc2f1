"""Checks that `generate` and `eval` fit into the memory of their nodes, before a rank loads its part of the model."""

from __future__ import annotations

from typing import Dict, List, Sequence

from fugaku_gpt.config.schema import RunConfig
from fugaku_gpt.errors import UsageError
from fugaku_gpt.layout.grid import coordinates_of
from fugaku_gpt.planner.trainer.generation_memory import (
    GenerationSize,
    bytes_of_node,
    evaluation_memory,
    generation_memory,
)
from fugaku_gpt.planner.trainer.memory_check import NodeLimits
from fugaku_gpt.planner.trainer.run_memory import MIB

_FEWER = "use fewer texts at a time (--batch), more ranks for each replica (--tp, --pp) or a --dtype of 16 bits"


def refuse_too_large_generation(
    config: RunConfig, size: GenerationSize, node_limits: NodeLimits, ranks: Sequence[int]
) -> None:
    """Refuse a generation that does not fit into the memory of a node.

    Args:
        config: replicas of the model, in their layout.
        size: texts that grow together on each replica.
        ranks: the ranks on the node.

    Raises:
        UsageError: it does not fit; the message has the missing memory and what helps.
    """
    stages = generation_memory(config, size, node_limits.framework)
    what = f"generation of {size.texts} texts of {size.tokens} tokens on each replica"
    _refuse(config, what, stages, node_limits, ranks)


def refuse_too_large_evaluation(config: RunConfig, windows: int, node_limits: NodeLimits, ranks: Sequence[int]) -> None:
    """Refuse an evaluation that does not fit into the memory of a node.

    Args:
        config: replicas of the model, in their layout.
        windows: windows of texts that a replica computes together.
        ranks: the ranks on the node.

    Raises:
        UsageError: it does not fit; the message has the missing memory and what helps.
    """
    stages = evaluation_memory(config, windows, node_limits.framework)
    _refuse(config, f"an evaluation of {windows} windows at a time", stages, node_limits, ranks)


def _refuse(
    config: RunConfig, what: str, stages: List[Dict[str, int]], node_limits: NodeLimits, ranks: Sequence[int]
) -> None:
    limit = node_limits.smallest_limit(config)
    if limit is None:
        return
    size, source = limit
    of_ranks = [coordinates_of(rank, config.layout, config.layout.order).pp for rank in ranks]
    needed = bytes_of_node(stages, of_ranks, node_limits.framework)
    if needed <= size:
        return
    largest = max(stages, key=lambda parts: sum(parts.values()))
    parts = ", ".join(f"{name} {-(-count // MIB)}" for name, count in largest.items())
    count = "1 rank" if len(of_ranks) == 1 else f"{len(of_ranks)} ranks"
    raise UsageError(
        f"{what} needs {-(-needed // MIB)} MiB of a node for {count}; there are {size // MIB} MiB ({source}); "
        f"{_FEWER}; of one rank, in MiB: {parts}; --no-memory-check continues all the same"
    )
