"""Calls have room for their frames, however deep they are called from."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, List

import pytest

from fugaku_gpt.machine.frames import with_room_for_frames

# pages that are mapped while a function is called 100 times, for each depth that it may be called from
_FAULTS = """
import json, resource, sys
from fugaku_gpt.machine.frames import with_room_for_frames

def small(a, b, c, d):
    return a

def calls():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(100):
        small(1, 2, 3, 4)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def at(depth):
    return calls() if depth == 0 else at(depth - 1)

def at_each():
    return [at(depth) for depth in range(400)]

at_each()
print(json.dumps([at_each(), with_room_for_frames(at_each)]))
"""


def test_no_loop_takes_and_hands_back_memory_at_each_call() -> None:
    done = subprocess.run([sys.executable, "-c", _FAULTS], stdout=subprocess.PIPE, check=True)
    without, with_room = json.loads(done.stdout)
    assert len(with_room) == len(without) == 400
    assert max(with_room) < 100
    if sys.implementation.name == "cpython" and sys.version_info[:2] == (3, 11):  # where it was seen
        assert max(without) >= 100


def test_what_is_called_gives_what_it_gives() -> None:
    assert with_room_for_frames(lambda: [1]) == [1]
    with pytest.raises(KeyError, match="here"):
        with_room_for_frames(lambda: {}["here"])
    nested: List[Any] = with_room_for_frames(lambda: with_room_for_frames(lambda: [with_room_for_frames]))
    assert nested == [with_room_for_frames]
