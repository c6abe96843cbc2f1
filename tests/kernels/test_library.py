"""Tests of loading the kernels: with PyTorch's OpenMP runtime, or not at all."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Tuple

import pytest

from fugaku_gpt.kernels import build, compile_kernels, load_library
from fugaku_gpt.kernels.build import CompiledLibrary

ROOT = Path(__file__).resolve().parents[2]
LOADS = """
import sys
from pathlib import Path
from fugaku_gpt.kernels import load_library
print(type(load_library(Path(sys.argv[1]))).__name__)
"""


def _python(text: str, file: Path) -> str:
    """Returns what a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", text, str(file)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout.strip()


@pytest.mark.slow
def test_the_library_shares_the_openmp_runtime_of_pytorch(compiled: Tuple[Path, CompiledLibrary]) -> None:
    file = compiled[1].file
    count = """
import re
mapped = Path("/proc/self/maps").read_text()
print(len(set(re.findall(r"/\\S*lib(?:gomp|iomp5|omp)[^/\\s]*", mapped))))
"""
    before = _python(f"import torch\nfrom pathlib import Path\n{count}", file)
    assert _python(f"import torch\n{LOADS}{count}", file).split() == ["Library", before]


@pytest.mark.slow
def test_without_an_openmp_runtime_in_the_process_no_kernels_are_loaded(compiled: Tuple[Path, CompiledLibrary]) -> None:
    file = compiled[1].file
    assert _python(LOADS, file) == "NoneType"


def test_a_file_that_is_no_kernel_library_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_library(tmp_path / "not-there.so") is None
    (tmp_path / "broken.so").write_text("no library", encoding="utf-8")
    assert load_library(tmp_path / "broken.so") is None
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no C compiler on PATH")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "one.c").write_text("int one(void) { return 1; }\n", encoding="utf-8")
    monkeypatch.setattr(build, "SOURCE", tmp_path / "source")
    other = compile_kernels(prefix=tmp_path).file  # loads, and has none of the functions
    assert load_library(other) is None
