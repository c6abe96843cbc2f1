"""The rules by which Perfetto's trace processor makes slices of a JSON trace, as far as complete events are concerned.

Of its sources (``src/trace_processor/importers/common/slice_tracker.cc`` and ``sorter``, 2025): events are sorted by
time, those of one time stay in their order; an event of negative time or length is dropped. A thread of a process has a
stack of open slices. A new event closes what ends before it or just when it begins, two events without length
excepted, and is dropped if it ends after a slice that is still open.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, DefaultDict, Dict, List, Mapping, Sequence, Tuple

NANOSECONDS = 1000  # of the microseconds in a file


def slices_of(events: Sequence[Mapping[str, Any]]) -> Dict[Tuple[int, int], List[Tuple[int, int, int]]]:
    """(process, thread) → (start, length, depth) of its slices, in nanoseconds.

    Raises:
        ValueError: an event would be dropped.
    """
    stacks: DefaultDict[Tuple[int, int], List[Tuple[int, int]]] = defaultdict(list)
    slices: DefaultDict[Tuple[int, int], List[Tuple[int, int, int]]] = defaultdict(list)
    complete = [event for event in events if event["ph"] == "X"]
    for event in sorted(complete, key=lambda event: float(event["ts"])):  # a stable sort, as Perfetto's
        start, length = (int(event[name] * NANOSECONDS) for name in ("ts", "dur"))
        if start < 0 or length < 0:
            raise ValueError(f"negative: {event}")
        track = event["pid"], event["tid"]
        stack = stacks[track]
        for at in range(len(stack) - 1, -1, -1):
            open_start, open_end = stack[at]
            is_over = open_end < start or (open_end == start and not (open_start == open_end and length == 0))
            if is_over:
                stack.pop()
            elif start < open_end < start + length:
                raise ValueError(f"overlaps [{open_start}, {open_end}]: {event}")
        slices[track].append((start, length, len(stack)))
        stack.append((start, start + length))
    return dict(slices)
