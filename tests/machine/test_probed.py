"""Tests of the section of a machine file that the probe fills."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fugaku_gpt.errors import UsageError
from fugaku_gpt.machine.constants import load_machine, machine_yaml
from fugaku_gpt.machine.probed import StepTiming, probe_from_data, probe_to_data
from fugaku_gpt.planner.trainer.fitting import machine_from_probe
from tests.planner.probes import even_machine


@pytest.mark.slow
def test_a_probed_machine_s_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    probed = even_machine().merged_with(even_machine())
    step = StepTiming("tiny", ("model.layers=2", "layout.split=[1, 1]", "layout.pp=2"), 0.5, 0.01)
    probed = probe_from_data(
        json.loads(
            json.dumps({**probe_to_data(probed), "steps": probe_to_data(replace(probed, steps=(step,)))["steps"]})
        )
    )
    assert probed.steps == (step,) and len(probed.products) == 2 * len(even_machine().products)
    machine, _ = machine_from_probe(probed, 2**34)
    path = tmp_path / "m.yaml"
    path.write_text(machine_yaml(machine))
    reloaded = load_machine(str(path))
    assert reloaded.probed == probed and machine_yaml(reloaded) == path.read_text()


@pytest.mark.slow
def test_damaged_sections_are_refused_and_the_error_for_a_missing_file_says_how_to_make_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, _ = machine_from_probe(even_machine(), 2**34)
    good = machine_yaml(machine)
    path = tmp_path / "m.yaml"
    for old, new in (
        ("  version: 1", "  version: 9"),
        ("[kind, dtype", "[kinds, dtype"),
        ("[linear, float32,", "["),
        ("  cores: 2", "  cores: 0"),
        ("    4: 1", "    7: 1"),
    ):
        assert old in good
        path.write_text(good.replace(old, new))
        with pytest.raises(UsageError, match="not a machine file"):
            load_machine(str(path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="plan probe --out machine-local.yaml"):
        load_machine("local")
    (tmp_path / "machine-local.yaml").write_text(good)
    assert machine_yaml(load_machine("local")) == good
