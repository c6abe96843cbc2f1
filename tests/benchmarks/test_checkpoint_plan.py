"""Tests of the benchmark that plans the checkpoint of every rank of a large run."""

from __future__ import annotations

import sys

import pytest

from benchmarks import checkpoint_plan
from fugaku_gpt.config import load_run_config

TINY = ("layout.tp=2", "layout.pp=2", "layout.zero=1")


@pytest.mark.slow
def test_every_rank_of_a_layout_is_planned_and_each_element_is_in_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = checkpoint_plan.run_of("tiny", 72, TINY)
    manifest, times = checkpoint_plan.plan_all(config)
    assert config.layout.ranks == 288 and 256 < len(manifest.files) <= 288  # some ranks hold padding alone
    assert 0 < times["slowest rank"] <= times["all ranks"]
    model = load_run_config(preset="tiny").model
    elements = model.layers * 12 * model.hidden**2
    assert manifest.data_bytes > 3 * 4 * elements
    arguments = [argument for setting in TINY for argument in ("--set", setting)]
    monkeypatch.setattr(sys, "argv", ["checkpoint_plan.py", "--preset", "tiny", "--dp", "72", *arguments])
    checkpoint_plan.main()
    printed = capsys.readouterr().out
    assert f"288 ranks, {len(manifest.files)} files" in printed and ", 2 parts of " in printed and "resume" in printed
