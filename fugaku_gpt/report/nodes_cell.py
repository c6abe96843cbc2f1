"""Parses the Nodes cells of Markdown tables: the number of nodes, and the toggles in parentheses."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Optional, Tuple

from fugaku_gpt.report.rows import MORE_KNOBS

_NODES = re.compile(r"(\d{1,9})\s*(?:\((.*)\))?\s*[\^†‡*]*")
_CLOCK = re.compile(r"(\d{1,4}(?:\.\d{1,6})?)\s*([kKmMgGtT]?)Hz", re.IGNORECASE)
_RANKS = re.compile(r"(?:max-proc-per-node|procs?-per-node|ppn|mppn)\s*=\s*(\d{1,4})", re.IGNORECASE)
_KNOB = re.compile(rf"(\w+_state|{'|'.join(knob.name for knob in MORE_KNOBS)})\s*=\s*(\d{{1,9}})")


@dataclass(frozen=True)
class NodesCell:
    """A parsed Nodes cell.

    Attributes:
        nodes: number of nodes; None if the cell does not begin with a number.
        ranks_per_node: None if not stated, which means 1.
        clock: (number, letter before Hz) as written; empty if no clock is stated.
        other_toggles: toggles of unrecognised names.
    """

    nodes: Optional[int] = None
    ranks_per_node: Optional[int] = None
    clock: Tuple[str, ...] = ()
    tcmalloc: bool = False
    states: Tuple[Tuple[str, int], ...] = ()
    other_toggles: Tuple[str, ...] = ()

    @property
    def freq_mhz(self) -> Optional[int]:
        """The clock in MHz; None if none is stated, or not in GHz or MHz."""
        if not self.clock:
            return None
        factor = {"g": 1000.0, "m": 1.0}.get(self.clock[1].lower())
        return round(float(self.clock[0]) * factor) if factor is not None else None


def read_nodes_cell(text: str) -> NodesCell:
    """Parse a Nodes cell; every text is valid."""
    matched = _NODES.fullmatch(text.strip())
    if matched is None:
        return NodesCell()
    ranks: Optional[int] = None
    clock: Tuple[str, ...] = ()
    tcmalloc, states, other_toggles = False, [], []
    for part in (matched[2] or "").split(","):
        word = part.strip().strip("\"'`“”").strip()
        is_clock, is_ranks, is_knob = _CLOCK.fullmatch(word), _RANKS.fullmatch(word), _KNOB.fullmatch(word)
        if is_clock:
            clock = read_clock(word)
        elif is_ranks:
            ranks = int(is_ranks[1])
        elif is_knob:
            states.append((is_knob[1], int(is_knob[2])))
        elif "tcmalloc" in word.lower():
            tcmalloc = True
        elif word:
            other_toggles.append(word)
    return NodesCell(int(matched[1]), ranks, clock, tcmalloc, tuple(states), tuple(other_toggles))


def read_clock(text: str) -> Tuple[str, ...]:
    """(number, letter before Hz) of a clock such as 2.2GHz, as written; empty if the text is none."""
    matched = _CLOCK.fullmatch(text.strip())
    return (matched[1], matched[2]) if matched is not None else ()
