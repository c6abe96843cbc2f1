"""Job ids of PJM: ``238``, a bulk job's ``239[1]``, a step job's ``240_0``, and ranges of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import List, Optional

from fugaku_gpt.limits import SUB_JOBS

# in a row of a table, an id may be a range of sub-jobs: 239[1-5], 240_0-4
ROW_ID_PATTERN = r"\d{1,15}(?:_\d+(?:-\d+)?|\[\d+(?:-\d+)?\])?"
# in a message, it may also be a range of jobs: 238-240
MESSAGE_ID_PATTERN = r"\d{1,15}(?:_\d{1,7}(?:-\d{1,7})?|\[\d{1,7}(?:-\d{1,7})?\]|-\d{1,15})?"
ID_PATTERN = r"[0-9]{1,15}(?:_[0-9]{1,7}|\[[0-9]{1,7}\])?"
_SINGLE = re.compile(r"(\d{1,15})(?:_(\d{1,7})|\[(\d{1,7})\])?", re.ASCII)
_RANGE = re.compile(r"(\d{1,15})(?:-(\d{1,15})|_(\d{1,7})-(\d{1,7})|\[(\d{1,7})-(\d{1,7})\])", re.ASCII)


@dataclass(frozen=True)
class PjmJobId:
    """The id of a job or sub-job.

    Attributes:
        number: number of the job.
        bulk: number of a bulk job's sub-job, otherwise None.
        step: number of a step job's sub-job, otherwise None.
    """

    number: int
    bulk: Optional[int] = None
    step: Optional[int] = None

    def __str__(self) -> str:
        if self.bulk is not None:
            return f"{self.number}[{self.bulk}]"
        return f"{self.number}" if self.step is None else f"{self.number}_{self.step}"

    @property
    def parent(self) -> PjmJobId:
        """The id of the job that a sub-job belongs to; for a job, its own id."""
        return PjmJobId(self.number)


def parse_job_id(text: str) -> PjmJobId:
    """Parse one id.

    Raises:
        ValueError: the text is not a job id of PJM.
    """
    match = _SINGLE.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{text[:60]!r} is not a job id such as 238, 239[1] or 240_0")
    number, step, bulk = match.groups()
    return PjmJobId(int(number), None if bulk is None else int(bulk), None if step is None else int(step))


def expand_job_ids(text: str) -> List[PjmJobId]:
    """Return the ids of an id or a range: ``239[1-5]``, ``240_0-4`` or ``238-240``.

    Raises:
        ValueError: the text is neither, or is a range of more than ``SUB_JOBS`` ids.
    """
    match = _RANGE.fullmatch(text.strip())
    if not match:
        return [parse_job_id(text)]
    number = int(match[1])
    first, last = next(
        (int(low), int(high))
        for low, high in ((match[1], match[2]), (match[3], match[4]), (match[5], match[6]))
        if high is not None
    )
    if last < first or last - first >= SUB_JOBS.value:
        raise ValueError(f"{text[:60]!r}: a range goes from the lower to the higher, over {SUB_JOBS.value} ids at most")
    numbers = range(first, last + 1)
    if match[2] is not None:
        return [PjmJobId(each) for each in numbers]
    if match[4] is not None:
        return [PjmJobId(number, step=each) for each in numbers]
    return [PjmJobId(number, bulk=each) for each in numbers]
