"""Seconds of an iteration of our own trainer on a machine that ``plan probe`` has measured.

Each chunk of the pipeline costs its matrix products, its passes over memory, an overhead for each layer and the sums
over tensor-parallel ranks, by what the probe says of their shapes; the pipeline's schedule is then run on these times
(``layout/schedule_times.py``). Ranks that have more threads than there are cores cannot be faster than their work
shared out to the cores. Sums over replicas, the optimiser and a constant come once per iteration. A few factors on all
of this, near 1, are fitted to steps of the trainer itself (``local_fitting.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Dict, Mapping, Tuple

import numpy as np

from fugaku_gpt.config.schema import RunConfig
from fugaku_gpt.errors import UsageError
from fugaku_gpt.layout.operations import ALL_REDUCE, SEND
from fugaku_gpt.layout.schedule_times import Timing, simulate
from fugaku_gpt.layout.schedules import schedule
from fugaku_gpt.machine.constants import Constant, Fitted, Machine
from fugaku_gpt.machine.probed import Probed
from fugaku_gpt.planner.intervals import WHOLE, Guess, widths
from fugaku_gpt.planner.trainer.rates import Rates
from fugaku_gpt.planner.trainer.work import StageWork, Tally, chunk_works, message_bytes, stage_work

PARTS = (
    "compute",
    "memory_bound",
    "overhead",
    "tensor_parallel",
    "pipeline",
    "shared_cores",
    "data_parallel",
    "optimiser",
    "fixed",
)
_WORLD_BYTES = 48  # of the one sum over all ranks
# name: (prior, its width in logarithms, meaning)
CONSTANTS: Mapping[str, Tuple[float, float, str]] = {
    "products": (1.0, 0.1, "matrix products, as a multiple of what the probe timed by themselves"),
    "passes": (1.0, 0.2, "passes over memory, as a multiple of what the probe timed by themselves"),
    "overhead": (0.9, 0.4, "of the time of a layer with next to no work, what comes on top of products and passes"),
    "tensor_sums": (1.0, 0.3, "sums over tensor-parallel ranks, as a multiple of what the probe timed"),
    "sends": (1.0, 0.5, "messages between stages, as a multiple of what the probe timed"),
    "exposed": (0.8, 0.3, "sums over replicas that computing does not hide, as a multiple of what the probe timed"),
    "optimiser": (1.0, 0.2, "optimiser, as a multiple of what the probe timed"),
    "shared_cores": (1.0, 0.1, "work of ranks that share cores, as a multiple of that of ranks with their own"),
    "fixed": (0.001, 1.0, "seconds of an iteration whatever its size"),
}


def prior_constants() -> Fitted:
    """The model's constants before any step is seen."""
    constants = tuple(
        Constant(name, meaning, prior, width, prior, width) for name, (prior, width, meaning) in CONSTANTS.items()
    )
    return Fitted(constants, spread=0.05)


@dataclass(frozen=True)
class LocalPrediction:
    """What the model says of a run.

    Attributes:
        seconds: per iteration; ``parts`` of each of :data:`PARTS`, which add up to it.
        extrapolated: what lies outside of what the probe has measured.
    """

    seconds: Guess
    parts: Mapping[str, Guess]
    extrapolated: Tuple[str, ...]


@dataclass(frozen=True)
class _Seconds:
    """Of one pass of one micro-batch through one chunk, before the factors."""

    products: float
    passes: float
    overhead: float
    sums: float

    def computing(self, c: Mapping[str, float]) -> float:
        return c["products"] * self.products + c["passes"] * self.passes + c["overhead"] * self.overhead

    def whole(self, c: Mapping[str, float]) -> float:
        return self.computing(c) + c["tensor_sums"] * self.sums


class RunCost:
    """A run's work in seconds by kind; cheap to ask again with other constants.

    Attributes:
        extrapolated: see :class:`LocalPrediction`; ``distance`` is how far that is.
    """

    def __init__(self, config: RunConfig, probed: Probed) -> None:
        """
        Raises:
            UsageError: the run is for more than one node, or the probe tells too little.
        """
        layout = config.layout
        if config.job.nodes != 1:
            raise UsageError(f"job.nodes: {config.job.nodes}: the local machine's file is of one node; valid: 1")
        self._layout, self._m = layout, config.micro_batches
        self._threads = config.node.threads_per_rank or max(1, probed.cores // layout.ranks)
        config = replace(config, node=replace(config.node, threads_per_rank=self._threads))
        self._crowd = max(1.0, layout.ranks * self._threads / probed.cores)
        self._rates = rates = Rates(probed, layout.ranks, self._threads)
        self._dtype = config.training.dtype
        works = chunk_works(config, rates.has_compiled(self._dtype))
        self._places = [work.chunk.stage for work in works]
        self._forward = [self._seconds(work.forward) for work in works]
        self._backward = [self._seconds(work.backward) for work in works]
        self._weights = [self._seconds(work.weights) for work in works]
        self._send = rates.message(SEND, 2, message_bytes(config)) if layout.pp > 1 else 0.0
        self._schedules = [
            schedule(layout.schedule, stage, layout.pp, self._m, layout.chunks) for stage in range(layout.pp)
        ]
        ends = [self._end(stage_work(config, stage)) for stage in range(layout.pp)]
        self._replicas = max(one[0] for one in ends)
        self._tied = max(one[1] for one in ends)
        self._whole = max(one[2] for one in ends)
        self._optimiser = max(one[3] for one in ends)
        self._world = rates.message(ALL_REDUCE, layout.ranks, _WORLD_BYTES)
        self.extrapolated, self.distance = rates.extrapolated, rates.distance

    def parts(self, c: Mapping[str, float]) -> Dict[str, float]:
        """Seconds of an iteration by part, with these constants."""
        forward = [one.whole(c) for one in self._forward]
        backward = [one.whole(c) for one in self._backward]
        stages = range(self._layout.pp)
        of_stage = [self._of_stage(stage) for stage in stages]
        weights = [one.whole(c) for one in self._weights]
        timing = Timing(forward, backward, c["sends"] * self._send, weights)
        slowest = max(of_stage, key=lambda one: one.whole(c))
        busy = slowest.whole(c)
        makespan = simulate(self._schedules, timing).makespan if self._layout.pp > 1 else busy
        sums = max(c["tensor_sums"] * one.sums for one in of_stage)
        # of all ranks' work each core does its share; waiting for messages takes no core
        mean = sum(one.computing(c) for one in of_stage) / len(of_stage)
        crowd = self._crowd * c["shared_cores"] if self._crowd > 1 else 1.0
        optimiser = c["optimiser"] * self._optimiser
        shared = max(0.0, crowd * mean + sums - makespan) + (crowd - 1) * optimiser if self._crowd > 1 else 0.0
        return {
            "compute": c["products"] * slowest.products,
            "memory_bound": c["passes"] * slowest.passes,
            "overhead": c["overhead"] * slowest.overhead,
            "tensor_parallel": c["tensor_sums"] * (slowest.sums + self._whole),
            "pipeline": makespan - busy + self._tied,
            "shared_cores": shared,
            "data_parallel": c["exposed"] * self._replicas,
            "optimiser": optimiser,
            "fixed": c["fixed"] * self._crowd + self._world,
        }

    def seconds(self, c: Mapping[str, float]) -> float:
        """Of an iteration."""
        return sum(self.parts(c).values())

    def _of_stage(self, stage: int) -> _Seconds:
        """A stage's work in an iteration."""
        mine = [place for place, its in enumerate(self._places) if its == stage]
        passes = [row[place] for row in (self._forward, self._backward) for place in mine]
        return _Seconds(
            *(
                self._m * sum(getattr(one, name) for one in passes)
                for name in ("products", "passes", "overhead", "sums")
            )
        )

    def _seconds(self, tally: Tally) -> _Seconds:
        rates, dtype = self._rates, self._dtype
        overhead = tally.layers * rates.overhead(dtype, False) if tally.layers else 0.0
        overhead += tally.layers_back * rates.overhead(dtype, True) if tally.layers_back else 0.0
        return _Seconds(
            products=sum(count * rates.product(dtype, *shape) for shape, count in tally.products.items()),
            passes=sum(count * rates.over(dtype, *key) for key, count in tally.passes.items()),
            overhead=overhead,
            sums=sum(
                count * rates.message(operation, self._layout.tp, size)
                for (operation, size), count in tally.messages.items()
            ),
        )

    def _end(self, work: StageWork) -> Tuple[float, float, float, float]:
        """Seconds of sums over replicas, of the token embedding's, of those over tensor-parallel ranks, and of the
        optimiser."""
        rates, layout = self._rates, self._layout
        replicas = sum(rates.message(operation, layout.dp, size) for operation, size in work.replicas)
        tied = rates.message(ALL_REDUCE, 2, work.tied) if layout.pp > 1 else 0.0
        whole = rates.message(ALL_REDUCE, layout.tp, work.whole)
        passes = sum(count * rates.over(self._dtype, *key) for key, count in work.passes.passes.items())
        return replicas, tied, whole, passes


def predict_run(config: RunConfig, machine: Machine) -> LocalPrediction:
    """Seconds per iteration and of each part, with 80 % intervals, on a probed machine.

    Raises:
        UsageError: the machine's file has no section ``probed``, or it tells too little of this run.
    """
    if machine.probed is None:
        raise UsageError(f"machine {machine.name}: its file is not of `plan probe`; valid: a file that is, or local")
    cost = RunCost(config, machine.probed)
    fitted = machine.time
    parts = cost.parts(fitted.values)

    def parts_of(constants: Mapping[str, float]) -> "Dict[str, np.ndarray]":
        return {name: np.array(part) for name, part in cost.parts(constants).items()}

    reach = widths(parts_of, fitted, cost.distance)
    return LocalPrediction(
        seconds=Guess.around(sum(parts.values()), float(reach[WHOLE])),
        parts={name: Guess.around(value, float(reach[name])) for name, value in parts.items()},
        extrapolated=cost.extrapolated,
    )


def probe_spread(probed: Probed) -> float:
    """Spread of one figure of the probe: the median of those of its products and steps."""
    found = sorted([one.spread for one in probed.products] + [one.spread for one in probed.steps])
    return found[len(found) // 2] if found else 0.0


def measured_flops(probed: Probed) -> float:
    """FLOP/s of all cores: the best rate of a product of any type, times the ranks that made it at once."""
    return max(one.ranks * one.flops / one.seconds for one in probed.products)
