"""Tests of ``fugaku-gpt train`` with real mpirun, files and exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Dict, List, Optional

import psutil
import pytest

from fugaku_gpt.checkpoint import file_system
from fugaku_gpt.cli.main import run
from fugaku_gpt.config import load_run_config
from fugaku_gpt.errors import EXIT_RESUME
from fugaku_gpt.launch.launcher import OPEN_MPI, find_launcher
from fugaku_gpt.records.run import RunDirectory
from tests.support.corpus import write_byte_corpus

SMALL = ["model.layers=1", "model.hidden=16", "model.heads=2", "model.seq_len=16", "model.vocab_size=256"]
SHORT = ["training.iterations=4", "training.global_batch=4", "training.micro_batch=1", "training.eval_interval=2"]


# The variables of jobs on other nodes, by which MPI's launchers would start ranks there.
SOMEBODYS_ALLOCATION = {
    **{"SLURM_JOB_ID": "1", "SLURM_JOBID": "1", "SLURM_NNODES": "1", "SLURM_TASKS_PER_NODE": "1"},
    **{"SLURM_JOB_NODELIST": "node8", "SLURM_NODELIST": "node8", "SLURM_JOB_NUM_NODES": "1"},
    **{"SLURM_JOB_START_TIME": "1700000000", "SLURM_JOB_END_TIME": "1700003600"},
    **{"PBS_ENVIRONMENT": "PBS_BATCH", "PBS_JOBID": "1", "PBS_NODEFILE": "/no/such/file"},
    **{"LSB_JOBID": "1", "LSB_HOSTS": "node8 node8", "LSB_MCPU_HOSTS": "node8 2", "LSF_BINDIR": "/no/such/folder"},
    **{"SGE_ROOT": "/no/such/folder", "PE_HOSTFILE": "/no/such/file", "FLUX_URI": "local:///none", "FLUX_JOB_ID": "1"},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_corpus(tmp_path_factory.mktemp("corpus") / "bytes")


# A rank that takes any second signal for another request to stop, and never reaches the end of a step.
UNFINISHED_STEP_PROGRAM = """
import sys
from fugaku_gpt.training import stopping
stopping._DUPLICATE_SECONDS = 0.0
stopping.StopRequest.should_stop = lambda stop: setattr(stop, "_last_step_end", 0.0) or False
from fugaku_gpt.cli.main import run
sys.exit(run(sys.argv[1:]))
"""


# Prints whether the garbage collector is on and whether imported objects are frozen, and at the end which modules of
# PyTorch's compiler are imported: importing them takes longer than the first step of a small run.
GARBAGE_COLLECTION_PROGRAM = """
import gc
import sys
from fugaku_gpt.cli import main
from fugaku_gpt.training import run, trainer

def reported(event, function):
    def reporting(*arguments, **options):
        print(event, gc.isenabled(), gc.get_freeze_count() > 10000, flush=True)
        return function(*arguments, **options)
    return reporting

run.agree_on_kernels = reported("starts", run.agree_on_kernels)
trainer.Trainer.step = reported("steps", trainer.Trainer.step)
code = main.run(sys.argv[1:])
print("ends", gc.isenabled())
print([name for name in ("sympy", "torch._dynamo", "torch.fx.experimental.symbolic_shapes") if name in sys.modules])
sys.exit(code)
"""


# Prints at the end of each step whether time is needed before the next one, and each time that is no part of a step.
TIME_BEFORE_STEPS_PROGRAM = """
import sys
from fugaku_gpt.training import stopping

class StopRequest(stopping.StopRequest):
    def should_stop(self):
        print("needs time:", self.time_before_next_step() > 0, flush=True)
        return super().should_stop()

    def leave_out(self, seconds):
        print("left out:", seconds > 0, flush=True)
        super().leave_out(seconds)

stopping.StopRequest = StopRequest
from fugaku_gpt.cli.main import run
sys.exit(run(sys.argv[1:]))
"""


def train_arguments(corpus: Path, out: Path, *settings: str) -> List[str]:
    arguments = ["train", "--data", str(corpus), "--out", str(out)]
    for setting in (*SMALL, *SHORT, *settings):
        arguments += ["--set", setting]
    return arguments


@pytest.mark.parametrize("ranks", [None, 2])
@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_a_run_that_does_not_fit_is_refused_before_anything_is_written(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], ranks: Optional[int]
) -> None:
    out = tmp_path / "run"
    arguments = train_arguments(corpus, out, f"layout.dp={ranks or 1}", "node.memory_limit=100Mi")
    command = [sys.executable, "-m", "fugaku_gpt", *arguments, *([] if ranks is None else ["--ranks", str(ranks)])]
    completed = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)
    output = completed.stdout.decode()
    assert completed.returncode == 2 and output.count("this run needs") == 1 and "(node.memory_limit" in output, output
    assert not out.exists()


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_under_mpirun_a_single_rank_reports_that_a_run_does_not_fit_and_all_end(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = train_arguments(corpus, out, "layout.pp=1", "layout.dp=2", "node.memory_limit=100Mi")
    launcher = find_launcher()
    command = [*launcher.command_prefix(2), sys.executable, "-m", "fugaku_gpt", *arguments]
    environment = {**os.environ, **launcher.environment}
    completed = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, timeout=300)
    output = completed.stdout.decode()
    assert completed.returncode == 2 and output.count("this run needs") == 1 and "for 2 ranks" in output, output
    assert not out.exists()


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_two_ranks_write_a_complete_run_directory_and_a_second_run_into_it_is_refused(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SOMEBODYS_ALLOCATION.items():
        monkeypatch.setenv(name, value)
    out = tmp_path / "run"
    command = [*train_arguments(corpus, out), "--ranks", "2"]  # data parallel, where the run does not say
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
    for phrase in ("torch ", "MPI ", "rank 1 on ", "| loss: ", "| grad norm: ", "| tok/s: ", "| ETA: 0:00:00\n"):
        assert phrase in printed
    assert "the time limit of 1:00:00 (Slurm) is past: ignored\n" in printed
    assert "2 ranks, and layout.dp is not set: layout.dp=2\n" in printed
    assert printed.endswith(
        f"run directory: {out}; last checkpoint: step-00000004\nnext: fugaku-gpt ckpt export {out} {out}-hf\n"
    )
    before = (out / "result.json").read_text(encoding="utf-8")
    assert run(command) == 2
    assert "already holds a run" in capfd.readouterr().err
    assert (out / "result.json").read_text(encoding="utf-8") == before


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_the_same_seed_gives_the_same_losses_on_1_and_2_ranks_with_any_launcher(corpus: Path, tmp_path: Path) -> None:
    losses = []
    for ranks, options in (
        (1, []),
        (2, []),  # by mpirun itself
        (2, ["--check-collectives"]),  # which finds no mismatch, and changes nothing
    ):
        out = tmp_path / "-".join([str(ranks), *options])
        arguments = [*train_arguments(corpus, out, f"layout.tp={ranks}", "training.dtype=float64"), *options]
        if ranks == 2 and not options:
            completed = _mpirun(ranks, arguments)
            assert completed.returncode == 0, completed.stdout
        else:
            assert run([*arguments, "--ranks", str(ranks)]) == 0
        result = RunDirectory(out).result()
        assert result is not None and result.status == "ok"
        losses.append([line["loss"] for line in RunDirectory(out).metrics("iteration")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12) and losses[1] == losses[2]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_a_run_imports_no_compiler_of_pytorch_and_collects_garbage_from_the_first_iteration_on(
    corpus: Path, tmp_path: Path, recompute: str
) -> None:
    arguments = train_arguments(corpus, tmp_path / "run", f"training.recompute={recompute}", "checkpoint.at_end=false")
    completed = subprocess.run(
        [sys.executable, "-c", GARBAGE_COLLECTION_PROGRAM, *arguments], check=True, stdout=subprocess.PIPE, timeout=300
    )
    lines = completed.stdout.decode().splitlines()
    assert any("iteration 4/4" in line for line in lines) and lines[-1] == "[]"
    events = [line for line in lines if line.split()[0] in ("starts", "steps", "ends")]
    assert events == ["starts False True", *["steps True True"] * 4, "ends True"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--set", "layout.dp=1", "--ranks", "2"],
            "layout.dp 1 * layout.tp 1 * layout.pp 1 = 1 ranks, but there are 2",
        ),
        (["--set", "layout.tp=3", "--ranks", "3"], "must divide model.heads 2; valid: 1, 2"),
        (["--set", "training.lr=fast"], "training.lr: 'fast': expected a number"),
        (["--preset", "huge"], "valid: tiny, llama-tiny, 124m"),
        (["--data", "nowhere", "--ranks", "1"], "nowhere: neither a folder made by"),
        (
            ["--set", "training.recompute=full", "--set", "training.recompute_budget_mib=0.001", "--ranks", "1"],
            "training.recompute_budget_mib: 0.001: stage 0 keeps",
        ),
    ],
)
def test_a_mistake_is_reported_and_creates_no_run_directory(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: List[str], message: str
) -> None:
    out = tmp_path / "run"
    code = run([*train_arguments(corpus, out), *arguments])
    captured = capfd.readouterr()
    output = captured.out + captured.err
    assert message in output
    assert "Traceback" not in output
    assert code == 2 and not out.exists()


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_a_run_whose_last_checkpoint_does_not_fit_on_the_disk_is_refused_at_its_start(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_system, "free_bytes", lambda _path: 2**16)
    assert run(train_arguments(corpus, tmp_path / "run")) == 2
    error = capfd.readouterr().err
    assert "a checkpoint needs 0 MiB, and 0 MiB are free" in error and "checkpoint.at_end=false" in error
    assert not (tmp_path / "run").exists()
    assert run(train_arguments(corpus, tmp_path / "run", "checkpoint.at_end=false")) == 0
    command = f"fugaku-gpt report table {tmp_path / 'run'}"
    assert f"no checkpoint was asked for\nnext: {command}\n" in capfd.readouterr().out
    assert run(command.split()[1:]) == 0


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_a_token_past_the_vocabulary_ends_all_ranks_with_a_message(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"  # a foreign corpus does not name its vocabulary: it is seen when a rank reads the sample
    assert run([*train_arguments(corpus, out, "model.vocab_size=118", "layout.dp=2"), "--ranks", "2"]) == 1
    output = capfd.readouterr().out
    assert "is outside the vocabulary; model.vocab_size is 118" in output and "Traceback" not in output
    result = RunDirectory(out).result()
    assert result is not None and result.status == "failed" and "vocabulary" in result.reason
    assert result.rank in (0, 1) and result.node and result.exception.startswith("DataError: ")


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_a_loss_that_is_not_finite_is_a_failed_run(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    settings = ["training.lr=1e30", "training.min_lr=1e29", "training.clip_grad=0", "layout.dp=2"]
    assert run([*train_arguments(corpus, out, *settings), "--ranks", "2"]) == 1
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    assert result["status"] == "failed" and "not finite" in result["reason"]
    assert "Traceback" not in capfd.readouterr().out


@pytest.mark.parametrize(("ranks", "victim", "own_launcher"), [(2, 1, True), (4, 2, False)])
@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_a_rank_that_is_killed_ends_the_run_and_is_named(
    corpus: Path, tmp_path: Path, ranks: int, victim: int, own_launcher: bool
) -> None:
    """The package's launcher is tested, and mpirun alone, which kills the other ranks within milliseconds."""
    out = tmp_path / "run"
    arguments = train_arguments(
        corpus, out, f"layout.dp={ranks}", "training.iterations=100000", "training.eval_interval=null"
    )
    launcher = find_launcher()
    train = [sys.executable, "-m", "fugaku_gpt", *arguments]
    command = [*train, "--ranks", str(ranks)] if own_launcher else [*launcher.command_prefix(ranks), *train]
    environment = {**os.environ, **({} if own_launcher else launcher.environment)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(b"iteration"):
                break
        recorded_environment = RunDirectory(out).environment()
        assert recorded_environment is not None
        processes = [psutil.Process(rank["process"]) for rank in recorded_environment["ranks"]]
        processes += [parent for parent in (rank.parent() for rank in processes) if parent is not None]
        os.kill(recorded_environment["ranks"][victim]["process"], signal.SIGKILL)
        output = process.stdout.read().decode()
        # the exit code of the rank's supervisor, or of another supervisor that mpirun has killed
        assert process.wait(timeout=300) in (128 + signal.SIGKILL, signal.SIGKILL)
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert len(processes) == 2 * ranks and not alive
    result = RunDirectory(out).result()
    assert result is not None and result.status == "failed" and result.iterations > 0
    assert (result.rank, result.node) == (victim, recorded_environment["ranks"][victim]["host"])
    assert result.reason == f"rank {victim}: killed by signal 9 (SIGKILL)"
    # printed by the rank's own supervisor, and by that of rank 0 for readers of rank 0's output only
    assert output.count(f"fugaku-gpt: {result.reason}") == 2 and "last checkpoint: none" in output


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_a_run_has_the_vocabulary_and_the_validation_of_the_corpus(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "texts.jsonl").write_text('{"text": "some words and a few more of them, for two samples"}\n' * 3)
    corpus, out = tmp_path / "corpus", tmp_path / "run"
    assert run(["data", "prepare", str(tmp_path / "texts.jsonl"), "--vocab-size", "260", "--out", str(corpus)]) == 0
    arguments = ["train", "--data", str(corpus), "--out", str(out), "--ranks", "2", "--set", "layout.dp=2"]
    for setting in [text for text in (*SMALL, *SHORT) if "vocab_size" not in text and "eval_interval" not in text]:
        arguments += ["--set", setting]
    capfd.readouterr()
    assert run(arguments) == 0
    captured = capfd.readouterr()
    assert f"note: model.vocab_size is 260, that of the corpus {corpus}\n" in captured.err
    assert "note: training.eval_interval is 4: validation at the start and the end" in captured.err
    assert [line["iteration"] for line in RunDirectory(out).metrics("validation")] == [0, 4]
    config = load_run_config(RunDirectory(out).config_file)
    assert (config.model.vocab_size, config.training.eval_interval) == (260, 4)


@pytest.mark.parametrize(
    ("signal_number", "own_launcher", "reason"),
    [
        (signal.SIGINT, True, "stopped: Ctrl-C (SIGINT), after iteration "),  # though it is passed on as SIGUSR1
        (signal.SIGTERM, False, "stopped: SIGTERM on "),
        (None, True, "stopped: 0:01:59 before the time limit of 0:02:00 (job.elapse)"),
    ],
)
@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_a_run_that_is_stopped_can_be_resumed(
    corpus: Path, tmp_path: Path, signal_number: Optional[int], own_launcher: bool, reason: str
) -> None:
    """A signal to the launcher, the package's or MPI's, stops the run, and so does the time limit. Open MPI's mpirun
    kills ranks a second after SIGTERM, whatever they do, and forwards SIGUSR1."""
    launcher = find_launcher()
    if launcher.family == OPEN_MPI and signal_number == signal.SIGTERM:
        signal_number, reason = signal.SIGUSR1, reason.replace("SIGTERM", "SIGUSR1")
    out = tmp_path / "run"
    arguments = train_arguments(corpus, out, "layout.dp=2", "training.iterations=100000", "training.eval_interval=null")
    train = [sys.executable, "-m", "fugaku_gpt", *arguments]
    if signal_number is None:
        train += ["--set", "job.elapse=120", "--set", "job.stop_margin=119"]
    command = [*train, "--ranks", "2"] if own_launcher else [*launcher.command_prefix(2), *train]
    environment = {**os.environ, **({} if own_launcher else launcher.environment)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if signal_number is not None and line.startswith(b"iteration"):
                process.send_signal(signal_number)
                break
        output = process.stdout.read()
        # mpirun alone may report ranks that it killed as they exited
        assert process.wait(timeout=300) in ((EXIT_RESUME,) if own_launcher else (EXIT_RESUME, signal.SIGKILL)), (
            output.decode()
        )
    result = RunDirectory(out).result()
    assert result is not None and result.status == "interrupted" and result.reason.startswith(reason)
    assert result.reason.endswith(f", after iteration {result.iterations}")
    assert result.last_checkpoint == f"step-{result.iterations:08d}" and b"Traceback" not in output
    resumed_by = f"resume it: fugaku-gpt train {out}/config.yaml --out {out} --resume auto"
    if signal_number is not None:  # else its output was read above
        assert f"{resumed_by}{' --ranks 2' if own_launcher else ''}\n" in output.decode()
        assert not own_launcher or f"fugaku-gpt: {result.reason}" in output.decode()
        assert not own_launcher or b": the run stops after this iteration, with a checkpoint, and is ended" in output


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_the_time_limit_is_judged_with_the_time_of_evaluations(corpus: Path, tmp_path: Path) -> None:
    arguments = train_arguments(corpus, tmp_path / "run")
    program = [sys.executable, "-c", TIME_BEFORE_STEPS_PROGRAM, *arguments]
    completed = subprocess.run(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)
    output = completed.stdout.decode()
    assert completed.returncode == 0, output
    lines = [line for line in output.splitlines() if line.startswith(("needs time:", "left out:"))]
    step, evaluation = "needs time: False", ["needs time: True", "left out: True"]
    assert lines == ["left out: True", step, *evaluation, step, *evaluation]


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_a_second_signal_ends_a_run_at_once(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = train_arguments(corpus, out, "training.iterations=100000", "training.eval_interval=null")
    process = subprocess.Popen(
        [sys.executable, "-c", UNFINISHED_STEP_PROGRAM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(b"iteration"):
                break
        process.send_signal(signal.SIGTERM)
        time.sleep(1.0)  # two signals that arrive before the process handles the first count once
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
        assert process.wait(timeout=300) == 1
    result = RunDirectory(out).result()
    assert result is not None and (result.status, result.reason) == ("interrupted", "rank 0: interrupted")


def _mpirun(ranks: int, arguments: List[str]) -> "subprocess.CompletedProcess[str]":
    launcher = find_launcher()
    return subprocess.run(
        [*launcher.command_prefix(ranks), sys.executable, "-m", "fugaku_gpt", *arguments],
        env={**os.environ, **launcher.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )


def _start_process(arguments: List[str], **variables: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "fugaku_gpt", *arguments]
    environment = {**os.environ, **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_a_process_without_a_launcher_is_told_how_to_start_the_ranks(corpus: Path, tmp_path: Path) -> None:
    alone = _start_process(train_arguments(corpus, tmp_path / "run", "layout.dp=2"))
    assert alone.returncode == 2 and not (tmp_path / "run").exists(), alone.stdout + alone.stderr
    assert alone.stderr.count("= 2 ranks, but this is one process; add --ranks 2") == 1


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_ranks_that_no_mpi_has_joined_do_not_train_one_by_one(corpus: Path, tmp_path: Path) -> None:
    """As under an mpirun of another MPI: four processes that are alone, each with a layout of one rank."""
    alone = _start_process(
        train_arguments(corpus, tmp_path / "run"), OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="4"
    )
    assert alone.returncode == 2 and not (tmp_path / "run").exists()
    assert "MPI has joined 1, this process alone: start 1, with the mpirun of the MPI that mpi4py" in alone.stderr


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_too_many_ranks_are_refused_by_a_single_message(corpus: Path, tmp_path: Path) -> None:
    completed = _mpirun(2, train_arguments(corpus, tmp_path / "run"))
    assert completed.returncode == 2 and not (tmp_path / "run").exists()
    assert completed.stdout.count("= 1 ranks, but MPI has joined 2; start 1, or set layout.dp") == 1, completed.stdout


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
@pytest.mark.parametrize(
    "variables",
    [
        {"PMI_RANK": "0", "PMI_SIZE": "1", "PMI_FD": "77"},
        {"PMIX_RANK": "0", "SLURM_NTASKS": "1"},
    ],
)
def test_ranks_are_started_from_a_launch_of_one(corpus: Path, tmp_path: Path, variables: Dict[str, str]) -> None:
    arguments = [*train_arguments(corpus, tmp_path / "run", "layout.tp=2"), "--ranks", "2"]
    completed = _start_process(arguments, **variables)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    environment = RunDirectory(tmp_path / "run").environment()
    assert environment is not None and [rank["rank"] for rank in environment["ranks"]] == [0, 1]


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_ranks_are_started_by_the_one_rank_of_a_real_launch(corpus: Path, tmp_path: Path) -> None:
    completed = _mpirun(1, [*train_arguments(corpus, tmp_path / "run", "layout.tp=2"), "--ranks", "2"])
    assert completed.returncode == 0, completed.stdout
    environment = RunDirectory(tmp_path / "run").environment()
    assert environment is not None and [rank["rank"] for rank in environment["ranks"]] == [0, 1]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"PMI_RANK": "0", "PMI_SIZE": "4"},
            "a launcher has started 4 ranks, by PMI_RANK and PMI_SIZE; leave --ranks out",
        ),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, ""),
        (
            {"PMIX_RANK": "0", "PLE_RANK_ON_NODE": "0"},
            "a launcher has started this rank, by PMIX_RANK and PLE_RANK_ON_NODE",
        ),
        ({"PMIX_RANK": "2", "PLE_RANK_ON_NODE": "2"}, ""),
    ],
)
def test_ranks_are_not_started_from_one_of_several_and_one_of_them_says_why(
    corpus: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    variables: Dict[str, str],
    message: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert run([*train_arguments(corpus, tmp_path / "run", "layout.tp=2"), "--ranks", "2"]) == 2
    error = capfd.readouterr().err
    assert not (tmp_path / "run").exists()
    assert message in error if message else not error


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_a_run_resumes_in_another_layout_and_refuses_another_corpus(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def train_command(out: str, iterations: int, *settings: str) -> List[str]:
        overrides = ("training.dtype=float64", "training.lr_schedule=constant", f"training.iterations={iterations}")
        return [
            *train_arguments(corpus, tmp_path / out, *overrides, "checkpoint.at_end=true", *settings),
            "--ranks",
            "2",
        ]

    assert run(train_command("whole", 6, "layout.dp=2")) == 0
    assert run(train_command("run", 4, "layout.dp=2", "layout.zero=1")) == 0
    capfd.readouterr()
    assert run([*train_command("run", 4, "layout.dp=2"), "--resume", "auto"]) == 0
    assert "the run has done its 4 iterations: nothing left to do" in capfd.readouterr().out
    other_corpus = write_byte_corpus(tmp_path / "other")
    (tmp_path / "other.bin").write_bytes((tmp_path / "other.bin").read_bytes()[::-1])
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    refused = [*train_command("run", 6, "layout.dp=2"), "--resume", "auto", "--data", str(other_corpus)]
    assert run(refused) == 2 and "--force-data" in capfd.readouterr().out
    directory = RunDirectory(tmp_path / "run")
    result = directory.result()
    assert result is not None and (result.status, result.iterations) == ("ok", 4)
    assert [name for name in sorted(path.name for path in directory.path.iterdir()) if ".claim" not in name] == [
        name for name in before if ".claim" not in name
    ]
    stale_record = directory.path / "flight" / "000" / "rank-000005.flight"
    stale_record.write_bytes(b"of a start with more ranks")
    assert run([*train_command("run", 6, "layout.tp=2"), "--resume", "auto"]) == 0
    assert len(list(stale_record.parent.iterdir())) == 2  # else the doctor would take it for a rank of this start
    output = capfd.readouterr().out
    assert "resuming from step-00000004: iteration 4, 16 samples consumed" in output
    assert "layout.dp 2 -> 1" in output and "layout.tp 1 -> 2" in output
    curves = []
    for out in ("run", "whole"):
        lines = RunDirectory(tmp_path / out)
        curves.append([line["loss"] for kind in ("iteration", "validation") for line in lines.metrics(kind)])
    assert len(curves[1]) == 6 + 4 and curves[0] == pytest.approx(curves[1], rel=1e-12)
    assert (directory.path / "result.1.json").exists() and load_run_config(directory.config_file).layout.tp == 2


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_runs_in_megatrons_order_share_its_indices_and_resume_with_them(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = write_byte_corpus(tmp_path / "other")
    blend = ("data.weights=[3,1]", f"data.paths={json.dumps([str(corpus), str(other)])}", "data.split=[90,10,0]")
    order = (*blend, "data.order=megatron", "data.order_samples=24", "data.document_mask=true")

    def train_command(out: str, iterations: int, *settings: str) -> List[str]:
        fixed = ("training.dtype=float64", "training.lr_schedule=constant", "checkpoint.at_end=true")
        command = train_arguments(
            corpus, tmp_path / out, *fixed, *order, f"training.iterations={iterations}", *settings
        )
        return [command[0], *command[3:]]  # without --data, which names one corpus

    assert run(train_command("whole", 6, "layout.dp=1")) == 0
    capfd.readouterr()
    assert run([*train_command("run", 4, "layout.dp=2"), "--ranks", "2"]) == 0
    folder = RunDirectory(tmp_path / "run").order_dir
    output = capfd.readouterr().out
    assert output.count("Megatron's order of 24 train samples was built in ") == 1 and f" s: {folder}\n" in output
    indices = {path: path.stat().st_mtime_ns for path in folder.glob("*-train-*")}
    assert len(indices) == 2 * (3 + 1) + 2 + 1, "with the checksums of each"
    longer = [*train_command("run", 6, "layout.pp=1", "data.order_samples=32"), "--resume", "auto"]
    assert run(longer) == 2
    assert "the number of samples that the order is made for (data.order_samples) is not" in capfd.readouterr().err
    assert run([*train_command("run", 6, "layout.dp=1"), "--resume", "auto"]) == 0
    assert f"Megatron's order of 24 train samples is read from {folder}\n" in capfd.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*-train-*")} == indices, "nothing is built twice"
    curves = [[line["loss"] for line in RunDirectory(tmp_path / out).metrics("iteration")] for out in ("run", "whole")]
    assert len(curves[1]) == 6 and curves[0] == pytest.approx(curves[1], rel=1e-12)


def test_resume_without_a_run_directory_is_refused(corpus: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--data", str(corpus), "--resume", "auto"]) == 2
    assert "--resume auto: needs --out" in capfd.readouterr().err
