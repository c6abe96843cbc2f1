"""Memory of configurations as the tables measure it, from the counted work and a machine's constants.

There are two figures: the reading in the tables (of a rank of the first stage, or of a node of such ranks), and the
highest memory of all stages, which decides whether the run fits. The last stage holds few micro-batches but the logits,
so an accelerator can run out of memory there while the reading on the first stage looks safe.
"""

from __future__ import annotations

from typing import Mapping, Optional, Tuple

import numpy as np

from fugaku_gpt.machine.constants import UNIT_BYTES
from fugaku_gpt.planner.tables.work import Work

# constants that every machine's file has; some files have others
MEMORY_CONSTANTS = (
    "weight_bytes",
    "state_bytes",
    "activations",
    "scores",
    "pipeline_copies",
    "logit_bytes",
    "base",
)


def unit_of(text: str, default: str) -> Optional[str]:
    """The unit at the beginning of a text such as ``MiB (node)``; None if it is not known."""
    unit = (text.split() or [default])[0]
    return unit if unit in UNIT_BYTES else None


def footprint(
    work: Work, constants: Mapping[str, float], facts: Mapping[str, float], unit: str, of_node: bool
) -> Tuple["np.ndarray", "np.ndarray"]:
    """Memory [N] in a reading, and memory [N] of the fullest stage, in ``unit``."""
    c = constants
    item = facts["item_bytes"]
    shards = np.where(work.sharded > 0, work.replicas, 1.0)
    per_weight = (
        c["weight_bytes"] + c["state_bytes"] / shards + np.where(work.sharded > 0, 0.0, c.get("flat_bytes", 0.0))
    )
    weights = per_weight * (work.layers_per_stage * work.layer_weights + work.embedding_weights)

    build = np.array([c.get(f"build_{build}", 1.0) for build in work.builds])
    layer = item * c["activations"] * build * (work.saved_elements + c["scores"] * work.saved_scores)
    hidden = item * work.hidden_elements
    recompute, single_stage = work.recompute > 0, work.stages == 1
    of_micro_batch = work.layers_per_stage * np.where(recompute, hidden, layer)
    of_micro_batch = of_micro_batch + np.where(single_stage, 0.0, c["pipeline_copies"] * hidden)
    live = np.where(recompute, layer, 0.0)  # the layer that is being recomputed
    head = c["logit_bytes"] * work.logits
    # interleaving holds (p - 1) / v micro-batches more (Korthikanti et al. 2022, section 4.2.3)
    more = np.where(work.chunks > 1, (work.stages - 1) / work.chunks, 0.0)
    in_flight = np.minimum(work.stages + more, work.micro_batches)

    allocator = np.where(work.tcmalloc > 0, c.get("tcmalloc", 1.0), 1.0)
    base = c["base"] + np.where(work.ranks > 1, c.get("communication", 0.0), 0.0)
    ranks = work.ranks_per_node if of_node else 1.0

    def reading(rank_bytes: "np.ndarray") -> "np.ndarray":
        total: "np.ndarray" = (rank_bytes * allocator / UNIT_BYTES[unit] + base) * ranks + c.get("system", 0.0)
        return total

    first = weights + in_flight * of_micro_batch + live + np.where(single_stage, head, 0.0)
    last = weights + of_micro_batch + live + head
    return reading(first), reading(np.maximum(first, last))
