"""Toggles that a prediction says cost seconds, with the sizes at which measured pairs of rows saw them help or hurt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import List, Mapping, Tuple

from fugaku_gpt.machine.constants import FUGAKU_HARDWARE, Machine
from fugaku_gpt.planner.tables.predict import predict_rows
from fugaku_gpt.planner.tables.rows import ConfigRow

_LEAST_COST = 0.01  # share of the seconds from which a toggle is named


@dataclass(frozen=True)
class ToggledPair:
    """Two rows of other trainers on Fugaku that differ in one toggle alone.

    Attributes:
        without, toggled: ids of the rows in ``benchmarks/reference/measurements.csv``.
        ratio: seconds with the toggle / seconds without it.
    """

    without: str
    toggled: str
    nodes: int
    ratio: float


# toggle → pairs by nodes; a test compares them with the table
PAIRS: Mapping[str, Tuple[ToggledPair, ...]] = {
    "tcmalloc": (
        ToggledPair("fsweep.t2.L21", "fsweep.t2.L24", 1, 0.655),
        ToggledPair("dsf.068", "dsf.060", 1, 0.772),
        ToggledPair("dsf.070", "dsf.062", 4, 0.579),
        ToggledPair("dsf.072", "dsf.064", 16, 0.592),
        ToggledPair("dsf.074", "dsf.066", 64, 0.564),
        ToggledPair("fsweep.t1.L10", "dsf.083", 512, 2.108),
    ),
}


def costly_toggles(machine: Machine, row: ConfigRow) -> List[str]:
    """A sentence for each toggle of a row that costs seconds by the machine's model, and where it was seen to."""
    if not row.tcmalloc or not row.hardware.startswith(FUGAKU_HARDWARE):
        return []
    with_it, without = predict_rows(machine, [row, replace(row, tcmalloc=False)])
    cost = with_it.seconds.value / without.seconds.value - 1
    if cost < _LEAST_COST:
        return []
    seen = ", ".join(f"{pair.ratio:.2f} on {pair.nodes} node{'s' * (pair.nodes > 1)}" for pair in PAIRS["tcmalloc"])
    return [
        f"node.tcmalloc costs {cost:.0%} of the seconds here by this model; seconds with it over those without it, as "
        f"measured (124M, other trainers): {seen}; measure both"
    ]
