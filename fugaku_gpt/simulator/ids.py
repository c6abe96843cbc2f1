"""Job ids in every form that commands take: ``238``, ``239[1]``, ``239[1-5]``, ``240_0``, ``240_0-4``, ``238-240``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Optional

_FORM = re.compile(
    r"""(?P<low>\d+)
        (?: -(?P<high>\d+)                                  # several jobs
          | \[(?P<first>\d+)(?:-(?P<last>\d+))?\]           # sub-jobs of a bulk job
          | _(?P<step>\d+)(?:-(?P<last_step>\d+))?          # sub-jobs of a step job
        )?""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class Selection:
    """The jobs that one id names.

    Attributes:
        text: as written.
        low, high: job numbers; the same for one job.
        kind: ``job``, ``bulk`` or ``step``: whether whole jobs or sub-jobs are named.
        first, last: numbers of the sub-jobs; 0 for whole jobs.
    """

    text: str
    low: int
    high: int
    kind: str = "job"
    first: int = 0
    last: int = 0

    @property
    def is_range(self) -> bool:
        """More than one job or sub-job may be meant: what is missing in between is no error."""
        return self.low != self.high or self.first != self.last


def parse_selection(text: str) -> Optional[Selection]:
    """An id as data; None where it is no id, or a range runs backwards."""
    found = _FORM.fullmatch(text)
    if found is None:
        return None
    low = int(found["low"])
    if found["high"] is not None:
        high = int(found["high"])
        return Selection(text, low, high) if low <= high else None
    for kind, start, end in (("bulk", "first", "last"), ("step", "step", "last_step")):
        if found[start] is not None:
            first = int(found[start])
            last = int(found[end]) if found[end] is not None else first
            return Selection(text, low, low, kind, first, last) if first <= last else None
    return Selection(text, low, low)
