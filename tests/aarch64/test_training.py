"""Commands and training on the emulated machine: the same data, losses and checkpoints as on this one."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
from pathlib import Path
from typing import Dict, Iterator, List, Sequence

import pytest

from fugaku_gpt.cli.main import run
from fugaku_gpt.doctor.machine import FAIL, OK
from fugaku_gpt.records.run import RunDirectory
from fugaku_gpt.simulator.session import Simulator
from tests.aarch64.machine import ROOT, EmulatedPython, folder, output, run_natively, variables
from tests.support.simulated import simulated_pjm  # noqa: F401  # a fixture
from tests.support.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (folder() / "wheels").exists(), reason="no PyTorch for Arm here: env/make_aarch64.sh says why"
    ),
]

MODEL = (
    "model.layers=2", "model.hidden=64", "model.heads=4", "model.seq_len=64", "model.vocab_size=512",
    "training.global_batch=4", "training.micro_batch=2", "training.iterations=5", "training.eval_interval=5",
    "training.eval_batches=1", "training.lr=1e-3", "node.threads_per_rank=1", "checkpoint.at_end=false",
)  # fmt: skip
LAYOUTS: Dict[str, Sequence[str]] = {
    "dp2": ("layout.dp=2",),
    "tp2": ("layout.tp=2",),
    "pp2": ("layout.pp=2", "training.micro_batch=1", "training.recompute=full"),
    "dp2-zero": ("layout.dp=2", "layout.zero=1"),
}
# of a run in two parts
HALVES = ("training.lr_schedule=constant", "checkpoint.at_end=true", "training.eval_interval=null")
OWN_KERNELS = "attention, LayerNorm, GELU, loss, AdamW by our own compiled kernels"
# of the preset llama-tiny, in fewer and smaller iterations
SMALL_LLAMA = (
    "model.seq_len=64", "model.vocab_size=512", "training.global_batch=2", "training.micro_batch=2",
    "training.iterations=3", "training.eval_interval=3", "training.eval_batches=1", "training.warmup_iterations=0",
    "node.threads_per_rank=1", "checkpoint.at_end=false",
)  # fmt: skip
# what it calls beside products; two of the four query heads share a head of keys
LLAMA_KERNELS = {
    "attention_forward 4/2", "attention_backward 4/2", "rms_norm", "rms_norm_gradient", "rotate", "swiglu",
    "swiglu_gradient", "loss_full_rows", "adamw",
}  # fmt: skip
TOLERANCE = 2e-6  # of a loss: float32 numbers are added in another order


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a corpus that this machine has prepared."""
    texts = tmp_path_factory.mktemp("corpora") / "texts"
    texts.mkdir()
    for page in sorted((ROOT / "docs" / "guide").glob("*.md")):
        for number, section in enumerate(page.read_text(encoding="utf-8").split("\n## ")):  # each is a document
            (texts / f"{page.stem}-{number}.txt").write_text(section, encoding="utf-8")
    out = texts.parent / "corpus"
    output(run_natively(["-m", "fugaku_gpt", *_prepare(texts, out)]))
    return out


def _prepare(texts: Path, out: Path) -> List[str]:
    return ["data", "prepare", str(texts), "--vocab-size", "512", "--out", str(out)]


def _train(corpus: Path, out: Path, settings: Sequence[str], *options: str) -> List[str]:
    """Returns the arguments of Python that train."""
    arguments = ["-m", "fugaku_gpt", "train", "--data", str(corpus), "--out", str(out), *options]
    for setting in (*MODEL, *settings):
        arguments += ["--set", setting]
    has_two = any(setting.endswith("=2") and setting.startswith("layout.") for setting in settings)
    return [*arguments, "--ranks", "2"] if has_two else arguments  # one rank trains in the process that is started


def _losses(out: Path) -> List[float]:
    """Returns the losses of a run that ended well, of its iterations and then of its validations."""
    directory = RunDirectory(out)
    result = directory.result()
    assert result is not None and result.status == "ok", result
    return [line["loss"] for kind in ("iteration", "validation") for line in directory.metrics(kind)]


@pytest.fixture(scope="session")
def emulated(shared: Path) -> Iterator[EmulatedPython]:
    """Returns the emulated Python, with PyTorch imported."""
    python = EmulatedPython(shared)
    with python.connect():
        yield python


@pytest.fixture(scope="session")
def with_kernels(emulated: EmulatedPython, shared: Path) -> EmulatedPython:
    """Compiles the kernels on the emulated machine, by a cross compiler that is its `cc`; once for all workers."""
    with open(shared / "kernels.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "kernels.txt").exists():
            lines = output(emulated.run(["-m", "fugaku_gpt", "env", "kernels", "--again"]))
            assert "-msve-vector-bits=512" in lines[0] and lines[1] == "kernels: each computes correct results here"
            assert all(line.startswith("products of layers") for line in lines[2:])
            (shared / "kernels.txt").write_text("\n".join(lines), encoding="utf-8")
    return emulated


def test_no_kernel_reads_or_writes_beside_its_tensors(with_kernels: EmulatedPython) -> None:
    lines = output(with_kernels.run(["-m", "tests.ops.fenced", "--short"]))
    for kernel in ("layer_norm_gradient", "rms_norm_gradient", "swiglu_gradient", "rotate_into"):
        assert any(line.startswith(f"{kernel} of torch.float32") for line in lines), lines[-1]


def test_data_is_prepared_to_the_same_bytes(emulated: EmulatedPython, corpus: Path, tmp_path: Path) -> None:
    lines = output(emulated.run(["-m", "fugaku_gpt", *_prepare(corpus.parent / "texts", tmp_path / "corpus")]))
    native = output(run_natively(["-m", "fugaku_gpt", "data", "info", str(corpus)]))
    fingerprint = re.search(r"fingerprint ([0-9a-f]{12})", "\n".join(lines))
    assert fingerprint is not None and fingerprint[1] in "\n".join(native)


@pytest.fixture(scope="session")
def native_losses(corpus: Path) -> List[float]:
    out = corpus.parent / "here"
    output(run_natively(_train(corpus, out, ())))
    return _losses(out)


def _check_losses(out: Path, native_losses: List[float]) -> None:
    assert _losses(out) == pytest.approx(native_losses, rel=TOLERANCE)
    environment = RunDirectory(out).environment()
    assert environment is not None and environment["precision"]["compiled"]
    assert environment["system"].endswith("aarch64")


def test_losses_are_those_of_this_machine(
    with_kernels: EmulatedPython, corpus: Path, native_losses: List[float], tmp_path: Path
) -> None:
    lines = output(with_kernels.run(_train(corpus, tmp_path / "run", ())))
    assert any(line.startswith(OWN_KERNELS) for line in lines)
    _check_losses(tmp_path / "run", native_losses)


def test_every_layout_of_two_ranks_has_the_losses_of_this_machine(
    with_kernels: EmulatedPython, corpus: Path, native_losses: List[float], tmp_path: Path
) -> None:
    paths = f"data.paths=[{json.dumps(str(corpus))}]"
    runs = [{"out": str(tmp_path / name), "settings": [paths, *MODEL, *settings]} for name, settings in LAYOUTS.items()]
    (tmp_path / "runs.json").write_text(json.dumps(runs), encoding="utf-8")
    program = ["-m", "tests.mpi.start", "2", "-m", "tests.aarch64.train_layouts", str(tmp_path / "runs.json")]
    lines = output(with_kernels.run(program))
    assert sum(line.startswith(OWN_KERNELS) for line in lines) == len(LAYOUTS)
    for name in LAYOUTS:
        _check_losses(tmp_path / name, native_losses)


def test_a_llama_has_the_losses_of_this_machine_by_the_same_kernels(
    with_kernels: EmulatedPython, corpus: Path, tmp_path: Path
) -> None:
    settings = [*SMALL_LLAMA, f"data.paths=[{json.dumps(str(corpus))}]"]
    calls = []
    for run_python, name in ((run_natively, "here"), (with_kernels.run, "arm")):
        lines = output(run_python(["-m", "tests.aarch64.count_kernels", str(tmp_path / name), *settings]))
        assert any("attention, RMSNorm, rotary positions, SwiGLU, loss, AdamW by our own" in line for line in lines)
        calls.append({kernel: count for kernel, count in json.loads(lines[-1]).items() if kernel in LLAMA_KERNELS})
    assert calls[0] == calls[1] and set(calls[1]) == LLAMA_KERNELS
    losses = _losses(tmp_path / "here")
    assert len(losses) == 5 and losses[4] < losses[3] - 0.05  # the validations before and after, of the same text
    _check_losses(tmp_path / "arm", losses)


@pytest.fixture(scope="session")
def unbroken_losses(corpus: Path) -> List[float]:
    """Returns the losses of a run that this machine did in one go."""
    out = corpus.parent / "unbroken"
    output(run_natively(_train(corpus, out, HALVES)))
    return _losses(out)


@pytest.mark.parametrize("starts_on_x86", [True, False], ids=["x86-to-Arm", "Arm-to-x86"])
def test_a_run_goes_on_on_the_other_machine(
    starts_on_x86: bool, with_kernels: EmulatedPython, corpus: Path, unbroken_losses: List[float], tmp_path: Path
) -> None:
    first, second = (run_natively, with_kernels.run) if starts_on_x86 else (with_kernels.run, run_natively)
    output(first(_train(corpus, tmp_path / "first", (*HALVES, "training.iterations=2"))))
    output(second(_train(corpus, tmp_path / "rest", (*HALVES, "layout.tp=2"), "--resume", str(tmp_path / "first"))))
    assert _losses(tmp_path / "first") + _losses(tmp_path / "rest") == pytest.approx(unbroken_losses, rel=TOLERANCE)


def test_a_killed_rank_is_named(with_kernels: EmulatedPython, corpus: Path, tmp_path: Path) -> None:
    settings = (*LAYOUTS["dp2"], "training.iterations=100000", "training.eval_interval=null")
    directory = RunDirectory(tmp_path / "run")
    with with_kernels.start(_train(corpus, directory.path, settings)) as process:
        until(lambda: directory.metrics("iteration"), process=process)
        environment = directory.environment()
        assert environment is not None
        os.kill(environment["ranks"][1]["process"], signal.SIGKILL)
        assert process.wait(timeout=600) != 0
    result = directory.result()
    assert result is not None and result.status != "ok"
    assert "rank 1" in result.reason and "SIGKILL" in result.reason, result


def test_a_job_script_for_fugaku_runs_in_the_simulator(
    with_kernels: EmulatedPython,
    corpus: Path,
    native_losses: List[float],
    simulated_pjm: Simulator,  # noqa: F811
    tmp_path: Path,
) -> None:
    """The script is the one for Fugaku; the ranks that its mpiexec starts are emulated."""
    profile = {
        "name": "emulated",
        "python": str(with_kernels.program),
        "environment": [f"{name}={value}" for name, value in variables("sve512").items()],
    }
    (tmp_path / "emulated.yaml").write_text(json.dumps(profile), encoding="utf-8")
    settings = (
        *MODEL, *LAYOUTS["dp2"], f"data.paths=[{json.dumps(str(corpus))}]", f"job.profile={tmp_path / 'emulated.yaml'}",
        "job.scheduler=pjm", "job.elapse=30:00", "job.group=hp000000", "job.volumes=[/vol0004]",
    )  # fmt: skip
    command = ["job", "submit", "--out", str(tmp_path / "run"), "--yes"]
    assert run([*command, *(argument for setting in settings for argument in ("--set", setting))]) == 0
    until(lambda: list((tmp_path / "run" / "exit").glob("*.json")))
    script = (tmp_path / "run" / "job.sh").read_text(encoding="utf-8")
    assert '#PJM -L "freq=2000"' in script and '#PJM -L "eco_state=0"' in script
    assert _losses(tmp_path / "run") == pytest.approx(native_losses, rel=TOLERANCE)
    environment = RunDirectory(tmp_path / "run").environment()
    assert environment is not None and environment["precision"]["compiled"]


def test_the_machine_is_examined(emulated: EmulatedPython) -> None:
    lines = output(emulated.run(["-m", "fugaku_gpt", "doctor", "--format", "json"]))
    checks = {check["name"]: check for check in json.loads("\n".join(lines))}
    assert checks["two ranks"]["status"] == OK and "Fujitsu A64FX" in checks["cores"]["seen"], checks
    assert all(check["status"] != FAIL for check in checks.values()), checks
