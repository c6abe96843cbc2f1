"""Tests of what the kernels for rates compute, and of threads that are pinned to cores."""

from __future__ import annotations

import os
import threading
from typing import Any, List

import numpy as np
import pytest
import torch  # noqa: F401  # its OpenMP runtime is the kernels'

from fugaku_gpt.kernels.rates import CoreWork, clock_hertz, compiled_triad, multiply_adds, timed_on_cores, triad
from tests.kernels.loaded import loaded_library


def test_the_triad_adds_a_multiple_of_one_array_to_another() -> None:
    x, y, z = (np.arange(1003, dtype=np.float32) + start for start in (0, 5, 9))
    compiled_triad(loaded_library())([x, y, z], 0.5, 2)
    assert (z == x + 0.5 * y).all()


def test_additions_and_multiply_adds_are_counted() -> None:
    library = loaded_library()
    assert library.chained_additions(1000) == 32_000
    result = np.zeros(1, np.float32)
    operations = library.multiply_adds(200, 0.5, result.ctypes.data)
    # each number approaches y / (1 - x) = 1, whatever it began with
    numbers = operations // (200 * 2)
    assert operations == 200 * 2 * numbers and numbers % library.lanes() == 0
    assert result[0] == pytest.approx(numbers)


def test_the_clock_is_that_of_the_round_with_the_most_cycles_per_second() -> None:
    library, core = loaded_library(), min(os.sched_getaffinity(0))
    times = iter([0.0, 4.0, 10.0, 12.0, 20.0, 28.0])  # begin and end of each round
    assert clock_hertz(library, core, 3, steps=1000, clock=lambda: next(times)) == 32_000 / 2.0
    assert next(times, None) is None


def test_work_of_this_machine_is_counted_and_timed() -> None:
    library, core = loaded_library(), min(os.sched_getaffinity(0))
    for work in (multiply_adds(library, 1000), triad(compiled_triad(library), floats=1000, passes=3)):
        ((units, seconds),) = timed_on_cores(work, [core], 1)
        assert units > 0 and seconds > 0


def test_each_core_has_a_thread_of_its_own_in_every_round() -> None:
    cores, seen, starts = sorted(os.sched_getaffinity(0))[:2], set(), []

    def prepare() -> List[int]:
        return sorted(os.sched_getaffinity(0))

    def run(affinity: Any) -> float:
        seen.add((threading.get_ident(), tuple(affinity)))
        return 2.0

    rounds = timed_on_cores(CoreWork(prepare, run), cores, 3, lambda: starts.append(len(seen)))
    assert [units for units, _ in rounds] == [2.0 * len(cores)] * 3 and all(seconds >= 0 for _, seconds in rounds)
    assert sorted(affinity for _, affinity in seen) == [(core,) for core in cores]
    assert starts == [0, len(cores), len(cores)]
    assert set(os.sched_getaffinity(0)) >= set(cores)  # the caller stays where it was


def test_a_rank_without_cores_takes_part_in_the_start_of_each_round() -> None:
    starts: List[int] = []
    assert timed_on_cores(CoreWork(lambda: None, lambda _: 1.0), [], 3, lambda: starts.append(1)) == []
    assert len(starts) == 3


def test_a_thread_that_fails_ends_all() -> None:
    core = min(os.sched_getaffinity(0))
    with pytest.raises(OSError, match="Invalid argument"):
        timed_on_cores(CoreWork(lambda: None, lambda _: 1.0), [core, 100_000], 2)

    def fail(_: Any) -> float:
        raise MemoryError("no memory")

    with pytest.raises(MemoryError, match="no memory"):
        timed_on_cores(CoreWork(lambda: None, fail), [core], 2)


@pytest.mark.parametrize("failing", ["prepare", "run"])
def test_a_rank_whose_thread_fails_takes_part_in_the_start_of_all_rounds(failing: str) -> None:
    starts: List[int] = []

    def fail(*_: Any) -> float:
        raise MemoryError("no memory")

    work = CoreWork(lambda: None, lambda _: 1.0)._replace(**{failing: fail})
    with pytest.raises(MemoryError, match="no memory"):
        timed_on_cores(work, sorted(os.sched_getaffinity(0))[:2], 4, lambda: starts.append(1))
    assert len(starts) == 4


def test_a_system_without_another_thread_ends_those_that_have_started(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    started: List[threading.Thread] = []
    starts: List[int] = []

    def start_one(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    core = min(os.sched_getaffinity(0))
    with pytest.raises(RuntimeError, match="can't start new thread"):
        timed_on_cores(CoreWork(lambda: None, lambda _: 1.0), [core, core], 2, lambda: starts.append(1))
    assert len(starts) == 2 and not started[0].is_alive()


def test_no_thread_stays_after_a_barrier_that_fails() -> None:
    before = set(threading.enumerate())

    def fail() -> None:
        raise ValueError("another rank has ended")

    with pytest.raises(ValueError, match="another rank has ended"):
        timed_on_cores(CoreWork(lambda: None, lambda _: 1.0), sorted(os.sched_getaffinity(0))[:2], 2, fail)
    assert set(threading.enumerate()) <= before
