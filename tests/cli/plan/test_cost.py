"""Tests of ``plan time``, ``plan days`` and ``plan ramp``."""

from __future__ import annotations

from typing import Any, List

import pytest

from fugaku_gpt.cli.main import run
from tests.support.commands import json_of

ON_512 = ["--preset", "1.3b", "--set", "layout.dp=128", "--set", "layout.tp=4", "--set", "job.nodes=512"]
BATCH = ["--set", "training.global_batch=1024", "--set", "training.micro_batch=1"]


def test_the_components_of_an_iteration_have_intervals_and_sum_up(capsys: pytest.CaptureFixture[str]) -> None:
    lines = {line["figure"]: line for line in json_of(capsys, "plan", "time", *ON_512, *BATCH, "--torch", "1.10")}
    iteration = lines["iteration"]
    components = ("compute", "memory_bound", "tensor_parallel", "pipeline", "data_parallel", "optimiser", "fixed")
    assert sum(lines[name]["value"] for name in components) == pytest.approx(iteration["value"], rel=0.01)
    assert all(line["low"] <= line["value"] <= line["high"] for line in lines.values())
    assert lines["speed"]["value"] == pytest.approx(1024 * 1024 / iteration["value"], rel=0.01)


def test_extrapolation_beyond_the_measured_rows_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "time", *ON_512, *BATCH, "--set", "training.micro_batch=8", "--torch", "2.13"]) == 0
    warnings = capsys.readouterr().err
    assert (
        "extrapolated: micro_batch 8: measured 1 to 4" in warnings
        and "extrapolated: torch 2.13: measured 1.10" in warnings
    )


def test_an_impossible_run_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "time", *ON_512, *BATCH, "--set", "job.nodes=100", "--set", "node.ranks_per_node=1"]) == 2
    assert "this run cannot be planned: ranks 512 are not nodes 100" in capsys.readouterr().err


def test_days_of_tokens_and_of_iterations_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    common = ["plan", "days", "--sec-per-it", "0.5", "--nodes", "512", "--elapse", "24:00:00"]
    by_count = json_of(capsys, *common, "--iterations", "362000")
    by_tokens = json_of(capsys, *common, "--tokens", str(362000 * 524288), "--tokens-per-iteration", "524288")
    assert by_count == by_tokens
    figures = {line["figure"]: line["value"] for line in by_count}
    assert figures["computing"] == 2.095 and figures["jobs"] == 3


def test_days_needs_a_single_amount_of_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "days", "--sec-per-it", "1", "--nodes", "1"]) == 2
    assert "give one of --iterations, --tokens or --flops" in capsys.readouterr().err


def test_a_ramp_is_a_table_of_phases(capsys: pytest.CaptureFixture[str]) -> None:
    batches = ["--start", "32", "--increment", "32", "--samples", "1000", "--global-batch", "128"]
    phases = json_of(capsys, "plan", "ramp", *batches, "--iterations", "100", "--nodes", "32")
    assert [(phase["nodes"], phase["batch"]) for phase in phases] == [(32, 32), (32, 64), (32, 96), (32, 128)]


@pytest.mark.parametrize(
    "arguments",
    [
        ["ramp", "--start", "1", "--increment", "1", "--samples", "9", "--iterations", "9", "--nodes", "2"]
        + ["--global-batch", "1" + "0" * 30],
        ["days", "--sec-per-it", "1", "--nodes", "1", "--iterations", "1" + "0" * 400],
    ],
)
def test_sizes_beyond_any_training_are_a_usage_error(arguments: List[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *arguments]) == 2
    assert "is not in the range 1<=x<=1000000000" in capsys.readouterr().err


def test_power_gives_joules_per_token(capsys: pytest.CaptureFixture[str]) -> None:
    def seconds_and_joules(*arguments: str) -> List[Any]:
        lines = json_of(capsys, "plan", "time", "--preset", "1.3b", *arguments)
        seconds = next(line["value"] for line in lines if line["figure"] == "iteration")
        return [seconds, *(line["value"] for line in lines if line["unit"] == "J/token")]

    assert len(seconds_and_joules()) == 1
    seconds, joules = seconds_and_joules("--watts", "150", "--set", "training.global_batch=64")
    assert joules == pytest.approx(150 * seconds / (64 * 1024), rel=1e-3)
