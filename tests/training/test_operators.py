"""Tests of the profile of an iteration: how operators are classed, and that profiling does not change the run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Set

import pytest
import torch

from fugaku_gpt import compat, ops
from fugaku_gpt.compat import OperatorCall
from fugaku_gpt.compat.kernel_choices import RANK_CONSENSUS
from fugaku_gpt.config import load_run_config
from fugaku_gpt.errors import RunFailed
from fugaku_gpt.launch.launch_result import result_of_launch
from fugaku_gpt.launch.launcher import exit_code_of, find_launcher
from fugaku_gpt.launch.processes import run_command
from fugaku_gpt.records.operators import (
    BATCHED_MATMUL,
    CAST,
    CLASSES,
    COMMUNICATION,
    CROSS_ENTROPY,
    GELU,
    MATMUL,
    OPTIMISER,
    OTHER,
    PYTHON,
    SOFTMAX,
    Operators,
    read_operators,
)
from fugaku_gpt.records.run import RunDirectory
from fugaku_gpt.training import operators
from fugaku_gpt.training.operators import profile_operators, scale_to_total, seconds_of_classes
from fugaku_gpt.training.optimizer import BlockedAdamW
from tests.support.corpus import write_byte_corpus
from tests.support.tiny import SETTINGS
from tests.training.trainers import tiny_trainer

ROOT = Path(__file__).resolve().parents[2]


def profile(*overrides: str) -> Operators:
    run = tiny_trainer(*overrides)
    run.step()
    measured = profile_operators(run, 1)
    assert measured is not None and run.iteration == 3
    return measured


def call(name: str, start: float, end: float, thread: int = 1) -> OperatorCall:
    return OperatorCall(name, thread, start, end)


def seconds(*calls: OperatorCall) -> Dict[str, float]:
    """Seconds of the classes that take any, in an iteration of 100 seconds."""
    class_seconds = seconds_of_classes([call("iteration", 0.0, 100.0), *calls])
    assert list(class_seconds) == list(CLASSES) and sum(class_seconds.values()) == pytest.approx(100.0)
    return {name: duration for name, duration in class_seconds.items() if duration}


def test_a_call_s_own_time_excludes_the_calls_inside_it() -> None:
    class_seconds = seconds(
        call("aten::linear", 10.0, 30.0), call("aten::t", 11.0, 12.0), call("aten::addmm", 12.0, 29.0),
        call("aten::add", 30.0, 35.0), call("aten::to", 31.0, 32.0),  # an operator's own copy of a number is no cast
        call("aten::to", 40.0, 45.0), call("aten::copy_", 41.0, 44.0),
        call("aten::contiguous", 50.0, 52.0), call("aten::copy_", 50.5, 51.5),
        call("aten::matmul", 60.0, 70.0), call("aten::bmm", 61.0, 69.0),
        call("aten::mm", 80.0, 90.0, thread=2), call("aten::mm", 100.0, 101.0), call("aten::mm", -2.0, -1.0),
    )  # fmt: skip
    assert class_seconds == {MATMUL: 20.0, OTHER: 5.0 + 2.0 + 2.0, CAST: 5.0, BATCHED_MATMUL: 8.0, PYTHON: 58.0}


def test_operators_without_a_class_of_their_own_have_that_of_the_function_they_are_in() -> None:
    class_seconds = seconds(
        call("_CrossEntropy", 0.0, 20.0), call("aten::mm", 1.0, 6.0), call("aten::exp_", 6.0, 9.0),
        call("aten::to", 9.0, 10.0), call("communication", 10.0, 14.0), call("aten::view", 11.0, 12.0),
        call("_TiledAttentionBackward", 20.0, 30.0), call("aten::bmm", 20.0, 23.0), call("aten::mul_", 23.0, 24.0),
        call("aten::copy_", 24.0, 26.0), call("cast", 26.0, 29.0), call("aten::copy_", 26.5, 28.5),
        call("optimiser", 30.0, 40.0), call("aten::mul_", 31.0, 35.0), call("aten::to", 35.0, 36.0),
        call("masks of dropout", 40.0, 42.0),
    )  # fmt: skip
    assert class_seconds == {
        MATMUL: 5.0, CROSS_ENTROPY: 3.0, CAST: 1.0 + 2.0, COMMUNICATION: 4.0, BATCHED_MATMUL: 3.0, SOFTMAX: 1.0,
        OTHER: 2.0 + 2.0, OPTIMISER: 5.0, PYTHON: 100.0 - 28.0,
    }  # fmt: skip


def test_a_compiled_kernel_s_own_time_counts_for_the_kernel_s_class_inside_any_function() -> None:
    class_seconds = seconds(
        call("_CompiledAttention", 0.0, 20.0), call("kernel of batched product", 1.0, 16.0),
        call("aten::empty", 2.0, 3.0), call("masks of dropout", 16.0, 18.0),
        call("_CrossEntropy", 20.0, 30.0), call("aten::mm", 20.0, 24.0), call("kernel of cross-entropy", 24.0, 28.0),
        call("optimiser", 30.0, 40.0), call("kernel of optimiser", 31.0, 38.0),
    )  # fmt: skip
    assert class_seconds == {
        BATCHED_MATMUL: 15.0, OTHER: 2.0, MATMUL: 4.0, CROSS_ENTROPY: 4.0, OPTIMISER: 7.0, PYTHON: 100.0 - 32.0,
    }  # fmt: skip


@pytest.mark.parametrize("prefix", ["", "autograd::engine::evaluate_function: "])
def test_autograd_operators_after_a_row_parallel_layer_count_as_gelu(prefix: str) -> None:
    class_seconds = seconds(
        call("_RecomputedBackward", 0.0, 50.0),
        call("_RowParallelBackward", 1.0, 20.0), call("aten::mm", 2.0, 5.0), call("aten::sum", 5.0, 6.0),
        call(f"{prefix}MulBackward0", 10.0, 14.0), call("aten::mul", 11.0, 13.0), call("aten::add", 14.0, 15.0),
        call(f"{prefix}AddBackward0", 20.0, 24.0), call("aten::mul", 21.0, 23.0),
    )  # fmt: skip
    assert class_seconds == {MATMUL: 3.0, OTHER: 1.0 + 2.0, GELU: 3.0, PYTHON: 91.0}


def test_the_listed_autograd_functions_exist() -> None:
    def names_below(base: type) -> Set[str]:
        return {base.__name__}.union(*(names_below(subclass) for subclass in base.__subclasses__()))

    names = {*operators._FUNCTION_CLASSES, *(name[: -len("Backward")] for name in operators._GELU_BACKWARD_FUNCTIONS)}
    assert names <= names_below(torch.autograd.Function)


def test_operators_that_exceed_the_total_are_scaled_to_it() -> None:
    assert scale_to_total({MATMUL: 6.0, CAST: 2.0, PYTHON: 1.0}, 10.0) == {MATMUL: 6.0, CAST: 2.0, PYTHON: 2.0}
    assert scale_to_total({MATMUL: 6.0, CAST: 2.0, PYTHON: 0.0}, 4.0) == {MATMUL: 3.0, CAST: 1.0, PYTHON: 0.0}


@pytest.mark.skipif(not ops.has_onednn(), reason="this build cannot ask oneDNN for a product")
@pytest.mark.skipif(not compat.has_profiler(), reason="this build has no profiler")
def test_the_onednn_operators_of_this_build_count_as_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RANK_CONSENSUS, "products_by_onednn", True)
    monkeypatch.setattr(RANK_CONSENSUS, "compiled_products", {torch.float32: False})
    x, weight, bias, sums = torch.ones(256, 512), torch.ones(5000, 512), torch.ones(5000), torch.ones(512, 5000)

    def products() -> None:
        with torch.no_grad():
            y = ops.linear(x, weight, bias)
            ops.matmul(y, weight)
            ops.add_product(sums, x.t(), y)

    products()  # finds out first which operators work
    onednn_operators = {
        call.name for call in compat.profile_operators(products) if "mkldnn" in call.name or "dense" in call.name
    }
    product_operators = {name for name, kind in operators._OPERATOR_CLASSES.items() if kind == MATMUL}
    assert onednn_operators and onednn_operators <= product_operators


CONFIGS: Dict[str, List[str]] = {
    "float32": [],
    "recomputed": ["training.recompute=full", "model.gelu=tanh", "model.dropout=0", "model.attention_dropout=0"],
    "bfloat16": ["training.dtype=bfloat16"],
}


@pytest.mark.parametrize("compiled", [False, True], ids=["by operators", "compiled"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_class_but_communication_takes_time_in_a_real_iteration(
    name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "bfloat16" and not compat.can_train(torch.bfloat16):
        pytest.skip("this PyTorch does not train in bfloat16")
    if compiled and not ops.has_native_kernels():
        pytest.skip("no kernels are compiled here")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # with more threads, few heads are too few for the kernels
    monkeypatch.setattr(RANK_CONSENSUS, "compiled", None)  # agreed on again in this test
    measured = profile(*CONFIGS[name], f"node.compiled_kernels={compiled}")
    assert tuple(measured.classes) == CLASSES and measured.ranks == measured.iterations == 1
    assert sum(measured.classes.values()) == pytest.approx(measured.seconds_per_iteration, rel=1e-9)
    none = [SOFTMAX, COMMUNICATION] if compiled else [COMMUNICATION]
    assert [kind for kind, duration in measured.classes.items() if duration == 0.0] == none
    assert measured.slowdown > 0.0


def test_profiled_iterations_are_ordinary_iterations_of_the_run() -> None:
    run, judge = tiny_trainer(), tiny_trainer()
    run.step()
    assert profile_operators(run, 2) is not None
    for _ in range(5):
        judge.step()
    assert run.step() == judge.step()
    for ours, theirs in zip(run.storages(), judge.storages()):
        assert torch.equal(ours.values, theirs.values)
    assert run.state() == judge.state()


def test_patched_functions_are_restored_even_after_a_failure() -> None:
    before, inside = BlockedAdamW.step, []
    run = tiny_trainer()

    def fail() -> bool:
        inside.append((BlockedAdamW.step is before, "copy_" in vars(torch.Tensor)))
        if len(inside) == 2:
            raise RunFailed("as if it were not finite")
        return False

    run.should_stop = fail
    with pytest.raises(RunFailed, match="as if"):
        profile_operators(run, 1)
    assert inside == [(True, False), (False, True)]
    assert BlockedAdamW.step is before and "copy_" not in vars(torch.Tensor)


@pytest.mark.parametrize("steps_before", [0, 1])
def test_profiling_ends_if_the_run_should_stop(steps_before: int) -> None:
    run = tiny_trainer()
    run.should_stop = lambda: run.iteration >= steps_before
    assert profile_operators(run, 1) is None and run.iteration == steps_before + 1


def train(out: Path, corpus: Path, *settings: str) -> None:
    arguments = ["--ranks", "2"] + [argument for setting in (*SETTINGS, *settings) for argument in ("--set", setting)]
    command = [sys.executable, "-m", "fugaku_gpt", "train", "--data", str(corpus), "--out", str(out), *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    output = done.stdout.decode("utf-8", "replace")
    assert done.returncode == 0 and ("operators of 2 more iterations" in output) == ("profiled" in out.name), output


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_profiling_changes_neither_checkpoints_nor_metrics_nor_the_result(tmp_path: Path) -> None:
    corpus = write_byte_corpus(tmp_path / "bytes")
    settings = (
        "training.iterations=3",
        "training.eval_interval=3",
        "checkpoint.at_end=true",
        "layout.dp=2",
        "layout.zero=1",
    )
    train(tmp_path / "plain", corpus, *settings)
    train(tmp_path / "profiled", corpus, *settings, "training.profile_operators=2")
    plain, profiled = ({path.name for path in (tmp_path / name).iterdir()} for name in ("plain", "profiled"))
    assert {name for name in profiled - plain if not name.startswith(".claim")} == {"operators.json"}
    assert tensors(tmp_path / "plain") == tensors(tmp_path / "profiled") != {}
    for file in ("metrics.jsonl", "result.json"):
        plain_lines, profiled_lines = (untimed(tmp_path / name / file) for name in ("plain", "profiled"))
        assert plain_lines == profiled_lines and plain_lines
    measured = read_operators(tmp_path / "profiled")
    assert (
        measured is not None
        and (measured.iterations, measured.ranks) == (2, 2)
        and measured.classes[COMMUNICATION] > 0.0
    )


PLANTED = """
import sys
from fugaku_gpt import compat, ops
from fugaku_gpt.cli.main import main
from fugaku_gpt.training import run as training

def fail(run):
    from mpi4py import MPI
    if MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
        raise ValueError("a planted failure")
    run()

def full(*_):
    raise OSError(28, "No space left on device")

if sys.argv.pop(1) == "profiler":
    compat.profile_operators = fail
else:
    training.write_operators = full
main()
"""


@pytest.mark.parametrize(("ranks", "failing"), [(1, "profiler"), (1, "disk"), (2, "profiler")])
@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_a_failure_of_profiling_does_not_fail_the_run(tmp_path: Path, ranks: int, failing: str) -> None:
    corpus, out = write_byte_corpus(tmp_path / "bytes"), tmp_path / "run"
    settings = (*SETTINGS, "training.iterations=2", "training.profile_operators=1", f"layout.dp={ranks}")
    arguments = ["--data", str(corpus), "--out", str(out)] + [
        argument for text in settings for argument in ("--set", text)
    ]
    config = load_run_config(overrides=list(settings))
    command = [sys.executable, "-c", PLANTED, failing, "train", *arguments]
    if ranks > 1:
        command = [*find_launcher().command_prefix(ranks), *command]
    log, started = tmp_path / "log.txt", time.time()
    done = run_command(command, find_launcher().environment, log=log, timeout=600.0)
    output = log.read_text()
    planted = "a planted failure" if failing == "profiler" else "No space left on device"
    assert planted in output and not done.timed_out, output
    assert done.exit_code == 0 or ranks > 1, output
    recorded = RunDirectory(out).result()
    assert recorded is not None and (recorded.status, recorded.iterations) == ("ok", 2), output
    assert result_of_launch(RunDirectory(out), config, done, log, started) == recorded
    assert exit_code_of(done, recorded) == 0


def tensors(run: Path) -> Dict[str, bytes]:
    """The files of a run's checkpoints that hold tensors."""
    folder = run / "checkpoints"
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".json"
    }


TIMED = ("seconds", "per_second", "tflops", "bytes", "hidden", "compute_", "started", "ended", "node")


def untimed(file: Path) -> Any:
    """The JSON of a file without times and memory use."""

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without(entry) for key, entry in value.items() if not any(word in key for word in TIMED)}
        return value

    texts = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
    return [without(json.loads(text)) for text in texts]
