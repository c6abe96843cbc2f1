"""All parameters of a rank in one flat tensor and all gradients in another, laid out once.

Parameters and their ``.grad`` are views into them: the optimiser and the gradient sum work on long contiguous ranges,
and nothing is packed, flattened or allocated per step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator, List, Mapping, Sequence, Tuple

import torch
from torch import nn

from fugaku_gpt.layout.tensors import TensorSpec

ALIGNMENT_BYTES = 64  # a cache line, and a full 512-bit vector


@dataclass(frozen=True)
class Placement:
    """Where one parameter lies: elements [start, start + size) of the flat tensors."""

    spec: TensorSpec
    start: int
    size: int


class FlatBuffers:
    """The flat parameters and gradients of a rank.

    Tensors lie in reverse order of their use in the forward pass, which is the order in which the backward pass
    finishes their gradients. Gaps from alignment hold zeros.

    Attributes:
        parameters, gradients: [elements], the same layout.
        placements: where each parameter lies, in order.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], specs: Sequence[TensorSpec]) -> None:
        dtype = next(iter(named.values())).dtype
        step = ALIGNMENT_BYTES // torch.empty(0, dtype=dtype).element_size()
        self.placements: List[Placement] = []
        end = 0
        for spec in reversed(specs):
            size = named[spec.name].numel()
            self.placements.append(Placement(spec, end, size))
            end += -(-size // step) * step
        self.parameters = torch.zeros(end, dtype=dtype)
        self.gradients = torch.zeros(end, dtype=dtype)
        for placement in self.placements:
            parameter = named[placement.spec.name]
            part = slice(placement.start, placement.start + placement.size)
            self.parameters[part].copy_(parameter.detach().reshape(-1))
            parameter.data = self.parameters[part].view(parameter.shape)
            parameter.grad = self.gradients[part].view(parameter.shape)

    def ranges(self) -> Iterator[Tuple[bool, slice]]:
        """(takes weight decay, range) of the longest runs of neighbours that agree on weight decay."""
        start, decays = 0, self.placements[0].spec.decays
        for placement in self.placements[1:]:
            if placement.spec.decays != decays:
                yield decays, slice(start, placement.start)
                start, decays = placement.start, placement.spec.decays
        yield decays, slice(start, self.parameters.numel())
