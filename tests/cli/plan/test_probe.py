"""``plan probe`` with real ranks for a moment, and ``plan time`` on what it has written."""

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


@pytest.mark.mpi
def test_two_ranks_measure_this_machine_and_a_run_is_planned_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["plan", "probe", "--ranks", "2", "--threads", "1", "--seconds", "2", "--dtype", "float32"]
    assert run([*words, "--out", "machine-local.yaml", "--format", "json"]) == 0
    caught = capsys.readouterr()
    steps = json.loads(caught.out)
    assert {"small dp 1", "small dp 2"} <= {one["run"] for one in steps}
    assert all(one["measured"] > 0 and one["predicted"] > 0 for one in steps)
    assert "2 ranks of 1 threads: messages" in caught.err
    probed = load_machine("local").probed
    assert probed is not None
    shared = {1, 2} if len(usable_cores()) > 1 else {1}  # two ranks on one core would measure each other
    kinds = {*PRODUCTS, *(COMPILED_ATTENTION if ops.has_native_kernels() else ())}
    assert {one.kind for one in probed.products} == kinds and {one.ranks for one in probed.products} == shared
    assert {ALL_REDUCE, SEND} <= {one.operation for one in probed.messages}
    assert set(probed.bandwidth) == {f"{kind} {ranks}" for kind in ("copy", "triad") for ranks in shared}

    settings = [word for one in [*SMALL, "layout.tp=2"] for word in ("--set", one)]
    assert run(["plan", "time", *settings, "--machine", "local", "--format", "json"]) == 0
    lines = {one["figure"]: one for one in json.loads(capsys.readouterr().out)}
    whole = lines["iteration"]
    assert whole["low"] < whole["value"] < whole["high"]
    assert sum(lines[part]["value"] for part in TIME_COMPONENTS) == pytest.approx(whole["value"], rel=0.01)
    assert run(["plan", "time", *settings, "--set", "model.hidden=65536", "--machine", "local"]) == 0
    assert "extrapolated: linear products in float32" in capsys.readouterr().err
    assert run(["plan", "time", *settings, "--machine", "local", "--torch", "1.10"]) == 2


def test_ranks_grow_by_twice_as_many() -> None:
    assert [rank_counts(most) for most in (1, 2, 3, 4, 48)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4],
        [1, 2, 4, 8, 16, 32, 48],
    ]


def test_what_cannot_be_probed_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "probe", "--out", str(tmp_path / "machine.txt")]) == 2
    assert "ends in .yaml" in capsys.readouterr().err
    assert run(["plan", "probe", "--threads", "100000", "--out", str(tmp_path / "m.yaml")]) == 2
    assert "valid: up to" in capsys.readouterr().err
    assert run(["plan", "probe", "--seconds", "nan", "--out", str(tmp_path / "m.yaml")]) == 2
    assert "nan is not a finite number" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
