"""Tests of ``plan topology``: table, formats, constraints and output files."""

from __future__ import annotations

import csv
import io
import time
from pathlib import Path
from typing import List

import pytest

from fugaku_gpt.cli.main import run
from fugaku_gpt.cli.plan.topology import _progress_printer
from tests.support.commands import json_of

AT_512 = ["plan", "topology", "--model", "1.3b", "--machine", "a64fx", "--nodes", "512", "--torch", "1.10"]


def test_the_best_layouts_are_ranked_by_seconds_with_intervals_and_both_memories(
    capsys: pytest.CaptureFixture[str],
) -> None:
    layouts = json_of(capsys, *AT_512)
    assert [layout["rank"] for layout in layouts] == list(range(1, 11))
    assert [layout["sec_per_it"] for layout in layouts] == sorted(layout["sec_per_it"] for layout in layouts)
    for layout in layouts:
        assert layout["dp"] * layout["tp"] * layout["pp"] == 512 * layout["ranks_per_node"]
        assert layout["low"] < layout["sec_per_it"] < layout["high"] and layout["tflops"] > 0
        assert 0 < layout["mem_rows"] < 32768 and 0 < layout["mem_ours"] < 32768
        assert sum(layout["parts"].values()) == pytest.approx(layout["sec_per_it"], rel=0.01)
        assert any("zero" in text for text in layout["extrapolated"]) == (layout["zero"] > 0)


def test_the_table_explains_the_best_layout_and_the_wasted_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*AT_512, "--top", "2"]) == 0
    output = capsys.readouterr().out
    assert "1 takes" in output and "gains in" in output and "waste in 1: 512 nodes are no whole units of 48" in output
    assert "layouts, " in output and "node.freq_mhz is not set: planned and written at 2000 MHz" in output


def test_csv_output_has_only_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*AT_512, "--top", "3", "--format", "csv"]) == 0
    captured = capsys.readouterr()
    rows = list(csv.DictReader(io.StringIO(captured.out)))
    assert len(rows) == 3 and rows[0]["ranks_per_node"] and "gains in" in captured.err


def test_constraints_are_met(capsys: pytest.CaptureFixture[str]) -> None:
    constraints = ["--constraint", "TP <= ranks_per_node and not recompute", "--constraint", "micro_batches % 4 == 0"]
    for layout in json_of(capsys, *AT_512, *constraints, "--variants", "--top", "30"):
        assert layout["tp"] <= layout["ranks_per_node"] and not layout["recompute"]
        assert 1024 // (layout["dp"] * layout["micro_batch"]) % 4 == 0


def test_a_batch_ramp_rules_out_replicas_that_do_not_divide_it(capsys: pytest.CaptureFixture[str]) -> None:
    ramp = ["training.ramp_start=64", "training.ramp_increment=64", "training.ramp_samples=10000"]
    options = [argument for setting in ramp for argument in ("--set", setting)]
    for layout in json_of(capsys, *AT_512, *options, "--top", "30"):
        assert 64 % (layout["dp"] * layout["micro_batch"]) == 0


def test_measured_keeps_only_layouts_without_extrapolation(capsys: pytest.CaptureFixture[str]) -> None:
    layouts = json_of(capsys, *AT_512, "--measured")
    assert layouts and all(not layout["extrapolated"] for layout in layouts)


@pytest.mark.slow
def test_max_nodes_and_a_range_of_global_batches(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--max-nodes", "12", "--global-batch", "90-130", "--constraint", "GBS % 32 == 0"]
    layouts = json_of(capsys, "plan", "topology", "--model", "124m", *sizes, "--top", "40")
    assert {layout["global_batch"] for layout in layouts} <= {96, 128} and max(
        layout["nodes"] for layout in layouts
    ) <= 12
    seconds_per_sample = [layout["sec_per_it"] / layout["global_batch"] for layout in layouts]
    assert seconds_per_sample == pytest.approx(sorted(seconds_per_sample), rel=1e-3)


@pytest.mark.slow
def test_run_files_a_sweep_and_a_plot_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "best", tmp_path / "search.svg"
    assert run([*AT_512, "--nodes", "768", "--top", "3", "--out", str(out), "--plot", str(plot)]) == 0
    assert len(list(out.glob("*.rankmap"))) == 3 and (out / "sweep.yaml").is_file()
    assert "<svg" in plot.read_text() and "frontier" in plot.read_text()
    job_options = ["--set", "job.group=hp000000", "--set", "job.elapse=1:00:00", "--set", "job.resource_group=large"]
    job_options += ["--set", "job.volumes=[/vol0004]"]
    capsys.readouterr()
    assert (
        run(["sweep", "submit", str(out / "sweep.yaml"), "--out", str(tmp_path / "s"), "--dry-run", *job_options]) == 0
    )
    assert "3 jobs" in capsys.readouterr().out
    run_file = sorted(out.glob("0*.yaml"))[0]
    assert run(["job", "render", str(run_file), *job_options]) == 0
    script = tmp_path / "job.sh"
    script.write_text(capsys.readouterr().out)
    assert "rank-map-hostfile=" in script.read_text()
    assert run(["job", "lint", str(script)]) == 0, capsys.readouterr().out


def test_gpu_nodes_have_a_rank_per_device_and_no_memory_of_this_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "plan",
        "topology",
        "--model",
        "1.3b",
        "--machine",
        "a100",
        "--nodes",
        "8",
        "--set",
        "training.dtype=bfloat16",
    ]
    for layout in json_of(capsys, *arguments, "--set", "training.global_batch=512"):
        assert layout["ranks_per_node"] == 8 and layout["mem_ours"] is None and layout["mem_unit"] == "GB"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "1.3b"], "give one of --nodes or --max-nodes"),
        (["--model", "1.3b", "--nodes", "4", "--max-nodes", "4"], "give one of --nodes or --max-nodes"),
        (["--model", "1.3b", "--nodes", "4", "--constraint", "dp @ 2"], "--constraint: 'dp @ 2', character 4"),
        (["--model", "1.3b", "--nodes", "4", "--constraint", "dq == 2"], "dq"),
        (["--model", "1.3b", "--nodes", "4", "--constraint", "dp + 2"], "neither true nor false"),
        (["--model", "1.3b", "--nodes", "4", "--global-batch", "9-3"], "--global-batch 9-3: must go up"),
        (["--model", "1.3b", "--nodes", "4", "--constraint", "GBS % 48 == 0"], "no global batch of 1024"),
        (["--model", "1.3b", "--nodes", "4", "--hardware", "A100"], "--hardware A100: machine a64fx has A64FX"),
        (["--model", "tiny", "--nodes", "4", "--global-batch", "9" * 20], "must be at most 1000000000"),
        (["--model", "tiny", "--nodes", "4", "--ranks-per-node", "64"], "a node of a64fx has 48 cores"),
        (["--model", "tiny", "--nodes", "4", "--ranks-per-node", "9", "--machine", "a100"], "a100 has 8 devices"),
        (["--model", "tiny", "--nodes", "4", "--plot", "x.gif"], "must end in .svg or .png"),
    ],
)
def test_mistakes_are_refused(arguments: List[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "topology", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_long_search_prints_progress_and_a_short_search_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    _progress_printer(time.monotonic())(1, 10)
    print_progress = _progress_printer(time.monotonic() - 10)
    print_progress(4, 10)
    print_progress(5, 10)  # not again at once
    assert capsys.readouterr().err == "4 of 10 layouts costed\n"


def test_a_search_without_fitting_layouts_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "topology", "--model", "30b", "--nodes", "1"]) == 1
    captured = capsys.readouterr()
    assert "no layout fits" in captured.err and not captured.out
