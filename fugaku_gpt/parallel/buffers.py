"""All parameters of a rank in one flat tensor and all gradients in another, laid out once.

Parameters and their ``.grad`` are views into them: the optimiser and the gradient sum work on long contiguous ranges,
and nothing is packed, flattened or allocated per step. Layers with large weights add to them by themselves, in the
product that makes a gradient (:func:`main_grad`); autograd adds the others.

With 16-bit parameters the flat gradients are float32 sums: what a backward pass finishes is added to them at once and
freed. The optimiser then steps float32 masters of what this rank owns, and the parameters are rounded from those.

Where each lies, and how they are cut for sums over replicas, says ``layout/flat.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import nn

from fugaku_gpt.comm import ProcessGrid
from fugaku_gpt.layout.flat import OptimizerShard, flat_layout
from fugaku_gpt.layout.tensors import TOKEN_EMBEDDING, TensorSpec
from fugaku_gpt.parallel.late import DeferredWeightGrads

# The switch of this fast path: layers add the gradients of their weights to the sums; False: autograd does, the judge
# of that. To be set before a model trains.
LAYERS_ADD = True


@dataclass(frozen=True)
class Placement:
    """Where one parameter lies: elements [start, start + size) of the flat tensors."""

    spec: TensorSpec
    start: int
    size: int

    @property
    def span(self) -> slice:
        """Its range of elements."""
        return slice(self.start, self.start + self.size)


@dataclass(frozen=True)
class ParamRange:
    """A range of owned elements that are treated alike.

    Attributes:
        decays: takes weight decay.
        counts: this rank is the one that counts them in the norm of the whole model's gradient.
        first: the flat tensors' element that is the first of them.
        parameters, gradients: [elements] views: what the optimiser steps, parameters or their masters, and the sums.
        rounded: of masters, the parameters in 16 bits that are made from them.
    """

    decays: bool
    counts: bool
    first: int
    parameters: torch.Tensor
    gradients: torch.Tensor
    rounded: Optional[torch.Tensor] = None


def nbytes(*tensors: torch.Tensor) -> int:
    """Memory of some tensors' elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def counted_in_norm(grid: ProcessGrid, sharded: bool) -> Callable[[TensorSpec], bool]:
    """Whether this rank counts a tensor in the norm of the whole model's gradient; each element is counted once.

    A tensor that every tensor-parallel rank holds whole is counted by the first of them, the token embedding by the
    first stage, and what replicas hold alike (without ZeRO) by the first replica.
    """
    first_replica = sharded or grid.place.dp == 0

    def counts(spec: TensorSpec) -> bool:
        if spec.name == TOKEN_EMBEDDING and grid.place.pp != 0:
            return False
        return first_replica and (spec.tp_dim is not None or grid.place.tp == 0)

    return counts


class FlatBuffers:
    """The flat parameters and gradients of a rank. Gaps from alignment hold zeros.

    Attributes:
        gradients: [elements], float32 at least.
        placements: where each parameter lies, in order.
        layout: where everything lies; see ``layout/flat.py``.
        buckets: consecutive ranges that are summed over replicas in one message each; each divides by ``shards``.
        late: what layers do not add at once, while the schedule puts it off.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        specs: Sequence[TensorSpec],
        shards: int = 1,
        bucket_bytes: int = 2**25,
        tp: int = 1,
    ) -> None:
        dtype = next(iter(named.values())).dtype
        itemsize = torch.empty(0, dtype=dtype).element_size()
        wide = dtype in (torch.float32, torch.float64)
        sums_in = dtype if wide else torch.float32
        laid = flat_layout(specs, tp, shards, itemsize, torch.empty(0, dtype=sums_in).element_size(), bucket_bytes)
        self.layout = laid
        self.placements = [Placement(one.spec, one.start, one.size) for one in laid.placed]
        self.buckets = list(laid.buckets)
        self.gradients = torch.zeros(laid.elements, dtype=sums_in)
        self._parameters = torch.zeros(laid.elements, dtype=dtype)
        self._nodes: List[Any] = []  # hooks live as long as the nodes that they are on
        self.late = DeferredWeightGrads()
        self.settle: Optional[Callable[[], None]] = None
        for placement in self.placements:
            parameter = named[placement.spec.name]
            self._parameters[placement.span].copy_(parameter.detach().reshape(-1))
            parameter.data = self._parameters[placement.span].view(parameter.shape)
            sums = self.gradients[placement.span].view(parameter.shape)
            parameter.main_grad = sums  # type: ignore[attr-defined]  # see main_grad()
            parameter.late = self.late  # type: ignore[attr-defined]
            if wide:
                parameter.grad = sums
            else:
                self._add_when_finished(parameter, sums)

    def _add_when_finished(self, parameter: nn.Parameter, sums: torch.Tensor) -> None:
        node = accumulation_of(parameter)

        def add(*_: Any) -> None:
            if parameter.grad is not None:
                sums.add_(parameter.grad)
                parameter.grad = None

        node.register_hook(add)
        self._nodes.append(node)

    @property
    def bytes(self) -> Tuple[int, int]:
        """Of memory that parameters and gradients take; waits for nothing."""
        return nbytes(self._parameters), nbytes(self.gradients)

    @property
    def parameters(self) -> torch.Tensor:
        """[elements], the same layout as the gradients. Waits for parameters that are still on their way here
        (``settle``)."""
        if self.settle is not None:
            self.settle()
        return self._parameters

    def param_ranges(
        self,
        owned: Sequence[OptimizerShard],
        counts: Callable[[TensorSpec], bool],
        masters: "Optional[MasterWeights]" = None,
    ) -> Iterator[ParamRange]:
        """The longest runs of owned neighbours that are treated alike, gaps included; the token embedding is by itself.

        Args:
            counts: whether this rank counts a tensor in the norm.
            masters: what the optimiser steps; default: the parameters themselves.
        """

        def run(kind: Tuple[bool, bool], mine: OptimizerShard, start: int, stop: int) -> ParamRange:
            flat, own = (self.parameters, mine.parameters) if masters is None else (masters.values, mine.masters)
            here, sums = (part.start - mine.parameters.start for part in (own, mine.gradients))
            rounded = None if masters is None else self.parameters[start:stop]
            gradients = self.gradients[start + sums : stop + sums]
            return ParamRange(*kind, start, flat[start + here : stop + here], gradients, rounded)

        for mine in owned:
            part = mine.parameters
            start, kind = part.start, None
            for placement in self.placements:
                if placement.span.stop <= part.start or placement.start >= part.stop:
                    continue
                now = (placement.spec.decays, counts(placement.spec))
                # the token embedding is a run of its own on both stages that have it: kernels that step it see the same
                # lengths there, and round the same elements in the same way
                if kind is not None and (now != kind or placement.spec.name == TOKEN_EMBEDDING):
                    yield run(kind, mine, start, placement.start)
                    start = placement.start
                kind = now
            if kind is not None:
                yield run(kind, mine, start, part.stop)


class MasterWeights:
    """The 16-bit parameters that this rank owns, in float32: steps too small for 16 bits add up in them.

    Attributes:
        values: [elements owned].
    """

    def __init__(self, buffers: FlatBuffers, owned: Sequence[OptimizerShard]) -> None:
        self._buffers = buffers
        self._owned = list(owned)
        self.values = torch.zeros(self._owned[-1].masters.stop, dtype=torch.float32)
        for mine in self._owned:
            self.values[mine.masters].copy_(buffers.parameters[mine.parameters])

    def round(self) -> None:
        """Write the parameters from them."""
        flat = self._buffers.parameters
        for mine in self._owned:
            flat[mine.parameters].copy_(self.values[mine.masters])


def main_grad(parameter: torch.Tensor) -> Optional[torch.Tensor]:
    """Where the gradients of a parameter are added up, of its shape and float32 at least; None where that is left to
    autograd, or no gradient is wanted.

    Whoever adds to it gives autograd no gradient for it. The hooks that say that a parameter's gradient is finished run
    all the same, after the last of its uses. The layers add in their backward pass, the cross-entropy in its forward
    pass: one with gradients whose backward pass never comes leaves the gradient of its weight in the sum.
    """
    return getattr(parameter, "main_grad", None) if LAYERS_ADD and parameter.requires_grad else None


def widened(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter in float32 at least; the gradient of that is added to its sum unrounded. A sum over tokens that
    overflows in 16 bits would depend on how many of them are on one rank."""
    if parameter.dtype in (torch.float32, torch.float64):
        return parameter
    wide: torch.Tensor = _Widened.apply(parameter)
    return wide


class _Widened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor) -> torch.Tensor:
        ctx.sums, ctx.dtype = main_grad(parameter), parameter.dtype
        return parameter.float()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Optional[torch.Tensor]:
        if ctx.sums is None:
            return grad.to(ctx.dtype)
        ctx.sums.add_(grad)
        return None


def accumulation_of(parameter: nn.Parameter) -> Any:
    """The node of autograd that adds a parameter's gradient up: hooks on it run when that has been done."""
    function: Any = parameter.expand_as(parameter).grad_fn
    return function.next_functions[0][0]
