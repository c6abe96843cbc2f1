"""Rates of cores, measured by the native kernels with one thread pinned to each core: cycles, multiply-adds, memory.

Threads of Python call the kernels, which leave Python's lock alone, so no OpenMP runtime has a say in where they run.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from fugaku_gpt.kernels.library import Library
from fugaku_gpt.machine.system import this_system

CHAIN_STEPS = 100_000  # of 32 additions each: 1.6 ms at 2 GHz, in which a thread is seldom interrupted
MULTIPLY_ADD_STEPS = 1_000_000
TRIAD_FLOATS = 2**22  # of each of three arrays of a core: 48 MiB a core, more than its share of any cache
TRIAD_PASSES = 12  # of a round: 0.6 GB a core
TRIAD_BYTES = 12  # of an element: two that are read and one that is written
_FACTOR = 0.5


Arrays = List["np.ndarray[Any, Any]"]
Triad = Callable[[Arrays, float, int], object]  # arrays x, y, z; the factor; passes


class CoreWork(NamedTuple):
    """The work of the thread of a core.

    Attributes:
        prepare: called once in the thread; what it returns is given to ``run``.
        run: the measured call; returns the number of units that it has done, such as bytes.
    """

    prepare: Callable[[], Any]
    run: Callable[[Any], float]


def clock_hertz(library: Library, core: int, rounds: int = 50, steps: int = CHAIN_STEPS) -> float:
    """Cycles per second of a core, the most of some rounds: additions that wait for each other take a cycle each, on
    A64FX as on x86. A core that other work shares shows less."""
    work = CoreWork(lambda: None, lambda _: library.chained_additions(steps))
    return max(units / seconds for units, seconds in timed_on_cores(work, [core], rounds))


def multiply_adds(library: Library, steps: int = MULTIPLY_ADD_STEPS) -> CoreWork:
    """Multiply-adds in the registers of a core, counted in float32 operations."""
    return CoreWork(
        lambda: np.zeros(1, np.float32), lambda result: library.multiply_adds(steps, _FACTOR, result.ctypes.data)
    )


def compiled_triad(library: Library) -> Triad:
    """The triad of the native kernels."""

    def call(arrays: Arrays, factor: float, passes: int) -> None:
        x, y, z = (array.ctypes.data for array in arrays)
        library.triad(x, y, z, arrays[0].size, factor, passes)

    return call


def triad(call: Triad, floats: int = TRIAD_FLOATS, passes: int = TRIAD_PASSES) -> CoreWork:
    """Passes of z = x + factor y in float32, counted in bytes. Each core has arrays of its own, which its thread
    touches first. Where a store reads the line that it writes to, a third more is moved than is counted."""

    def prepare() -> Arrays:
        return [np.full(floats, value, np.float32) for value in (1.0, 2.0, 3.0)]

    def run(arrays: Arrays) -> float:
        call(arrays, _FACTOR, passes)
        return float(TRIAD_BYTES * floats * passes)

    return CoreWork(prepare, run)


def timed_on_cores(
    work: CoreWork, cores: Sequence[int], rounds: int, start_together: Callable[[], object] = lambda: None
) -> List[Tuple[float, float]]:
    """(units of all cores, seconds from the first start to the last end) of each round, on threads pinned to cores.

    Args:
        start_together: called before each round by this thread, such as a barrier of ranks; also without cores, so
            that a rank without any can take part in it.

    Raises:
        OSError, MemoryError: a thread could not be pinned to its core, or had no memory; that of the first one.
    """
    results: List[List[Tuple[float, float, float]]] = [[] for _ in cores]
    errors: List[BaseException] = []
    gate = threading.Barrier(len(cores) + 1)

    def on_core(index: int) -> None:
        try:
            this_system().set_affinity([cores[index]])
            state = work.prepare()
            gate.wait()
            for _ in range(rounds):
                gate.wait()
                before = time.perf_counter()
                units = work.run(state)
                results[index].append((units, before, time.perf_counter()))
                gate.wait()
        except threading.BrokenBarrierError:  # another thread failed, which has its error
            pass
        except BaseException as error:
            errors.append(error)
            gate.abort()

    threads = [threading.Thread(target=on_core, args=(index,), daemon=True) for index in range(len(cores))]
    for thread in threads:
        thread.start()
    problem: Optional[threading.BrokenBarrierError] = None
    try:
        gate.wait()
        for _ in range(rounds):
            start_together()
            gate.wait()
            gate.wait()
    except threading.BrokenBarrierError as error:
        problem = error
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    if problem is not None:
        raise problem
    return [_summary([result[number] for result in results]) for number in range(rounds)] if cores else []


def _summary(on_cores: Sequence[Tuple[float, float, float]]) -> Tuple[float, float]:
    units, starts, ends = zip(*on_cores)
    return sum(units), max(ends) - min(starts)
