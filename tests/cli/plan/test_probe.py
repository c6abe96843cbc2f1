"""Tests of a short ``plan probe`` with real ranks, and of ``plan time`` with the machine file that it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fugaku_gpt import ops
from fugaku_gpt.cli.main import run
from fugaku_gpt.cli.plan.probe import rank_counts
from fugaku_gpt.layout.operations import ALL_REDUCE, SEND
from fugaku_gpt.machine.constants import load_machine
from fugaku_gpt.machine.local import usable_cores
from fugaku_gpt.machine.probed import COMPILED_ATTENTION, PRODUCTS
from fugaku_gpt.planner.trainer.seconds import TIME_COMPONENTS

SMALL = ["model.layers=2", "model.hidden=128", "model.heads=4", "model.seq_len=64", "training.global_batch=8"]


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_two_ranks_measure_this_machine_and_a_run_is_planned_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["plan", "probe", "--ranks", "2", "--threads", "1", "--seconds", "2", "--dtype", "float32"]
    assert run([*arguments, "--out", "machine-local.yaml", "--format", "json"]) == 0
    captured = capsys.readouterr()
    steps = json.loads(captured.out)
    assert {"small dp 1", "small dp 2"} <= {step["run"] for step in steps}
    assert all(step["measured"] > 0 and step["predicted"] > 0 for step in steps)
    assert "2 ranks of 1 threads: messages" in captured.err
    probed = load_machine("local").probed
    assert probed is not None
    probed_ranks = {1, 2} if len(usable_cores()) > 1 else {1}  # two ranks on one core would measure each other
    kinds = {*PRODUCTS, *(COMPILED_ATTENTION if ops.has_native_kernels() else ())}
    assert {product.kind for product in probed.products} == kinds and {
        product.ranks for product in probed.products
    } == probed_ranks
    assert {ALL_REDUCE, SEND} <= {message.operation for message in probed.messages}
    assert set(probed.bandwidth) == {f"{kind} {ranks}" for kind in ("copy", "triad") for ranks in probed_ranks}

    settings = [argument for setting in [*SMALL, "layout.tp=2"] for argument in ("--set", setting)]
    assert run(["plan", "time", *settings, "--machine", "local", "--format", "json"]) == 0
    lines = {line["figure"]: line for line in json.loads(capsys.readouterr().out)}
    iteration = lines["iteration"]
    assert iteration["low"] < iteration["value"] < iteration["high"]
    assert sum(lines[part]["value"] for part in TIME_COMPONENTS) == pytest.approx(iteration["value"], rel=0.01)
    assert run(["plan", "time", *settings, "--set", "model.hidden=65536", "--machine", "local"]) == 0
    assert "extrapolated: linear products in float32" in capsys.readouterr().err
    assert run(["plan", "time", *settings, "--machine", "local", "--torch", "1.10"]) == 2


def test_rank_counts_are_powers_of_two_and_the_maximum() -> None:
    assert [rank_counts(max_ranks) for max_ranks in (1, 2, 3, 4, 48)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4],
        [1, 2, 4, 8, 16, 32, 48],
    ]


def test_invalid_probe_options_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "probe", "--out", str(tmp_path / "machine.txt")]) == 2
    assert "ends in .yaml" in capsys.readouterr().err
    assert run(["plan", "probe", "--threads", "100000", "--out", str(tmp_path / "m.yaml")]) == 2
    assert "valid: up to" in capsys.readouterr().err
    assert run(["plan", "probe", "--seconds", "nan", "--out", str(tmp_path / "m.yaml")]) == 2
    assert "nan is not a finite number" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
