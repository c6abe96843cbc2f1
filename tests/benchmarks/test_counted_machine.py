"""Tests of the program that writes the machine file of counted cycles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from fugaku_gpt.machine.constants import load_machine, machine_yaml
from tests.benchmarks.programs import refusal

SIZES = {
    "tile_rows": 8,
    "tile_columns": 48,
    "depth": 512,
    "group_rows": 64,
    "packed_columns": 192,
    "l2_bytes": 2**23,
    "line_bytes": 256,
}


@pytest.fixture
def program() -> Any:
    import counted_machine

    return counted_machine


def _table(program: Any, folder: Path, without: str = "") -> Path:
    names = sorted({name for names in program.KERNELS.values() for name in names} - {without})
    lines = [
        f"{name},,element,{index + 1}.5,,,,1.00,,,\n{name},f:1,iteration,99,,,,0.5,0,0,0"
        for index, name in enumerate(names)
    ]
    file = folder / "a64fx.csv"
    header = "kernel,loop,unit,cycles,bound_cycles,share,flop_per_cycle,time_share,spills,divisions,broadcasts"
    file.write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")
    return file


def test_the_machine_has_the_cycles_of_the_table_s_kernels(program: Any, tmp_path: Path) -> None:
    cycles = program.read_cycles(_table(program, tmp_path))
    machine = program.counted_machine(cycles, SIZES)
    path = tmp_path / "m.yaml"
    path.write_text(machine_yaml(machine), encoding="utf-8")
    assert load_machine(str(path)) == machine
    by_operation = machine.counted.cycles()
    assert by_operation["linear"] == cycles["gemm_nt"] and by_operation["optimiser"] == cycles["adamw"]
    assert by_operation["loss of columns"] == cycles["loss_sums"] + cycles["loss_gradient"]


def test_a_table_that_lacks_a_kernel_is_refused(
    program: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    table = str(_table(program, tmp_path, without="adamw"))
    assert "no cycles of adamw" in refusal(capfd, "counted_machine", "--table", table)
    assert "not a table of benchmarks/a64fx.py" in refusal(
        capfd, "counted_machine", "--table", str(tmp_path / "no.csv")
    )
    table = str(_table(program, tmp_path))
    error = refusal(capfd, "counted_machine", "--table", table, "--machine", str(tmp_path))
    assert "make test-arm makes it" in error


def test_a_writer_replaces_the_machine_file_as_a_whole(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text("former\n", encoding="utf-8")
    monkeypatch.setattr(program, "FILE", file)
    monkeypatch.setattr(program, "gemm_sizes", lambda machine: SIZES)
    with file.open(encoding="utf-8") as reader:
        program.main(["--table", str(_table(program, tmp_path)), "--write"])
        assert reader.read() == "former\n"
    assert load_machine(str(file)).counted is not None


def test_the_committed_machine_is_that_of_the_committed_table(program: Any) -> None:
    assert program.TABLE.exists() == program.FILE.exists(), "benchmarks/counted_machine.py --write"
    if program.TABLE.exists():
        text = program.FILE.read_text(encoding="utf-8")
        sizes = {name: yaml.safe_load(text)["counted"][name] for name in SIZES}  # tests/aarch64 checks these
        assert machine_yaml(program.counted_machine(program.read_cycles(program.TABLE), sizes)) == text
