"""Tests of the count of cycles on A64FX that need no compiler for it: what it makes of instructions and of a run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import a64fx_mca  # noqa: E402
from a64fx import CASES, TABLE, committed_shares  # noqa: E402
from a64fx_trace import Block, Trace, backward_jumps  # noqa: E402


@pytest.mark.parametrize(
    ("instruction", "flop"),
    [
        ("fmla z0.s, p0/m, z1.s, z2.s", 32),
        ("fadd z0.s, z1.s, z2.s", 16),
        ("fmul z0.d, z1.d, z2.d", 8),
        ("fmla v0.4s, v1.4s, v2.s[0]", 8),
        ("fmadd s0, s1, s2, s3", 2),
        ("movprfx z0, z1", 0),
        ("ld1w { z0.s }, p0/z, [x0]", 0),
    ],
)
def test_the_operations_of_an_instruction(instruction: str, flop: int) -> None:
    assert a64fx_mca.flop_of(instruction) == flop


def test_a_sum_that_a_loop_keeps_in_memory_is_found() -> None:
    loop = [
        "ld1w { z0.s }, p0/z, [x2, x0, lsl #2]",
        "add x12, sp, #0x20",
        "ld1w { z1.s }, p0/z, [x12]",
        "fadd z0.s, z0.s, z1.s",
        "st1w { z0.s }, p0, [x12]",
        "add x0, x0, #0x10",
    ]
    assert a64fx_mca._memory_sums(loop) and a64fx_mca._spills(loop) == 2


def test_a_loop_that_changes_an_array_in_place_keeps_no_sum_in_memory() -> None:
    loop = ["ld1w { z0.s }, p0/z, [x1]", "st1w { z0.s }, p0, [x1]", "add x1, x1, #0x40"]
    assert not a64fx_mca._memory_sums(loop) and a64fx_mca._spills(loop) == 0


def test_a_jump_backwards_is_a_loop_and_a_return_is_none() -> None:
    instructions = {0: "nop", 4: "b.any 0x0 <f>", 8: "ret"}
    trace = Trace([Block(0, 4), Block(8, 8)], [0, 0, 0, 1, 0], instructions, {0: "f"})
    assert list(backward_jumps(trace)) == [(1, 0, 4), (2, 0, 4)]


def test_each_row_of_the_table_is_of_a_kernel_and_its_share_follows_from_its_cycles() -> None:
    rows = [line.split(",") for line in TABLE.read_text(encoding="utf-8").splitlines()[1:]]
    assert rows and {row[0] for row in rows} <= set(CASES)
    for name, loop, _, cycles, *_ in rows:
        if not loop:
            assert committed_shares()[name] == pytest.approx(CASES[name].bound_cycles / float(cycles), abs=2e-3)
