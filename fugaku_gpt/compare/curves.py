"""Loss curves of two sides, held against each other: did both compute the same?

The tolerance is a share of the loss, for the first hundred iterations or so: rounding differences grow as training goes
on, by a factor that hangs on model and learning rate. It is meant to tell another order of sums from another result.

========  =========  ==============================================================================================
float64   1e-9       sums of another order differ by 1e-15 a step
float32   1e-4       by 1e-7 a step; over a few iterations of a small model, PyTorch 1.7.1, 1.10.2 and 2.13 were seen
                     3e-8 apart (tests/matrix)
bfloat16  2e-2       8 bits: each activation is rounded to 4e-3
float16   5e-3       11 bits: to 5e-4
========  =========  ==============================================================================================

Where the sides compute in different types, the coarser one's holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping, Optional, Sequence

TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "float16": 5e-3, "bfloat16": 2e-2}


@dataclass(frozen=True)
class CurveDistance:
    """How far two curves are apart.

    Attributes:
        points: iterations that both have.
        distance: largest of their distances, as a share of A's loss.
        iteration: where that is, the first where there are several.
        loss_a, loss_b: there.
        tolerance: see above.
    """

    points: int
    distance: float
    iteration: int
    loss_a: float
    loss_b: float
    tolerance: float

    @property
    def is_within_tolerance(self) -> bool:
        """Within the tolerance everywhere."""
        return self.distance <= self.tolerance


def compare_curves(a: Mapping[int, float], b: Mapping[int, float], dtypes: Sequence[str]) -> Optional[CurveDistance]:
    """Two curves, iteration → loss; None where they have no iteration in common.

    Args:
        dtypes: ``training.dtype`` of both sides.
    """
    common = sorted(set(a) & set(b))
    if not common:
        return None

    def distance(iteration: int) -> float:
        return abs(b[iteration] - a[iteration]) / max(abs(a[iteration]), 1e-12)

    # max gives the first of equals
    worst = max(common, key=distance)
    tolerance = max(TOLERANCES[dtype] for dtype in dtypes)
    return CurveDistance(len(common), distance(worst), worst, a[worst], b[worst], tolerance)


def farthest_repeat(curves: Sequence[Mapping[int, float]], dtype: str) -> Optional[CurveDistance]:
    """Of one side's own runs, how far the one that is farthest from the first is from it; None where there is one run
    alone. The same seed and the same build draw the same curve where sums have one order."""
    distances = [
        distance
        for distance in (compare_curves(curves[0], other, (dtype,)) for other in curves[1:])
        if distance is not None
    ]
    return max(distances, key=lambda distance: distance.distance) if distances else None
