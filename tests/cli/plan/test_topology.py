"""``plan topology``: the table, its forms, constraints and files."""

from __future__ import annotations

import csv
import io
import json
import time
from pathlib import Path
from typing import Any, Dict, List

import pytest

from fugaku_gpt.cli.main import run
from fugaku_gpt.cli.plan.topology import _progress_printer

AT_512 = ["plan", "topology", "--model", "1.3b", "--machine", "a64fx", "--nodes", "512", "--torch", "1.10"]


def _lines(arguments: List[str], capsys: pytest.CaptureFixture[str]) -> List[Dict[str, Any]]:
    code = run([*arguments, "--format", "json"])
    caught = capsys.readouterr()
    assert code == 0, caught.err
    found: List[Dict[str, Any]] = json.loads(caught.out)
    return found


def test_the_best_layouts_are_ranked_by_seconds_with_intervals_and_both_memories(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = _lines(AT_512, capsys)
    assert [one["rank"] for one in lines] == list(range(1, 11))
    assert [one["sec_per_it"] for one in lines] == sorted(one["sec_per_it"] for one in lines)
    for one in lines:
        assert one["dp"] * one["tp"] * one["pp"] == 512 * one["ranks_per_node"]
        assert one["low"] < one["sec_per_it"] < one["high"] and one["tflops"] > 0
        assert 0 < one["mem_rows"] < 32768 and 0 < one["mem_ours"] < 32768
        assert sum(one["parts"].values()) == pytest.approx(one["sec_per_it"], rel=0.01)
        assert any("zero" in text for text in one["extrapolated"]) == (one["zero"] > 0)


def test_a_person_is_told_why_the_first_is_first_and_what_it_wastes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*AT_512, "--top", "2"]) == 0
    out = capsys.readouterr().out
    assert "1 takes" in out and "gains in" in out and "waste in 1: 512 nodes are no whole units of 48" in out
    assert "layouts, " in out and "node.freq_mhz is not set: planned and written at 2000 MHz" in out


def test_rows_alone_go_to_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*AT_512, "--top", "3", "--format", "csv"]) == 0
    caught = capsys.readouterr()
    rows = list(csv.DictReader(io.StringIO(caught.out)))
    assert len(rows) == 3 and rows[0]["ranks_per_node"] and "gains in" in caught.err


def test_constraints_are_met(capsys: pytest.CaptureFixture[str]) -> None:
    rules = ["--constraint", "TP <= ranks_per_node and not recompute", "--constraint", "micro_batches % 4 == 0"]
    for one in _lines([*AT_512, *rules, "--variants", "--top", "30"], capsys):
        assert one["tp"] <= one["ranks_per_node"] and not one["recompute"]
        assert 1024 // (one["dp"] * one["micro_batch"]) % 4 == 0


def test_a_growing_batch_rules_out_replicas_that_do_not_divide_it(capsys: pytest.CaptureFixture[str]) -> None:
    ramp = ["training.ramp_start=64", "training.ramp_increment=64", "training.ramp_samples=10000"]
    sets = [word for text in ramp for word in ("--set", text)]
    for one in _lines([*AT_512, *sets, "--top", "30"], capsys):
        assert 64 % (one["dp"] * one["micro_batch"]) == 0


def test_only_layouts_like_measured_ones(capsys: pytest.CaptureFixture[str]) -> None:
    lines = _lines([*AT_512, "--measured"], capsys)
    assert lines and all(not one["extrapolated"] for one in lines)


def test_at_most_so_many_nodes_and_a_choice_of_batches(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--max-nodes", "12", "--global-batch", "90-130", "--constraint", "GBS % 32 == 0"]
    lines = _lines(["plan", "topology", "--model", "124m", *sizes, "--top", "40"], capsys)
    assert {one["global_batch"] for one in lines} <= {96, 128} and max(one["nodes"] for one in lines) <= 12
    per = [one["sec_per_it"] / one["global_batch"] for one in lines]
    assert per == pytest.approx(sorted(per), rel=1e-3)


@pytest.mark.slow
def test_run_files_a_sweep_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "best", tmp_path / "search.svg"
    assert run([*AT_512, "--nodes", "768", "--top", "3", "--out", str(out), "--plot", str(picture)]) == 0
    assert len(list(out.glob("*.rankmap"))) == 3 and (out / "sweep.yaml").is_file()
    assert "<svg" in picture.read_text() and "frontier" in picture.read_text()
    job = ["--set", "job.group=hp000000", "--set", "job.elapse=1:00:00", "--set", "job.resource_group=large"]
    job += ["--set", "job.volumes=[/vol0004]"]
    capsys.readouterr()
    assert run(["sweep", "submit", str(out / "sweep.yaml"), "--out", str(tmp_path / "s"), "--dry-run", *job]) == 0
    assert "3 jobs" in capsys.readouterr().out
    first = sorted(out.glob("0*.yaml"))[0]
    assert run(["job", "render", str(first), *job]) == 0
    script = tmp_path / "job.sh"
    script.write_text(capsys.readouterr().out)
    assert "rank-map-hostfile=" in script.read_text()
    assert run(["job", "lint", str(script)]) == 0, capsys.readouterr().out


def test_gpus_have_their_own_ranks_and_no_memory_of_this_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    model = [
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
    for one in _lines([*model, "--set", "training.global_batch=512"], capsys):
        assert one["ranks_per_node"] == 8 and one["mem_ours"] is None and one["mem_unit"] == "GB"


@pytest.mark.parametrize(
    ("arguments", "said"),
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
def test_mistakes_are_told(arguments: List[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "topology", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_long_search_says_how_far_it_is_and_a_short_one_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    _progress_printer(time.monotonic())(1, 10)
    long = _progress_printer(time.monotonic() - 10)
    long(4, 10)
    long(5, 10)  # not again at once
    assert capsys.readouterr().err == "4 of 10 layouts costed\n"


def test_where_nothing_fits_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "topology", "--model", "30b", "--nodes", "1"]) == 1
    caught = capsys.readouterr()
    assert "no layout fits" in caught.err and not caught.out
