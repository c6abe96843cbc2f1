"""Tests of the benchmark of plans: its list of runs, its verdicts, and a run of real ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import planned
from fugaku_gpt.config import load_run_config
from fugaku_gpt.planner.intervals import Estimate
from fugaku_gpt.planner.trainer.fitting import machine_from_probe
from fugaku_gpt.planner.trainer.seconds import LocalPrediction
from tests.planner.probes import even_machine

TINY = ["model.layers=2", "model.hidden=64", "model.heads=2", "model.seq_len=32", "model.vocab_size=256"]


def test_there_are_twenty_runs_of_two_models_on_up_to_four_ranks() -> None:
    configs = [load_run_config(overrides=settings) for settings in planned.chosen(None)]
    assert len(configs) == len({planned.name_of(config) for config in configs}) == 20
    assert {config.layout.ranks for config in configs} == {1, 2, 3, 4}
    assert len({(config.model.layers, config.model.hidden) for config in configs}) == 2


def row(seconds: float, peak: int) -> planned.Row:
    """A row planned at one second, 0.9 to 1.1, and 1000 bytes."""
    return planned.Row("a run", 1, LocalPrediction(Estimate(1.0, 0.9, 1.1), {}, ()), 1000, seconds, peak)


def test_verdicts_are_by_the_median_and_by_the_minimum() -> None:
    good = planned.verdicts([row(1.05, 1010), row(0.95, 990), row(2.0, 960)])
    assert [met for met, _ in good] == [True, True, True, True]
    assert "hold 2 of 3" in good[-1][1] and "*" in planned.line_of(row(2.0, 960))
    bad = planned.verdicts([row(1.3, 1010), row(0.7, 1100), row(0.8, 900)])
    assert [met for met, _ in bad] == [False, False, False, True]
    assert bad[2][1] == "MISSED: memory: -9.1 % at the lowest (bar -5 %)"


@pytest.mark.long
def test_a_run_of_two_ranks_is_planned_and_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(planned.__file__).parent))
    monkeypatch.setattr(sys, "argv", ["planned.py"])
    machine, _ = machine_from_probe(even_machine(), 2**34)
    machine.probed.facts["torch"] = ""  # type: ignore[union-attr,index]
    measured_row = planned.run([*TINY, "layout.dp=2", "training.global_batch=8", "node.threads_per_rank=1"], machine)
    assert measured_row.name.endswith("dp2") and measured_row.ranks == 2
    assert measured_row.seconds > 0 and measured_row.planned.seconds.value > 0
    assert -0.3 < measured_row.memory_off < 0.6  # nearly all of it is the framework
