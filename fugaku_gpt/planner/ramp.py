"""A growing batch as phases: how many nodes, replicas and which micro-batch each size can use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import List

from fugaku_gpt.errors import UsageError


@dataclass(frozen=True)
class Phase:
    """Iterations of one global batch.

    Args:
        samples: consumed in this phase; the last one's are without end, and given as 0.
    """

    global_batch: int
    nodes: int
    dp: int
    micro_batch: int
    micro_batches: int
    samples: int
    iterations: int


def phases(
    *,
    start: int,
    increment: int,
    samples: int,
    full: int,
    nodes: int,
    ranks_per_node: int,
    tp: int,
    pp: int,
    micro_batch: int,
    iterations: int,
) -> List[Phase]:
    """The phases of a batch that grows from ``start`` by ``increment`` to ``full``, over ``samples`` samples.

    Each phase gets the most replicas whose share of its batch is whole, and then the largest micro-batch up to
    ``micro_batch`` that divides that share and leaves at least as many micro-batches as stages, where there are any.

    Args:
        nodes: that there are.
        iterations: of the whole training, which the last phase fills up.

    Raises:
        UsageError: the sizes do not fit together.
    """
    if full < start or (full - start) % increment:
        raise UsageError(f"batch from {start} in steps of {increment} does not come to {full}")
    width = tp * pp
    most = nodes * ranks_per_node // width
    if most < 1:
        raise UsageError(f"tp {tp} * pp {pp} = {width} ranks need more than {nodes} nodes of {ranks_per_node} ranks")
    steps = (full - start) // increment
    found: List[Phase] = []
    consumed = done = 0
    for step in range(steps + 1):
        batch = start + step * increment
        dp = max(d for d in range(1, min(most, batch) + 1) if batch % d == 0 and d * width % ranks_per_node == 0)
        share = batch // dp
        fitting = [b for b in range(1, min(micro_batch, share) + 1) if share % b == 0]
        chosen = max([b for b in fitting if share // b >= pp] or [min(fitting)])
        last = step == steps
        end = -(-samples * (step + 1) // steps) if not last else consumed
        count = max(0, -(-(end - consumed) // batch)) if not last else max(0, iterations - done)
        found.append(
            Phase(batch, dp * width // ranks_per_node, dp, chosen, share // chosen, 0 if last else count * batch, count)
        )
        consumed += count * batch if not last else 0
        done += count
    return found
