"""Checks that a run fits into the memory of its nodes, before ``train``, a job or a row of a sweep.

A limit applies to everything that runs on a node. The smallest known limit counts, minus the margin at which the memory
guard would end the run.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import List, Optional, Sequence, Tuple

from fugaku_gpt.config.schema import RunConfig
from fugaku_gpt.config.values import size_bytes
from fugaku_gpt.errors import UsageError
from fugaku_gpt.layout.grid import coordinates_of
from fugaku_gpt.machine import local
from fugaku_gpt.machine.framework import Framework, framework_of, framework_on
from fugaku_gpt.machine.memory import guard_margin
from fugaku_gpt.planner.trainer.run_memory import MIB, RunMemory, memory_of_run


@dataclass(frozen=True)
class NodeLimits:
    """The nodes for which a run is planned, and the limits of their memory.

    Attributes:
        limits: (bytes that the ranks of a node may use, source of the limit); empty if none is known.
        framework: memory of a rank there before it has a model.
        cores: number of cores of a node.
        has_more_nodes: whether there are more nodes than the run uses.
    """

    limits: Tuple[Tuple[int, str], ...]
    framework: Framework
    cores: int
    has_more_nodes: bool = True

    def run_memory(self, config: RunConfig) -> RunMemory:
        """Memory of a run on these nodes."""
        return memory_of_run(config, self.framework, cores=self.cores)

    def smallest_limit(self, config: RunConfig) -> Optional[Tuple[int, str]]:
        """The smallest limit, including the run's own, minus the guard's margin; None if no limit is known."""
        limits = list(self.limits)
        for text, key in ((config.node.memory_limit, "node.memory_limit"), (config.job.node_memory, "job.node_memory")):
            if text and not (key == "job.node_memory" and config.job.scheduler == "local"):
                limits.append((size_bytes(text), key))
        if not limits:
            return None
        size, source = min(limits)
        if not config.node.memory_guard:
            return size, source
        return size - guard_margin(size), f"{source}, less what the memory guard keeps free"


def local_node_limits(torch: str = "") -> NodeLimits:
    """The limits of the machine that this program runs on.

    Args:
        torch: version of PyTorch; default: the installed one.
    """
    limits = ((local.memory_limit(), "this machine"),)
    framework = framework_on(framework_of(torch or _installed_torch()), local.vector_flags())
    return NodeLimits(limits, framework, len(local.usable_cores()), has_more_nodes=False)


def refuse_too_large(config: RunConfig, node_limits: NodeLimits, ranks: Optional[Sequence[int]] = None) -> None:
    """Refuses a run that does not fit, unless ``node.memory_check`` is off.

    Args:
        ranks: ranks on the node to check; default: the fullest node by ``node.ranks_per_node`` and ``job.rank_map``.

    Raises:
        UsageError: the run does not fit; the message has the missing memory and the smallest change that helps.
    """
    limit = node_limits.smallest_limit(config) if config.node.memory_check else None
    if limit is None:
        return
    size, source = limit
    memory = node_limits.run_memory(config)
    layout = config.layout
    stages = [coordinates_of(rank, layout, layout.order).pp for rank in ranks] if ranks is not None else None
    needed = memory.bytes_of_node if stages is None else memory.bytes_of_ranks(stages)
    if needed <= size:
        return
    from fugaku_gpt.planner.trainer.shrink import smallest_change  # ten thousand ranks that fit need not import it

    count = len(stages) if stages is not None else config.ranks_per_node
    if memory.bytes_of_node <= size:  # but not with this number of its ranks on a node
        remedy = f"it would fit with {_ranks_text(config.ranks_per_node)} on a node, as job.nodes has it"
    else:
        change = smallest_change(
            _with_ranks_per_node(config, count), node_limits.run_memory, size, node_limits.has_more_nodes
        )
        remedy = f"the smallest change that fits: {' '.join(set_options(change))}" if change else "no change of it fits"
    raise UsageError(
        f"this run needs {needed // MIB} MiB of a node for {_ranks_text(count)}, of up to "
        f"{memory.bytes_of_rank // MIB} MiB (stage {memory.peak_stage}); there are {size // MIB} MiB ({source}); "
        f"{remedy}; `fugaku-gpt plan memory` shows the parts, --set node.memory_check=false continues all the same"
    )


def set_options(change: Sequence[Tuple[str, str]]) -> List[str]:
    """The change as options ``--set key=value``."""
    return [f"--set {key}={value}" for key, value in change]


def _with_ranks_per_node(config: RunConfig, ranks_per_node: int) -> RunConfig:
    """The run with this number of ranks per node; unchanged if it cannot be divided that way."""
    if ranks_per_node == config.ranks_per_node or config.layout.ranks % ranks_per_node:
        return config
    job = replace(config.job, nodes=config.layout.ranks // ranks_per_node)
    return replace(config, job=job, node=replace(config.node, ranks_per_node=ranks_per_node))


def _ranks_text(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _installed_torch() -> str:
    if sys.modules.get("torch") is not None:  # in a rank: reading metadata would import dozens of modules
        return str(sys.modules["torch"].__version__)
    from importlib import metadata

    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:  # on a login node
        return ""
