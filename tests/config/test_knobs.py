"""Tests of the table of knobs, and that adding a knob takes a single edit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from fugaku_gpt.config import NodeConfig
from fugaku_gpt.config.knobs import NodeKnob, is_requested
from fugaku_gpt.config.schema import NODE_KNOBS, POWER_KNOBS
from tests.config.one_more_knob import STAGES

ROOT = Path(__file__).resolve().parents[2]
FIELD_NAMES = [field.name for field in fields(NodeConfig)]
# The start of the field that follows the last power knob in the source.
NEXT_FIELD = f"    {FIELD_NAMES[FIELD_NAMES.index(POWER_KNOBS[-1].name) + 1]}: "
EXTRA_KNOB = (
    '    prefetch_level: Optional[int] = power_knob("of the test", (0, 1, 2), default=1, '
    f"statistics_order={len(POWER_KNOBS) + 1})\n"
)


def test_the_power_knobs_are_those_of_the_user_guide() -> None:
    assert [(knob.name, knob.resource, knob.values, knob.default) for knob in POWER_KNOBS] == [
        ("freq_mhz", "freq", (2000, 2200), 2200),
        ("eco_state", "eco_state", (0, 1, 2), 2),
        ("retention_state", "retention_state", (0, 1), 1),
        ("throttling_state", "throttling_state", tuple(range(10)), 0),
        ("issue_state", "issue_state", (0, 1), 0),
        ("ex_pipe_state", "ex_pipe_state", (0, 1), 0),
    ]


def test_each_power_knob_has_a_distinct_statistics_order_and_a_valid_default() -> None:
    assert sorted(knob.statistics_order for knob in POWER_KNOBS) == list(range(1, len(POWER_KNOBS) + 1))
    assert all(knob.default in knob.values for knob in POWER_KNOBS)
    assert all(knob.historical_value is None or knob.historical_value in knob.values for knob in POWER_KNOBS)
    aliases = [knob.alias for knob in NODE_KNOBS if knob.alias]
    assert len(set(aliases)) == len(aliases) and not set(aliases) & {knob.name for knob in NODE_KNOBS}


def test_a_node_requests_nothing_by_default_and_zero_is_a_request() -> None:
    assert not any(is_requested(getattr(NodeConfig(), knob.name)) for knob in NODE_KNOBS)
    assert is_requested(0) and is_requested("none") and not is_requested(())


@pytest.mark.slow  # starts an interpreter that goes through every room
def test_adding_a_power_knob_takes_a_single_edit(tmp_path: Path) -> None:
    """A copy of the package with one more field goes through all stages."""
    for package in ("fugaku_gpt", "jobscripts"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    schema = tmp_path / "fugaku_gpt" / "config" / "schema.py"
    text = schema.read_text(encoding="utf-8")
    assert text.count(NEXT_FIELD) == 1
    schema.write_text(text.replace(NEXT_FIELD, EXTRA_KNOB + NEXT_FIELD), encoding="utf-8")
    folder = tmp_path / "work"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tests.config.one_more_knob", str(folder)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT)))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {stage.__name__ for stage in STAGES} <= set(done.stdout.splitlines()), done.stdout


def test_a_power_knob_is_a_resource_of_pjm_under_the_name_of_the_field_or_another() -> None:
    named = NodeKnob(name="clock", values=(1, 2), pjm_name="freq")
    assert (named.key, named.resource, named.is_power_knob, named.is_in_tables) == ("node.clock", "freq", True, True)
    plain = NodeKnob(name="eco", values=(1, 2))
    assert (
        plain.resource == "eco" and plain.format_for_tables(2) == "eco=2" and plain.format_for_row_name("2") == "eco2"
    )
    other = NodeKnob(name="open_files")
    assert not other.is_power_knob and not other.is_in_tables
