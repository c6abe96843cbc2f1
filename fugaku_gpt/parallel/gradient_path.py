"""The gradient path of one rank, from the last backward call to the reduced bucket.

A step's gradients travel in this order; every function named here is in this file:

1. The trainer calls :meth:`GradientReducer.begin`: the flat gradients are zero and no parameter is ready.
2. The pipeline puts each backward pass between :meth:`GradientReducer.begin_backward`, which says whether it is its
   chunk's last one of the step, and :meth:`GradientReducer.end_backward`.
3. Inside, layers with large weights add to :func:`main_grad` (Megatron-LM's word: where a parameter's gradient is added
   up, a view of the flat gradients in float32 at least) in the very product that makes the gradient; autograd adds the
   gradients of other parameters.
4. :func:`add_weight_grad` makes that product at once, or leaves it to :meth:`GradientReducer.make_deferred` where the
   schedule defers it: another stage waits for the gradient of a layer's input, only the optimiser for that of its
   weights (Qi et al. 2023, "Zero Bubble Pipeline Parallelism").
5. When autograd has passed a parameter, its ``AccumulateGrad`` node runs the only hook that there is
   (:meth:`GradientReducer._on_accumulated`). The parameter is ready once this has happened in the last pass of every
   chunk that uses it and none of its products is deferred.
6. A bucket whose parameters are all ready starts its sum over replicas, while the backward pass computes on. Buckets
   start in a fixed order, equal on all ranks, and at most ``buckets_at_once`` are summed at the same time. MPI
   itself is called by ``ProcessGrid.replicas`` (``comm/communicator.py``, or ``comm/hierarchical.py`` above it). In
   calibration steps, whose sums are timed alone, no bucket starts before the next point.
7. The trainer calls :meth:`GradientReducer.finish`: parameters that tensor-parallel ranks hold alike are summed over
   these first (copied heads of keys and values, norms of heads, and under sequence parallelism all), the remaining
   buckets start, all are waited for, and last the two ends of the pipeline add up the tied token embedding.

With ZeRO stage 1 (Rajbhandari et al. 2020, section 5.1) a bucket's sum is a reduce-scatter: each replica gets its own
shard, steps it, and ``parameter_gather.py`` brings the parameters back.

The one attribute that is put on parameters, ``_gradient_slot``, is set by :func:`attach_main_grad` and read by
:func:`main_grad` and :func:`add_weight_grad`, and by nothing else.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from typing import Any, Callable, Deque, Dict, List, Mapping, Optional, Sequence, Set, Tuple, Union

import torch
from torch import nn

from fugaku_gpt.comm import ProcessGrid
from fugaku_gpt.comm.hierarchical import ChainedRequest
from fugaku_gpt.comm.pending import Pending
from fugaku_gpt.layout.communications import is_calibration_step
from fugaku_gpt.parallel.buffers import FlatBuffers, nbytes
from fugaku_gpt.parallel.overlap import Overlap

PassKey = Tuple[int, int]  # micro-batch, chunk
Product = Callable[[], None]


class GradientSlot:
    """The state of one parameter's gradient.

    Attributes:
        main_grad: where it is added up: of the parameter's shape, float32 at least.
        deferrals: takes products that are deferred.
        deferred_products: products that are deferred and not made yet.
        narrow: the parameter, where it has 16 bits: what autograd leaves in its ``.grad`` is added to ``main_grad``.
        buckets: numbers of the buckets in which it lies.
        chunks: chunks on this rank that use the parameter.
        unfinished_chunks: those of them whose last pass has not finished its gradient in this step.
    """

    __slots__ = ("main_grad", "deferrals", "deferred_products", "narrow", "buckets", "chunks", "unfinished_chunks")

    def __init__(
        self,
        main_grad: torch.Tensor,
        deferrals: "DeferredWeightGrads",
        narrow: Optional[nn.Parameter] = None,
        buckets: Sequence[int] = (),
        chunks: int = 1,
    ) -> None:
        self.main_grad = main_grad
        self.deferrals = deferrals
        self.deferred_products = 0
        self.narrow = narrow
        self.buckets = tuple(buckets)
        self.chunks = self.unfinished_chunks = chunks


class DeferredWeightGrads:
    """The products of one rank that make gradients of weights later than their backward pass.

    Attributes:
        recording: the products of the backward pass that runs now and defers them; None where it does not.
    """

    def __init__(self) -> None:
        self.recording: Optional[Deque[Tuple[GradientSlot, Product]]] = None
        self._products: Dict[PassKey, Deque[Tuple[GradientSlot, Product]]] = {}

    def begin(self, key: PassKey) -> None:
        """Defer the products of the backward pass that begins, until :meth:`make` of the same key."""
        self.recording = self._products[key] = deque()

    def end(self) -> None:
        """Make the products of later backward passes at once."""
        self.recording = None

    @torch.no_grad()
    def make(self, key: PassKey, on_last_product: Optional[Callable[[GradientSlot], None]] = None) -> None:
        """Make the products of one backward pass, each of which lets go of its tensors.

        Args:
            on_last_product: called with each slot for which no deferred product is left, as soon as that is so.
        """
        products = self._products.pop(key)
        while products:
            slot, product = products.popleft()
            product()
            del product
            slot.deferred_products -= 1
            if on_last_product is not None and not slot.deferred_products:
                on_last_product(slot)


def attach_main_grad(parameter: torch.Tensor, slot: GradientSlot) -> None:
    """Have layers add the gradient of a parameter to its slot by themselves."""
    parameter._gradient_slot = slot  # type: ignore[attr-defined]  # the one attribute that is put on parameters


def main_grad(parameter: torch.Tensor) -> Optional[torch.Tensor]:
    """Where the gradients of a parameter are added up, of its shape and float32 at least; None where that is left to
    autograd, or the parameter needs no gradient.

    Whoever adds to it gives autograd no gradient for it: the hook that finishes the parameter runs all the same, after
    the last of its uses. The layers add in their backward pass, the cross-entropy in its forward pass: a forward pass
    with gradients whose backward pass never comes leaves the gradient of the cross-entropy's weight there.
    """
    slot: Optional[GradientSlot] = getattr(parameter, "_gradient_slot", None)
    return slot.main_grad if slot is not None and parameter.requires_grad else None


def add_weight_grad(parameter: torch.Tensor, product: Product) -> None:
    """Add to the gradient of a parameter that has a :func:`main_grad`: now, or when the schedule makes what it defers.

    Args:
        product: adds to the parameter's ``main_grad``.
    """
    slot: GradientSlot = parameter._gradient_slot  # type: ignore[attr-defined]
    recording = slot.deferrals.recording
    if recording is None:
        product()
        return
    recording.append((slot, product))
    slot.deferred_products += 1


def widened(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter in float32 at least, whose gradient is added to its ``main_grad`` unrounded. A sum over tokens that
    overflows in 16 bits would depend on how many of them are on one rank."""
    if parameter.dtype in (torch.float32, torch.float64):
        return parameter
    wide: torch.Tensor = _Widened.apply(parameter)
    return wide


class _Widened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor) -> torch.Tensor:
        ctx.main_grad, ctx.dtype = main_grad(parameter), parameter.dtype
        return parameter.float()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Optional[torch.Tensor]:
        if ctx.main_grad is None:
            return grad.to(ctx.dtype)
        ctx.main_grad.add_(grad)
        return None


def accumulate_grad_node(parameter: torch.Tensor) -> Any:
    """Autograd's node that adds a parameter's gradient up: hooks on it run when that has been done."""
    function: Any = parameter.expand_as(parameter).grad_fn
    return function.next_functions[0][0]


class GradientReducer:
    """Adds up a rank's gradients and reduces them over its groups, a bucket at a time.

    The module's docstring says who calls what in a step.

    Attributes:
        overlap: the share of the replicas' communication that computation hides.
        deferrals: the products that the schedule defers.
    """

    def __init__(
        self,
        buffers: FlatBuffers,
        chunks: Mapping[int, nn.Module],
        grid: ProcessGrid,
        sharded: bool,
        sequence_parallel: bool = False,
        dtype: Optional[torch.dtype] = None,
        buckets_at_once: int = 4,
        accumulate_in_layers: bool = True,
    ) -> None:
        """
        Args:
            chunks: the model's chunks on this rank, by number.
            sharded: each replica gets the sum of its own shard of every bucket only.
            sequence_parallel: tensor-parallel ranks have different tokens.
            dtype: precision of the sums over replicas; default: that of the flat gradients.
            buckets_at_once: buckets that are summed at one time: MPI takes memory of its own for each.
            accumulate_in_layers: layers add to ``main_grad``; False: autograd adds all gradients, which serves as
                the reference.

        Raises:
            ValueError: the grid's groups are not those of the ranks that hold copies of the same heads.
        """
        copies = max((placement.spec.copies for placement in buffers.placements), default=1)
        if copies > 1 and grid.kv.size != copies:
            raise ValueError(f"tensors with {copies} copies of heads were given groups of {grid.kv.size}")
        self._buffers = buffers
        self._grid = grid
        self._sharded = sharded
        layout = buffers.layout
        self._tp_summed = layout.summed_over_tp(sequence_parallel) if grid.tp.size > 1 else slice(0, 0)
        self._tied = layout.tied(grid.dp.size if sharded else 1) if grid.embedding.size > 1 else []
        self.deferrals = DeferredWeightGrads()
        self._nodes: List[Any] = []  # hooks live as long as the nodes that they are on
        self._slots = self._attach(chunks, accumulate_in_layers)
        members = [sum(index in slot.buckets for slot in self._slots) for index in range(len(buffers.buckets))]
        for index in buffers.buckets_of(layout.copied, self._tp_summed):  # finish() sums over other groups first
            members[index] += 1
        self._members = members
        # [elements] of another type than the gradients, in which they travel
        self._rounded: Optional[torch.Tensor] = None
        if grid.dp.size > 1 and dtype not in (None, buffers.gradients.dtype):
            self._rounded = torch.zeros_like(buffers.gradients, dtype=dtype)
        self._buckets_at_once = buckets_at_once
        self._unready = list(members)  # by bucket: its parameters that are not ready
        self._started: List[Union[Pending, ChainedRequest]] = []
        self._is_last_pass = False
        self._last_passes: Set[int] = set()  # chunks whose last backward pass has begun
        self._steps = 0
        self._is_calibration = False
        self.overlap = Overlap(grid.dp, sharded)

    def _attach(self, chunks: Mapping[int, nn.Module], accumulate_in_layers: bool) -> List[GradientSlot]:
        """Give each parameter its slot, and its ``AccumulateGrad`` node the hook; returns the slots."""
        by_name: Dict[str, nn.Parameter] = {}
        for chunk in chunks.values():
            by_name.update(chunk.named_parameters())
        uses = [{id(parameter) for parameter in chunk.parameters()} for chunk in chunks.values()]
        slots: List[GradientSlot] = []
        for placement in self._buffers.placements:
            parameter = by_name[placement.spec.name]
            gradient = self._buffers.gradients[placement.span].view(parameter.shape)
            is_narrow = parameter.dtype != gradient.dtype
            slot = GradientSlot(
                gradient,
                self.deferrals,
                parameter if is_narrow else None,
                self._buffers.buckets_of(placement.span),
                sum(id(parameter) in chunk for chunk in uses),
            )
            if not is_narrow:
                parameter.grad = gradient
            if accumulate_in_layers:
                attach_main_grad(parameter, slot)
            node = accumulate_grad_node(parameter)
            node.register_hook(functools.partial(self._on_accumulated, slot))
            self._nodes.append(node)
            slots.append(slot)
        return slots

    @property
    def bytes(self) -> int:
        """Bytes of the memory in which sums travel, beside the gradients themselves."""
        return nbytes(self._rounded) if self._rounded is not None else 0

    def begin(self) -> None:
        """Begin a step: gradients are zero and no parameter is ready."""
        self._buffers.gradients.zero_()
        for slot in self._slots:
            slot.unfinished_chunks = slot.chunks
        self._unready = list(self._members)
        self._last_passes.clear()
        self._started = []
        self._is_calibration = is_calibration_step(self._steps)
        self._steps += 1

    def begin_backward(self, micro_batch: int, chunk: int, is_last: bool, is_deferring: bool = False) -> None:
        """Begin a backward pass.

        Args:
            is_last: it is the last one of this step through its chunk.
            is_deferring: :meth:`make_deferred` makes its gradients of weights.
        """
        self._is_last_pass = is_last
        if is_last:
            self._last_passes.add(chunk)
        if is_deferring:
            self.deferrals.begin((micro_batch, chunk))

    def end_backward(self) -> None:
        """End the backward pass that :meth:`begin_backward` has begun."""
        self._is_last_pass = False
        self.deferrals.end()

    def make_deferred(self, micro_batch: int, chunk: int) -> None:
        """Make the gradients of weights that a backward pass has deferred."""
        self.deferrals.make((micro_batch, chunk), self._mark_ready if chunk in self._last_passes else None)

    def _on_accumulated(self, slot: GradientSlot, *_: Any) -> None:
        """Autograd has passed a parameter: all that this backward pass does not defer is in ``.grad`` or added."""
        if slot.narrow is not None:
            grad = slot.narrow.grad
            if grad is not None:
                slot.main_grad.add_(grad)
                slot.narrow.grad = None
        if self._is_last_pass and not slot.deferred_products:
            self._mark_ready(slot)

    def _mark_ready(self, slot: GradientSlot) -> None:
        """A parameter's gradient is finished for one of its chunks; start the buckets that are ready by that."""
        slot.unfinished_chunks -= 1
        if not slot.unfinished_chunks:
            for index in slot.buckets:
                self._unready[index] -= 1
        if self._grid.dp.size == 1 or self._is_calibration:
            return
        before = time.perf_counter()
        if not self._started:
            self.overlap.sums.begin_background()
        while len(self._started) < len(self._unready) and not self._unready[len(self._started)]:
            self._start_next()
        for pending in self._started:  # lets MPI make progress
            pending.done()
        seconds = time.perf_counter() - before
        self.overlap.sums.exposed_seconds += seconds
        self.overlap.sums.polled_seconds += seconds

    def _start_next(self) -> None:
        """Start the reduction of the next bucket."""
        index = len(self._started)
        if index >= self._buckets_at_once:  # not as one ends: each step of each rank makes its calls at the same place
            self._started[index - self._buckets_at_once].wait()
        span = self._buffers.buckets[index]
        bucket = self._buffers.gradients[span]
        if self._rounded is not None:
            bucket = self._rounded[span].copy_(bucket)
        replicas = self._grid.replicas
        start = replicas.start_reduce_scatter if self._sharded else replicas.start_all_reduce
        self._started.append(start(bucket))

    def finish(self) -> None:
        """Start the reduction of what is not started yet, and wait for all of it."""
        copied = self._buffers.layout.copied
        if copied.stop > copied.start:  # each rank has seen its own query heads only
            self._grid.kv.all_reduce(self._buffers.gradients[copied])
        if self._tp_summed.stop > self._tp_summed.start:
            # each rank has seen its own heads only, or under sequence parallelism its own tokens
            self._grid.tp.all_reduce(self._buffers.gradients[self._tp_summed])
        if self._grid.dp.size > 1:
            self._finish_replicas()
        embedding = self._grid.embedding
        for pending in [embedding.start_all_reduce(self._buffers.gradients[span]) for span in self._tied]:
            pending.wait()

    def _finish_replicas(self) -> None:
        if self._is_calibration:
            self.overlap.wait_for_replicas()
        elif self._started:
            self.overlap.sums.count_background()
        before = time.perf_counter()
        while len(self._started) < len(self._buffers.buckets):
            self._start_next()
        for pending, bucket in zip(self._started, self._buffers.buckets):
            pending.wait()
            if self._rounded is not None:  # with sharded sums only the first shard of a bucket means anything
                size = (bucket.stop - bucket.start) // (self._grid.dp.size if self._sharded else 1)
                span = slice(bucket.start, bucket.start + size)
                self._buffers.gradients[span].copy_(self._rounded[span])
        seconds = time.perf_counter() - before
        if self._is_calibration:
            self.overlap.sums.record_alone(seconds)
            self.overlap.gather_is_due = True
        else:
            self.overlap.sums.exposed_seconds += seconds
            self.overlap.sums.steps += 1
