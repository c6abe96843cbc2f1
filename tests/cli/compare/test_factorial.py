"""Tests of ``fugaku-gpt compare --factorial``."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from fugaku_gpt.cli.main import run
from fugaku_gpt.errors import EXIT_OK, EXIT_RUN_FAILED, EXIT_USAGE
from fugaku_gpt.records.run import RunDirectory
from tests.compare.runs import ENVIRONMENT, leave_run, tiny
from tests.support.corpus import write_byte_corpus
from tests.support.measurements import MEASUREMENTS
from tests.support.prepared_corpus import PREPARED
from tests.sweep.fake_scheduler import FakeScheduler


def factorial(*arguments: object) -> int:
    return run(["compare", "--factorial", *map(str, arguments)])


def test_a_design_is_printed_and_nothing_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert factorial("tcmalloc,dtype,bind", "--preset", "tiny", "--fraction", 1, "--repeats", 2) == EXIT_OK
    text = capsys.readouterr().out
    assert "2^(3-1), resolution III: 4 combinations in 2 blocks, 8 runs" in text
    assert "generator: bind = " in text


@pytest.mark.mpi
@pytest.mark.long
def test_a_design_is_run_locally_and_reports_effects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--preset", "tiny", "--data", write_byte_corpus(tmp_path / "bytes"), "--iterations", 2, "--warm-up", 1]
    for setting in ("model.layers=1", "model.hidden=16", "model.seq_len=16", "model.vocab_size=256"):
        arguments += ["--set", setting]
    out = tmp_path / "out"
    assert factorial("gelu,dtype=float32|float64", *arguments, "--repeats", 1, "--out", out) == EXIT_OK
    assert len(list(out.glob("*/result.json"))) == 4
    assert all(RunDirectory(path.parent).result().status == "ok" for path in out.glob("*/result.json"))  # type: ignore[union-attr]
    first = capsys.readouterr().out
    assert "gelu" in first and "dtype" in first
    # the folder of a design is reported in the same way again
    assert run(["compare", str(out)]) == EXIT_OK
    assert capsys.readouterr().out == first
    assert run(["compare", str(out), "--format", "json"]) == EXIT_OK
    assert {effect["name"] for effect in json.loads(capsys.readouterr().out)["effects"]} >= {"gelu", "dtype"}


def test_a_toggle_that_was_not_applied_is_the_exit_code_of_failed_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toggle = {"name": "tcmalloc", "requested": True, "applied": False, "seen": "libc"}
    environment = {**ENVIRONMENT, "toggles": [toggle]}
    for repeat in range(2):
        leave_run(tmp_path / f"off{repeat}", [1.0] * 6)
        leave_run(tmp_path / f"vain{repeat}", [1.0] * 6, tiny("node.tcmalloc=true"), environment=environment)
    assert factorial("tcmalloc", tmp_path) == EXIT_RUN_FAILED
    error = capsys.readouterr().err
    assert "vain0: node.tcmalloc=True was not applied" in error and "vain1" in error
    leave_run(tmp_path / "on", [0.8] * 6, tiny("node.tcmalloc=true"))
    assert factorial("tcmalloc", tmp_path) == EXIT_RUN_FAILED
    assert "vain0" in capsys.readouterr().out


def test_failed_runs_alone_are_the_exit_code_of_failed_runs_and_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        leave_run(tmp_path / name, [1.0] * 6, status="failed", reason=f"{name} has no memory")
    assert factorial("tcmalloc", tmp_path) == EXIT_RUN_FAILED
    error = capsys.readouterr().err
    assert "no run that has ended well" in error and "a: failed: a has no memory" in error and "b: failed" in error
    assert run(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == EXIT_RUN_FAILED


def test_the_report_of_recorded_rows_names_effects_that_are_not_identified(capsys: pytest.CaptureFixture[str]) -> None:
    assert factorial("freq,tcmalloc,retention,ranks", MEASUREMENTS) == EXIT_OK
    text = capsys.readouterr().out
    assert "effect" in text and "not identified:" in text and "noise between jobs" in text


@pytest.mark.slow
def test_a_submitted_design_asks_first_and_prints_commands_that_can_be_pasted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.chdir(tmp_path)
    scheduler = FakeScheduler(tmp_path / "queue")
    monkeypatch.setattr("fugaku_gpt.jobs.schedulers.slurm.SlurmScheduler", lambda: scheduler)
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    settings = ["--preset", "tiny", "--set", "job.elapse=30:00", "--set", f"data.paths=[{PREPARED}]", "--repeats", 1]
    assert factorial("dtype", *settings, "--scheduler", "slurm", "--out", "an out") == EXIT_OK
    error = capsys.readouterr().err
    assert "submit 2 jobs, 1 node-hours? [y/N]" in error and len(scheduler.jobs()) == 2
    assert "2 submitted; to follow: fugaku-gpt sweep status 'an out'\n" in error
    assert "the effects, when they have run: fugaku-gpt compare 'an out'\n" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing", "--preset", "tiny"], "nothing: no such setting"),
        (["tcmalloc"], "give --preset, such as tiny, or --run RUN.yaml"),
        (["tcmalloc", "a", "b"], "--factorial: goes with nothing, a folder of runs or a FILE.csv"),
    ],
)
def test_mistakes_are_refused(arguments: "list[str]", message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert factorial(*arguments) == EXIT_USAGE
    assert message in capsys.readouterr().err
