"""Seconds of an iteration of our own trainer on one node, from counted cycles and bytes; nothing of it is measured.

The operations of a rank (``planner/trainer/work.py``) add up by component, each with the seconds of its cores and of
its memory (``planner/trainer/operation_times.py``); the slowest stage of a pipeline counts, with its waits for the
others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from fugaku_gpt.config.schema import RunConfig
from fugaku_gpt.errors import UsageError
from fugaku_gpt.formulas.flops import exact_flops, notes_flops
from fugaku_gpt.layout.operations import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, SEND
from fugaku_gpt.layout.schedule_times import Timing, simulate
from fugaku_gpt.layout.schedules import schedule
from fugaku_gpt.machine.constants import Machine
from fugaku_gpt.machine.counted import LOSS_OF_COLUMNS, CountedCycles
from fugaku_gpt.machine.fugaku import ONE_PIPE_STATES, PIPES, peak_flops, power_knobs
from fugaku_gpt.machine.probed import COMPILED_ATTENTION, INPUT, LINEAR, WEIGHT
from fugaku_gpt.planner.trainer.operation_times import TRAFFIC, OperationTimes, Work
from fugaku_gpt.planner.trainer.work import Tally, count_chunk_work, count_stage_work, message_bytes

PRODUCTS, ATTENTION_PART, ELEMENTWISE = "products", "attention", "elementwise"
OPTIMISER, COMMUNICATION, PIPELINE = "optimiser", "communication", "pipeline"
ITERATION = "iteration"
COMPONENTS = (PRODUCTS, ATTENTION_PART, ELEMENTWISE, OPTIMISER, COMMUNICATION, PIPELINE)
_NOT_COUNTED = (
    "misses of the L1 cache and waits for memory within a kernel, barriers of threads, calls of Python and PyTorch, "
    "page faults, MPI's own work, other ranks' traffic, a clock that falls"
)


@dataclass(frozen=True)
class ComponentFigures:
    """Figures of a component, or of the iteration, where memory and cores overlap perfectly.

    Attributes:
        share: share of the iteration's seconds.
        share_of_peak: share of the node's peak; None for components without FLOPs of the iteration's formula.
        lost: share of the iteration's seconds beyond the time of the component's FLOPs at the peak.
    """

    name: str
    work: Work
    share: float
    share_of_peak: Optional[float]
    lost: float


@dataclass(frozen=True)
class CountedPrediction:
    """An iteration by counted cycles.

    Attributes:
        components: the work by component; their ``overlapped`` add up to the iteration.
        flops: FLOPs of an iteration by component, of all ranks; attention counts in full, causal or not.
        notes_flops: FLOPs of an iteration by the formula of the notes.
        peak: FLOP/s of the node.
        tokens: tokens of an iteration.
        assumptions: what the figures rest on, and what they leave out.
    """

    components: Mapping[str, Work]
    flops: Mapping[str, float]
    notes_flops: float
    peak: float
    tokens: int
    assumptions: Tuple[str, ...]

    @property
    def total(self) -> Work:
        """The work of an iteration."""
        return sum(self.components.values(), Work())

    @property
    def total_flops(self) -> float:
        """FLOPs of an iteration."""
        return sum(self.flops.values())

    def figures(self) -> List[ComponentFigures]:
        """The figures of each component, and then those of the iteration."""
        components = [self._figures_of(name, work, self.flops[name]) for name, work in self.components.items()]
        return [*components, self._figures_of(ITERATION, self.total, self.total_flops)]

    def rate(self, seconds: float) -> float:
        """TFLOP/s of the node where an iteration takes this long."""
        return self.total_flops / seconds / 1e12

    def notes_rate(self, seconds: float) -> float:
        """TFLOP/s of the node by the formula of the notes where an iteration takes this long."""
        return self.notes_flops / seconds / 1e12

    def tokens_per_second(self, seconds: float) -> float:
        """Tokens/s of the node where an iteration takes this long."""
        return self.tokens / seconds

    def share_of_peak(self, seconds: float) -> float:
        """Share of the node's peak where an iteration takes this long."""
        return self.rate(seconds) * 1e12 / self.peak

    def _figures_of(self, name: str, work: Work, flops: float) -> ComponentFigures:
        iteration, at_peak = self.total.overlapped, flops / self.peak
        return ComponentFigures(
            name,
            work,
            share=work.overlapped / iteration,
            share_of_peak=at_peak / work.overlapped if flops else None,
            lost=(work.overlapped - at_peak) / iteration,
        )


def predict_counted(config: RunConfig, machine: Machine) -> CountedPrediction:
    """Predict an iteration of a run on one node from counted cycles.

    Raises:
        UsageError: the machine has none, or the run is of another type than float32, on more than one node or with more
            threads than a node has cores, sums rounded gradients, or products or attention are not computed by our
            kernels.
    """
    counted = machine.counted
    if counted is None:
        raise UsageError(f"machine {machine.name}: its file has no counted cycles")
    config = _checked_run(config, counted)
    knobs = power_knobs(config.node, 1)
    freq, eco = knobs["freq"], knobs["eco_state"]
    pipes = 1 if eco in ONE_PIPE_STATES else PIPES
    threads = config.node.threads_per_rank or 1
    times = OperationTimes(counted, freq * 1e6, pipes, threads)
    components = _component_work(config, times)
    batch = config.training.global_batch
    exact = exact_flops(config.model, batch, config.padded_vocab)
    model = config.model
    attention = 3 * 2.0 * batch * model.seq_len * 2.0 * model.seq_len * model.query_width * model.layers
    return CountedPrediction(
        components,
        {**dict.fromkeys(COMPONENTS, 0.0), PRODUCTS: exact - attention, ATTENTION_PART: attention},
        notes_flops(config.model, batch, config.padded_vocab, config.training.recompute == "full"),
        peak_flops(freq, eco),
        batch * model.seq_len,
        _assumptions(config, machine, counted, times, (freq, eco, pipes)),
    )


def _checked_run(config: RunConfig, counted: CountedCycles) -> RunConfig:
    """The run with the threads of a rank set.

    Raises:
        UsageError: it does what is not counted; the message has the key of it.
    """
    layout, training, node = config.layout, config.training, config.node
    if config.job.nodes != 1 or layout.ranks > counted.cores:
        raise UsageError(
            f"job.nodes {config.job.nodes}, {layout.ranks} ranks: cycles are counted for one node; for more, `plan "
            "time` with a machine of measured rows"
        )
    if config.model.settings_unlike_gpt2:
        raise UsageError(f"{config.model.settings_unlike_gpt2[0]}: cycles are counted of the kernels of a GPT-2 alone")
    if training.dtype != "float32":
        raise UsageError(f"training.dtype {training.dtype}: cycles are counted of float32 kernels")
    if training.gradient_dtype == "bfloat16" and layout.dp > 1:
        raise UsageError(
            f"training.gradient_dtype bfloat16: sums of rounded gradients over {layout.dp} replicas are not counted: "
            "leave it out, or set it to float32"
        )
    if not node.compiled_kernels:
        raise UsageError("node.compiled_kernels false: cycles are counted of our own kernels alone: set it to true")
    if node.compiled_products == "off":
        raise UsageError(
            "node.compiled_products off: cycles are counted of our own products alone: set it to auto or on"
        )
    threads = node.threads_per_rank or counted.cores // layout.ranks
    if layout.ranks * threads > counted.cores:
        raise UsageError(f"{layout.ranks} ranks * {threads} threads: a node has {counted.cores} cores")
    return replace(config, node=replace(node, threads_per_rank=threads))


def _component_work(config: RunConfig, times: OperationTimes) -> Dict[str, Work]:
    layout, micro_batches = config.layout, config.micro_batches
    works = count_chunk_work(config, compiled=True)
    passes = [
        [_tally_work(config, times, tally) for tally in (work.forward, work.backward, work.weights)] for work in works
    ]
    by_stage = []
    for stage in range(layout.pp):
        of_stage = [chunk for work, chunk in zip(works, passes) if work.chunk.stage == stage]
        by_stage.append(_sums([part for chunk in of_stage for part in chunk[:2]]))
    slowest = max(by_stage, key=lambda stage: _total(stage).overlapped)
    components = {name: work.times(micro_batches) for name, work in slowest.items()}
    ends = [_end_work(config, times, stage) for stage in range(layout.pp)]
    end = max(ends, key=lambda stage: _total(stage).overlapped)
    components = _sums([components, end])
    if layout.pp > 1:
        send = times.message(SEND, 2, message_bytes(config))
        idle, idle_not_overlapped = (
            _makespan(config, passes, send, seconds) - micro_batches * seconds(_total(slowest))
            for seconds in (_overlapped, _not_overlapped)
        )
        components[PIPELINE] = Work(overlapped=idle, idle=idle_not_overlapped)
    return components


def _makespan(
    config: RunConfig, passes: Sequence[Sequence[Mapping[str, Work]]], send: Work, seconds: Callable[[Work], float]
) -> float:
    """Seconds from the start of a pipeline until its last stage is done.

    Args:
        passes: forward pass, backward pass, and the part of it for gradients of weights, by chunk.
        send: a message between stages.
        seconds: of a work.
    """
    layout, micro_batches = config.layout, config.micro_batches
    forward, backward, weights = ([seconds(_total(chunk[number])) for chunk in passes] for number in range(3))
    schedules = [
        schedule(layout.schedule, stage, layout.pp, micro_batches, layout.chunks) for stage in range(layout.pp)
    ]
    return simulate(schedules, Timing(forward, backward, seconds(send), weights)).makespan


def _overlapped(work: Work) -> float:
    return work.overlapped


def _not_overlapped(work: Work) -> float:
    return work.not_overlapped


def _tally_work(config: RunConfig, times: OperationTimes, tally: Tally) -> Dict[str, Work]:
    work = dict.fromkeys(COMPONENTS, Work())
    heads = config.training.micro_batch * config.model.heads // config.layout.tp
    for (kind, batch, rows, inner, columns), count in tally.products.items():
        if kind in COMPILED_ATTENTION:
            one = times.attention(kind, batch, heads, rows, inner)
            work[ATTENTION_PART] += one.times(count)
        elif kind in (LINEAR, INPUT, WEIGHT):
            work[PRODUCTS] += times.product(kind, rows, inner, columns).times(batch * count)
        else:
            raise UsageError(
                f"{heads} heads of a micro-batch on {config.node.threads_per_rank} threads: attention is left to "
                "PyTorch, whose cycles are not counted; more heads on a rank: less layout.tp, or a larger "
                "training.micro_batch"
            )
    for (name, elements), count in tally.passes.items():
        counted_name = LOSS_OF_COLUMNS if name == "loss" and config.layout.tp > 1 else name
        work[ELEMENTWISE] += times.elementwise(counted_name, elements).times(count)
    for (operation, size), count in tally.messages.items():
        work[COMMUNICATION] += times.message(operation, config.layout.tp, size).times(count)
    return work


def _end_work(config: RunConfig, times: OperationTimes, stage: int) -> Dict[str, Work]:
    """The optimiser and the sums over ranks, once an iteration."""
    layout, end = config.layout, count_stage_work(config, stage)
    messages = [(operation, layout.dp, size) for operation, size in end.replicas]
    messages += [(ALL_REDUCE, layout.tp, end.replicated_bytes)]  # no heads have copies: _checked_run
    messages += [(ALL_REDUCE, 2, end.tied_bytes)] if layout.pp > 1 else []
    work = dict.fromkeys(COMPONENTS, Work())
    for operation, group, size in messages:
        work[COMMUNICATION] += times.message(operation, group, size)
    for (name, elements), count in end.passes.passes.items():
        work[OPTIMISER] += times.elementwise(name, elements).times(count)
    return work


def _sums(works: "Iterable[Mapping[str, Work]]") -> Dict[str, Work]:
    works = list(works)
    return {name: sum((work[name] for work in works), Work()) for name in COMPONENTS}


def _total(work: Mapping[str, Work]) -> Work:
    return sum(work.values(), Work())


def _assumptions(
    config: RunConfig, machine: Machine, counted: CountedCycles, times: OperationTimes, state: Tuple[int, int, int]
) -> Tuple[str, ...]:
    freq, eco, pipes = state
    threads = config.node.threads_per_rank
    uncounted = [name for name in TRAFFIC if not times.is_counted(name)]
    cycles = "as counted" if pipes == PIPES else "twice what is counted, in kernels that wait for loads as well"
    bandwidth, link = counted.bandwidth / 1e9, machine.time.values["tensor_bandwidth"]
    return (
        f"cycles of one core by llvm-mca for code of {counted.compiler}, all loads from the L1 cache: {counted.table}",
        f"{config.layout.ranks} ranks of {threads} threads at {freq} MHz, eco_state {eco}, {pipes} pipes: {cycles}",
        f"memory: {bandwidth:g} GB/s for each {counted.cores_of_group} cores; lines of {counted.line_bytes} bytes are "
        "read before they are written to; nothing stays in the L2 cache from one operation to the next",
        f"products: tiles of {counted.tile_rows} x {counted.tile_columns} count in full at edges, and for the thread "
        "with the most of them; share_of_peak counts attention in full, as is the custom, though its mask leaves out "
        "half",
        f"by memory alone, as operators of PyTorch: {', '.join(uncounted)}",
        f"communication: one copy through memory by every rank; at the {link / 1e9:.3g} GB/s of a rank to which rows "
        f"of {machine.base} were fitted, sums between ranks take {_sent_bytes(config) / link:.4g} s",
        f"not in the figures: {_NOT_COUNTED}",
    )


def _sent_bytes(config: RunConfig) -> float:
    """Bytes that a rank sends in an iteration's sums and gathers over ranks and replicas, as in rings."""
    layout = config.layout
    shares = {ALL_REDUCE: 2.0, REDUCE_SCATTER: 1.0, ALL_GATHER: 1.0}
    works = count_chunk_work(config, compiled=True)
    by_stage = []
    for stage in range(layout.pp):
        tallies = [tally for work in works if work.chunk.stage == stage for tally in (work.forward, work.backward)]
        tensor = sum(
            count * shares[operation] * size for tally in tallies for (operation, size), count in tally.messages.items()
        )
        replicas = sum(shares[operation] * size for operation, size in count_stage_work(config, stage).replicas)
        by_stage.append(
            config.micro_batches * tensor * (layout.tp - 1) / layout.tp + replicas * (layout.dp - 1) / layout.dp
        )
    return max(by_stage)
