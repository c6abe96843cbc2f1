"""Tests of the accounting file, which holds the measurements of schedulers in the run directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fugaku_gpt.errors import UsageError
from fugaku_gpt.records.accounting import (
    TOO_SHORT,
    Energy,
    JobAccount,
    Knob,
    energy_of,
    read_accounting,
    write_accounting,
)

JOB = JobAccount(
    "pjm",
    "21103755",
    elapsed_seconds=600.0,
    nodes=4,
    energy_joules=240_000.0,
    energy_joules_ideal=200_000.0,
    knobs={"freq": Knob("2200", "2200", "2000"), "eco_state": Knob()},
    capped="2026-11-20 10:00:00",
    values={"JOB NAME": "é"},
)


def test_accounts_round_trip(tmp_path: Path) -> None:
    assert read_accounting(tmp_path) == ()
    write_accounting(tmp_path, (JOB, replace(JOB, job_id="239[1]")))
    assert read_accounting(tmp_path) == (JOB, replace(JOB, job_id="239[1]"))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"version": 1, "jobs": [{}]}', '{"version": 1, "jobs": [3]}'])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "accounting.json").write_text(text)
    with pytest.raises(UsageError, match="accounting.json: not an accounting file"):
        read_accounting(tmp_path)


def test_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "accounting.json").write_text('{"version": 2, "jobs": []}')
    with pytest.raises(UsageError, match="version 2"):
        read_accounting(tmp_path)


def test_energy_is_the_measured_energy_of_all_jobs() -> None:
    assert energy_of((JOB,)) == Energy(240_000.0, 400.0, 4, "measured")
    assert energy_of((JOB, JOB)) == Energy(480_000.0, 400.0, 4, "measured")
    assert energy_of((replace(JOB, energy_joules=None),)) == Energy(200_000.0, 200_000 / 600, 4, "ideal")
    assert energy_of((JOB, replace(JOB, energy_joules=0.0))) == Energy(240_000.0, 200.0, 4, "measured")
    assert energy_of((JOB, replace(JOB, nodes=8))) == Energy(480_000.0, 400.0, None, "measured")
    assert energy_of(()) == Energy() and energy_of((JobAccount("slurm", "7", elapsed_seconds=900.0),)) == Energy()


def test_a_job_shorter_than_the_sampling_has_no_energy() -> None:
    short = JobAccount("pjm", "1", elapsed_seconds=59.0, energy_joules=1000.0)
    assert energy_of((short,)) == Energy(basis=TOO_SHORT)
    assert energy_of((short, JOB)).watts == 400.0
    assert energy_of((replace(short, elapsed_seconds=60.0),)) == Energy(1000.0, 1000 / 60, None, "measured")
    assert energy_of((JobAccount("local", "local-1", elapsed_seconds=5.0),)) == Energy()


def test_measured_and_ideal_are_never_added() -> None:
    ideal = replace(JOB, energy_joules=None)
    assert energy_of((JOB, ideal)) == Energy(400_000.0, 400_000 / 1200, 4, "ideal")
    assert energy_of((replace(JOB, energy_joules_ideal=None), ideal)).joules is None
