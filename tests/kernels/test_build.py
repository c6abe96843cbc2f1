"""Compiling the kernels: where the library goes, what it is called, and what is said where it cannot be."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Tuple

import pytest

from fugaku_gpt.errors import UsageError
from fugaku_gpt.kernels import build, compile_kernels, library_file
from fugaku_gpt.kernels.build import CompiledLibrary


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources of one function, which take no time."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "one.c").write_text('#include "one.h"\nint one(void) { return ONE; }\n', encoding="utf-8")
    (folder / "one.h").write_text("#define ONE 1\n", encoding="utf-8")
    monkeypatch.setattr(build, "SOURCE", folder)
    return folder


def compiler(folder: Path, words: str) -> str:
    """A compiler that is a script."""
    file = folder / "mycc"
    file.write_text(f"#!/bin/sh\n{words}\n", encoding="utf-8")
    file.chmod(0o755)
    return str(file)


@pytest.mark.slow
@pytest.mark.xdist_group("compiled")  # which is compiled once
def test_the_library_is_in_the_environment_under_the_name_of_its_sources(
    compiled: Tuple[Path, CompiledLibrary],
) -> None:
    prefix, file = compiled[0], compiled[1].file
    assert file == library_file(prefix) and file.is_file()
    assert [path for path in prefix.rglob("*") if path.is_file()] == [file]
    assert library_file() == Path(sys.prefix) / file.relative_to(prefix)


def test_other_sources_another_name(tiny: Path, tmp_path: Path) -> None:
    first = library_file(tmp_path)
    (tiny / "notes.txt").write_text("no source", encoding="utf-8")
    assert library_file(tmp_path) == first
    (tiny / "one.h").write_text("#define ONE 2\n", encoding="utf-8")
    second = library_file(tmp_path)
    (tiny / "two.c").write_text("int two(void) { return 2; }\n", encoding="utf-8")
    assert len({first, second, library_file(tmp_path)}) == 3


def test_other_options_another_name(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = library_file(tmp_path)
    monkeypatch.setattr(build, "_OPTIONS", ("-O1",))
    assert library_file(tmp_path) != first


def test_without_a_compiler_it_is_said_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"no C compiler \(cc, gcc, clang\) on PATH: install one .*--compiler"):
        compile_kernels(prefix=tmp_path / "prefix")
    with pytest.raises(UsageError, match=r"no C compiler \(mycc\) on PATH"):
        compile_kernels("mycc", tmp_path / "prefix")
    assert not (tmp_path / "prefix").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("echo one.c: no such pragma >&2; exit 1", "cannot compile the kernels:\none.c: no such pragma"),
        ("exit 4", "cannot compile the kernels:\nexit code 4"),
        ('case "$*" in *-shared*) echo no linker >&2; exit 1;; esac', "cannot link the kernels:\nno linker"),
    ],
)
def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(tiny: Path, tmp_path: Path, words: str, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        compile_kernels(compiler(tmp_path, words), tmp_path / "prefix")
    assert told in str(caught.value) and str(tmp_path / "mycc") in str(caught.value)
    assert not (tmp_path / "prefix").exists()


def test_a_compiler_that_does_not_know_this_processor_is_asked_for_less(tiny: Path, tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no cc on PATH")
    words = 'case "$*" in *-march=*|*-mcpu=*) echo what processor >&2; exit 1;; esac; exec cc "$@"'
    made = compile_kernels(compiler(tmp_path, words), tmp_path / "prefix")
    assert made.file.is_file() and made.target == ""
    refused = [" ".join(target) for target in build._targets() if target]
    assert made.refused == "\n".join(f"{target}: what processor" for target in refused)


@pytest.mark.slow
def test_the_kernels_compile_for_every_target_that_the_compiler_knows(tmp_path: Path) -> None:
    (tmp_path / "nothing.c").write_text("int nothing;\n", encoding="utf-8")
    command = next((name for name in build._COMPILERS if shutil.which(name)), None)
    if command is None:
        pytest.skip("no C compiler on PATH")
    # an error in what is compiled for some processors alone would be hidden behind the next target
    words = [command, *build._OPTIONS, "-S"]  # an assembler may know less
    known = [target for target in build._targets() if not build._run([*words, *target, "nothing.c"], str(tmp_path))]
    assert () in known
    for target in known:
        assert build._run([*words, *target, *map(str, build.sources())], str(tmp_path)) == ""


def test_a_place_that_cannot_be_written_is_named(tiny: Path, tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no cc on PATH")
    (tmp_path / "prefix" / "lib").mkdir(parents=True)
    (tmp_path / "prefix" / "lib" / "fugaku_gpt").touch()
    with pytest.raises(UsageError, match="prefix/lib/fugaku_gpt: .*: the kernels are put into the environment"):
        compile_kernels(prefix=tmp_path / "prefix")
