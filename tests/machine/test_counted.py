"""Tests of the section of counted cycles in a machine file."""

from __future__ import annotations

from pathlib import Path

import pytest

from fugaku_gpt.errors import UsageError
from fugaku_gpt.machine.constants import load_machine, machine_yaml
from fugaku_gpt.planner.tables.fitting import check_complete
from tests.planner.counted import counted_machine


def test_the_section_is_read_as_it_was_written_and_the_rest_is_of_the_base(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(machine_yaml(counted_machine()), encoding="utf-8")
    reloaded = load_machine(str(path))
    assert reloaded == counted_machine() and machine_yaml(reloaded) == path.read_text(encoding="utf-8")
    base = load_machine("a64fx")
    assert (reloaded.time, reloaded.memory, reloaded.hardware) == (base.time, base.memory, base.hardware)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("version: 1", "version: 2", "counted.version 2: this version reads 1"),
        ("groups: 4", "groups: 5", "cores a multiple of groups"),
        ("bandwidth: 2.56e+11", "bandwidth: 0", "must be above 0"),
        ("[operation, cycles, case]", "[operation, cycles]", "counted.kernels.columns"),
        ("base: a64fx", "base: abacus", "machine abacus: unknown; valid: a100, a64fx"),
    ],
)
def test_a_damaged_section_is_refused(tmp_path: Path, before: str, after: str, message: str) -> None:
    text = machine_yaml(counted_machine())
    assert before in text
    (tmp_path / "m.yaml").write_text(text.replace(before, after), encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        load_machine(str(tmp_path / "m.yaml"))


def test_rows_are_not_predicted_by_counted_cycles() -> None:
    with pytest.raises(UsageError, match="has counted cycles, to which no rows are fitted; valid: a64fx"):
        check_complete(counted_machine())
