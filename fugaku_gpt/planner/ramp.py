"""A growing batch as phases: the nodes, replicas and micro-batch that each batch size can use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import List

from fugaku_gpt.errors import UsageError
from fugaku_gpt.formulas.divisors import divisors_of

_MAX_PHASES = 10_000


@dataclass(frozen=True)
class Phase:
    """Iterations with one global batch.

    Args:
        samples: samples consumed in this phase; 0 in the last phase, which has no end of its own.
    """

    global_batch: int
    nodes: int
    dp: int
    micro_batch: int
    micro_batches: int
    samples: int
    iterations: int


@dataclass(frozen=True)
class BatchRamp:
    """A batch that grows from ``start`` by ``increment`` to ``global_batch``, over ``samples`` samples.

    Args:
        nodes: number of nodes that can be used.
        micro_batch: the largest micro-batch that fits.
        iterations: iterations of the training run; the last phase has those that remain.
    """

    start: int
    increment: int
    samples: int
    global_batch: int
    nodes: int
    ranks_per_node: int
    tp: int
    pp: int
    micro_batch: int
    iterations: int


def ramp_phases(ramp: BatchRamp) -> List[Phase]:
    """The phases of a growing batch.

    Each phase gets as many replicas as divide its batch evenly, and then the largest micro-batch up to ``micro_batch``
    that divides a replica's share and leaves at least as many micro-batches as stages, if there is such a micro-batch.

    Raises:
        UsageError: the sizes do not fit together.
    """
    start, increment, full, ranks_per_node = ramp.start, ramp.increment, ramp.global_batch, ramp.ranks_per_node
    if full < start or (full - start) % increment:
        raise UsageError(f"batch from {start} in steps of {increment} does not reach {full}")
    width = ramp.tp * ramp.pp
    width_text = f"tp {ramp.tp} * pp {ramp.pp} = {width}"
    max_replicas = ramp.nodes * ranks_per_node // width
    if max_replicas < 1:
        raise UsageError(f"{width_text} ranks need more than {ramp.nodes} nodes of {ranks_per_node} ranks")
    steps = (full - start) // increment
    if steps >= _MAX_PHASES:
        raise UsageError(
            f"batch from {start} in steps of {increment} reaches {full} in {steps} steps; "
            f"valid: fewer than {_MAX_PHASES}"
        )
    phases: List[Phase] = []
    consumed = done = 0
    for step in range(steps + 1):
        batch = start + step * increment
        dp = max((d for d in divisors_of(batch) if d <= max_replicas and d * width % ranks_per_node == 0), default=0)
        if not dp:
            raise UsageError(
                f"batch {batch}: no number of replicas that divides it fills whole nodes of {ranks_per_node} ranks "
                f"with {width_text} each; valid: other --start and --increment, or --ranks-per-node 1"
            )
        share = batch // dp
        fitting = [b for b in divisors_of(share) if b <= ramp.micro_batch]
        chosen = max([b for b in fitting if share // b >= ramp.pp] or [min(fitting)])
        last = step == steps
        end = -(-ramp.samples * (step + 1) // steps) if not last else consumed
        count = max(0, -(-(end - consumed) // batch)) if not last else max(0, ramp.iterations - done)
        phases.append(
            Phase(batch, dp * width // ranks_per_node, dp, chosen, share // chosen, 0 if last else count * batch, count)
        )
        consumed += count * batch if not last else 0
        done += count
    return phases
