"""Seconds of an iteration of our own trainer on a machine that ``plan probe`` has measured.

Each chunk of the pipeline costs its matrix products, its passes over memory, an overhead for each layer and the sums
over tensor-parallel ranks, at the rates that the probe has measured for their shapes; the pipeline's schedule is then
simulated with these times (``layout/schedule_times.py``). If ranks have more threads than there are cores, they cannot
be faster than their total work divided by the cores. Sums over replicas, the optimiser and a constant occur once per
iteration. A few factors on all of this, close to 1, are fitted to steps of the trainer
(``planner/trainer/fitting.py``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Dict, Mapping, Tuple

import numpy as np

from fugaku_gpt.config.schema import RunConfig
from fugaku_gpt.errors import UsageError
from fugaku_gpt.layout.operations import ALL_REDUCE, SEND
from fugaku_gpt.layout.schedule_times import Timing, simulate
from fugaku_gpt.layout.schedules import schedule
from fugaku_gpt.machine.constants import Constant, FittedModel, Machine
from fugaku_gpt.machine.probed import ProbeResults
from fugaku_gpt.planner.extrapolation import SETTING_DISTANCE
from fugaku_gpt.planner.intervals import TOTAL, Estimate, log_widths
from fugaku_gpt.planner.trainer.rates import ProbeRates
from fugaku_gpt.planner.trainer.work import StageWork, Tally, count_chunk_work, count_stage_work, message_bytes

TIME_COMPONENTS = (
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
_GRIDS = (
    "model.kind grid_classifier: the probe has timed a decoder; attention of all cells counts as twice a causal one, "
    "and padding like other cells"
)
_WORLD_BYTES = 48  # bytes of the single sum over all ranks
# name: (prior, its width in logarithms, meaning)
CONSTANTS: Mapping[str, Tuple[float, float, str]] = {
    "products": (1.0, 0.1, "matrix products, as a multiple of what the probe timed by themselves"),
    "passes": (1.0, 0.2, "passes over memory, as a multiple of what the probe timed by themselves"),
    "overhead": (0.9, 0.4, "share of the time of a layer with next to no work that is added to products and passes"),
    "tensor_sums": (1.0, 0.3, "sums over tensor-parallel ranks, as a multiple of what the probe timed"),
    "sends": (1.0, 0.5, "messages between stages, as a multiple of what the probe timed"),
    "exposed": (0.8, 0.3, "sums over replicas that computing does not hide, as a multiple of what the probe timed"),
    "optimiser": (1.0, 0.2, "optimiser, as a multiple of what the probe timed"),
    "shared_cores": (1.0, 0.1, "work of ranks that share cores, as a multiple of that of ranks with their own"),
    "fixed": (0.001, 1.0, "seconds of an iteration whatever its size"),
}


def prior_constants() -> FittedModel:
    """The model's constants before it is fitted to any step."""
    constants = tuple(
        Constant(name, meaning, prior, width, prior, width) for name, (prior, width, meaning) in CONSTANTS.items()
    )
    return FittedModel(constants, spread=0.05)


@dataclass(frozen=True)
class LocalPrediction:
    """The predicted time of a run.

    Attributes:
        seconds: seconds per iteration; ``components`` has each of :data:`TIME_COMPONENTS`, which add up to it.
        extrapolated: the sizes and settings that the probe has not measured.
    """

    seconds: Estimate
    components: Mapping[str, Estimate]
    extrapolated: Tuple[str, ...]


@dataclass(frozen=True)
class _PassSeconds:
    """Seconds of one pass of one micro-batch through one chunk, before the factors."""

    products: float
    passes: float
    overhead: float
    sums: float

    def computing(self, c: Mapping[str, float]) -> float:
        return c["products"] * self.products + c["passes"] * self.passes + c["overhead"] * self.overhead

    def total(self, c: Mapping[str, float]) -> float:
        return self.computing(c) + c["tensor_sums"] * self.sums


class RunCost:
    """A run's work in seconds by kind, which is cheap to evaluate again with other constants.

    Attributes:
        extrapolated: see :class:`LocalPrediction`; ``distance`` is the distance from the measured sizes.
    """

    def __init__(self, config: RunConfig, probed: ProbeResults) -> None:
        """Counts the work of a run and looks up its rates.

        Raises:
            UsageError: the run is for more than one node, or the probe lacks an operation.
        """
        layout = config.layout
        if config.job.nodes != 1:
            raise UsageError(f"job.nodes: {config.job.nodes}: the local machine's file describes one node; valid: 1")
        self._layout, self._micro_batches, self._kv_copies = layout, config.micro_batches, config.kv_copies
        self._threads = config.node.threads_per_rank or max(1, probed.cores // layout.ranks)
        config = replace(config, node=replace(config.node, threads_per_rank=self._threads))
        self._oversubscription = max(1.0, layout.ranks * self._threads / probed.cores)
        self._rates = rates = ProbeRates(probed, layout.ranks, self._threads)
        self._dtype = config.training.dtype
        works = count_chunk_work(config, rates.has_compiled(self._dtype))
        self._stage_of_chunk = [work.chunk.stage for work in works]
        self._forward = [self._tally_seconds(work.forward) for work in works]
        self._backward = [self._tally_seconds(work.backward) for work in works]
        self._weights = [self._tally_seconds(work.weights) for work in works]
        self._send = rates.message(SEND, 2, message_bytes(config)) if layout.pp > 1 else 0.0
        self._schedules = [
            schedule(layout.schedule, stage, layout.pp, self._micro_batches, layout.chunks)
            for stage in range(layout.pp)
        ]
        ends = [self._end_seconds(count_stage_work(config, stage)) for stage in range(layout.pp)]
        self._replicas = max(end[0] for end in ends)
        self._tied = max(end[1] for end in ends)
        self._replicated = max(end[2] for end in ends)
        self._optimiser = max(end[3] for end in ends)
        self._world = rates.message(ALL_REDUCE, layout.ranks, _WORLD_BYTES)
        self.extrapolated, self.distance = rates.extrapolated, rates.distance
        if config.model.is_grid_classifier:
            self.extrapolated = (*self.extrapolated, _GRIDS)
            self.distance = math.hypot(self.distance, SETTING_DISTANCE)

    def seconds_by_component(self, c: Mapping[str, float]) -> Dict[str, float]:
        """Seconds of an iteration by component, with these constants."""
        forward = [chunk.total(c) for chunk in self._forward]
        backward = [chunk.total(c) for chunk in self._backward]
        stages = range(self._layout.pp)
        by_stage = [self._stage_seconds(stage) for stage in stages]
        weights = [chunk.total(c) for chunk in self._weights]
        timing = Timing(forward, backward, c["sends"] * self._send, weights)
        slowest = max(by_stage, key=lambda stage: stage.total(c))
        busy = slowest.total(c)
        makespan = simulate(self._schedules, timing).makespan if self._layout.pp > 1 else busy
        sums = max(c["tensor_sums"] * stage.sums for stage in by_stage)
        # each core does its share of all ranks' work; waiting for messages takes no core
        mean = sum(stage.computing(c) for stage in by_stage) / len(by_stage)
        oversubscription = self._oversubscription * c["shared_cores"] if self._oversubscription > 1 else 1.0
        optimiser = c["optimiser"] * self._optimiser
        shared = (
            max(0.0, oversubscription * mean + sums - makespan) + (oversubscription - 1) * optimiser
            if self._oversubscription > 1
            else 0.0
        )
        return {
            "compute": c["products"] * slowest.products,
            "memory_bound": c["passes"] * slowest.passes,
            "overhead": c["overhead"] * slowest.overhead,
            "tensor_parallel": c["tensor_sums"] * (slowest.sums + self._replicated),
            "pipeline": makespan - busy + self._tied,
            "shared_cores": shared,
            "data_parallel": c["exposed"] * self._replicas,
            "optimiser": optimiser,
            "fixed": c["fixed"] * self._oversubscription + self._world,
        }

    def seconds(self, c: Mapping[str, float]) -> float:
        """Seconds of an iteration, with these constants."""
        return sum(self.seconds_by_component(c).values())

    def _stage_seconds(self, stage: int) -> _PassSeconds:
        """A stage's work in an iteration."""
        chunk_indices = [index for index, chunk_stage in enumerate(self._stage_of_chunk) if chunk_stage == stage]
        passes = [chunk_passes[index] for chunk_passes in (self._forward, self._backward) for index in chunk_indices]
        return _PassSeconds(
            *(
                self._micro_batches * sum(getattr(chunk_pass, name) for chunk_pass in passes)
                for name in ("products", "passes", "overhead", "sums")
            )
        )

    def _tally_seconds(self, tally: Tally) -> _PassSeconds:
        rates, dtype = self._rates, self._dtype
        overhead = tally.layers * rates.overhead(dtype, False) if tally.layers else 0.0
        overhead += tally.layers_back * rates.overhead(dtype, True) if tally.layers_back else 0.0
        return _PassSeconds(
            products=sum(count * rates.product(dtype, *shape) for shape, count in tally.products.items()),
            passes=sum(count * rates.elementwise(dtype, *key) for key, count in tally.passes.items()),
            overhead=overhead,
            sums=sum(
                count * rates.message(operation, self._layout.tp, size)
                for (operation, size), count in tally.messages.items()
            ),
        )

    def _end_seconds(self, work: StageWork) -> Tuple[float, float, float, float]:
        """Seconds of sums over replicas, of the token embedding's sum, of sums over tensor-parallel ranks, and of the
        optimiser."""
        rates, layout = self._rates, self._layout
        replicas = sum(rates.message(operation, layout.dp, size) for operation, size in work.replicas)
        tied = rates.message(ALL_REDUCE, 2, work.tied_bytes) if layout.pp > 1 else 0.0
        replicated = rates.message(ALL_REDUCE, layout.tp, work.replicated_bytes)
        replicated += rates.message(ALL_REDUCE, self._kv_copies, work.copied_bytes)
        passes = sum(count * rates.elementwise(self._dtype, *key) for key, count in work.passes.passes.items())
        return replicas, tied, replicated, passes


def predict_run(config: RunConfig, machine: Machine) -> LocalPrediction:
    """Seconds per iteration and of each component, with 80 % intervals, on a probed machine.

    Raises:
        UsageError: the machine's file has no section ``probed``, or the section lacks an operation of this run.
    """
    if machine.probed is None:
        raise UsageError(f"machine {machine.name}: its file is not from `plan probe`; valid: a file that is, or local")
    cost = RunCost(config, machine.probed)
    fitted = machine.time
    components = cost.seconds_by_component(fitted.values)

    def component_seconds(constants: Mapping[str, float]) -> "Dict[str, np.ndarray]":
        return {name: np.array(seconds) for name, seconds in cost.seconds_by_component(constants).items()}

    deviations = log_widths(component_seconds, fitted, cost.distance)
    return LocalPrediction(
        seconds=Estimate.from_log_width(sum(components.values()), float(deviations[TOTAL])),
        components={
            name: Estimate.from_log_width(value, float(deviations[name])) for name, value in components.items()
        },
        extrapolated=cost.extrapolated,
    )


def probe_spread(probed: ProbeResults) -> float:
    """Spread of a figure of the probe: the median over its products and steps."""
    spreads = sorted([product.spread for product in probed.products] + [step.spread for step in probed.steps])
    return spreads[len(spreads) // 2] if spreads else 0.0


def measured_flops(probed: ProbeResults) -> float:
    """FLOP/s of all cores: the best rate of a product of any type, times the ranks that measured it at once."""
    return max(product.ranks * product.flops / product.seconds for product in probed.products)
