"""Rates of cores, measured by the native kernels with one thread pinned to each core: cycles, multiply-adds, memory.

Threads of Python call the kernels, which leave Python's lock alone, so no OpenMP runtime has a say in where they run.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any, Callable, Iterator, List, NamedTuple, Sequence, Tuple

import numpy as np

from fugaku_gpt.kernels.library import Library
from fugaku_gpt.machine.system import this_system

CHAIN_STEPS = 100_000  # of 32 additions each: 1.6 ms at 2 GHz, in which a thread is seldom interrupted
MULTIPLY_ADD_STEPS = 1_000_000
TRIAD_FLOATS = 2**22  # of each of three arrays of a core: 48 MiB a core, more than its share of any cache
TRIAD_PASSES = 12  # of a round: 0.6 GB a core
TRIAD_BYTES = 12  # of an element: two that are read and one that is written
_FACTOR = 0.5


Clock = Callable[[], float]
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


def clock_hertz(
    library: Library, core: int, rounds: int = 50, steps: int = CHAIN_STEPS, clock: Clock = time.perf_counter
) -> float:
    """Cycles per second of a core, the most of some rounds: additions that wait for each other take a cycle each, on
    A64FX as on x86. A core that other work shares shows less. ``clock``: the time in seconds."""
    work = CoreWork(lambda: None, lambda _: library.chained_additions(steps))
    return max(units / seconds for units, seconds in timed_on_cores(work, [core], rounds, clock=clock))


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
    work: CoreWork,
    cores: Sequence[int],
    rounds: int,
    start_together: Callable[[], object] = lambda: None,
    clock: Clock = time.perf_counter,
) -> List[Tuple[float, float]]:
    """(units of all cores, seconds from the first start to the last end) of each round, on threads pinned to cores.

    Args:
        start_together: called before each round by this thread, such as a barrier of ranks; also without cores, and
            after a thread has failed, so that other ranks never wait for this one. What it raises ends the threads and
            passes through.
        clock: the time in seconds.

    Raises:
        RuntimeError, OSError, MemoryError: a thread could not be started or pinned to its core, or had no memory; that
            of the first one, after the last call of ``start_together``.
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
                before = clock()
                units = work.run(state)
                results[index].append((units, before, clock()))
                gate.wait()
        except threading.BrokenBarrierError:  # another thread failed, which has its error
            pass
        except BaseException as error:
            errors.append(error)
            gate.abort()

    threads = [threading.Thread(target=on_core, args=(index,), daemon=True) for index in range(len(cores))]
    with _ended(threads, gate):
        try:
            for thread in threads:
                thread.start()
        except RuntimeError as error:  # the system has no more of them
            errors.append(error)
            gate.abort()
        _pass(gate)
        for _ in range(rounds):
            start_together()
            _pass(gate)
            _pass(gate)
    if errors:
        raise errors[0]
    return [_summary([result[number] for result in results]) for number in range(rounds)] if cores else []


@contextlib.contextmanager
def _ended(threads: Sequence[threading.Thread], gate: threading.Barrier) -> Iterator[None]:
    """Waits for threads at the end of this context; an error in it ends those that wait at the gate."""
    try:
        yield
    except BaseException:
        gate.abort()
        raise
    finally:
        for thread in threads:
            if thread.ident is not None:  # it was started
                thread.join()


def _pass(gate: threading.Barrier) -> None:
    """Wait for all at the gate, unless one of them has failed."""
    with contextlib.suppress(threading.BrokenBarrierError):
        gate.wait()


def _summary(on_cores: Sequence[Tuple[float, float, float]]) -> Tuple[float, float]:
    units, starts, ends = zip(*on_cores)
    return sum(units), max(ends) - min(starts)
