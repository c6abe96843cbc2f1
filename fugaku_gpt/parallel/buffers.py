"""The memory of a rank's parameters and gradients: one flat tensor each, laid out once.

Parameters become views of the flat parameters, and ``gradient_path.py`` adds their gradients up in views of the flat
gradients: the optimiser and the reduction over replicas work on long contiguous ranges, and nothing is packed,
flattened or allocated per step.

With 16-bit parameters the flat gradients are float32. The optimiser then steps float32 masters of what this rank owns,
and the parameters are rounded from those.

``layout/flat.py`` says where each parameter lies and how the flat tensors are cut into buckets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Iterator, List, Mapping, Optional, Protocol, Sequence, Tuple

import torch
from torch import nn

from fugaku_gpt.comm import ProcessGrid
from fugaku_gpt.layout.flat import OptimizerShard, flat_layout
from fugaku_gpt.layout.shards import is_first_holder
from fugaku_gpt.layout.tensors import TOKEN_EMBEDDING, TensorSpec


@dataclass(frozen=True)
class ParamRange:
    """A range of owned elements that are treated alike.

    Attributes:
        decays: weight decay applies to it.
        counts: this rank is the one that counts it in the norm of the whole model's gradient.
        first: index of its first element in the flat tensors.
        parameters, gradients: [elements] views: what the optimiser steps (parameters or their masters), and the
            reduced gradients.
        rounded: the 16-bit parameters that are rounded from the masters; None if there are no masters.
    """

    decays: bool
    counts: bool
    first: int
    parameters: torch.Tensor
    gradients: torch.Tensor
    rounded: Optional[torch.Tensor] = None


class AllGather(Protocol):
    """An all-gather that brings parameters from other replicas."""

    def finish(self) -> None:
        """Wait until all parameters have arrived."""


def nbytes(*tensors: torch.Tensor) -> int:
    """Return the memory of some tensors' elements, in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def have_overlap(a: slice, b: slice) -> bool:
    """Return whether two ranges have elements in common."""
    return a.start < b.stop and b.start < a.stop


def counted_in_norm(grid: ProcessGrid, sharded: bool) -> Callable[[TensorSpec], bool]:
    """Return a function that says whether this rank counts a tensor in the norm of the whole model's gradient.

    Each element is counted once. A part of a tensor that several tensor-parallel ranks hold is counted by the first of
    them, the token embedding by the first stage, and what replicas hold alike (without ZeRO) by the first replica.
    """
    first_replica = sharded or grid.coordinates.dp == 0

    def counts(spec: TensorSpec) -> bool:
        return first_replica and is_first_holder(spec, grid.coordinates)

    return counts


class FlatBuffers:
    """The flat parameters and gradients of a rank. Gaps from alignment hold zeros.

    Attributes:
        gradients: [elements], float32 at least.
        placements: where each parameter lies, in order.
        layout: where everything lies; see ``layout/flat.py``.
        buckets: consecutive ranges that are reduced over replicas in one message each; each divides by ``shards``.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        specs: Sequence[TensorSpec],
        shards: int = 1,
        bucket_bytes: int = 2**25,
        tp: int = 1,
    ) -> None:
        """Make the parameters views of the flat parameters, with the values that they have.

        Args:
            named: the rank's parameters by name.
            specs: their tensors, in order of first use.
            shards: equal parts into which every bucket divides.
            bucket_bytes: size of a bucket's gradients at most.
            tp: tensor-parallel ranks.
        """
        dtype = next(iter(named.values())).dtype
        gradient_dtype = dtype if dtype in (torch.float32, torch.float64) else torch.float32
        item_bytes, gradient_bytes = (torch.empty(0, dtype=kind).element_size() for kind in (dtype, gradient_dtype))
        self.layout = flat_layout(specs, tp, shards, item_bytes, gradient_bytes, bucket_bytes)
        self.placements = list(self.layout.placed)
        self.buckets = list(self.layout.buckets)
        self.gradients = torch.zeros(self.layout.elements, dtype=gradient_dtype)
        self._parameters = torch.zeros(self.layout.elements, dtype=dtype)
        self._all_gather: Optional[AllGather] = None
        for placement in self.placements:
            parameter = named[placement.spec.name]
            self._parameters[placement.span].copy_(parameter.detach().reshape(-1))
            parameter.data = self._parameters[placement.span].view(parameter.shape)

    @property
    def bytes(self) -> Tuple[int, int]:
        """Bytes of parameters and of gradients; waits for nothing."""
        return nbytes(self._parameters), nbytes(self.gradients)

    def register_all_gather(self, all_gather: AllGather) -> None:
        """Have :attr:`parameters` wait for this all-gather."""
        self._all_gather = all_gather

    def wait_for_all_gather(self) -> None:
        """Wait for parameters that are still arriving from other replicas."""
        if self._all_gather is not None:
            self._all_gather.finish()

    @property
    def parameters(self) -> torch.Tensor:
        """The flat parameters [elements], in the same layout as the gradients. Waits for parameters that are still
        arriving."""
        self.wait_for_all_gather()
        return self._parameters

    def buckets_of(self, *spans: slice) -> List[int]:
        """Return the numbers of the buckets that have elements in common with any of some ranges."""
        return [index for index, bucket in enumerate(self.buckets) if any(have_overlap(span, bucket) for span in spans)]

    def param_ranges(
        self,
        owned: Sequence[OptimizerShard],
        counts: Callable[[TensorSpec], bool],
        masters: "Optional[MasterWeights]" = None,
        are_equal_on_all_ranks: bool = False,
    ) -> Iterator[ParamRange]:
        """Iterate over the longest ranges of owned neighbours that are treated alike, gaps included; the token
        embedding is a range by itself.

        Args:
            owned: the shards that this rank steps.
            counts: whether this rank counts a tensor in the norm.
            masters: what the optimiser steps; default: the parameters themselves.
            are_equal_on_all_ranks: cut ranges also where it depends on the rank whether the tensors on both sides are
                counted, so that kernels round the same elements in the same way on all ranks that hold them.
        """

        def param_range(kind: Tuple[bool, bool], shard: OptimizerShard, start: int, stop: int) -> ParamRange:
            flat, span = (self.parameters, shard.parameters) if masters is None else (masters.values, shard.masters)
            to_flat, to_gradients = (other.start - shard.parameters.start for other in (span, shard.gradients))
            rounded = None if masters is None else self.parameters[start:stop]
            gradients = self.gradients[start + to_gradients : stop + to_gradients]
            return ParamRange(*kind, start, flat[start + to_flat : stop + to_flat], gradients, rounded)

        for shard in owned:
            span = shard.parameters
            start, kind, is_copied, is_replicated = span.start, None, False, False
            for placement in self.placements:
                if not have_overlap(placement.span, span):
                    continue
                next_kind = (placement.spec.decays, counts(placement.spec))
                # the token embedding is a range of its own on both stages that have it, and copies are apart from
                # other tensors on all ranks that hold them: kernels that step them see the same lengths there, and
                # round the same elements in the same way
                is_border = placement.spec.name == TOKEN_EMBEDDING or (placement.spec.copies > 1) != is_copied
                if are_equal_on_all_ranks:
                    is_border = is_border or (placement.spec.tp_dim is None) != is_replicated
                if kind is not None and (next_kind != kind or is_border):
                    yield param_range(kind, shard, start, placement.start)
                    start = placement.start
                kind, is_copied = next_kind, placement.spec.copies > 1
                is_replicated = placement.spec.tp_dim is None
            if kind is not None:
                yield param_range(kind, shard, start, span.stop)


class MasterWeights:
    """The 16-bit parameters that this rank owns, in float32: steps too small for 16 bits add up in them.

    Attributes:
        values: [elements owned].
    """

    def __init__(self, buffers: FlatBuffers, owned: Sequence[OptimizerShard]) -> None:
        self._buffers = buffers
        self._owned = list(owned)
        self.values = torch.zeros(self._owned[-1].masters.stop, dtype=torch.float32)
        for shard in self._owned:
            self.values[shard.masters].copy_(buffers.parameters[shard.parameters])

    def round(self) -> None:
        """Write the 16-bit parameters, rounded from the masters."""
        flat = self._buffers.parameters
        for shard in self._owned:
            flat[shard.parameters].copy_(self.values[shard.masters])
