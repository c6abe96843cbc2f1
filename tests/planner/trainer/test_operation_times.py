"""Tests of the time of single operations from counted cycles and bytes."""

from __future__ import annotations

import pytest

from fugaku_gpt.layout.operations import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from fugaku_gpt.machine.probed import ATTENTION, LINEAR
from fugaku_gpt.planner.trainer.operation_times import OperationTimes, Work, busiest_thread_tiles
from tests.planner.counted import PEAK_CYCLES, counted_machine

MACHINE = counted_machine()
HERTZ = 2e9


def _times(threads: int = 12, pipes: int = 2) -> OperationTimes:
    assert MACHINE.counted is not None
    return OperationTimes(MACHINE.counted, HERTZ, pipes, threads)


def test_a_product_of_full_tiles_shared_evenly_runs_at_the_counted_rate() -> None:
    rows, inner, columns = 8 * 12, 512, 48 * 12
    work = _times().product(LINEAR, rows, inner, columns)
    assert work.cores == pytest.approx(rows * inner * columns / 12 * PEAK_CYCLES / HERTZ)
    operands = 4 * (rows * inner + inner * columns + 2 * rows * columns)  # all fit into the cache
    assert work.memory == pytest.approx(operands / 256e9)
    assert work.overlapped == max(work.cores, work.memory) and work.not_overlapped == work.cores + work.memory


def test_edges_of_tiles_and_idle_threads_cost_the_time_of_full_tiles() -> None:
    full = _times().product(LINEAR, 96, 512, 576).cores
    assert _times().product(LINEAR, 95, 512, 575).cores == full
    assert _times().product(LINEAR, 97, 512, 576).cores > full  # one more row of tiles than the threads share evenly
    single_tile = _times().product(LINEAR, 8, 512, 48).cores  # eleven threads wait
    assert single_tile == pytest.approx(_times().product(LINEAR, 96, 512, 48).cores)
    assert busiest_thread_tiles(128, 48, 12) == 512 and busiest_thread_tiles(128, 16, 12) == 172
    assert busiest_thread_tiles(1, 1, 12) == 1 and busiest_thread_tiles(7, 5, 1) == 35


def test_operands_that_do_not_fit_into_the_cache_cross_more_than_once() -> None:
    small, large = _times().product(LINEAR, 1024, 768, 2304), _times().product(LINEAR, 8192, 768, 4608)
    factor = (8192 * 4608) / (1024 * 2304)
    assert large.cores == pytest.approx(factor * small.cores)
    assert large.memory * 256e9 > 4 * (8192 * 768 + 768 * 4608 + 2 * 8192 * 4608)


def test_attention_is_that_of_the_causal_half_in_rounds_of_heads() -> None:
    twelve_heads = _times().attention(ATTENTION, 12, 12, 1024, 64)
    assert twelve_heads.cores == pytest.approx(2 * 1024 * 1025 / 2 * 64 * 2 * PEAK_CYCLES / HERTZ)
    assert _times().attention(ATTENTION, 24, 16, 1024, 64).cores == pytest.approx(2 * twelve_heads.cores)


def test_passes_cross_memory_by_their_operands_and_results() -> None:
    elements = 3 * 2**20
    assert _times().elementwise("layer_norm", elements).memory == pytest.approx(12 * elements / 256e9)
    assert _times().elementwise("optimiser", elements).memory == pytest.approx(28 * elements / 256e9)
    assert _times().elementwise("add", elements).cores == 0  # PyTorch's own is not counted
    assert _times(24).elementwise("zero", elements).memory == pytest.approx(8 * elements / 512e9)


def test_a_pass_takes_the_cycles_of_the_thread_with_the_most_elements() -> None:
    cycles = 0.5 / HERTZ  # of an element of the layer norm
    for elements, busiest in ((1, 1), (12, 1), (13, 2), (24, 2), (25, 3)):
        assert _times().elementwise("layer_norm", elements).cores == pytest.approx(busiest * cycles)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    size = 2**24
    both = sum(_times().message(operation, 4, size).memory for operation in (REDUCE_SCATTER, ALL_GATHER))
    assert _times().message(ALL_REDUCE, 4, size).memory == pytest.approx(both)
    assert _times().message(ALL_REDUCE, 1, size).memory == 0


def test_a_wait_is_work_of_neither_cores_nor_memory() -> None:
    waiting = Work(cores=1.0, memory=2.0, overlapped=2.0) + Work(overlapped=5.0, idle=6.0)
    assert (waiting.bound_by, waiting.overlapped, waiting.not_overlapped) == ("memory", 7.0, 9.0)
    assert waiting.times(2).not_overlapped == 18.0
