"""The communications of one rank in one training step, in order: a function of the run's layout alone.

The pipeline's schedule says when the rank computes and exchanges; around each computation stand the collectives of
tensor parallelism, after the last one those of data parallelism. A rank's communications depend on its stage only, and,
where replicas sum within their nodes first, on how many of its replicas share its node; the signature of
:func:`program` shows that. ``communication_check.py`` proves that a whole grid of such ranks fits together.

The order here is the order of posting. Whoever posts a collective earlier, or waits for it later, to overlap it with
computation, keeps the order on each communicator, and what cannot get stuck here cannot get stuck there.
``tests/mpi/test_communications.py`` compares it with the calls that ranks really make.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Iterable, List, Optional, Tuple, Union

from fugaku_gpt.config.schema import LayoutConfig, ModelConfig, RunConfig
from fugaku_gpt.layout.flat import FlatLayout, flat_layout
from fugaku_gpt.layout.grid import ORDERS, TP_PP_DP
from fugaku_gpt.layout.memory import ITEM_BYTES, recompute_of_layers
from fugaku_gpt.layout.nodes import ACROSS_NODES, ACROSS_NODES_GATHER, NODE, NODE_GATHER, Nodes, nodes_of
from fugaku_gpt.layout.operations import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_REDUCES,
    BARRIER,
    BROADCAST,
    GATHER_JSON,
    REDUCE_SCATTER,
)
from fugaku_gpt.layout.replica_checks import comparisons
from fugaku_gpt.layout.schedule_times import Timing, simulate
from fugaku_gpt.layout.schedules import Action, BackwardWeight, Exchange, Forward, schedule
from fugaku_gpt.layout.stages import RECOMPUTE, Chunk, chunks_of, split_layers, stage_tensors, work_of

CALIBRATION_INTERVAL = 100  # steps
# tokens whose logits exist at one time; measured in float32 with two threads: the whole loss takes 8 % longer with 256,
# and 5 % less with 1024, for half and twice the memory
CHUNK_TOKENS = 512
# sum of the losses, sum of squares of the gradients; ranks that have met a non-finite number, that want to stop, that
# have written their part of a checkpoint, and that could not
NORM_ELEMENTS = 6
COUNTING_NORM_ELEMENTS = 7  # the number of grids whose class was right, or of targets that count, too


@dataclass(frozen=True)
class Collective:
    """An operation that all ranks of a communicator do together.

    Attributes:
        communicator: ``tp``, ``kv``, ``dp``, ``embedding`` or ``world``, see ``grid.py``; or one of ``nodes.py``.
        operation: one of ``operations.py``.
        elements: number of elements that this rank contributes: all of them for a sum, its share for a gather.
    """

    __slots__ = ("communicator", "operation", "elements")
    communicator: str
    operation: str
    elements: int


@dataclass(frozen=True)
class Transfer:
    """An exchange of the pipeline whose messages have ``elements`` elements each. Peers are stages of the same replica,
    at the same tensor-parallel position."""

    __slots__ = ("exchange", "elements")
    exchange: Exchange
    elements: int


Communication = Union[Collective, Transfer]

ANY_SIZE = -1  # elements of a collective whose number depends on the run, such as a text's
_TEXT = (Collective("world", BROADCAST, 1), Collective("world", BROADCAST, ANY_SIZE))  # its length first
# The exchanges of all ranks while a checkpoint is saved, in any order: a save begins with a text (where to write), and
# some steps later, when all ranks have written, rank 0 gathers their reports.
CHECKPOINT_EXCHANGES: Tuple[Tuple[Collective, ...], ...] = (
    _TEXT,
    # once in a run: which share of the optimiser each rank has, and how long the files are
    (Collective("world", ALL_GATHER, 1), Collective("world", ALL_GATHER, 1), *_TEXT),
    (Collective("world", ALL_GATHER, 1), *_TEXT),  # how long they are, with the copy for loss spikes
    (
        Collective("world", ALL_GATHER, 1),
        Collective("world", GATHER_JSON, ANY_SIZE),
    ),  # reports of what ranks have written
    (Collective("world", BARRIER, 0),),  # of ranks that end, as the checkpoint could not be written
)


@dataclass(frozen=True)
class CommunicationPlan:
    """All that the communications of a step depend on.

    Attributes:
        micro_batches: per step and replica.
        micro_batch: sequences in one.
        order: of the grid's axes, fastest first.
        schedule, chunks: kind of pipeline, and chunks of each stage.
        split: layers of each chunk; None: balanced by work.
        zero: 0, gradients are summed and every replica updates all weights; 1, each updates its share.
        sequence_parallel: activations between the cut layers are shared out over tp along the sequence.
        recompute: of each layer, ``none``, ``selective`` or ``full``; empty: none anywhere.
        element_bytes: of parameters; of sums of gradients at least 4.
        bucket_bytes: of one gradient sum.
        loss_tokens: tokens whose logits exist at one time.
        seq_len: tokens of a sequence, while they grow; default: the model's.
        nodes: placement of the ranks; matters only for hierarchical sums.
        checksum_interval: steps from one comparison of what ranks hold alike to the next; None: never.
        counts_targets: ranks add up how many tokens have a loss (:attr:`DataConfig.counts_targets`).
    """

    model: ModelConfig
    layout: LayoutConfig
    micro_batches: int
    micro_batch: int = 1
    order: str = TP_PP_DP
    schedule: str = "1f1b"
    chunks: int = 1
    split: Optional[Tuple[int, ...]] = None
    zero: int = 0
    sequence_parallel: bool = False
    recompute: Tuple[str, ...] = ()
    element_bytes: int = 4
    bucket_bytes: int = 32 * 2**20
    loss_tokens: int = CHUNK_TOKENS
    seq_len: Optional[int] = None
    nodes: Optional[Nodes] = None
    checksum_interval: Optional[int] = None
    counts_targets: bool = False
    model_chunks: Tuple[Chunk, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check it, and cut the model into :attr:`model_chunks`, its chunks in order of the forward pass.

        Raises:
            ValueError: a value that is not valid, and what would be.
        """
        model, layout = self.model, self.layout
        sizes = {
            "heads": model.heads,
            "MLP width": model.ffn_size,
            "padded vocabulary": self.vocab,
            "padded outputs": self.outputs,
        }
        for name, size in sizes.items():
            if size % layout.tp:
                raise ValueError(f"tp {layout.tp} must divide the {name}, {size}")
        if not model.supports_tp(layout.tp):
            rule = f"must divide the heads of keys, {model.kv_head_count}, or be a multiple of them"
            raise ValueError(f"tp {layout.tp} {rule}")
        if self.sequence_parallel and self.tokens % layout.tp:
            raise ValueError(f"sequence parallelism: tp {layout.tp} must divide the sequence length, {self.tokens}")
        if self.is_hierarchical and self.nodes is None:
            raise ValueError("sums by nodes first: which ranks share a node must be given")
        if self.zero not in (0, 1):
            raise ValueError(f"zero {self.zero}: valid: 0, 1")
        if self.order not in ORDERS:
            raise ValueError(f"grid order {self.order!r}: valid: {'; '.join(ORDERS)} (fastest axis first)")
        if self.recompute and len(self.recompute) != model.layers:
            raise ValueError(
                f"recompute of {len(self.recompute)} layers: valid: one for each of {model.layers}, or none"
            )
        for kind in self.recompute:
            if kind not in RECOMPUTE:
                raise ValueError(f"recompute {kind!r}: valid: {', '.join(RECOMPUTE)}")
        schedule(self.schedule, 0, layout.pp, self.micro_batches, self.chunks)  # judges its own arguments
        usual = self.recompute[0] if len(set(self.recompute)) == 1 else "none"
        work = work_of(model, self.outputs, usual, layout.tp)
        object.__setattr__(self, "model_chunks", split_layers(model.layers, layout.pp, self.chunks, work, self.split))

    @property
    def vocab(self) -> int:
        """Rows of the embedding."""
        return self.model.padded_vocab(self.layout.tp)

    @property
    def outputs(self) -> int:
        """Rows of the output weights."""
        return self.model.padded_outputs(self.layout.tp)

    @property
    def kv_copies(self) -> int:
        """Number of tensor-parallel ranks that hold the same head of keys and values."""
        return self.model.kv_copies(self.layout.tp)

    @property
    def is_hierarchical(self) -> bool:
        """Whether replicas sum within nodes first, where their placement allows it."""
        return self.layout.hierarchical_sum and self.layout.dp > 1

    @property
    def tokens(self) -> int:
        """Number of tokens per sequence."""
        return self.seq_len if self.seq_len is not None else self.model.seq_len

    @property
    def activation(self) -> int:
        """Elements of a micro-batch's hidden states [micro-batch, s, h], whole."""
        return self.micro_batch * self.tokens * self.model.hidden

    def recompute_of(self, layer: int) -> str:
        """How a layer is recomputed: ``none``, ``selective`` or ``full``."""
        return self.recompute[layer] if self.recompute else "none"


def plan_of(config: RunConfig) -> CommunicationPlan:
    """The plan of a run, for batches of the full size.

    Raises:
        ValueError: it cannot be planned; the message says why.
    """
    training, layout = config.training, config.layout
    chunks = chunks_of(config)
    return CommunicationPlan(
        model=config.model,
        layout=layout,
        micro_batches=config.micro_batches,
        micro_batch=training.micro_batch,
        order=layout.order,
        schedule=layout.schedule,
        chunks=layout.chunks,
        split=tuple(len(chunk.layers) for chunk in chunks),
        recompute=recompute_of_layers(config, chunks),
        zero=layout.zero,
        sequence_parallel=layout.sequence_parallel,
        element_bytes=ITEM_BYTES[training.dtype],
        bucket_bytes=int(training.bucket_mib * 2**20),
        nodes=nodes_of(config) if layout.hierarchical_sum and layout.dp > 1 else None,
        checksum_interval=training.checksum_interval,
        counts_targets=config.data.counts_targets,
    )


def is_calibration_step(step: int) -> bool:
    """Whether a step (counted from 0 at each start of a run) times the communication of replicas by itself, after all
    of them have finished computing, instead of overlapping it. That is the second step, the third, because MPI
    allocates memory when so much is communicated at once for the first time (seen: up to five times as long), and a few
    later ones."""
    return step in (1, 2) or (step > 0 and step % CALIBRATION_INTERVAL == 0)


def schedule_of(plan: CommunicationPlan, stage: int) -> Tuple[Action, ...]:
    """The pipeline schedule of one stage."""
    return schedule(plan.schedule, stage, plan.layout.pp, plan.micro_batches, plan.chunks)


@lru_cache(maxsize=256)
def program(
    plan: CommunicationPlan, stage: int, on_node: int = 1, is_calibration: bool = False, has_checksums: bool = False
) -> Tuple[Communication, ...]:
    """All communications of a step, of any rank of one stage.

    Args:
        on_node: number of replicas on each node for hierarchical sums; 1: they are summed in one step.
        is_calibration: the step times the communication of replicas by itself (:func:`is_calibration_step`).
        has_checksums: before the update, ranks compare what they hold alike (``replica_checks.py``).
    """
    stage_chunks = {chunk.index: chunk for chunk in plan.model_chunks if chunk.stage == stage}
    forward = {index: tuple(forward_communications(plan, chunk)) for index, chunk in stage_chunks.items()}
    backward = {index: tuple(backward_communications(plan, chunk)) for index, chunk in stage_chunks.items()}
    message_elements = plan.activation // (plan.layout.tp if plan.sequence_parallel else 1)
    steps: List[Communication] = []
    for action in schedule_of(plan, stage):
        if isinstance(action, Exchange):
            steps.append(Transfer(action, message_elements))
        elif not isinstance(action, BackwardWeight):  # gradients of weights are nobody else's business
            steps += (forward if isinstance(action, Forward) else backward)[action.chunk]
    return (*steps, *communications_after_backward(plan, stage, on_node, is_calibration, has_checksums))


def chunk_times(plan: CommunicationPlan) -> Timing:
    """The duration of each chunk's passes for one micro-batch, in forward passes of a layer, by the operations of
    ``work_of``.

    The loss makes its gradients along with the logits, so all of its work is in the forward pass. Attention has no
    weights.
    """
    weights = float(plan.model.computed_layer_weights(plan.layout.tp))
    layer = weights + 2.0 * plan.tokens * plan.model.query_width
    logits = 3.0 * plan.outputs * plan.model.hidden
    if plan.model.is_grid_classifier:  # one row of logits for all cells of a grid
        logits /= plan.tokens
    forward = [len(chunk.layers) + logits / layer * chunk.has_head for chunk in plan.model_chunks]
    backward = [
        sum(2.0 + (plan.recompute_of(number) == "full") for number in chunk.layers) for chunk in plan.model_chunks
    ]
    return Timing(forward, backward, weights=[len(chunk.layers) * weights / layer for chunk in plan.model_chunks])


def predicted_bubble(plan: CommunicationPlan) -> float:
    """Idle over busy time of a step, the mean over its stages, with the work that each of them has; messages free.
    :func:`schedule_times.ideal_bubble` says what it would be if all had as much."""
    times = simulate([schedule_of(plan, stage) for stage in range(plan.layout.pp)], chunk_times(plan))
    return times.mean_bubble


def forward_communications(plan: CommunicationPlan, chunk: Chunk) -> Iterable[Collective]:
    """Tensor parallelism around one forward pass of a chunk."""
    if plan.layout.tp == 1:
        return
    if chunk.has_embedding:
        yield _reduce_hidden(plan)
    for _ in chunk.layers:
        yield from _layer_forward(plan)
    if chunk.has_head:
        is_grid = plan.model.is_grid_classifier
        if plan.sequence_parallel and is_grid:  # of the sums over the cells that each rank has
            yield Collective("tp", ALL_REDUCE, plan.micro_batch * plan.model.hidden)
        elif plan.sequence_parallel:
            yield _gather_sequence(plan)
        tokens = plan.micro_batch * (1 if is_grid else plan.tokens)
        # largest logit, sum of exponentials, logit of the target; of grids also whether that is the largest
        figures = 4 if is_grid else 3
        for start in range(0, tokens, plan.loss_tokens):
            yield Collective("tp", ALL_GATHER, figures * min(plan.loss_tokens, tokens - start))
        if is_grid:  # of the gradient of the means over cells
            yield Collective("tp", ALL_REDUCE, tokens * plan.model.hidden)
        else:
            yield _reduce_hidden(plan)  # of the gradient of the hidden states, which the loss makes at once


def backward_communications(plan: CommunicationPlan, chunk: Chunk) -> Iterable[Collective]:
    """Tensor parallelism around one backward pass of a chunk."""
    if plan.layout.tp == 1:
        return
    for layer in reversed(chunk.layers):
        if plan.recompute_of(layer) == "full":
            yield from _layer_forward(plan)
        for _ in ("mlp", "attention"):
            if plan.sequence_parallel:
                yield _gather_sequence(plan)  # the gradient of the row-parallel outputs
                yield _gather_sequence(
                    plan
                )  # the column-parallel inputs once more, of which each rank has kept its share
            yield _reduce_hidden(plan)  # of the gradient of the column-parallel inputs
    if chunk.has_embedding and plan.sequence_parallel:
        yield _gather_sequence(plan)


def _layer_forward(plan: CommunicationPlan) -> Iterable[Collective]:
    for _ in ("attention", "mlp"):
        if plan.sequence_parallel:
            yield _gather_sequence(plan)  # column-parallel inputs
        yield _reduce_hidden(plan)  # row-parallel outputs


def _reduce_hidden(plan: CommunicationPlan) -> Collective:
    """The sum of full hidden states over tp: to every rank, or to each rank its share of the sequence."""
    return Collective("tp", REDUCE_SCATTER if plan.sequence_parallel else ALL_REDUCE, plan.activation)


def _gather_sequence(plan: CommunicationPlan) -> Collective:
    """Each rank's share of the sequence, to all."""
    return Collective("tp", ALL_GATHER, plan.activation // plan.layout.tp)


def communications_after_backward(
    plan: CommunicationPlan, stage: int, on_node: int = 1, is_calibration: bool = False, has_checksums: bool = False
) -> Iterable[Collective]:
    """From the last backward pass to the end of the step."""
    layout, tp = plan.layout, plan.layout.tp
    flat = _flat(plan, stage)
    if flat.copied.stop > flat.copied.start:
        yield Collective("kv", ALL_REDUCE, flat.copied.stop - flat.copied.start)
    summed = flat.summed_over_tp(plan.sequence_parallel)
    if summed.stop > summed.start and tp > 1:
        yield Collective("tp", ALL_REDUCE, summed.stop - summed.start)
    buckets = bucket_elements(plan, stage)
    if layout.dp > 1:
        if is_calibration:
            yield Collective("dp", BARRIER, 0)
        for elements in buckets:
            yield from _sum_over_replicas(plan, elements, on_node)
    if layout.pp > 1:
        for embedding_range in flat.tied(layout.dp if plan.zero else 1):
            yield Collective("embedding", ALL_REDUCE, embedding_range.stop - embedding_range.start)
    if layout.ranks > 1:
        yield Collective("world", ALL_REDUCE, norm_elements(plan.model, plan.counts_targets))
    if has_checksums:
        yield from checksum_communications(plan, stage)
    if layout.dp > 1 and plan.zero:
        if is_calibration:
            yield Collective("dp", BARRIER, 0)
        for elements in reversed(buckets):  # the forward pass uses the last one first
            if on_node == 1:
                yield Collective("dp", ALL_GATHER, elements // layout.dp)
            else:
                yield Collective(ACROSS_NODES_GATHER, ALL_GATHER, elements // layout.dp)
                yield Collective(NODE_GATHER, ALL_GATHER, elements // on_node)


def checksum_communications(plan: CommunicationPlan, stage: int) -> Iterable[Collective]:
    """The comparison of what ranks hold alike, and whether it has found a difference anywhere."""
    for comparison in comparisons(_flat(plan, stage), plan.layout, plan.sequence_parallel):
        yield Collective(comparison.communicator, ALL_REDUCES["max"], comparison.elements)
    if plan.layout.ranks > 1:
        yield Collective("world", ALL_REDUCE, 1)


def norm_elements(model: ModelConfig, counts_targets: bool) -> int:
    """Elements of the sum over all ranks that ends a step; ``counts_targets``: see :class:`CommunicationPlan`."""
    return COUNTING_NORM_ELEMENTS if model.is_grid_classifier or counts_targets else NORM_ELEMENTS


def _sum_over_replicas(plan: CommunicationPlan, elements: int, on_node: int) -> Iterable[Collective]:
    """The sum of one bucket over replicas: to every replica, or to each its share."""
    if on_node == 1:
        yield Collective("dp", REDUCE_SCATTER if plan.zero else ALL_REDUCE, elements)
        return
    yield Collective(NODE, REDUCE_SCATTER, elements)
    yield Collective(ACROSS_NODES, REDUCE_SCATTER if plan.zero else ALL_REDUCE, elements // on_node)
    if not plan.zero:
        yield Collective(NODE_GATHER, ALL_GATHER, elements // on_node)


def bucket_elements(plan: CommunicationPlan, stage: int) -> List[int]:
    """Elements of each bucket of a stage's flat gradients; where replicas share them out, each is padded to whole
    shares."""
    return [bucket.stop - bucket.start for bucket in _flat(plan, stage).buckets]


def _flat(plan: CommunicationPlan, stage: int) -> FlatLayout:
    specs = stage_tensors(plan.model, plan.layout.tp, plan.model_chunks, stage)
    shards = plan.layout.dp if plan.zero or plan.layout.hierarchical_sum else 1
    item = plan.element_bytes
    return flat_layout(specs, plan.layout.tp, shards, item, max(item, 4), plan.bucket_bytes)
