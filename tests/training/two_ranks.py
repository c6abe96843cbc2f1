"""The first of two ranks, without a second process."""

from __future__ import annotations

from typing import Any, Dict, List

from fugaku_gpt.comm import Communicator


class TwoRanks(Communicator):
    """The first of two ranks; a test sets the values that the other rank gathers."""

    other: Dict[str, Any]

    def gather_json(self, value: Any) -> List[Any]:
        return [value, {**value, **self.other}]
