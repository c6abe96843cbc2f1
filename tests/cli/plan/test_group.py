"""Tests of ``plan check``, which checks a run before it is started."""

from __future__ import annotations

import csv
import io
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import List

import pytest

from fugaku_gpt.cli.main import run
from fugaku_gpt.config import load_run_config
from fugaku_gpt.layout import communication_check
from fugaku_gpt.layout.communications import plan_of, predicted_bubble

BIG = ["plan", "check", "--preset", "13b", "--set", "layout.tp=6", "--set", "layout.pp=8", "--ranks", "13824"]
GLOBAL_BATCH = ["--set", "training.global_batch=288"]
RAMP = [
    argument
    for setting in ("ramp_start=288", "ramp_increment=288", "ramp_samples=5000", "iterations=1000")
    for argument in ("--set", f"training.{setting}")
]
GIB = 2**30


def _limit_memory_to_two_gib() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (2 * GIB, 2 * GIB))


@pytest.mark.slow
def test_the_run_on_13824_nodes_fits_within_two_gib() -> None:
    completed = subprocess.run(
        [sys.executable, "-m", "fugaku_gpt", *BIG, "--set", "layout.zero=1", "--set", "training.global_batch=2304"],
        capture_output=True,
        preexec_fn=_limit_memory_to_two_gib,
        timeout=300,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    assert "ranks           13824: dp 288 * tp 6 * pp 8, order tp,pp,dp" in completed.stdout
    assert "groups          2304 tp, 1728 pp, 48 dp, 1728 embedding, 1 world" in completed.stdout
    assert "all fits" in completed.stdout
    assert completed.stdout.splitlines()[2].split()[:2] == ["0", "5"]


def test_options_override_the_run_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    layout = "{pp: 2, dp: 2, schedule: interleaved, chunks: 2, split: [1, 3, 2, 2]}"
    text = f"model: {{layers: 8, heads: 4}}\ntraining: {{global_batch: 16}}\nlayout: {layout}\n"
    file.write_text(text, encoding="utf-8")
    options = ["--set", "layout.order=dp,tp,pp", "--every-rank", "--format", "csv"]
    assert run(["plan", "check", str(file), *options]) == 0
    captured = capsys.readouterr()
    rows = list(csv.DictReader(io.StringIO(captured.out)))
    assert [row["layers"] for row in rows] == ["1+2", "3+2"]
    assert [row["in_flight"] for row in rows] == ["5", "3"]
    assert "ran every rank" in captured.err and "8 micro-batches, 2 chunks each" in captured.err


def test_equal_stages_idle_as_the_formula_says(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--set", "model.layers=16", "--set", "model.vocab_size=2", "--set", "model.padded_vocab_size=2"]
    assert run(["plan", "check", *options, "--set", "layout.pp=4", "--micro-batches", "12", "--format", "json"]) == 0
    captured = capsys.readouterr()
    rows = json.loads(captured.out)
    assert [row["idle_share"] for row in rows] == pytest.approx([1 - 12 / 15] * 4, abs=0.002)
    assert [row["in_flight"] for row in rows] == [4, 3, 2, 1]
    assert [row["messages"] for row in rows] == [12, 24, 24, 12]


def test_the_bubble_of_uneven_stages_is_predicted_as_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["layout.pp=2", "layout.dp=2", "model.layers=3"]
    assert run(["plan", "check", *(argument for setting in settings for argument in ("--set", setting))]) == 0
    bubble = predicted_bubble(plan_of(load_run_config(overrides=settings)))
    assert f"bubble          {bubble:.1%} of the busy time" in capsys.readouterr().out


@pytest.mark.slow
def test_every_size_of_a_batch_ramp_with_hierarchical_sums_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    length_ramp = ["seq_ramp_start=512", "seq_ramp_increment=512", "seq_ramp_iterations=8"]
    settings = [f"training.{setting}" for setting in length_ramp]
    settings += ["training.global_batch=2304", "layout.hierarchical_sum=true", "node.ranks_per_node=4", "layout.zero=1"]
    settings += ["layout.order=dp,tp,pp"]
    assert run([*BIG, *RAMP, *(argument for setting in settings for argument in ("--set", setting))]) == 0
    output = capsys.readouterr().out
    groups = "2304 tp, 1728 pp, 48 dp, 1728 embedding, 3456 dp-node, 192 dp-across, 3456 dp-node-gather, "
    assert f"groups          {groups}192 dp-across-gather, 1 world" in output
    # micro-batches of 512 tokens: 1; of 1024: 2, 3, 4; of 1536: 5, 7; of 2048: 8
    assert "sizes           7: from 1 micro-batches of 512 tokens (bubble 701.9% of the busy time)" in output
    assert "to 8 of 2048" in output and "all fits" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "13820"], "--ranks 13820: must be a multiple of tp 6 * pp 8 = 48; valid: 13776 or 13824"),
        (["--ranks", "5"], "valid: 48"),
        (["--dp", "4"], "--ranks 13824: dp 4 * tp 6 * pp 8 = 192; leave --dp or --ranks out"),
        (["--set", "layout.tp=7", "--ranks", "56"], "13b: tp 7 must divide the heads, 36"),
        (
            ["--set", "layout.chunks=2", *GLOBAL_BATCH],
            "schedule 1f1b with 2 chunks per stage: valid: 1, or the schedule",
        ),
        (
            ["--set", "layout.schedule=interleaved", "--set", "layout.chunks=6", *GLOBAL_BATCH],
            "valid: stages * chunks up to 40",
        ),
        (["--set", "layout.split=[5, 5]", *GLOBAL_BATCH], "has 2 numbers; valid: 8"),
        (
            ["--set", "layout.hierarchical_sum=true", "--set", "job.nodes=5", *GLOBAL_BATCH],
            "layout.hierarchical_sum: job.nodes 5 must divide the 13824 ranks; valid: 4 or 6",
        ),
        (
            [*RAMP, "--set", "training.global_batch=2304", "--set", "training.ramp_increment=100"],
            "training.ramp_increment: 100: must be a multiple of training.micro_batch 1 * layout.dp 288 = 288",
        ),
        (["--ranks", "528"], "must be a multiple of training.micro_batch 1 * dp 11 = 11"),
    ],
)
def test_an_impossible_layout_is_refused_with_valid_values(
    arguments: List[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run([*BIG, *arguments])
    error = capsys.readouterr().err
    assert (code, message in error) == (2, True), error


def test_a_mismatch_is_named_and_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original_program = communication_check.program

    def program_of_stage(plan, stage, *more, **named):  # type: ignore[no-untyped-def]
        steps = original_program(plan, stage, *more, **named)
        return steps[1:] if stage == 1 else steps

    monkeypatch.setattr(communication_check, "program", program_of_stage)
    assert run(["plan", "check", "--set", "layout.tp=2", "--set", "layout.pp=2", "--dp", "2"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("does not fit: rank 0, communicator pp, position ")


def test_a_group_that_does_not_fit_is_named_also_with_a_batch_ramp(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(communication_check, "groups_of", lambda plan: {"tp": lambda coordinates, layout, order: [0]})
    ramp = ["training.ramp_start=4", "training.ramp_increment=4", "training.ramp_samples=16"]
    arguments = [argument for setting in ("layout.dp=2", *ramp) for argument in ("--set", setting)]
    assert run(["plan", "check", *arguments]) == 1
    assert capsys.readouterr().err.startswith("does not fit: rank 0, communicator tp: ")


@pytest.mark.long
def test_all_nodes_of_fugaku_are_checked_within_four_gibibytes() -> None:
    """158,976 nodes with four ranks each. A check whose time grew as the square of the replicas took hours."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))
        resource.setrlimit(resource.RLIMIT_CPU, (300, 300))

    settings = ("layout.tp=6", "layout.pp=8", "model.hidden=6144", "model.heads=48", "model.vocab_size=50256")
    command = [sys.executable, "-m", "fugaku_gpt", "plan", "check", "--preset", "13b", "--ranks", "635904"]
    command += ["--micro-batches", "16", *(argument for setting in settings for argument in ("--set", setting))]
    result = subprocess.run(command, capture_output=True, text=True, preexec_fn=limited)
    assert result.returncode == 0, result.stderr
    assert "ranks           635904: dp 13248 * tp 6 * pp 8" in result.stdout
    assert "groups          105984 tp, 79488 pp, 48 dp, 79488 embedding, 1 world" in result.stdout
