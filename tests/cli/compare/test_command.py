"""Tests of ``fugaku-gpt compare`` with real jobs of a minuscule model, recorded rows and a job script."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Optional

import pytest

from fugaku_gpt.cli.main import run
from fugaku_gpt.compare import live
from fugaku_gpt.errors import EXIT_FINDINGS, EXIT_OK, EXIT_RUN_FAILED, EXIT_USAGE
from fugaku_gpt.launch.launcher import find_launcher
from tests.compare.runs import leave_run, tiny
from tests.support.corpus import write_byte_corpus
from tests.support.forks import starting
from tests.support.measurements import MEASUREMENTS

MINI = """
model: {layers: 1, hidden: 16, heads: 4, seq_len: 16, vocab_size: 256, vocab_multiple: 8, name: mini}
training: {global_batch: 4, lr: 1e-2, min_lr: 1e-3}
node.threads_per_rank: 1
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, forking_python: Optional[Path]) -> Path:
    """A comparison of this Python with itself as the environment of a profile file, with a single pair of real jobs."""
    folder = tmp_path_factory.mktemp("compare")
    corpus = write_byte_corpus(folder / "bytes")
    (folder / "mini.yaml").write_text(MINI)
    python, mpirun = forking_python or sys.executable, find_launcher().path
    (folder / "here.yaml").write_text(f"name: here\npython: {python}\npath: [{mpirun.parent}]\n")
    arguments = ["--run", folder / "mini.yaml", "--data", corpus, "--iterations", 4, "--warm-up", 1, "--pairs", 1]
    arguments += ["--load", 1, "--out", folder / "out"]
    with pytest.MonkeyPatch.context() as patch, starting(forking_python):
        # disturbances by other load on this machine do not matter here; their effect on a pair has separate tests
        patch.setattr(live, "disturbances", lambda *_: [])
        assert compare("base", f"{folder / 'here.yaml'},dtype=bfloat16", *arguments) == EXIT_OK
        # all pairs exist: the same command has nothing to run
        assert compare("base", f"{folder / 'here.yaml'},dtype=bfloat16", *arguments) == EXIT_OK
    return folder


def compare(*arguments: object) -> int:
    return run(["compare", *map(str, arguments)])


@pytest.mark.mpi
def test_real_jobs_of_both_sides_are_reported_and_printed_again(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = finished / "out"
    assert sorted(path.name for path in out.glob("pair-*")) == ["pair-001"]
    assert compare(out) == EXIT_OK
    table = capsys.readouterr().out
    assert "undecided: B takes" in table and "one run each cannot tell why" in table
    for phrase in ("Seconds per iteration", "largest rank's RSS", "equal within 2e-02", "training.dtype", "What else"):
        assert phrase in table
    assert compare(out) == EXIT_OK
    assert capsys.readouterr().out == table
    assert compare(out, "--format", "json", "--fail-on", "slower") == EXIT_OK  # an undecided comparison is not slower
    values = json.loads(capsys.readouterr().out)
    (pair,) = values["pairs"]
    assert pair["order"] == "AB" and pair["counts"] and pair["noise_a"]["minor_faults"] > 0
    log = (out / "pair-001" / "b" / "log.txt").read_text()
    assert "computing in bfloat16" in log and "iteration 5/5" in log


@pytest.mark.mpi
def test_plots_of_a_comparison_are_reproducible(finished: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("one.svg", "two.svg"):
        assert compare(finished / "out", "--plot", tmp_path / name) == EXIT_OK
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


@pytest.mark.slow
def test_recorded_rows_and_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(f"{MEASUREMENTS}:torch=1.7", f"{MEASUREMENTS}:torch=1.10", "--format", "md") == EXIT_OK
    text = capsys.readouterr().out
    assert "**undecided" in text and "| none by itself: one run each |" in text
    for repeat, (fast, slow) in enumerate(((1.0, 1.2), (1.01, 1.22), (0.99, 1.19))):
        leave_run(tmp_path / "runs" / f"a{repeat}", [fast] * 6)
        leave_run(tmp_path / "runs" / f"b{repeat}", [slow] * 6, tiny("training.dtype=bfloat16"))
    sides = f"{tmp_path / 'runs'}:dtype=float32", f"{tmp_path / 'runs'}:dtype=bfloat16"
    assert compare(*sides) == EXIT_OK
    assert "B is slower: B takes 1.203 of A's" in capsys.readouterr().out
    assert compare(*sides, "--fail-on", "slower") == EXIT_FINDINGS


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["pjm", "slurm"])
def test_the_script_of_a_job_that_runs_both_sides_is_clean(
    scheduler: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--preset", "tiny", "--ranks", 4, "--set", "job.elapse=1:00:00", "--set", "job.group=hp000000"]
    arguments += ["--set", "job.volumes=[/vol0004]", "--set", "job.resource_group=small", "--pairs", 8]
    assert (
        compare("base", "tcmalloc=true,ranks=2", *arguments, "--job", scheduler, "--out", tmp_path / "job") == EXIT_OK
    )
    script = tmp_path / "job" / "job.sh"
    text = script.read_text()
    assert "\na=base\nb=node.tcmalloc=true,ranks=2\n" in text
    assert '-m fugaku_gpt compare "$a" "$b" --run config.yaml --out pairs' in text
    assert "--pairs=8" in text and '"${start[@]/#/--start=}"' in text
    launch = {"pjm": "mpiexec -n '{ranks}'", "slurm": "'--ntasks={ranks}'"}[scheduler]
    assert launch in text
    subprocess.run(["bash", "-n", str(script)], check=True)
    shellcheck = shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if shellcheck is not None:
        subprocess.run([shellcheck, str(script)], check=True)
    if scheduler == "pjm":
        assert run(["job", "lint", str(script)]) == EXIT_OK


def test_sides_that_need_different_allocations_are_refused_in_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare("base", "freq=2200", "--preset", "tiny", "--job", "pjm") == EXIT_USAGE
    assert "node.freq_mhz: set for a whole job" in capsys.readouterr().err


def test_a_job_s_unnamed_side_has_the_job_s_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The program that alternates the sides runs in the named side's Python; the other side needs the job's profile."""
    ours, theirs = tmp_path / "ours.yaml", tmp_path / "theirs.yaml"
    for file in (ours, theirs):
        file.write_text(f"name: {file.stem}\npython: /e/{file.stem}/bin/python\n")
    arguments = ("--preset", "tiny", "--job", "slurm", "--set", "job.elapse=1:00:00")
    assert compare("base", theirs, *arguments) == EXIT_USAGE
    assert "job.profile" in capsys.readouterr().err
    assert compare("threads=1", theirs, *arguments, "--set", f"job.profile={ours}") == EXIT_OK
    script = capsys.readouterr().out
    assert f"a={ours},node.threads_per_rank=1\nb={theirs}\n" in script and "python=/e/ours/bin/python\n" in script
    assert "--ntasks={ranks}" in script and "--cpus-per-task={threads}" in script


def test_settings_of_the_user_are_set_in_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--preset", "tiny", "--job", "pjm", "--set", "job.elapse=1:00:00", "--set", "training.log_interval=2"]
    arguments += ["--set", "training.profile_operators=null", "--set", "training.lr=1e-3"]
    assert compare("base", "threads=1", *arguments) == EXIT_OK
    script = capsys.readouterr().out
    assert "--set=training.log_interval=2" in script and "--set=training.profile_operators=null" in script
    assert "--set=training.lr" not in script  # in the configuration that is written beside the script


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["base", "threads=2", "--preset", "tiny"], "give --out, a folder"),
        (["base", "threads=2", "--out", "x"], "give --preset, such as tiny, or --run RUN.yaml"),
        (["base", "thread=2"], "did you mean threads?"),
        (["nothing"], "nothing: no such folder"),
        (["base", "model.mlp=swiglu", "--preset", "tiny", "--out", "x"], "model.mlp: gelu and swiglu"),
        (["a", "b", "c"], "3 sides"),
        ([f"{MEASUREMENTS}:torch=1.7", "base"], "one is recorded and one would be run now"),
        (["base", "gbs=2"], "gbs: no such setting"),
        (["base", "global_batch=32", "--preset", "tiny", "--out", "x"], "do not do the same work"),
        ([f"{MEASUREMENTS}:torch=1.7", f"{MEASUREMENTS}:torch=1.10", "--job", "pjm"], "these were run before"),
        (["--factorial", "freq", MEASUREMENTS, "--fail-on", "slower"], "not with --factorial"),
        (["base", "threads=2", "--plot", "x.txt"], "its name must end in .svg or .png"),
    ],
)
def test_mistakes_are_refused_before_anything_runs(
    arguments: "list[str]",
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert compare(*arguments) == EXIT_USAGE
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_a_failed_side_is_the_exit_code_of_failed_runs(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--run", finished / "mini.yaml", "--data", finished / "no-corpus", "--out", finished / "failing"]
    assert compare("base", "threads=2", *arguments, "--load", 1) == EXIT_RUN_FAILED
    output = capsys.readouterr().out
    assert "no verdict" in output and "A did not run (pair-001): refused" in output
