"""Tests of the count of cycles on A64FX that need no compiler for it: what it makes of instructions and of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, List, Sequence

import pytest

from tests.benchmarks import programs  # noqa: F401  # puts benchmarks/ on the path

import a64fx  # isort: skip
import a64fx_mca  # isort: skip
import a64fx_trace  # isort: skip
from a64fx_trace import Block, Machine, Trace, backward_jumps  # isort: skip

LOG = """IN: begin
0x1000:  d503201f  nop
0x1004:  d65f03c0  ret

Trace 0: 0x7f0000 [00000000/0000000000001000/00000000/00000000] begin
IN: kernel
0x2000:  d65f03c0  ret

Trace 0: 0x7f0100 [00000000/0000000000002000/00000000/00000000] kernel
IN: end
0x3000:  d65f03c0  ret

Trace 0: 0x7f0200 [00000000/0000000000003000/00000000/00000000] end
"""
SYMBOLS = {0x1000: "begin", 0x2000: "kernel", 0x3000: "end"}


def _record(log: str, monkeypatch: pytest.MonkeyPatch) -> Trace:
    """The trace of a run of qemu that has written this log."""

    def write_log(command: Sequence[str], environment: Dict[str, str], text: str = "") -> str:
        Path(command[command.index("-D") + 1]).write_text(log, encoding="ascii")
        return ""

    monkeypatch.setattr(a64fx_trace, "_disassembly", lambda *_: (SYMBOLS, dict.fromkeys(SYMBOLS, "ret")))
    monkeypatch.setattr(a64fx_trace, "_output", write_log)
    return a64fx_trace.record(Machine(Path()), Path("driver"), [])


def test_the_blocks_between_begin_and_end_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = _record(LOG, monkeypatch)
    assert trace.blocks == [Block(0x1000, 0x1004), Block(0x2000, 0x2000)] and trace.order == [0, 1]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("Trace 0: 0x7f0100 [", "Trace 0: 0x7f01", "log cannot be read: not a line of an executed block: Trace 0"),
        (LOG[LOG.index("IN: end") :], "", "stops after 2 blocks, before the driver's `end`"),
        (LOG[LOG.index("Trace 0: 0x7f0200") :], "", "stops after 2 blocks, before the driver's `end`"),
        (LOG, "", "stops after 0 blocks, before the driver's `begin`"),
        ("0x2000:  d65f03c0  ret\n", "", "no instructions of the block at 0x2000"),
    ],
)
def test_a_log_that_cannot_be_read_to_the_kernel_s_end_is_refused(
    before: str, after: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert before in LOG
    with pytest.raises(RuntimeError, match=message):
        _record(LOG.replace(before, after), monkeypatch)


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


def test_a_sum_that_a_loop_keeps_in_memory_is_detected() -> None:
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


def test_a_writer_replaces_the_table_and_the_page_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TABLE", "PAGE"):
        copy = tmp_path / name
        copy.write_text(getattr(a64fx, name).read_text(encoding="utf-8"), encoding="utf-8")
        monkeypatch.setattr(a64fx, name, copy)
    table, page = (path.read_text(encoding="utf-8") for path in (a64fx.TABLE, a64fx.PAGE))
    row = ["adamw", "", "parameter", "1.2345", "1.0000", "0.810", "", "1.00", "", "", ""]
    with a64fx.TABLE.open(encoding="utf-8") as table_reader, a64fx.PAGE.open(encoding="utf-8") as page_reader:
        a64fx._write([row])
        assert (table_reader.read(), page_reader.read()) == (table, page)
    assert ",".join(row) in a64fx.TABLE.read_text(encoding="utf-8") and ",".join(row) not in table
    assert "| 19.75 | 16.00, memory | 81.0 % |" in a64fx.PAGE.read_text(encoding="utf-8")


def test_the_kernels_are_compiled_once_for_all_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    compiled: List[Path] = []

    def compile_program(machine: Machine, compiler: str, target: Sequence[str], folder: Path, source: Path) -> Path:
        compiled.append(folder)
        return folder / "driver"

    monkeypatch.setattr(a64fx, "compile_program", compile_program)
    monkeypatch.setattr(a64fx, "record", lambda *_: None)
    monkeypatch.setattr(a64fx, "count_cycles", lambda *_: a64fx_mca.Count(8192.0, 100, []))
    monkeypatch.setattr(a64fx, "machine_of", Machine)
    lines = programs.printed_lines(capfd, "a64fx", "--machine", str(tmp_path), "gelu_erf", "gelu_tanh", "adamw")
    assert [line.split()[0] for line in lines[1:]] == ["gelu_erf", "gelu_tanh", "adamw"] and len(compiled) == 1


@pytest.mark.parametrize(
    ("committed", "share", "message"),
    [
        (0.95, 0.921, ""),
        (0.95, 0.979, ""),
        (0.95, 0.919, "slower; if that is meant: benchmarks/a64fx.py --write adamw"),
        (0.95, 0.981, "faster, and the table is stale: benchmarks/a64fx.py --write adamw"),
        (0.15, 0.119, "slower"),
        (5.0, 4.86, ""),
        (5.0, 4.84, "slower"),
        (5.0, 5.16, "stale"),
    ],
)
def test_a_share_that_is_not_the_table_s_is_reported(
    committed: float, share: float, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(a64fx, "committed_shares", lambda: {"adamw": committed})
    difference = a64fx.difference_from_table("adamw", share)
    assert message in difference and bool(difference) == bool(message)


def test_each_row_of_the_table_is_of_a_kernel_and_its_share_follows_from_its_cycles() -> None:
    rows = [line.split(",") for line in a64fx.TABLE.read_text(encoding="utf-8").splitlines()[1:]]
    assert rows and {row[0] for row in rows} <= set(a64fx.CASES)
    for name, loop, _, cycles, *_ in rows:
        if not loop:
            assert a64fx.committed_shares()[name] == pytest.approx(
                a64fx.CASES[name].bound_cycles / float(cycles), abs=2e-3
            )
