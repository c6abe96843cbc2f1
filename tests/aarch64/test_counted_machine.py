"""The sizes of GEMM's blocks in the machine file of counted cycles are those that are compiled for A64FX."""

from __future__ import annotations

import importlib

import pytest

from fugaku_gpt.machine.constants import load_machine
from tests.aarch64.machine import compiler, folder
from tests.benchmarks import programs  # noqa: F401  # puts benchmarks/ on the path

pytestmark = pytest.mark.slow


def test_the_machine_of_counted_cycles_has_the_sizes_of_gemm() -> None:
    compiler("gcc-12")
    program = importlib.import_module("counted_machine")
    sizes = program.gemm_sizes(folder())
    assert (sizes["l2_bytes"], sizes["line_bytes"]) == (8 * 2**20, 256)
    assert (sizes["tile_rows"], sizes["tile_columns"]) == (8, 48) and sizes["depth"] % 32 == 0
    if program.FILE.exists():  # with the table that it is made of
        counted = load_machine("a64fx-counted").counted
        assert counted is not None and {name: getattr(counted, name) for name in sizes} == sizes
