"""Measures in which way layers' products are fastest: PyTorch's, oneDNN's where this build can call it, or our own.

The operators of ``gemm`` are called as layers call them, with one choice of kernels after another. All ways compute one
product before any computes the next, in an order that changes with each turn, and each is compared with PyTorch's in
the same turn: other work on the machine then slows all of them alike. Medians leave out the moments when it does not,
and the fastest times those when anything else runs: what is faster by both is faster.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import time
from dataclasses import asdict
from functools import partial
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch

from fugaku_gpt.compat.kernel_choices import RANK_CONSENSUS
from fugaku_gpt.compat.probes import has_kernel, probe_input
from fugaku_gpt.kernels.product_verdicts import (
    COMPILED,
    MEASURED_DTYPES,
    MIN_TURNS,
    ONEDNN,
    PYTORCH,
    ProductTimes,
    ProductVerdict,
    Verdicts,
    add_verdicts,
    read_verdicts,
    verdict_file,
)
from fugaku_gpt.machine import local
from fugaku_gpt.ops import gemm, native
from fugaku_gpt.ops.product_choice import current_stamp, forget_recorded
from fugaku_gpt.ops.tensor_pool import release_tensor_pool, use_tensor_pool

# for all products of one number type and one number of threads: seconds that are planned with, and the most, on a
# processor that is slow, or busy with other work
_SECONDS, _LIMIT_SECONDS = 2.0, 20.0
_SECONDS_AT_START, _LIMIT_AT_START = 1.5, 3.0  # while ranks wait
_MAX_TURNS = 15
_PLANNED_TURNS = 8  # with the first, which is not counted
# inputs and outputs of layers: the first of an MLP of 124M, and its slice on one of four tensor-parallel ranks
_LAYERS = ((768, 3072), (768, 768))
_ROWS = (1024, 512, 256, 128)  # tokens, the most that there is time for

Clock = Callable[[], float]
_Call = Callable[[], object]


class _Product(NamedTuple):
    """A product [rows, inner] x [inner, columns] of a layer, and the call that computes it."""

    kind: str
    rows: int
    inner: int
    columns: int
    call: _Call


class _Times(NamedTuple):
    """When a measurement ends by its plan, and at the latest, on ``clock``."""

    planned_end: float
    limit: float
    clock: Clock


def measure_missing(threads: Optional[Sequence[int]] = None, again: bool = False) -> Dict[str, Any]:
    """Measure what the file of verdicts lacks, and write it there; for a process of its own.

    Args:
        threads: numbers of threads; default: :func:`usual_threads`.
        again: measure all of them again.

    Returns:
        JSON values: ``verdicts`` in force for these numbers of threads, ``stamp``, ``file``, ``measured_anew`` (why
        some were measured, or empty) and ``problem`` (why they could not be written, or empty).
    """
    use_tensor_pool(local.allocator_in_use() == "libc")  # as runs do
    counts = usual_threads() if threads is None else sorted(set(threads))
    keys = [(dtype, count) for dtype in MEASURED_DTYPES for count in counts]
    recorded, reason = ({}, "asked for") if again else read_verdicts(verdict_file(current_stamp()), current_stamp())
    missing = [key for key in keys if key not in recorded or recorded[key].is_disturbed]
    verdicts, problem = recorded, ""
    if missing:
        measured = _time(missing, _SECONDS, _LIMIT_SECONDS)
        verdicts, problem = add_verdicts(verdict_file(current_stamp()), current_stamp(), measured, again)
        forget_recorded()
    return {
        "verdicts": [asdict(verdicts[key]) for key in keys],
        "stamp": asdict(current_stamp()),
        "file": str(verdict_file(current_stamp())),
        "measured_anew": (reason or _reason_to_measure(missing, recorded)) if missing else "",
        "problem": problem,
    }


def _reason_to_measure(missing: Sequence[Tuple[str, int]], recorded: Verdicts) -> str:
    if all(key in recorded for key in missing):
        return "other work had disturbed some measurements"
    return "not all had been measured"


def usual_threads() -> List[int]:
    """The numbers of threads that runs on this machine use: 1, the cores of a memory node that this process may use,
    and all of them."""
    cores = local.usable_cores()
    return sorted({1, max(map(len, local.group_by_numa_node(cores))), len(cores)})


def measure_at_start(dtype: str, threads: int) -> Tuple[ProductVerdict, str]:
    """Measure products at the start of a run, in a shorter time, and write the verdict to the file; returns the one in
    force, and why it could not be written, or an empty text. That there was no time is not written: the next start may
    have it."""
    (verdict,) = _time([(dtype, threads)], _SECONDS_AT_START, _LIMIT_AT_START)
    if verdict.turns < MIN_TURNS:
        return verdict, ""
    verdicts, problem = add_verdicts(verdict_file(current_stamp()), current_stamp(), [verdict], False)
    forget_recorded()
    return verdicts[dtype, threads], problem


def _time(keys: Sequence[Tuple[str, int]], seconds: float, limit: float) -> List[ProductVerdict]:
    try:
        return [time_products(dtype, threads, seconds, limit) for dtype, threads in keys]
    finally:  # a run has products of other sizes, or none of ours
        release_tensor_pool()
        native.release_workspace()


def time_products(
    dtype: str, threads: int, seconds: float, limit: float, clock: Clock = time.perf_counter
) -> ProductVerdict:
    """Measure the products of layers in a number type with a number of threads.

    Args:
        seconds: time that is planned with.
        limit: seconds after which at most one more product is computed in each way. Where there are not enough turns by
            then, as on an emulated processor, the verdict has none.
        clock: the time in seconds.
    """
    kind, before = getattr(torch, dtype), torch.get_num_threads()
    ways = _ways(kind)
    if len(ways) == 1:
        return ProductVerdict(dtype, threads, _MAX_TURNS)  # there is nothing to choose from
    begin = clock()
    times = _Times(begin + seconds, begin + limit, clock)
    try:
        torch.set_num_threads(threads)
        with torch.no_grad(), _restored_choices():
            measuring, waited = clock(), local.seconds_without_core()
            rows = _affordable_rows(kind, ways, times)
            turns = [] if rows is None else _turns(_products(kind, rows, _LAYERS), kind, ways, times)
            wait_share = _wait_share(waited, threads * (clock() - measuring))
    finally:
        torch.set_num_threads(before)
    if rows is None or len(turns) < MIN_TURNS:
        return ProductVerdict(dtype, threads, 0, wait_share=wait_share)
    return ProductVerdict(dtype, threads, len(turns), _summary(_sizes(rows, _LAYERS), ways, turns), wait_share)


def _wait_share(waited_before: Optional[float], thread_seconds: float) -> Optional[float]:
    """Share of the threads' seconds that they have waited for a core since a moment; None if it is unknown."""
    waited = local.seconds_without_core()
    if waited is None or waited_before is None or thread_seconds <= 0.0:
        return None
    return min(1.0, max(0.0, (waited - waited_before) / thread_seconds))  # threads may have ended meanwhile


def _ways(dtype: torch.dtype) -> List[str]:
    """The ways that there are on this machine, PyTorch's first."""
    in_float32 = dtype == torch.float32 or not all(has_kernel(name, dtype) for name in ("linear", "matmul"))
    ways = [PYTORCH]
    if in_float32 and gemm.has_onednn():
        ways.append(ONEDNN)
    if native.supports_native_matmul(dtype):
        ways.append(COMPILED)
    return ways


@contextlib.contextmanager
def _restored_choices() -> Iterator[None]:
    before = copy.deepcopy(RANK_CONSENSUS)
    try:
        yield
    finally:
        vars(RANK_CONSENSUS).update(vars(before))


def _choose(way: str, dtype: torch.dtype) -> None:
    native.choose_native_kernels(native.has_native_kernels())
    for kind in (torch.float32, dtype):  # what is not computed in 16 bits is in float32
        native.choose_native_matmul(way == COMPILED, kind)
    gemm.choose_onednn_matmul(way == ONEDNN)


def _affordable_rows(dtype: torch.dtype, ways: Sequence[str], times: _Times) -> Optional[int]:
    """The most rows with which the turns fit into the time, by the rate of small products; None if not even these are
    computed in it."""
    smallest = _ROWS[-1]
    small = _products(dtype, smallest, _LAYERS[-1:])
    for _ in range(2):  # the first prepares what a library prepares once
        took = 0.0
        for product in small:
            for way in ways:
                took += _seconds(product.call, way, dtype, times.clock)
                if times.clock() >= times.limit:
                    return None
    seconds_per_size = took / sum(product.rows * product.inner * product.columns for product in small)
    for rows in _ROWS:
        total = sum(height * inner * columns for _, height, inner, columns in _sizes(rows, _LAYERS))
        if _PLANNED_TURNS * seconds_per_size * total <= times.planned_end - times.clock():
            return rows
    return smallest


_Turn = List[Dict[str, float]]  # of each product, way → seconds


def _turns(products: Sequence[_Product], dtype: torch.dtype, ways: Sequence[str], times: _Times) -> List[_Turn]:
    """The turns for which there is time, without the first, which warms up, and the last if it is not complete."""
    turns: List[_Turn] = []
    for number in range(_MAX_TURNS + 1):
        order = [*ways[number % len(ways) :], *ways[: number % len(ways)]]
        turn: _Turn = []
        for product in products:
            turn.append({way: _seconds(product.call, way, dtype, times.clock) for way in order})
            if times.clock() >= (times.planned_end if len(turns) >= MIN_TURNS else times.limit):
                return turns
        if number:
            turns.append(turn)
    return turns


def _seconds(call: _Call, way: str, dtype: torch.dtype, clock: Clock) -> float:
    _choose(way, dtype)
    before = clock()
    call()
    return max(clock() - before, 1e-9)  # a clock may stand still


def _sizes(tokens: int, layers: Sequence[Tuple[int, int]]) -> List[Tuple[str, int, int, int]]:
    """Kind, rows, inner dimension and columns of each product of layers [inputs, outputs]."""
    sizes = []
    for inputs, outputs in layers:
        sizes.append(("forward", tokens, inputs, outputs))
        sizes.append(("gradient of inputs", tokens, outputs, inputs))
        sizes.append(("gradient of weights", outputs, tokens, inputs))
    return sizes


def _products(dtype: torch.dtype, tokens: int, layers: Sequence[Tuple[int, int]]) -> List[_Product]:
    """The products of layers [inputs, outputs], as their forward and backward passes call them."""
    calls: List[_Call] = []
    for inputs, outputs in layers:
        x, grad = probe_input(tokens, inputs).to(dtype), probe_input(tokens, outputs).to(dtype)
        weight, bias = probe_input(outputs, inputs).to(dtype), probe_input(outputs).to(dtype)
        calls += [
            partial(gemm.linear, x, weight, bias),
            partial(gemm.matmul, grad, weight),
            partial(gemm.add_product, torch.zeros(outputs, inputs), grad.t(), x),
        ]
    return [_Product(*size, call) for size, call in zip(_sizes(tokens, layers), calls)]


def _summary(
    sizes: Sequence[Tuple[str, int, int, int]], ways: Sequence[str], turns: Sequence[_Turn]
) -> Tuple[ProductTimes, ...]:
    """The times of each product over the turns."""
    products = []
    for index, size in enumerate(sizes):
        seconds = {way: [turn[index][way] for turn in turns] for way in ways}
        base = seconds[PYTORCH]
        speedups = {
            way: min(_median(map(operator.truediv, base, seconds[way])), min(base) / min(seconds[way]))
            for way in ways
            if way != PYTORCH
        }
        products.append(ProductTimes(*size, _median(base), speedups))
    return tuple(products)


def _median(values: Iterable[float]) -> float:
    return float(np.median(list(values)))  # the standard library's imports more at the start of each rank
