"""Tests of loading the kernels: with PyTorch's OpenMP runtime, or not at all."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Tuple

import pytest

from fugaku_gpt.kernels import LibraryError, build, compile_kernels, load_library
from fugaku_gpt.kernels.build import CompiledLibrary

ROOT = Path(__file__).resolve().parents[2]
LOADS = """
import sys
from pathlib import Path
from fugaku_gpt.kernels import LibraryError, load_library
try:
    print(type(load_library(Path(sys.argv[1]))).__name__)
except LibraryError as error:
    print(error)
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
    assert _python(LOADS, file).startswith("they do not load: undefined symbol: ")


def test_a_file_that_is_no_kernel_library_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LibraryError, match="none are compiled for this processor and version"):
        load_library(tmp_path / "not-there.so")
    (tmp_path / "broken.so").write_text("no library", encoding="utf-8")
    with pytest.raises(LibraryError, match="they do not load: file too short"):
        load_library(tmp_path / "broken.so")
    other = _compile(tmp_path, monkeypatch, "int sve_vector_bytes(void) { return 0; }")
    with pytest.raises(LibraryError, match="they do not load: undefined symbol: attention_workspace_floats"):
        load_library(other)


@pytest.mark.parametrize(("length", "what"), [(32, "256 bits"), (0, "none")])
def test_a_library_for_sve_vectors_of_another_length_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, what: str
) -> None:
    other = _compile(tmp_path, monkeypatch, "int sve_vector_bytes(void) { return 64; }")
    monkeypatch.setattr("fugaku_gpt.kernels.library.sve_vector_bytes", lambda: length)
    with pytest.raises(LibraryError, match=f"compiled for SVE vectors of 512 bits, and this process has {what}"):
        load_library(other)


def _compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> Path:
    """Returns a library that loads, and has none of the kernels."""
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no C compiler on PATH")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "one.c").write_text(f'__attribute__((visibility("default"))) {source}', encoding="utf-8")
    monkeypatch.setattr(build, "SOURCE", tmp_path / "source")
    return compile_kernels(prefix=tmp_path).file
