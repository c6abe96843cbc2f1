"""All parameters of a rank in one flat tensor and all gradients in another, laid out once.

Parameters and their ``.grad`` are views into them: the optimiser and the gradient sum work on long contiguous ranges,
and nothing is packed, flattened or allocated per step.

Order: first the tensors that are cut over tensor-parallel ranks, in reverse order of their use in the forward pass,
which is the order in which the backward pass finishes their gradients; then those that every such rank holds whole;
last the token embedding, whose gradient the last stage of a pipeline shares with the first. So what must be summed over
other groups before the replicas lies together at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Iterator, List, Mapping, Optional, Sequence

import torch
from torch import nn

from fugaku_gpt.layout.tensors import TOKEN_EMBEDDING, TensorSpec

ALIGNMENT_BYTES = 64  # a cache line, and a full 512-bit vector


@dataclass(frozen=True)
class Placement:
    """Where one parameter lies: elements [start, start + size) of the flat tensors."""

    spec: TensorSpec
    start: int
    size: int

    @property
    def part(self) -> slice:
        """Its range of elements."""
        return slice(self.start, self.start + self.size)


@dataclass(frozen=True)
class Owned:
    """A range of parameters whose optimiser step this rank does, and where the sum of their gradients ends up."""

    parameters: slice
    gradients: slice


@dataclass(frozen=True)
class Run:
    """A range of owned elements that are treated alike.

    Attributes:
        decays: takes weight decay.
        counts: this rank is the one that counts them in the norm of the whole model's gradient.
        parameters, gradients: [elements] views into the flat tensors.
    """

    decays: bool
    counts: bool
    parameters: torch.Tensor
    gradients: torch.Tensor


class FlatBuffers:
    """The flat parameters and gradients of a rank. Gaps from alignment hold zeros.

    Attributes:
        gradients: [elements].
        placements: where each parameter lies, in order.
        buckets: consecutive ranges that are summed over replicas in one message each; each divides by ``shards``.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        specs: Sequence[TensorSpec],
        shards: int = 1,
        bucket_bytes: int = 2**25,
    ) -> None:
        dtype = next(iter(named.values())).dtype
        itemsize = torch.empty(0, dtype=dtype).element_size()
        step = ALIGNMENT_BYTES // itemsize
        self.placements: List[Placement] = []
        end = 0
        last_used_first = list(reversed(specs))
        for spec in sorted(last_used_first, key=_rank_of_kind):  # stable: within a kind the order stays
            size = named[spec.name].numel()
            self.placements.append(Placement(spec, end, size))
            end += -(-size // step) * step
        end = -(-end // (step * shards)) * step * shards
        width = max(1, bucket_bytes // itemsize // (step * shards)) * step * shards
        self.buckets = [slice(start, min(start + width, end)) for start in range(0, end, width)]
        self._parameters = torch.zeros(end, dtype=dtype)
        self.gradients = torch.zeros(end, dtype=dtype)
        self.settle: Optional[Callable[[], None]] = None
        for placement in self.placements:
            parameter = named[placement.spec.name]
            self._parameters[placement.part].copy_(parameter.detach().reshape(-1))
            parameter.data = self._parameters[placement.part].view(parameter.shape)
            parameter.grad = self.gradients[placement.part].view(parameter.shape)

    @property
    def parameters(self) -> torch.Tensor:
        """[elements], the same layout as the gradients. Waits for parameters that are still on their way here
        (``settle``)."""
        if self.settle is not None:
            self.settle()
        return self._parameters

    def whole(self) -> slice:
        """The range of the tensors that every tensor-parallel rank holds whole."""
        parts = [placement for placement in self.placements if placement.spec.tp_dim is None]
        return slice(parts[0].start, parts[-1].part.stop) if parts else slice(0, 0)

    def embedding(self) -> slice:
        """The range of the token embedding; empty where this stage has none."""
        last = self.placements[-1]
        return last.part if last.spec.name == TOKEN_EMBEDDING else slice(0, 0)

    def owned(self, shard: int, shards: int) -> List[Owned]:
        """What one of ``shards`` ranks owns of every bucket; with one shard, everything."""
        if shards == 1:
            return [Owned(slice(0, self.gradients.numel()), slice(0, self.gradients.numel()))]
        found = []
        for bucket in self.buckets:
            size = (bucket.stop - bucket.start) // shards
            first = bucket.start + shard * size
            found.append(Owned(slice(first, first + size), slice(bucket.start, bucket.start + size)))
        return found

    def runs(self, owned: Sequence[Owned], counts: Callable[[TensorSpec], bool]) -> Iterator[Run]:
        """The longest runs of owned neighbours that are treated alike, gaps included.

        ``counts`` says of a tensor whether this rank counts it in the norm.
        """
        flat = self.parameters
        for mine in owned:
            part, shift = mine.parameters, mine.gradients.start - mine.parameters.start
            start, kind = part.start, None
            for placement in self.placements:
                if placement.part.stop <= part.start or placement.start >= part.stop:
                    continue
                now = (placement.spec.decays, counts(placement.spec))
                if kind is not None and now != kind:
                    yield Run(*kind, flat[start : placement.start], self._shifted(start, placement.start, shift))
                    start = placement.start
                kind = now
            if kind is not None:
                yield Run(*kind, flat[start : part.stop], self._shifted(start, part.stop, shift))

    def _shifted(self, start: int, stop: int, shift: int) -> torch.Tensor:
        return self.gradients[start + shift : stop + shift]


def _rank_of_kind(spec: TensorSpec) -> int:
    if spec.name == TOKEN_EMBEDDING:
        return 2
    return 0 if spec.tp_dim is not None else 1
