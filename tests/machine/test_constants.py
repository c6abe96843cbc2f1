"""Tests of machine files: read, written and refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from fugaku_gpt.errors import UsageError
from fugaku_gpt.machine.constants import load_machine, machine_names, machine_path, machine_yaml


@pytest.mark.parametrize("name", machine_names())
def test_a_machine_file_is_written_as_it_was_read(name: str) -> None:
    machine = load_machine(name)
    assert machine_yaml(machine) == machine_path(name).read_text(encoding="utf-8")
    assert len(machine.time.covariance) == len(machine.time.free_constants) and machine.time.rows


def test_the_hardware_of_a_row_picks_the_machine() -> None:
    covering = [name for name in machine_names() if load_machine(name).has_hardware("V100-16GB JeanZay")]
    assert covering == ["v100"] and load_machine("v100").capacity("V100-16GB JeanZay") == 16
    assert not any(load_machine(name).has_hardware("TPU") for name in machine_names())


@pytest.mark.slow
def test_unknown_machines_and_damaged_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"machine abacus: unknown; valid: a100, a64fx.*, v100"):
        load_machine("abacus")
    damaged = tmp_path / "m.yaml"
    damaged.write_text("format: 1\nname: m\n")
    with pytest.raises(UsageError, match=r"not a machine file: KeyError: 'memory_unit'"):
        load_machine(str(damaged))
    text = machine_yaml(load_machine("v100")).replace("matrix_efficiency:", "matrix_efficiency: {prior: [0, 1]}\n#")
    damaged.write_text(text)
    with pytest.raises(UsageError, match="not a machine file|cannot be read"):
        load_machine(str(damaged))
    damaged.write_text(machine_yaml(load_machine("v100")).replace("memory_unit: GB", "memory_unit: pages"))
    with pytest.raises(UsageError, match="memory_unit must be one of KiB, MiB"):
        load_machine(str(damaged))


def test_a_job_on_fugaku_may_ask_for_less_than_a_node_has() -> None:
    machine = load_machine("a64fx")
    assert machine.capacity("A64FX Fugaku") == 32768
    assert machine.job_capacity("A64FX Fugaku") == pytest.approx(29315.3, abs=0.1)
    assert load_machine("v100").job_capacity("V100-16GB JeanZay") == 16
