"""Tests of ``plan time``, ``plan days`` and ``plan ramp``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, List

import pytest

from fugaku_gpt.cli.main import run
from fugaku_gpt.machine.constants import machine_yaml
from tests.planner.counted import counted_machine
from tests.support.commands import json_of

ROOT = Path(__file__).resolve().parents[3]
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


def test_a_grid_classifier_has_images_per_second_of_each_bucket(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "time", "--preset", "arc-nano", "--machine", "a64fx", "--watts", "100"]
    lines = {line["figure"]: line for line in json_of(capsys, *arguments)}
    assert lines["speed"]["value"] == pytest.approx(32 / lines["iteration"]["value"], rel=0.01)
    assert lines["speed"]["unit"] == lines["speed of grids of 16 x 16"]["unit"] == "images/s"
    assert lines["speed of grids of 16 x 16"]["value"] > lines["speed"]["value"]
    assert lines["energy"]["unit"] == "J/image"
    assert run(arguments) == 0
    err = capsys.readouterr().err
    assert "extrapolated: model.kind grid_classifier: counted as a GPT-2's" in err
    assert "extrapolated: model.classes 400: counted as a vocabulary of 1\n" in err and "extrapolated: vocab" not in err


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


ON_A_NODE = ["--preset", "124m", "--set", "layout.dp=4", "--set", "node.ranks_per_node=4"]


@pytest.fixture
def counted(tmp_path: Path) -> str:
    """The path of a machine file with counted cycles."""
    path = tmp_path / "counted.yaml"
    path.write_text(machine_yaml(counted_machine()), encoding="utf-8")
    return str(path)


def test_counted_cycles_give_a_table_by_component(counted: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["component"]: row for row in json_of(capsys, "plan", "time", *ON_A_NODE, "--machine", counted)}
    iteration = rows.pop("iteration")
    assert sum(row["seconds"] for row in rows.values()) == pytest.approx(iteration["seconds"], rel=1e-3)
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1, abs=1e-3)
    assert sum(row["lost"] for row in rows.values()) == pytest.approx(iteration["lost"], abs=1e-3)
    assert iteration["lost"] == pytest.approx(1 - iteration["share_of_peak"], abs=1e-3)
    assert rows["products"]["bound_by"] == "cores" and rows["communication"]["bound_by"] == "memory"
    assert run(["plan", "time", *ON_A_NODE, "--machine", counted]) == 0
    captured = capsys.readouterr()
    assert "share of peak: " in captured.out and "measured" not in captured.out
    assert "counted: not in the figures: misses of the L1 cache" in captured.err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["time", *ON_A_NODE, "--torch", "1.10"], "a probed or counted machine is as it is"),
        (["time", *ON_A_NODE, "--watts", "100"], "counts no energy"),
        (
            ["topology", "--model", "124m", "--nodes", "1"],
            "layouts are searched with models of measured rows; valid: a64fx",
        ),
        (["fit", "--rows", str(ROOT / "benchmarks" / "reference" / "measurements.csv")], "to which no rows are fitted"),
    ],
)
def test_counted_cycles_serve_the_time_of_a_run_alone(
    counted: str, capsys: pytest.CaptureFixture[str], command: "list[str]", message: str
) -> None:
    assert run(["plan", *command, "--machine", counted]) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_machine_is_refused_with_the_valid_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "time", *ON_A_NODE, "--machine", "a64fx-guessed"]) == 2
    error = capsys.readouterr().err
    assert "machine a64fx-guessed: unknown; valid: a100, a64fx" in error and "or the path of a machine file" in error


def test_days_of_a_run_are_predicted_and_nodes_billed_in_shelves(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("job.nodes=1000", "layout.dp=250", "layout.tp=4", "training.global_batch=1000", "job.elapse=24:00:00")
    source = ["--preset", "1.3b", *(word for size in sizes for word in ("--set", size))]
    assert run(["plan", "days", *source, "--tokens", "300B", "--format", "json"]) == 0
    output = capsys.readouterr()
    figures = {line["figure"]: line["value"] for line in json.loads(output.out)}
    assert figures["iterations"] == -(-300 * 10**9 // (1000 * 1024))
    assert (figures["nodes"], figures["nodes paid for"]) == (1000, 1008)
    assert figures["node-hours"] == pytest.approx(figures["whole"] * 24 * 1008, rel=1e-3)
    assert figures["jobs"] > 1 and "80 % interval" in output.err
    lines = {line["figure"]: line for line in json_of(capsys, "plan", "time", *source)}
    predicted = figures["computing"] * 86400 / figures["iterations"]
    assert predicted == pytest.approx(lines["iteration"]["value"], rel=1e-3)


@pytest.mark.parametrize("tokens", ["300X", "B", "0", "nan", "1e40"])
def test_tokens_are_a_number_with_a_letter(tokens: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "days", "--sec-per-it", "1", "--nodes", "1", "--tokens", tokens]) == 2
    assert "K, M, B or T" in capsys.readouterr().err


@pytest.mark.parametrize(("machine", "billed"), [("a64fx", 432), ("v100", 400)])
def test_days_of_a_number_of_nodes_are_billed_by_the_machine(
    machine: str, billed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--sec-per-it", "3.6", "--iterations", "1000", "--nodes", "400", "--machine", machine]
    figures = {line["figure"]: line["value"] for line in json_of(capsys, "plan", "days", *options)}
    assert figures["node-hours"] == billed and figures.get("nodes paid for", 400) == billed


def test_days_need_a_run_or_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "days", "--tokens", "3B"]) == 2
    assert "--sec-per-it and --nodes, or a RUN.yaml" in capsys.readouterr().err
    assert run(["plan", "days", *ON_512, "--nodes", "4", "--tokens", "3B"]) == 2
    assert "--nodes 4: the run has 512" in capsys.readouterr().err


def test_an_eco_state_that_follows_from_the_clock_is_extrapolated(capsys: pytest.CaptureFixture[str]) -> None:
    """At 2200 MHz a job has eco_state 2, whether it asks for it or not."""
    assert run(["plan", "time", *ON_512, *BATCH, "--torch", "1.10", "--set", "node.freq_mhz=2200"]) == 0
    assert "extrapolated: node.eco_state 2" in capsys.readouterr().err
    assert run(["plan", "time", *ON_512, *BATCH, "--torch", "1.10", "--set", "node.freq_mhz=2000"]) == 0
    assert "eco_state" not in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "note"),
    [
        (["--nodes", "4"], "at least 2, as small allows 72:00:00 (as of 2026-"),
        (["--nodes", "1000"], "at least 5, as large allows 24:00:00 (as of 2026-"),
        (["--nodes", "4", "--machine", "v100"], "give --elapse, or job.elapse\n"),
        (["--nodes", "200000"], "give --elapse, or job.elapse\n"),
    ],
)
def test_days_without_a_time_limit_state_that_the_jobs_are_unknown(
    options: List[str], note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", "days", "--sec-per-it", "10", "--iterations", "40000", *options]
    assert run([*command, "--format", "json"]) == 0
    output = capsys.readouterr()
    figures = {line["figure"]: line["value"] for line in json.loads(output.out)}
    assert figures["jobs"] is None and figures["iterations per job"] is None and figures["computing"] == 4.63
    assert note in output.err
    assert run([*command, "--elapse", "24:00:00"]) == 0
    assert capsys.readouterr().err == ""
