"""The tensors of a run's state, as a checkpoint holds them: along the flat parameters, kind by kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator, Sequence, Tuple

import torch

from fugaku_gpt.parallel.buffers import ParamRange
from fugaku_gpt.training.health import Optimizer, StateCopy

KINDS = ("weights", "first_moment", "second_moment")
KEPT_KINDS = tuple(f"kept_{kind}" for kind in KINDS)  # of the copy to which a loss spike returns


@dataclass(frozen=True)
class Storage:
    """Where one kind of state lies for a range of parameters.

    Attributes:
        kind: one of ``KINDS`` or ``KEPT_KINDS``.
        first: the flat tensors' element that is the first of them.
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
    """The kinds of state that there are now, on every rank alike."""
    return (*KINDS, *KEPT_KINDS) if copy.iteration else KINDS


def storages_of(runs: Sequence[ParamRange], optimizer: Optimizer, copy: StateCopy) -> Iterator[Storage]:
    """All tensors of the state that this rank owns; weights are the masters where there are masters."""
    for run, moments in zip(runs, optimizer.moments):
        for kind, values in zip(KINDS, (run.parameters, *moments)):
            yield Storage(kind, run.first, values)
    for run, kept in zip(runs, copy.tensors if copy.iteration else []):
        for kind, values in zip(KEPT_KINDS, kept):
            yield Storage(kind, run.first, values)
