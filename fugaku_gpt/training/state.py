"""Names the tensors of a run's state as a checkpoint stores them: kind by kind, along the flat parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator, Sequence, Tuple

import torch

from fugaku_gpt.parallel.buffers import ParamRange
from fugaku_gpt.training.health import Optimizer, StateCopy

KINDS = ("weights", "first_moment", "second_moment")
COPY_KINDS = tuple(f"kept_{kind}" for kind in KINDS)  # the copy to which a loss spike returns; names in checkpoints


@dataclass(frozen=True)
class Storage:
    """One kind of state of a range of parameters.

    Attributes:
        kind: one of ``KINDS`` or ``COPY_KINDS``.
        first: index of the first element in the flat tensors.
        values: [elements] view.
    """

    kind: str
    first: int
    values: torch.Tensor

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.first + self.values.numel()


def kinds_of(copy: StateCopy) -> Tuple[str, ...]:
    """Return the kinds of state that exist, the same on every rank."""
    return (*KINDS, *COPY_KINDS) if copy.iteration else KINDS


def storages_of(param_ranges: Sequence[ParamRange], optimizer: Optimizer, copy: StateCopy) -> Iterator[Storage]:
    """Iterate over the state tensors that this rank owns; weights are the master weights if there are any."""
    for param_range, moments in zip(param_ranges, optimizer.moments):
        for kind, values in zip(KINDS, (param_range.parameters, *moments)):
            yield Storage(kind, param_range.first, values)
    for param_range, copies in zip(param_ranges, copy.tensors if copy.iteration else []):
        for kind, values in zip(COPY_KINDS, copies):
            yield Storage(kind, param_range.first, values)
