"""Which inputs of a configuration lie outside of what fitted rows cover, and how far.

The rows' hull is a box in logarithms: of each number the range from its least to its most, of what has few values those
values. An input lies outside by the logarithm of the factor to the nearest value inside; a setting that no row has
counts as much as a doubling. The distance of a configuration is the root of the sum of the squares of all of these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Sequence, Tuple

from fugaku_gpt.planner.tables.rows import MEASURED_ORDER, ConfigRow

# of each input: (least, most) of RANGES, all values of KINDS; [ranks per node, fewest nodes, most] of RANKS_ON_NODES
Seen = Mapping[str, Tuple[Any, ...]]
RANGES = ("layers", "hidden", "heads", "vocab", "seq_len", "nodes", "dp", "tp", "pp", "micro_batch", "global_batch")
KINDS = ("ranks_per_node", "zero", "recompute", "torch", "dtype", "tcmalloc", "freq_ghz")
_SLACK = {"vocab": 1.05}  # one vocabulary is padded to several sizes
_FACTORS = ("ranks_per_node", "freq_ghz")  # KINDS between whose values there is a factor
RANKS_ON_NODES = "ranks_on_nodes"
SETTING = math.log(2)  # the distance of a setting that no row has


@dataclass(frozen=True)
class Outside:
    """An input outside of the hull: what to say of it, and how far it is."""

    text: str
    distance: float


def seen_inputs(rows: Sequence[ConfigRow]) -> Dict[str, Tuple[Any, ...]]:
    """Of each input the values of these rows; nothing where there are none."""
    if not rows:
        return {}
    seen: Dict[str, Tuple[Any, ...]] = {}
    for name in RANGES:
        values = [getattr(row, name) for row in rows]
        seen[name] = (min(values), max(values))
    for name in KINDS:
        seen[name] = tuple(sorted({getattr(row, name) for row in rows}))
    counts = [(ranks, [row.nodes for row in rows if row.ranks_per_node == ranks]) for ranks in seen["ranks_per_node"]]
    seen[RANKS_ON_NODES] = tuple([ranks, min(nodes), max(nodes)] for ranks, nodes in counts)
    return seen


def outside(row: ConfigRow, seen: Seen) -> List[Outside]:
    """The inputs of a row that no fitted row is like, each with what was measured."""
    found = []
    for name in RANGES:
        if name not in seen:
            continue
        value, (least, most) = getattr(row, name), seen[name]
        slack = _SLACK.get(name, 1.0)
        beyond = max(math.log(least / slack / value), math.log(value / (most * slack)))
        if beyond > 0:
            found.append(Outside(f"{name} {value}: measured {least} to {most}", beyond))
    for name in KINDS:
        value = getattr(row, name)
        if name not in seen or value in seen[name]:
            continue
        near = [one for one in seen[name] if one] if name in _FACTORS and value else []
        beyond = min((abs(math.log(value / one)) for one in near), default=SETTING)
        measured = ", ".join(_said(name, one) for one in seen[name])
        found.append(Outside(f"{name} {_said(name, value)}: measured {measured}", beyond))
    return found


def in_no_table(row: ConfigRow, ordered: bool, seen: Seen) -> List[Outside]:
    """What of a configuration the model counts by rules alone: what no measured row of any machine has, and several
    ranks on each of many nodes where rows have them on a few.

    Args:
        ordered: the machine's model counts how far stages are apart.
    """
    found = []
    ranks = row.ranks_per_node
    alike = sorted(seen.get(RANKS_ON_NODES, ()), key=lambda one: (abs(math.log(ranks / one[0])), -one[0]))
    for _, least, most in alike[:1]:
        if not least <= row.nodes <= most and (least, most) != seen["nodes"]:
            measured = str(least) if least == most else f"{least} to {most}"
            found.append(Outside(f"ranks_per_node {ranks} on {row.nodes} nodes: measured on {measured}", SETTING))
    if row.chunks > 1:
        found.append(Outside(f"chunks {row.chunks}: measured 1", SETTING))
    if ordered and row.order != MEASURED_ORDER and row.pp > 1 and row.dp > 1:
        found.append(Outside(f"order {row.order}: measured {MEASURED_ORDER}", SETTING))
    if row.sequence_parallel:
        found.append(Outside("sequence_parallel: measured without", SETTING))
    return found


def distance(inputs: Sequence[Outside]) -> float:
    """Of a configuration with these inputs outside; 0 where there are none."""
    return math.sqrt(sum(one.distance**2 for one in inputs))


def _said(name: str, value: object) -> str:
    return "not given" if value == "" or (name == "freq_ghz" and value == 0) else str(value)
