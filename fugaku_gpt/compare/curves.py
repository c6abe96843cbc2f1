"""Compares the loss curves of two sides: did both compute the same?

The tolerance is a share of the loss, for about the first hundred iterations: rounding differences grow during training,
by a factor that depends on model and learning rate. It is meant to distinguish another order of summation from another
result.

========  =========  ==============================================================================================
float64   1e-9       another order of summation differs by 1e-15 a step
float32   1e-4       1e-7 a step; over a few iterations of a small model, PyTorch 1.7.1, 1.10.2 and 2.13 differed by
                     3e-8 (tests/matrix)
bfloat16  2e-2       8 bits: each activation is rounded to 4e-3
float16   5e-3       11 bits: each activation is rounded to 5e-4
========  =========  ==============================================================================================

Where the sides compute in different types, the tolerance of the coarser one applies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping, Optional, Sequence

TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "float16": 5e-3, "bfloat16": 2e-2}


@dataclass(frozen=True)
class CurveDistance:
    """The distance between two loss curves.

    Attributes:
        points: number of iterations that both curves have.
        distance: largest difference of their losses, as a share of A's loss.
        iteration: the (first) iteration with this difference.
        loss_a, loss_b: the losses in that iteration.
        tolerance: largest distance at which the curves count as equal (see the module).
    """

    points: int
    distance: float
    iteration: int
    loss_a: float
    loss_b: float
    tolerance: float

    @property
    def is_within_tolerance(self) -> bool:
        """True if the curves differ by no more than the tolerance in any iteration."""
        return self.distance <= self.tolerance


def compare_curves(a: Mapping[int, float], b: Mapping[int, float], dtypes: Sequence[str]) -> Optional[CurveDistance]:
    """Compares two curves (iteration → loss); None where they have no iteration in common.

    Args:
        dtypes: ``training.dtype`` of both sides.
    """
    common = sorted(set(a) & set(b))
    if not common:
        return None

    def distance(iteration: int) -> float:
        return abs(b[iteration] - a[iteration]) / max(abs(a[iteration]), 1e-12)

    # max returns the first of equal maxima
    worst = max(common, key=distance)
    tolerance = max(TOLERANCES[dtype] for dtype in dtypes)
    return CurveDistance(len(common), distance(worst), worst, a[worst], b[worst], tolerance)


def farthest_repeat(curves: Sequence[Mapping[int, float]], dtype: str) -> Optional[CurveDistance]:
    """Distance between one side's first run and the run that differs most from it; None if there is a single run.

    The same seed and build give the same curve if sums are always taken in the same order.
    """
    distances = [
        distance
        for distance in (compare_curves(curves[0], other, (dtype,)) for other in curves[1:])
        if distance is not None
    ]
    return max(distances, key=lambda distance: distance.distance) if distances else None
