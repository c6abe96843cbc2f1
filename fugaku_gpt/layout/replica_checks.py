"""Selects what ranks hold alike, bit for bit, for comparison by checksums (``training.checksum_interval``).

Only what must be equal is compared, so that a difference is never a matter of rounding:

* The parameters of replicas. They have made the same step with the same sums, or have got them from whoever made it.
* A tied token embedding on the first and the last stage of a pipeline: both add the same two terms.
* Of tensor-parallel ranks, what they hold alike and whose gradients they sum, if there are one or two replicas. Each of
  these ranks sums over replicas in a group of its own, in whatever order the MPI library chooses there; two terms have
  the same sum in either order, and more have not.
"""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Tuple

from fugaku_gpt.config.schema import LayoutConfig
from fugaku_gpt.layout.flat import FlatLayout, PlacedTensor

_REPLICAS_OF_ONE_SUM = 2  # at most, so that the order of a sum over them does not matter


class Comparison(NamedTuple):
    """Tensors that the ranks of a communicator hold alike.

    Attributes:
        communicator: ``dp``, ``tp``, ``kv`` or ``embedding``, see ``grid.py``.
        tensors: in the order of the flat parameters; at least one.
    """

    communicator: str
    tensors: Tuple[PlacedTensor, ...]

    @property
    def elements(self) -> int:
        """Elements of the all-reduce that compares them: the checksum of each tensor, and its complement."""
        return 2 * len(self.tensors)


def comparisons(flat: FlatLayout, layout: LayoutConfig, sequence_parallel: bool) -> List[Comparison]:
    """The comparisons that a rank takes part in, in the order in which they are made; those of its stage alike."""
    selected = []
    if layout.dp > 1:
        selected.append(Comparison("dp", flat.placed))
    if layout.dp <= _REPLICAS_OF_ONE_SUM and layout.tp > 1:
        selected.append(Comparison("tp", _tensors_within(flat, flat.summed_over_tp(sequence_parallel))))
        selected.append(Comparison("kv", _tensors_within(flat, flat.copied)))
    if layout.pp > 1:
        selected.append(Comparison("embedding", _tensors_within(flat, flat.embedding)))
    return [comparison for comparison in selected if comparison.tensors]


def is_checksum_step(interval: Optional[int], iteration: int) -> bool:
    """Whether checksums are compared in an iteration, before its update: of the weights that it has computed with.

    Args:
        interval: ``training.checksum_interval``.
        iteration: number of the iteration, from 1.
    """
    return interval is not None and iteration % interval == 0


def _tensors_within(flat: FlatLayout, span: slice) -> Tuple[PlacedTensor, ...]:
    return tuple(placed for placed in flat.placed if span.start <= placed.start < span.stop)
