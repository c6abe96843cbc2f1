"""Tests that a command which needs an optional package says which, where it is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Sequence

import pytest

from fugaku_gpt.config import load_run_config
from fugaku_gpt.errors import missing_package
from tests.support.corpus import write_byte_corpus
from tests.sweep.fake import leave_run

pytestmark = pytest.mark.slow  # each case starts Python

# None in sys.modules: as if the package were not installed
PROGRAM = """
import sys
sys.modules[sys.argv[1]] = None
from fugaku_gpt.cli.main import run
sys.exit(run(sys.argv[2:]))
"""
TRAIN = ("train", "--preset", "tiny", "--data", "CORPUS", "--set", "model.vocab_size=256")


@pytest.mark.parametrize(
    ("package", "extra", "command"),
    [
        ("torch", "train", TRAIN),
        ("torch", "train", (*TRAIN, "--set", "layout.dp=2", "--ranks", "2")),
        ("mpi4py", "train", TRAIN),
        ("mpi4py", "train", (*TRAIN, "--set", "layout.dp=2", "--ranks", "2")),
        ("torch", "train", ("sweep", "run", "SWEEP", "--out", "swept")),
        ("mpi4py", "train", ("sweep", "run", "SWEEP", "--out", "swept")),
        (
            "mpi4py",
            "train",
            ("compare", "--preset", "tiny", "--data", "CORPUS", "--out", "pairs", "base", "threads=1"),
        ),
        ("mpi4py", "train", ("plan", "probe", "--out", "machine.yaml")),
        ("tokenizers", "data", ("data", "prepare", "TEXT", "--out", "prepared")),
        ("pyarrow", "parquet", ("report", "export", "RUN", "--to", "parquet", "-o", "out.parquet")),
        ("matplotlib", "plot", ("plan", "topology", "--nodes", "384", "--plot", "torus.png")),
    ],
)
def test_a_missing_package_is_named_with_the_extra_that_installs_it(
    package: str, extra: str, command: Sequence[str], tmp_path: Path
) -> None:
    corpus = write_byte_corpus(tmp_path / "bytes")
    text = tmp_path / "text.txt"
    text.write_text("some words\n" * 100)
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(f"name: s\npreset: tiny\ndefaults: {{data.paths: [{corpus}]}}\nmatrix: {{layout.tp: [1]}}\n")
    leave_run(tmp_path / "run", load_run_config(preset="tiny"))
    replaced = {"CORPUS": str(corpus), "RUN": str(tmp_path / "run"), "TEXT": str(text), "SWEEP": str(sweep)}
    arguments = [replaced.get(argument, argument) for argument in command]
    files = set(tmp_path.rglob("*"))
    completed = subprocess.run(
        [sys.executable, "-c", PROGRAM, package, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 2, completed.stderr
    error = completed.stderr
    assert package in error and f"pip install 'fugaku_gpt[{extra}]'" in error and "Traceback" not in error, error
    assert set(tmp_path.rglob("*")) == files  # nothing half-written


def test_a_missing_module_of_our_own_is_no_mistake_of_the_user() -> None:
    assert missing_package(ModuleNotFoundError("no", name="fugaku_gpt.none")) is None
    assert missing_package(ModuleNotFoundError("no", name=None)) is None
    assert "torch" in str(missing_package(ModuleNotFoundError("no", name="torch.nn")))
