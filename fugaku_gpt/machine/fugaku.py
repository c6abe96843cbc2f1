"""Fugaku's nodes: facts that job scripts and checks need.

Sources: user guide 1.52, chapters PowerControlFunction and UsageRules; the help desk's monthly briefings of 2025-04 and
2025-09; A64FX Microarchitecture Manual 1.8 for the processor. The sizes of its caches and of their lines are in
``kernels/source/gemm_sizes.h``, whose blocks depend on them.
"""

from __future__ import annotations

import itertools
import math
from typing import Dict, Sequence, Tuple

from fugaku_gpt.config.schema import POWER_KNOBS, NodeConfig

CORES = 48  # compute cores of a node
GROUPS = 4  # core-memory groups of a node, each with an L2 cache and memory of its own
GROUP_CORES = CORES // GROUPS
GROUP_BANDWIDTH = 256e9  # bytes/s of a group's memory (HBM2)
RETENTION_LIMIT = 9216  # nodes; on more, retention_state is fixed at 0
TORUS_ABOVE = 384  # nodes; larger tori are allocated in whole shelves
TOFU_UNIT = (2, 3, 2)  # nodes; a torus of up to TORUS_ABOVE nodes is allocated in these units
SHELF = (2, 3, 8)  # nodes; a larger torus is allocated in these units
LONGEST_SIDES = (48, 48, 69)  # nodes, of the whole machine: 24 x 23 x 24 Tofu units
VECTOR_BYTES = 64  # of an SVE register
COMPILER_OPTIONS = ("-mcpu=a64fx", f"-msve-vector-bits={8 * VECTOR_BYTES}")  # of GCC and Clang, for the processor
PIPES = 2  # floating-point pipes of a core
ONE_PIPE_STATES = (1, 2)  # values of eco_state that leave a core one of its two floating-point pipes
JOB_BYTES = 30_739_333_120  # of a node's memory that a job can ask for
NODE_TEMPORARY_BYTES = 87 * 2**30  # of a node's disk for temporary files
TEMPORARY_BYTES = NODE_TEMPORARY_BYTES - 128 * 2**20  # of them, for localtmp and sharedtmp together by the guide


def site_power_knobs(nodes: int) -> Dict[str, int]:
    """The power knobs, by PJM's names, of a job that asks for none: the defaults since April 2025, 2200 MHz with one
    floating-point pipe (``eco_state`` 2).

    Args:
        nodes: number of nodes of the job. On more than ``RETENTION_LIMIT`` no core sleeps.
    """
    knobs = {knob.resource: int(knob.default) for knob in POWER_KNOBS}
    if nodes > RETENTION_LIMIT:
        knobs["retention_state"] = 0
    return knobs


def power_knobs(node: NodeConfig, nodes: int) -> Dict[str, int]:
    """All power knobs of a job by PJM's names, for ``-L``: requested values, else the site's defaults.

    Clock and eco state depend on each other: the legal pairs are 2000 MHz with 0 (both pipes) or 2 (one pipe), and 2200
    MHz with 2. If one of them is set, the other follows. If neither is, it is 2000 MHz with both pipes: at the site's
    default, a node has little more than half of that peak (:func:`peak_flops`).

    Args:
        nodes: number of nodes of the job.
    """
    requested = {knob.resource: getattr(node, knob.name) for knob in POWER_KNOBS}
    defaults = site_power_knobs(nodes)
    is_unset = node.freq_mhz is None and node.eco_state is None
    if is_unset or node.eco_state in (0, 1):
        defaults["freq"] = 2000
    if is_unset or node.freq_mhz == 2000:
        defaults["eco_state"] = 0
    return {name: default if requested[name] is None else requested[name] for name, default in defaults.items()}


def allocated_nodes(dims: Sequence[int], is_torus: bool, is_io_exclusive: bool = False) -> int:
    """The nodes that Fugaku allocates for a shape, and bills: those of :func:`allocated_shape`."""
    return math.prod(allocated_shape(dims, is_torus, is_io_exclusive))


def allocated_shape(dims: Sequence[int], is_torus: bool, is_io_exclusive: bool = False) -> Tuple[int, ...]:
    """The shape that Fugaku allocates for another (user guide, UsageRules): whole units for a torus, which every job of
    more than ``TORUS_ABOVE`` nodes is; otherwise the one that was asked for.

    Each side of a box is rounded up to the unit's, in the orientation that wastes least. A shape of one or two axes may
    be folded, so its number of nodes is rounded up.

    Args:
        dims: sides of the shape in nodes, or the number of nodes alone.
        is_torus: whether a torus is asked for, or the resource group has nothing else.
        is_io_exclusive: whether no I/O node is shared with another job.
    """
    nodes = math.prod(dims)
    if nodes <= TORUS_ABOVE and not is_torus:
        return tuple(dims)
    unit = allocation_unit(nodes, is_io_exclusive)
    if len(dims) < 3:
        size = math.prod(unit)
        return (-(-nodes // size) * size,)
    boxes = (
        tuple(-(-side // least) * least for side, least in zip(dims, order)) for order in itertools.permutations(unit)
    )
    return min(boxes, key=math.prod)


def allocation_unit(nodes: int, is_io_exclusive: bool = False) -> Tuple[int, int, int]:
    """The shape of the units in which a torus of this many nodes is allocated."""
    return SHELF if nodes > TORUS_ABOVE or is_io_exclusive else TOFU_UNIT


def peak_flops(freq_mhz: int, eco_state: int) -> float:
    """Float32 FLOP/s of a node: its cores, each with a fused multiply-add of 16 numbers per pipe and cycle, and two
    pipes, or one in eco states 1 and 2 (A64FX Microarchitecture Manual 1.8, 2.2; user guide, PowerControlFunction)."""
    pipes = 1 if eco_state in ONE_PIPE_STATES else PIPES
    return CORES * (VECTOR_BYTES / 4) * 2 * pipes * freq_mhz * 1e6
