"""Tests of the clock that never jumps."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Dict

import pytest

from fugaku_gpt.machine.clock import clock_variables, steady_time

PROGRAM = "from fugaku_gpt.machine.clock import steady_time; print(steady_time())"


def time_of_child(variables: Dict[str, str]) -> float:
    environment = {**os.environ, **variables}
    output = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE, check=True).stdout
    return float(output)


def test_the_clock_does_not_follow_the_time_of_day(monkeypatch: pytest.MonkeyPatch) -> None:
    before = steady_time()
    monkeypatch.setattr(time, "time", lambda: before - 3600.0)
    assert steady_time() >= before


def test_a_child_has_the_clock_of_the_parent_process() -> None:
    """The parent began when the clock of the node was two hours slow."""
    ((name, text),) = clock_variables().items()
    boot, offset = text.split()
    before = steady_time() - 7200.0
    after_start = time_of_child({name: f"{boot} {float(offset) - 7200.0!r}"})
    assert before <= after_start <= steady_time() - 7200.0


@pytest.mark.parametrize("text", ["another-start-or-node 1000.0", "", "words", "{boot} words", "{boot}"])
def test_the_clock_of_another_node_or_start_is_not_taken(text: str) -> None:
    ((name, own),) = clock_variables().items()
    before = time.time()
    assert before - 1.0 <= time_of_child({name: text.format(boot=own.split()[0])}) <= time.time() + 1.0
