"""``plan memory``: its four forms, its verdict and exit codes, and that jobs are judged in the same way."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any, Dict, List

import pytest

from fugaku_gpt.cli.main import run
from fugaku_gpt.planner.trainer.run_memory import CATEGORIES

Said = pytest.CaptureFixture[str]
PIPELINE = ["--preset", "1.3b", "--set", "layout.pp=4", "--set", "job.nodes=4", "--set", "training.global_batch=64"]


def rows(capsys: Said, *words: str, code: int = 0) -> List[Dict[str, Any]]:
    assert run(["plan", "memory", *words, "--format", "json"]) == code
    found: List[Dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_every_stage_and_the_fullest_node_are_rows(capsys: Said) -> None:
    *stages, node = rows(capsys, *PIPELINE)
    assert [one["part"] for one in stages] == [f"stage {stage}" for stage in range(4)] and node["part"] == "node of 1"
    for one in (*stages, node):
        assert sum(one[name] for name in CATEGORIES) == pytest.approx(one["total"], abs=0.5)
    assert [one["activations"] for one in stages] == sorted((one["activations"] for one in stages), reverse=True)
    assert [one["logits"] > 0 for one in stages] == [False, False, False, True]
    assert node["total"] == max(one["total"] for one in stages)


def test_the_forms_are_of_the_same_rows(capsys: Said) -> None:
    as_json = rows(capsys, *PIPELINE)
    assert run(["plan", "memory", *PIPELINE, "--format", "csv"]) == 0
    as_csv = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [float(one["total"]) for one in as_csv] == [one["total"] for one in as_json]
    assert run(["plan", "memory", *PIPELINE, "--format", "md"]) == 0
    assert capsys.readouterr().out.startswith("| part | layers | recompute | weights |")


def test_the_peak_stage_and_the_room_are_told(capsys: Said) -> None:
    assert run(["plan", "memory", *PIPELINE]) == 0
    said = capsys.readouterr().out
    assert re.search(r"peak stage +0: \d+ MiB a rank", said) and re.search(r"fits: \d+ MiB are left", said)
    assert re.search(r"node +\d+ of \d+ MiB \(what a job may ask for of Fugaku's nodes", said)


def test_what_does_not_fit_is_a_finding_and_its_advice_can_be_pasted(capsys: Said) -> None:
    words = [*PIPELINE, "--machine", "a64fx", "--node-memory", "6Gi"]
    assert run(["plan", "memory", *words]) == 3
    said = capsys.readouterr().out
    assert "does not fit: " in said and "the smallest change that fits:" in said
    advice = [word for line in said.splitlines() if line.startswith("--set ") for word in line.split()]
    assert advice and run(["plan", "memory", *words, *advice]) == 0


def test_nothing_helps_where_a_rank_alone_is_too_large(capsys: Said) -> None:
    assert run(["plan", "memory", "--preset", "tiny", "--machine", "local", "--node-memory", "200Mi"]) == 3
    assert "no change of layout, batch and recompute fits" in capsys.readouterr().out


@pytest.mark.parametrize("where", ["--machine=local", "--set=job.scheduler=local", "--set=job.scheduler=slurm"])
def test_the_base_is_that_of_the_build_that_is_asked_for(where: str, capsys: Said) -> None:
    bases = [rows(capsys, "--preset", "tiny", where, "--torch", build)[0]["base"] for build in ("1.7", "1.10")]
    assert bases[0] < bases[1]


def test_without_a_limit_there_is_no_verdict(capsys: Said) -> None:
    assert run(["plan", "memory", *PIPELINE, "--set", "job.scheduler=slurm"]) == 0
    assert "no limit is known: give --node-memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--node-memory", "28G"], "--node-memory 28G: valid: a size with its unit, such as 23Gi"),
        (["--node-memory", "0Gi"], "--node-memory 0Gi: valid: a size with its unit, such as 23Gi"),
        (["--torch", "1.10"], "--torch 1.10: memory on a64fx is from rows of other trainers"),
        (["--machine", "v100"], "--machine v100: its memory is that of accelerators"),
        (["--set", "layout.tp=7"], "layout.tp: 7: must divide model.heads 32"),
    ],
)
def test_mistakes_are_usage_errors(words: List[str], said: str, capsys: Said) -> None:
    assert run(["plan", "memory", "--preset", "1.3b", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("verb", [["render"], ["submit", "--dry-run"], ["submit"]])
def test_a_job_that_does_not_fit_its_nodes_is_refused(
    verb: List[str], capsys: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--preset", "13b", "--scheduler", "pjm"]
    assert run(["job", *verb, *words]) == 2
    said = capsys.readouterr()
    assert "this run needs " in said.err and said.out == "" and list(tmp_path.iterdir()) == []
    if verb != ["submit"]:
        assert run(["job", *verb, *words, "--set", "node.memory_check=false"]) == 0
        assert capsys.readouterr().out.startswith("#!/bin/bash")
