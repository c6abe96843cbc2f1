"""The train verb as a user calls it: real mpirun, real files, real exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import List, Optional

import psutil
import pytest

from fugaku_gpt.cli.main import run
from fugaku_gpt.config import load_run_config
from fugaku_gpt.errors import EXIT_RESUME
from fugaku_gpt.launch.launcher import find_launcher
from fugaku_gpt.records.run import RunDirectory
from tests.support.corpus import write_byte_corpus

SMALL = ["model.layers=1", "model.hidden=16", "model.heads=2", "model.seq_len=16", "model.vocab_size=256"]
SHORT = ["training.iterations=4", "training.global_batch=4", "training.micro_batch=1", "training.eval_interval=2"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_corpus(tmp_path_factory.mktemp("corpus") / "bytes")


# a rank that takes any second signal for another order, and never comes to the end of a step
IMPATIENT = """
import sys
from fugaku_gpt.training import stopping
stopping._DUPLICATE_SECONDS = 0.0
stopping.StopRequest.should_stop = lambda stop: setattr(stop, "_last_step_end", 0.0) or False
from fugaku_gpt.cli.main import run
sys.exit(run(sys.argv[1:]))
"""


# Whether garbage is collected, and whether what was imported is out of its reach; and what is imported in the end of
# PyTorch's compiler, which takes longer than all of a small run's first step.
WATCHED = """
import gc
import sys
from fugaku_gpt.cli import main
from fugaku_gpt.training import run, trainer

def told(what, function):
    def telling(*arguments, **options):
        print(what, gc.isenabled(), gc.get_freeze_count() > 10000, flush=True)
        return function(*arguments, **options)
    return telling

run.agree_on_kernels = told("starts", run.agree_on_kernels)
trainer.Trainer.step = told("steps", trainer.Trainer.step)
code = main.run(sys.argv[1:])
print("ends", gc.isenabled())
print([name for name in ("sympy", "torch._dynamo", "torch.fx.experimental.symbolic_shapes") if name in sys.modules])
sys.exit(code)
"""


def arguments(corpus: Path, out: Path, *settings: str) -> List[str]:
    words = ["train", "--data", str(corpus), "--out", str(out)]
    for setting in (*SMALL, *SHORT, *settings):
        words += ["--set", setting]
    return words


@pytest.mark.parametrize("ranks", [None, 2])
@pytest.mark.mpi
def test_a_run_that_does_not_fit_is_refused_before_anything_is_written(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], ranks: Optional[int]
) -> None:
    out = tmp_path / "run"
    words = arguments(corpus, out, f"layout.dp={ranks or 1}", "node.memory_limit=100Mi")
    command = [sys.executable, "-m", "fugaku_gpt", *words, *([] if ranks is None else ["--ranks", str(ranks)])]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)
    said = done.stdout.decode()
    assert done.returncode == 2 and said.count("this run needs") == 1 and "(node.memory_limit" in said, said
    assert not out.exists()


@pytest.mark.mpi
def test_under_mpirun_one_rank_says_that_a_run_does_not_fit_and_none_goes_on(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = arguments(corpus, out, "layout.pp=1", "layout.dp=2", "node.memory_limit=100Mi")
    launcher = find_launcher()
    command = [*launcher.command_prefix(2), sys.executable, "-m", "fugaku_gpt", *words]
    environment = {**os.environ, **launcher.environment}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, timeout=300)
    said = done.stdout.decode()
    assert done.returncode == 2 and said.count("this run needs") == 1 and "for 2 ranks" in said, said
    assert not out.exists()


@pytest.mark.mpi
def test_two_ranks_leave_a_whole_run_directory_and_a_second_run_into_it_is_refused(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    command = [*arguments(corpus, out, "layout.dp=2"), "--ranks", "2"]
    assert run(command) == 0
    directory = RunDirectory(out)
    result, environment = directory.result(), directory.environment()
    assert result is not None and result.status == "ok" and result.iterations == 4
    assert [line["iteration"] for line in directory.metrics("iteration")] == [1, 2, 3, 4]
    assert [line["iteration"] for line in directory.metrics("validation")] == [0, 2, 4]
    assert load_run_config(directory.config_file).layout.dp == 2
    assert environment is not None and [rank["rank"] for rank in environment["ranks"]] == [0, 1]
    last = directory.metrics("iteration")[-1]
    assert last["consumed_samples"] == 16 and last["consumed_tokens"] == 16 * 16
    assert last["compute_max"] >= last["compute_min"] > 0 and last["compute_max_rank"] in (0, 1)
    assert last["compute_max_node"] == environment["ranks"][0]["host"]
    assert last["rss_max_bytes"] > 0 and last["node_used_bytes"] > last["rss_max_bytes"] / 2
    printed = capfd.readouterr().out
    for words in ("torch ", "MPI ", "rank 1 on ", "lm loss:", "grad norm:", "tokens per second:", "TFLOPs:"):
        assert words in printed
    before = (out / "result.json").read_text(encoding="utf-8")
    assert run(command) == 2
    assert "already holds a run" in capfd.readouterr().err
    assert (out / "result.json").read_text(encoding="utf-8") == before


@pytest.mark.mpi
def test_the_same_seed_gives_the_same_losses_with_one_rank_and_with_two_whoever_starts_them(
    corpus: Path, tmp_path: Path
) -> None:
    losses = []
    for ranks, more in (
        (1, []),
        (2, []),  # by mpirun itself
        (2, ["--check-collectives"]),  # which finds nothing to say, and changes nothing
    ):
        out = tmp_path / "-".join([str(ranks), *more])
        words = [*arguments(corpus, out, f"layout.tp={ranks}", "training.dtype=float64"), *more]
        if ranks == 2 and not more:
            done = _mpirun(ranks, words)
            assert done.returncode == 0, done.stdout
        else:
            assert run([*words, "--ranks", str(ranks)]) == 0
        result = RunDirectory(out).result()
        assert result is not None and result.status == "ok"
        losses.append([line["loss"] for line in RunDirectory(out).metrics("iteration")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12) and losses[1] == losses[2]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.mpi
def test_a_run_imports_nothing_of_pytorch_s_compiler_and_collects_garbage_from_its_first_iteration_on(
    corpus: Path, tmp_path: Path, recompute: str
) -> None:
    words = arguments(corpus, tmp_path / "run", f"training.recompute={recompute}", "checkpoint.at_end=false")
    done = subprocess.run([sys.executable, "-c", WATCHED, *words], check=True, stdout=subprocess.PIPE, timeout=300)
    lines = done.stdout.decode().splitlines()
    assert any("iteration 4/4" in line for line in lines) and lines[-1] == "[]"
    watched = [line for line in lines if line.split()[0] in ("starts", "steps", "ends")]
    assert watched == ["starts False True", *["steps True True"] * 4, "ends True"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "2"], "layout.dp 1 * layout.tp 1 * layout.pp 1 = 1 ranks, but there are 2"),
        (["--set", "layout.dp=2"], "add --ranks 2"),
        (["--set", "layout.tp=3", "--ranks", "3"], "must divide model.heads 2; valid: 1, 2"),
        (["--set", "training.lr=fast"], "training.lr: 'fast': expected a number"),
        (["--preset", "huge"], "valid: tiny, 124m"),
        (["--data", "nowhere", "--ranks", "1"], "nowhere: neither a folder made by"),
        (
            ["--set", "training.recompute=full", "--set", "training.recompute_budget_mib=0.001", "--ranks", "1"],
            "training.recompute_budget_mib: 0.001: stage 0 keeps",
        ),
    ],
)
def test_a_mistake_is_a_message_and_leaves_nothing(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], words: List[str], said: str
) -> None:
    out = tmp_path / "run"
    code = run([*arguments(corpus, out), *words])
    captured = capfd.readouterr()
    output = captured.out + captured.err
    assert said in output
    assert "Traceback" not in output
    assert code == 2 and not out.exists()


@pytest.mark.mpi
def test_a_token_past_the_vocabulary_ends_all_ranks_with_a_message(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"  # a foreign corpus does not name its vocabulary: it is seen when a rank reads the sample
    assert run([*arguments(corpus, out, "model.vocab_size=118", "layout.dp=2"), "--ranks", "2"]) == 1
    output = capfd.readouterr().out
    assert "is outside the vocabulary; model.vocab_size is 118" in output and "Traceback" not in output
    result = RunDirectory(out).result()
    assert result is not None and result.status == "failed" and "vocabulary" in result.reason
    assert result.rank in (0, 1) and result.node and result.exception.startswith("DataError: ")


@pytest.mark.mpi
def test_a_loss_that_is_not_finite_is_a_failed_run(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    settings = ["training.lr=1e30", "training.min_lr=1e29", "training.clip_grad=0", "layout.dp=2"]
    assert run([*arguments(corpus, out, *settings), "--ranks", "2"]) == 1
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    assert result["status"] == "failed" and "not finite" in result["reason"]
    assert "Traceback" not in capfd.readouterr().out


@pytest.mark.parametrize(("ranks", "victim", "own"), [(2, 1, True), (4, 2, False)])
@pytest.mark.mpi
def test_a_rank_that_is_killed_ends_the_run_and_is_named(
    corpus: Path, tmp_path: Path, ranks: int, victim: int, own: bool
) -> None:
    """Under a launcher of ours, and under mpirun alone, which kills the others within milliseconds."""
    out = tmp_path / "run"
    words = arguments(corpus, out, f"layout.dp={ranks}", "training.iterations=100000", "training.eval_interval=null")
    launcher = find_launcher()
    train = [sys.executable, "-m", "fugaku_gpt", *words]
    command = [*train, "--ranks", str(ranks)] if own else [*launcher.command_prefix(ranks), *train]
    environment = {**os.environ, **({} if own else launcher.environment)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(b"iteration"):
                break
        facts = RunDirectory(out).environment()
        assert facts is not None
        processes = [psutil.Process(rank["process"]) for rank in facts["ranks"]]
        processes += [parent for parent in (rank.parent() for rank in processes) if parent is not None]
        os.kill(facts["ranks"][victim]["process"], signal.SIGKILL)
        said = process.stdout.read().decode()
        # of the rank's supervisor, or of one that mpirun has killed meanwhile
        assert process.wait(timeout=300) in (128 + signal.SIGKILL, signal.SIGKILL)
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert len(processes) == 2 * ranks and not alive
    result = RunDirectory(out).result()
    assert result is not None and result.status == "failed" and result.iterations > 0
    assert (result.rank, result.node) == (victim, facts["ranks"][victim]["host"])
    assert result.reason == f"rank {victim}: killed by signal 9 (SIGKILL)"
    # the rank's own supervisor says it, and that of rank 0, for whoever reads rank 0's output only
    assert said.count(f"fugaku-gpt: {result.reason}") == 2 and "last checkpoint: none" in said


@pytest.mark.parametrize(
    ("number", "own", "reason"),
    [
        (signal.SIGINT, True, "stopped: SIGINT, after iteration "),  # though it is passed on as SIGUSR1
        (signal.SIGTERM, False, "stopped: SIGTERM on "),
        (None, True, "stopped: 0:01:59 before the time limit of 0:02:00 (job.elapse)"),
    ],
)
@pytest.mark.mpi
def test_a_run_that_is_stopped_can_be_resumed(
    corpus: Path, tmp_path: Path, number: Optional[int], own: bool, reason: str
) -> None:
    """Told by a signal to its launcher, ours or MPI's, or by its time limit."""
    out = tmp_path / "run"
    words = arguments(corpus, out, "layout.dp=2", "training.iterations=100000", "training.eval_interval=null")
    launcher = find_launcher()
    train = [sys.executable, "-m", "fugaku_gpt", *words]
    if number is None:
        train += ["--set", "job.elapse=120", "--set", "job.stop_margin=119"]
    command = [*train, "--ranks", "2"] if own else [*launcher.command_prefix(2), *train]
    environment = {**os.environ, **({} if own else launcher.environment)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if number is not None and line.startswith(b"iteration"):
                process.send_signal(number)
                break
        output = process.stdout.read()
        # mpirun alone may tell of ranks that it has killed as they left
        assert process.wait(timeout=300) in ((EXIT_RESUME,) if own else (EXIT_RESUME, signal.SIGKILL)), output.decode()
    result = RunDirectory(out).result()
    assert result is not None and result.status == "interrupted" and result.reason.startswith(reason)
    assert result.reason.endswith(f", after iteration {result.iterations}")
    assert result.last_checkpoint == f"step-{result.iterations:08d}" and b"Traceback" not in output


@pytest.mark.mpi
def test_a_second_order_ends_a_run_at_once(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = arguments(corpus, out, "training.iterations=100000", "training.eval_interval=null")
    process = subprocess.Popen(
        [sys.executable, "-c", IMPATIENT, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(b"iteration"):
                break
        process.send_signal(signal.SIGTERM)
        time.sleep(1.0)  # two that come before the process looks are one
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
        assert process.wait(timeout=300) == 1
    result = RunDirectory(out).result()
    assert result is not None and (result.status, result.reason) == ("interrupted", "rank 0: interrupted")


def _mpirun(ranks: int, words: List[str]) -> "subprocess.CompletedProcess[str]":
    launcher = find_launcher()
    return subprocess.run(
        [*launcher.command_prefix(ranks), sys.executable, "-m", "fugaku_gpt", *words],
        env={**os.environ, **launcher.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.mpi
def test_a_run_goes_on_in_another_layout_and_refuses_another_corpus(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def words(out: str, iterations: int, *settings: str) -> List[str]:
        more = ("training.dtype=float64", "training.lr_schedule=constant", f"training.iterations={iterations}")
        return [*arguments(corpus, tmp_path / out, *more, "checkpoint.at_end=true", *settings), "--ranks", "2"]

    assert run(words("whole", 6, "layout.dp=2")) == 0
    assert run(words("run", 4, "layout.dp=2", "layout.zero=1")) == 0
    capfd.readouterr()
    assert run([*words("run", 4, "layout.dp=2"), "--resume", "auto"]) == 0
    assert "the run has done its 4 iterations: nothing to do" in capfd.readouterr().out
    other = write_byte_corpus(tmp_path / "other")
    (tmp_path / "other.bin").write_bytes((tmp_path / "other.bin").read_bytes()[::-1])
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    refused = [*words("run", 6, "layout.dp=2"), "--resume", "auto", "--data", str(other)]
    assert run(refused) == 2 and "--force-data" in capfd.readouterr().out
    directory = RunDirectory(tmp_path / "run")
    result = directory.result()
    assert result is not None and (result.status, result.iterations) == ("ok", 4)
    assert [name for name in sorted(path.name for path in directory.path.iterdir()) if ".claim" not in name] == [
        name for name in before if ".claim" not in name
    ]
    stale = directory.path / "flight" / "000" / "rank-000005.flight"
    stale.write_bytes(b"of a start with more ranks")
    assert run([*words("run", 6, "layout.tp=2"), "--resume", "auto"]) == 0
    assert len(list(stale.parent.iterdir())) == 2  # else the doctor would take it for a rank of this start
    said = capfd.readouterr().out
    assert "resuming from step-00000004: iteration 4, 16 samples consumed" in said
    assert "layout.dp 2 -> 1" in said and "layout.tp 1 -> 2" in said
    curves = []
    for out in ("run", "whole"):
        lines = RunDirectory(tmp_path / out)
        curves.append([line["loss"] for kind in ("iteration", "validation") for line in lines.metrics(kind)])
    assert len(curves[1]) == 6 + 4 and curves[0] == pytest.approx(curves[1], rel=1e-12)
    assert (directory.path / "result.1.json").exists() and load_run_config(directory.config_file).layout.tp == 2


def test_going_on_without_saying_where_is_refused(corpus: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--data", str(corpus), "--resume", "auto"]) == 2
    assert "--resume auto: needs --out" in capfd.readouterr().err
