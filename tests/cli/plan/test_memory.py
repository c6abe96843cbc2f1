"""Tests of ``plan memory`` (formats, verdict, exit codes), and of the same check before a job is submitted."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import List

import pytest

from fugaku_gpt.cli.main import run
from fugaku_gpt.planner.trainer.run_memory import CATEGORIES
from tests.support.commands import Capture, json_of

PIPELINE = ["--preset", "1.3b", "--set", "layout.pp=4", "--set", "job.nodes=4", "--set", "training.global_batch=64"]


def test_every_stage_and_the_fullest_node_are_rows(capsys: Capture) -> None:
    *stages, node = json_of(capsys, "plan", "memory", *PIPELINE)
    assert [row["part"] for row in stages] == [f"stage {stage}" for stage in range(4)] and node["part"] == "node of 1"
    for row in (*stages, node):
        assert sum(row[name] for name in CATEGORIES) == pytest.approx(row["total"], abs=0.5)
    assert [row["activations"] for row in stages] == sorted((row["activations"] for row in stages), reverse=True)
    assert [row["logits"] > 0 for row in stages] == [False, False, False, True]
    assert node["total"] == max(row["total"] for row in stages)


def test_all_formats_have_the_same_rows(capsys: Capture) -> None:
    as_json = json_of(capsys, "plan", "memory", *PIPELINE)
    assert run(["plan", "memory", *PIPELINE, "--format", "csv"]) == 0
    as_csv = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [float(row["total"]) for row in as_csv] == [row["total"] for row in as_json]
    assert run(["plan", "memory", *PIPELINE, "--format", "md"]) == 0
    assert capsys.readouterr().out.startswith("| part | layers | recompute | weights |")


def test_the_peak_stage_and_the_free_memory_are_printed(capsys: Capture) -> None:
    assert run(["plan", "memory", *PIPELINE]) == 0
    output = capsys.readouterr().out
    assert re.search(r"peak stage +0: \d+ MiB a rank", output) and re.search(r"fits: \d+ MiB are left", output)
    assert re.search(r"node +\d+ of \d+ MiB \(what a job may ask for of Fugaku's nodes", output)


def test_a_run_that_does_not_fit_is_a_finding_with_advice_that_can_be_pasted(capsys: Capture) -> None:
    arguments = [*PIPELINE, "--machine", "a64fx", "--node-memory", "6Gi"]
    assert run(["plan", "memory", *arguments]) == 3
    output = capsys.readouterr().out
    assert "does not fit: " in output and "the smallest change that fits:" in output
    advice = [argument for line in output.splitlines() if line.startswith("--set ") for argument in line.split()]
    assert advice and run(["plan", "memory", *arguments, *advice]) == 0


def test_nothing_helps_where_a_rank_alone_is_too_large(capsys: Capture) -> None:
    assert run(["plan", "memory", "--preset", "tiny", "--machine", "local", "--node-memory", "200Mi"]) == 3
    assert "no change of layout, batch and recompute fits" in capsys.readouterr().out


@pytest.mark.parametrize("target_option", ["--machine=local", "--set=job.scheduler=local", "--set=job.scheduler=slurm"])
def test_the_base_memory_is_that_of_the_requested_build(target_option: str, capsys: Capture) -> None:
    bases = [
        json_of(capsys, "plan", "memory", "--preset", "tiny", target_option, "--torch", build)[0]["base"]
        for build in ("1.7", "1.10")
    ]
    assert bases[0] < bases[1]


def test_without_a_limit_there_is_no_verdict(capsys: Capture) -> None:
    assert run(["plan", "memory", *PIPELINE, "--set", "job.scheduler=slurm"]) == 0
    assert "no limit is known: give --node-memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--node-memory", "28G"], "--node-memory 28G: valid: a size with its unit, such as 23Gi"),
        (["--node-memory", "0Gi"], "--node-memory 0Gi: valid: a size with its unit, such as 23Gi"),
        (["--torch", "1.10"], "--torch 1.10: memory on a64fx is from rows of other trainers"),
        (["--machine", "v100"], "--machine v100: its memory is that of accelerators"),
        (["--set", "layout.tp=7"], "layout.tp: 7: must divide model.heads 32"),
    ],
)
def test_mistakes_are_usage_errors(arguments: List[str], message: str, capsys: Capture) -> None:
    assert run(["plan", "memory", "--preset", "1.3b", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", [["render"], ["submit", "--dry-run"], ["submit"]])
def test_a_job_that_does_not_fit_the_nodes_is_refused(
    command: List[str], capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["--preset", "13b", "--scheduler", "pjm"]
    assert run(["job", *command, *arguments]) == 2
    captured = capsys.readouterr()
    assert "this run needs " in captured.err and captured.out == "" and list(tmp_path.iterdir()) == []
    if command != ["submit"]:
        assert run(["job", *command, *arguments, "--set", "node.memory_check=false"]) == 0
        assert capsys.readouterr().out.startswith("#!/bin/bash")


def test_the_memory_of_generation_has_the_cache(capsys: Capture) -> None:
    (one,) = json_of(capsys, "plan", "memory", "--preset", "smollm2-135m", "--generate", "1x1024")
    (eight,) = json_of(capsys, "plan", "memory", "--preset", "smollm2-135m", "--generate", "8x1024")
    # 30 layers of 3 heads of 64 elements of keys and of values, 4 bytes each
    assert eight["cache"] == 8 * one["cache"] == pytest.approx(8 * 1024 * 30 * 2 * 3 * 64 * 4 / 2**20)
    assert eight["weights"] == one["weights"] > 500
    assert run(["plan", "memory", "--preset", "smollm2-135m", "--generate", "8x1024", "--node-memory", "1Gi"]) == 3
    assert "does not fit" in capsys.readouterr().out
    for text, message in (("8", "valid: TEXTSxTOKENS"), ("8x999999", "tokens of a text, model.seq_len")):
        assert run(["plan", "memory", "--preset", "smollm2-135m", "--generate", text]) == 2
        assert message in capsys.readouterr().err
