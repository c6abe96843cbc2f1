"""The search of the fastest layouts of a run, as a user asks for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Callable, List, Optional, Sequence, Tuple

from fugaku_gpt.config.grid_checks import require_decoder
from fugaku_gpt.config.schema import RunConfig
from fugaku_gpt.errors import UsageError
from fugaku_gpt.machine.constants import Machine
from fugaku_gpt.machine.fugaku import CORES
from fugaku_gpt.planner.search.best import RankedLayout, best_layouts
from fugaku_gpt.planner.search.constraints import batches_of, parsed, rules_of
from fugaku_gpt.planner.search.topology import CostedLayouts, SearchSpace, measured_range_rules, search_layouts
from fugaku_gpt.planner.trainer.node_limits import hardware_node_limits

BOTH, ROWS, OURS = FITS = ("both", "rows", "ours")
_RANKS_PER_NODE = (1, 2, 4)  # on a node without devices: one rank, one for each half, or one for each core-memory group


@dataclass(frozen=True)
class TopologyRequest:
    """The layouts among which the fastest are searched.

    Attributes:
        nodes: number of nodes; None where ``max_nodes`` is given.
        max_nodes: largest number of nodes; None where ``nodes`` is given.
        ranks_per_node: numbers of ranks on a node to choose from; empty for 1, 2 and 4, on GPUs one for each.
        batches: global batches, or ranges of them such as 1920-2048; empty for the run's.
        constraints: conditions that layouts must meet, such as ``GBS % 32 == 0 and TP <= 8``.
        fit: the estimate of memory that must fit: one of ``FITS``.
        measured: whether only layouts are kept whose inputs all lie within the measured rows.
        variants: whether all layouts are returned, not only the fastest for each nodes, ranks, DP, TP and PP.
        top: number of layouts that are returned.
    """

    nodes: Optional[int] = None
    max_nodes: Optional[int] = None
    ranks_per_node: Tuple[int, ...] = ()
    batches: Tuple[str, ...] = ()
    constraints: Tuple[str, ...] = ()
    fit: str = BOTH
    measured: bool = False
    variants: bool = False
    top: int = 10

    def check(self) -> None:
        """Check what needs no run.

        Raises:
            UsageError: neither or both of ``nodes`` and ``max_nodes`` are given, or ``fit`` is none of ``FITS``.
        """
        if (self.nodes is None) == (self.max_nodes is None):
            raise UsageError("give one of --nodes or --max-nodes")
        if self.fit not in FITS:
            raise UsageError(f"--fit {self.fit}: valid: {', '.join(FITS)}")


@dataclass(frozen=True)
class TopologyPlan:
    """The layouts that were found.

    Attributes:
        best: the fastest layouts that fit, the fastest first.
        space: what was searched.
        layouts: all layouts, with their times.
        has_rules: whether conditions were to be met.
        dropped: number of faster layouts that this trainer's memory rules out.
    """

    best: Tuple[RankedLayout, ...]
    space: SearchSpace
    layouts: CostedLayouts
    has_rules: bool = False
    dropped: int = 0

    @property
    def summary(self) -> str:
        """How many layouts there are, and how many fit."""
        meeting = " meet the constraints" if self.has_rules else ""
        return f"{len(self.layouts.seconds)} layouts{meeting}, {self.layouts.fits.sum()} fit by mem_rows"

    @property
    def failure(self) -> str:
        """Why there is no layout; empty if there is one."""
        if len(self.layouts.ranking):
            return ""
        condition = "fits" if len(self.layouts.seconds) else "is valid"
        return f"no layout {condition}: other nodes or global batch, or fewer constraints"


def require_searchable(name: str, machine: Machine) -> None:
    """Refuse a machine without a model of measured rows; ``name`` is as it was given.

    Raises:
        UsageError: the machine is a probed or a counted one.
    """
    if machine.probed is not None:
        raise UsageError(f"--machine {name}: layouts are searched with models of measured rows; see plan time for this")
    if machine.counted is not None:
        raise UsageError(f"--machine {name}: layouts are searched with models of measured rows; valid: {machine.base}")


def with_searched_clock(config: RunConfig, machine: Machine) -> Tuple[RunConfig, List[str]]:
    """The run with the clock and pipes that its job gets where it sets neither, with which most rows ran, and a note.

    Raises:
        UsageError: the run is not of a decoder.
    """
    require_decoder(config, "the time of its layouts")
    node = config.node
    if machine.name != "a64fx" or node.freq_mhz is not None or node.eco_state is not None:
        return config, []
    note = "node.freq_mhz is not set: planned and written at 2000 MHz with both pipes, as most rows ran"
    return replace(config, node=replace(node, freq_mhz=2000, eco_state=0)), [note]


def plan_topology(
    config: RunConfig,
    machine: Machine,
    request: TopologyRequest,
    hardware: Optional[str] = None,
    torch: str = "",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> TopologyPlan:
    """Search the fastest layouts of a run among all that fit.

    Args:
        hardware: kind of the machine's hardware; default: its first.
        torch: the PyTorch build, such as 1.10, where the machine's rows distinguish builds.
        on_progress: called with the number of layouts that have been costed, and of all.

    Raises:
        UsageError: the request is not valid, or none of the fastest layouts fits this trainer. That no layout fits at
            all is no error: see ``TopologyPlan.failure``.
    """
    request.check()
    expressions = parsed(request.constraints)
    batches = batches_of(request.batches, config.training.global_batch, expressions)
    space = _search_space(config, machine, request, hardware or next(iter(machine.hardware)), torch, batches)
    rules = [*rules_of(expressions), *(measured_range_rules(machine.time) if request.measured else ())]
    layouts = search_layouts(space, rules, request.fit == OURS, on_progress)
    if not len(layouts.ranking):
        return TopologyPlan((), space, layouts, bool(rules))
    our_memory = _our_memory(space) if request.fit != ROWS else None
    best, dropped = best_layouts(space, layouts, request.top, request.variants, our_memory)
    if not best:
        raise UsageError(f"none of the {dropped} fastest layouts fits this trainer; see plan memory; add a constraint")
    return TopologyPlan(tuple(best), space, layouts, bool(rules), dropped)


def _search_space(
    config: RunConfig,
    machine: Machine,
    request: TopologyRequest,
    hardware: str,
    torch: str,
    batches: Sequence[int],
) -> SearchSpace:
    ranks_per_node = request.ranks_per_node
    if not machine.has_hardware(hardware):
        raise UsageError(f"--hardware {hardware}: machine {machine.name} has {', '.join(machine.hardware)}")
    devices = int(machine.facts["devices_per_node"])
    default_counts, largest_count = ((devices,), devices) if devices > 1 else (_RANKS_PER_NODE, CORES)
    if ranks_per_node and max(ranks_per_node) > largest_count:
        unit = "devices" if devices > 1 else "cores"
        raise UsageError(f"--ranks-per-node {max(ranks_per_node)}: a node of {machine.name} has {largest_count} {unit}")
    nodes = (request.nodes, request.nodes) if request.nodes is not None else (1, request.max_nodes or 1)
    return SearchSpace(config, machine, hardware, torch, nodes, ranks_per_node or default_counts, tuple(batches))


def _our_memory(space: SearchSpace) -> Optional[Callable[[RunConfig], Tuple[int, bool]]]:
    """Return a function that predicts this trainer's memory on a run's fullest node [bytes] and whether it fits.

    Returns None for a machine whose memory is that of GPUs, for which the trainer has no code.
    """
    if space.machine.memory_of != "node":
        return None
    node = hardware_node_limits(space.machine, space.hardware)

    def check_fit(config: RunConfig) -> Tuple[int, bool]:
        needed, limit = node.run_memory(config).bytes_of_node, node.smallest_limit(config)
        return needed, limit is None or needed <= limit[0]

    return check_fit
