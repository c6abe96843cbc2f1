"""Fugaku's nodes: facts that job scripts and checks need.

Sources: user guide 1.52, chapters PowerControlFunction and UsageRules; the help desk's monthly briefings of 2025-04 and
2025-09.
"""

from __future__ import annotations

from typing import Dict

from fugaku_gpt.config.schema import POWER_KNOBS, NodeConfig

CORES = 48  # compute cores of a node, in four core-memory groups of 12
RETENTION_LIMIT = 9216  # nodes; on more, retention_state is fixed at 0
TORUS_ABOVE = 384  # nodes; larger tori are allocated in whole shelves
TOFU_UNIT = (2, 3, 2)  # nodes; a torus of up to TORUS_ABOVE nodes is allocated in these units
SHELF = (2, 3, 8)  # nodes; a larger torus is allocated in these units
LONGEST_SIDES = (48, 48, 69)  # nodes, of the whole machine: 24 x 23 x 24 Tofu units
VECTOR_BYTES = 64  # of an SVE register
JOB_BYTES = 30_739_333_120  # of a node's memory that a job can ask for
TEMPORARY_BYTES = 87 * 2**30 - 128 * 2**20  # of a node, for localtmp and sharedtmp together


def power_knobs(node: NodeConfig, nodes: int) -> Dict[str, int]:
    """All power knobs of a job by PJM's names, for ``-L``: requested values, else the defaults since April 2025.

    Clock and eco state depend on each other: the legal pairs are 2000 MHz with 0 (both pipes) or 2 (one pipe), and 2200
    MHz with 2. If one of them is set, the other follows; if neither is, the default is 2200 MHz with 2. On more than
    ``RETENTION_LIMIT`` nodes no core sleeps.

    Args:
        nodes: number of nodes of the job.
    """
    requested = {knob.resource: getattr(node, knob.name) for knob in POWER_KNOBS}
    defaults = {knob.resource: knob.default for knob in POWER_KNOBS}
    if node.eco_state in (0, 1):
        defaults["freq"] = 2000
    if node.freq_mhz == 2000:
        defaults["eco_state"] = 0
    if nodes > RETENTION_LIMIT:
        defaults["retention_state"] = 0
    return {name: default if requested[name] is None else requested[name] for name, default in defaults.items()}
