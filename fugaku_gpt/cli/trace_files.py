"""Files of timelines, whose names say what they are: shared by ``report trace`` and ``plan check``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, List, Optional, Sequence, Set

from fugaku_gpt.errors import UsageError
from fugaku_gpt.limits import RANKS, cut

if TYPE_CHECKING:
    from fugaku_gpt.report.timeline import Timeline

_RANGE = re.compile(r" *([0-9]{1,7})(?:-([0-9]{1,7}))? *")


def check_timeline_files(option: str, files: Sequence[Path]) -> None:
    """Refuse files of which no timeline can be made, before any work is done for them.

    Raises:
        UsageError: a name has another suffix.
    """
    from fugaku_gpt.report.gantt import SUFFIX
    from fugaku_gpt.report.trace_events import SUFFIXES

    for path in files:
        if not path.name.endswith((*SUFFIXES, SUFFIX)):
            raise UsageError(
                f"{option} {path}: its name must end in {' or '.join(SUFFIXES)}, for Perfetto and speedscope, or in "
                f"{SUFFIX}, a picture"
            )


def write_timeline(timeline: "Timeline", files: Sequence[Path]) -> None:
    """Write a timeline to each file.

    Raises:
        UsageError: it is too large for one of them, or a file cannot be written.
    """
    from fugaku_gpt.report.gantt import SUFFIX, write_gantt
    from fugaku_gpt.report.trace_events import write_trace_events

    for path in files:
        write = write_gantt if path.name.endswith(SUFFIX) else write_trace_events
        write(timeline, path)


def parse_ranks(text: Optional[str]) -> Optional[List[int]]:
    """The ranks of an option such as ``0-7,64``, in order, each once; None where it was not given.

    Raises:
        UsageError: it is not of this form, or names more ranks than there can be.
    """
    if text is None:
        return None
    ranks: Set[int] = set()
    for item in text.split(","):
        matched = _RANGE.fullmatch(item)
        first, last = (int(matched[1]), int(matched[2] or matched[1])) if matched is not None else (1, 0)
        if first > last:
            raise UsageError(f"--ranks {cut(text)}: valid: numbers and ranges of ranks, such as 0-7,64")
        if last >= RANKS.value:
            raise UsageError(f"--ranks {cut(text)}: a run has at most {RANKS}")
        ranks.update(range(first, last + 1))
    return sorted(ranks)
