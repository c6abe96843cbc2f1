"""Which inputs of a configuration lie outside of what fitted rows cover, and how far.

The rows cover a box in logarithms: the range from the smallest to the largest value of each numeric input, and the
measured values of each categorical input. The distance of an input is the logarithm of the factor to the nearest
covered value; a setting that no row has counts as much as a doubling. The distance of a configuration is the root of
the sum of the squares of these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Sequence, Tuple

from fugaku_gpt.planner.tables.rows import MEASURED_ORDER, ConfigRow

# by input: (least, most) of a numeric one, all values of a categorical one; RANKS_ON_NODES has [ranks per node, fewest
# nodes, most nodes] for each number of ranks
InputRanges = Mapping[str, Tuple[Any, ...]]
NUMERIC_INPUTS = (
    "layers", "hidden", "heads", "vocab", "seq_len", "nodes", "dp", "tp", "pp", "micro_batch", "global_batch",
)  # fmt: skip
CATEGORICAL_INPUTS = ("ranks_per_node", "zero", "recompute", "torch", "dtype", "tcmalloc", "freq_ghz")
_SLACK = {"vocab": 1.05}  # one vocabulary is padded to several sizes
# categorical inputs that are numbers, so that a factor between values means something
_FACTORS = ("ranks_per_node", "freq_ghz")
RANKS_ON_NODES = "ranks_on_nodes"
SETTING_DISTANCE = math.log(2)  # the distance of a setting that no row has


@dataclass(frozen=True)
class ExtrapolatedInput:
    """An input outside of the covered range: its description, and its distance in logarithms."""

    text: str
    distance: float


def input_ranges_of(rows: Sequence[ConfigRow]) -> Dict[str, Tuple[Any, ...]]:
    """The values that these rows have of each input; empty without rows."""
    if not rows:
        return {}
    ranges: Dict[str, Tuple[Any, ...]] = {}
    for name in NUMERIC_INPUTS:
        values = [getattr(row, name) for row in rows]
        ranges[name] = (min(values), max(values))
    for name in CATEGORICAL_INPUTS:
        ranges[name] = tuple(sorted({getattr(row, name) for row in rows}))
    counts = [(ranks, [row.nodes for row in rows if row.ranks_per_node == ranks]) for ranks in ranges["ranks_per_node"]]
    ranges[RANKS_ON_NODES] = tuple([ranks, min(nodes), max(nodes)] for ranks, nodes in counts)
    return ranges


def extrapolated_inputs(row: ConfigRow, ranges: InputRanges) -> List[ExtrapolatedInput]:
    """The inputs of a row that lie outside of the fitted rows' ranges, each with what was measured."""
    inputs = []
    for name in NUMERIC_INPUTS:
        if name not in ranges:
            continue
        value, (least, most) = getattr(row, name), ranges[name]
        slack = _SLACK.get(name, 1.0)
        distance = max(math.log(least / slack / value), math.log(value / (most * slack)))
        if distance > 0:
            inputs.append(ExtrapolatedInput(f"{name} {value}: measured {least} to {most}", distance))
    for name in CATEGORICAL_INPUTS:
        value = getattr(row, name)
        if name not in ranges or value in ranges[name]:
            continue
        numbers = [number for number in ranges[name] if number] if name in _FACTORS and value else []
        distance = min((abs(math.log(value / number)) for number in numbers), default=SETTING_DISTANCE)
        measured = ", ".join(_value_text(name, measured_value) for measured_value in ranges[name])
        inputs.append(ExtrapolatedInput(f"{name} {_value_text(name, value)}: measured {measured}", distance))
    return inputs


def rule_based_inputs(row: ConfigRow, counts_stage_distance: bool, ranges: InputRanges) -> List[ExtrapolatedInput]:
    """The inputs that the model handles by rules alone: settings that no measured row of any machine has, and several
    ranks per node on more nodes than the rows have them on.

    Args:
        counts_stage_distance: whether the machine's model depends on how far stages are from each other.
    """
    inputs = []
    ranks = row.ranks_per_node
    by_similarity = sorted(
        ranges.get(RANKS_ON_NODES, ()), key=lambda entry: (abs(math.log(ranks / entry[0])), -entry[0])
    )
    for _, least, most in by_similarity[:1]:
        if not least <= row.nodes <= most and (least, most) != ranges["nodes"]:
            measured = str(least) if least == most else f"{least} to {most}"
            inputs.append(
                ExtrapolatedInput(
                    f"ranks_per_node {ranks} on {row.nodes} nodes: measured on {measured}", SETTING_DISTANCE
                )
            )
    if row.chunks > 1:
        inputs.append(ExtrapolatedInput(f"chunks {row.chunks}: measured 1", SETTING_DISTANCE))
    if counts_stage_distance and row.order != MEASURED_ORDER and row.pp > 1 and row.dp > 1:
        inputs.append(ExtrapolatedInput(f"order {row.order}: measured {MEASURED_ORDER}", SETTING_DISTANCE))
    if row.sequence_parallel:
        inputs.append(ExtrapolatedInput("sequence_parallel: measured without", SETTING_DISTANCE))
    return inputs


def extrapolation_distance(inputs: Sequence[ExtrapolatedInput]) -> float:
    """Distance of a configuration with these extrapolated inputs; 0 if there are none."""
    return math.sqrt(sum(extrapolated.distance**2 for extrapolated in inputs))


def _value_text(name: str, value: object) -> str:
    return "not given" if value == "" or (name == "freq_ghz" and value == 0) else str(value)
