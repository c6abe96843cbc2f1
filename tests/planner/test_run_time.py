"""Tests of the figures that are predicted of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Dict

import pytest

from fugaku_gpt.config import RunConfig, load_run_config
from fugaku_gpt.formulas.flops import exact_flops, notes_flops
from fugaku_gpt.machine.constants import Machine
from fugaku_gpt.machine.probed import StepTiming
from fugaku_gpt.planner.intervals import Estimate
from fugaku_gpt.planner.run_time import local_run_figures
from fugaku_gpt.planner.trainer.fitting import machine_from_probe
from tests.planner.probes import even_machine

SETTINGS = (
    "model.layers=4", "model.hidden=128", "model.heads=4", "model.seq_len=64", "model.vocab_size=512",
    "training.micro_batch=2", "training.global_batch=16", "node.threads_per_rank=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def machine() -> Machine:
    probed = replace(even_machine(), steps=(StepTiming("one", SETTINGS, 1.0, 0.01),))
    return machine_from_probe(probed, 2**34)[0]


def figures_of(config: RunConfig, machine: Machine) -> Dict[str, Estimate]:
    return {figure.name: figure.estimate for figure in local_run_figures(config, machine)[1]}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_rates_follow_from_the_seconds_and_the_formulas(machine: Machine, recompute: str) -> None:
    config = load_run_config(overrides=[*SETTINGS, f"training.recompute={recompute}"])
    figures = figures_of(config, machine)
    seconds = figures["iteration"].value
    flops = notes_flops(config.model, 16, config.padded_outputs, recompute == "full")
    assert figures["speed"].value == pytest.approx(16 * 64 / seconds)
    assert figures["rate per node (notes' formula)"].value == pytest.approx(flops / seconds / 1e12)
    assert figures["rate of all nodes"].value == pytest.approx(flops / seconds / 1e15)
    exact = exact_flops(config.model, 16, config.padded_outputs)
    assert figures["utilisation (exact FLOPs, no recompute)"].value == pytest.approx(
        100 * exact / seconds / machine.facts["peak_flops"]
    )


def test_shared_heads_of_keys_are_timed_like_separate_heads(machine: Machine) -> None:
    shared = load_run_config(overrides=[*SETTINGS, "model.kv_heads=2"])
    assert "model.kv_heads 2: timed as 4" in local_run_figures(shared, machine)[0]
    plain = local_run_figures(load_run_config(overrides=SETTINGS), machine)[0]
    assert not any("kv_heads" in text for text in plain)
