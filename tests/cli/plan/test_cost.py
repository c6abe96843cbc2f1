"""``plan time``, ``plan days`` and ``plan ramp``."""

from __future__ import annotations

import json
from typing import Any, Dict, List

import pytest

from fugaku_gpt.cli.main import run

ON_512 = ["--preset", "1.3b", "--set", "layout.dp=128", "--set", "layout.tp=4", "--set", "job.nodes=512"]
BATCH = ["--set", "training.global_batch=1024", "--set", "training.micro_batch=1"]


def _lines(arguments: List[str], capsys: pytest.CaptureFixture[str]) -> List[Dict[str, Any]]:
    code = run([*arguments, "--format", "json"])
    caught = capsys.readouterr()
    assert code == 0, caught.err
    found: List[Dict[str, Any]] = json.loads(caught.out)
    return found


def test_the_parts_of_an_iteration_have_intervals_and_sum_up(capsys: pytest.CaptureFixture[str]) -> None:
    lines = {one["figure"]: one for one in _lines(["plan", "time", *ON_512, *BATCH, "--torch", "1.10"], capsys)}
    whole = lines["iteration"]
    parts = ("compute", "memory_bound", "tensor_parallel", "pipeline", "data_parallel", "optimiser", "fixed")
    assert sum(lines[name]["value"] for name in parts) == pytest.approx(whole["value"], rel=0.01)
    assert all(one["low"] <= one["value"] <= one["high"] for one in lines.values())
    assert lines["speed"]["value"] == pytest.approx(1024 * 1024 / whole["value"], rel=0.01)


def test_what_the_rows_do_not_tell_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "time", *ON_512, *BATCH, "--set", "training.micro_batch=8", "--torch", "2.13"]) == 0
    said = capsys.readouterr().err
    assert "extrapolated: micro_batch 8: measured 1 to 4" in said and "extrapolated: torch 2.13: measured 1.10" in said


def test_a_run_that_cannot_be_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "time", *ON_512, *BATCH, "--set", "job.nodes=100", "--set", "node.ranks_per_node=1"]) == 2
    assert "this run cannot be planned: ranks 512 are not nodes 100" in capsys.readouterr().err


def test_days_of_tokens_and_of_iterations_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    common = ["plan", "days", "--sec-per-it", "0.5", "--nodes", "512", "--elapse", "24:00:00"]
    by_count = _lines([*common, "--iterations", "362000"], capsys)
    by_tokens = _lines([*common, "--tokens", str(362000 * 524288), "--tokens-per-iteration", "524288"], capsys)
    assert by_count == by_tokens
    found = {one["figure"]: one["value"] for one in by_count}
    assert found["computing"] == 2.095 and found["jobs"] == 3


def test_days_needs_one_amount_of_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "days", "--sec-per-it", "1", "--nodes", "1"]) == 2
    assert "give one of --iterations, --tokens or --flops" in capsys.readouterr().err


def test_a_ramp_is_a_table_of_phases(capsys: pytest.CaptureFixture[str]) -> None:
    batches = ["--start", "32", "--increment", "32", "--samples", "1000", "--global-batch", "128"]
    lines = _lines(["plan", "ramp", *batches, "--iterations", "100", "--nodes", "32"], capsys)
    assert [(one["nodes"], one["batch"]) for one in lines] == [(32, 32), (32, 64), (32, 96), (32, 128)]


@pytest.mark.parametrize(
    "words",
    [
        ["ramp", "--start", "1", "--increment", "1", "--samples", "9", "--iterations", "9", "--nodes", "2"]
        + ["--global-batch", "1" + "0" * 30],
        ["days", "--sec-per-it", "1", "--nodes", "1", "--iterations", "1" + "0" * 400],
    ],
)
def test_sizes_beyond_any_training_are_a_usage_error(words: List[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *words]) == 2
    assert "is not in the range 1<=x<=1000000000" in capsys.readouterr().err


def test_power_gives_joules_of_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    def energy(*words: str) -> List[Any]:
        lines = _lines(["plan", "time", "--preset", "1.3b", *words], capsys)
        seconds = next(one["value"] for one in lines if one["figure"] == "iteration")
        return [seconds, *(one["value"] for one in lines if one["unit"] == "J/token")]

    assert len(energy()) == 1
    seconds, joules = energy("--watts", "150", "--set", "training.global_batch=64")
    assert joules == pytest.approx(150 * seconds / (64 * 1024), rel=1e-3)
