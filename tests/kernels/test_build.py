"""Tests of compiling the kernels: folder and name of the library, and the errors where it cannot be compiled."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Tuple

import pytest

from fugaku_gpt.errors import UsageError
from fugaku_gpt.kernels import build, compile_kernels, library_file
from fugaku_gpt.kernels.build import CompiledLibrary
from fugaku_gpt.machine.system import System


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replaces the sources by those of one function, which compile at once."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "one.c").write_text('#include "one.h"\nint one(void) { return ONE; }\n', encoding="utf-8")
    (folder / "one.h").write_text("#define ONE 1\n", encoding="utf-8")
    monkeypatch.setattr(build, "SOURCE", folder)
    return folder


def compiler(folder: Path, script: str) -> str:
    """Writes a compiler that is a shell script, and returns its path."""
    file = folder / "mycc"
    file.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    file.chmod(0o755)
    return str(file)


@pytest.mark.slow
def test_the_library_is_in_the_environment_under_the_name_of_the_sources(
    compiled: Tuple[Path, CompiledLibrary],
) -> None:
    prefix, file = compiled[0], compiled[1].file
    assert file == library_file(prefix) and file.is_file()
    assert [path for path in prefix.rglob("*") if path.is_file()] == [file]
    assert library_file() == Path(sys.prefix) / file.relative_to(prefix)


def test_other_sources_have_another_name(tiny: Path, tmp_path: Path) -> None:
    first = library_file(tmp_path)
    (tiny / "notes.txt").write_text("no source", encoding="utf-8")
    assert library_file(tmp_path) == first
    (tiny / "one.h").write_text("#define ONE 2\n", encoding="utf-8")
    second = library_file(tmp_path)
    (tiny / "two.c").write_text("int two(void) { return 2; }\n", encoding="utf-8")
    assert len({first, second, library_file(tmp_path)}) == 3


def test_other_options_have_another_name(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = library_file(tmp_path)
    monkeypatch.setattr(build, "_OPTIONS", ("-O1",))
    assert library_file(tmp_path) != first


def test_without_a_compiler_the_error_says_how_to_get_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"no C compiler \(cc, gcc, clang, fcc\) on PATH: install one .*--compiler"):
        compile_kernels(prefix=tmp_path / "prefix")
    with pytest.raises(UsageError, match=r"no C compiler \(mycc\) on PATH"):
        compile_kernels("mycc", tmp_path / "prefix")
    with pytest.raises(UsageError, match=r"no C compiler \(' '\) on PATH"):
        compile_kernels(" ", tmp_path / "prefix")
    with pytest.raises(UsageError, match="--compiler 'cc: No closing quotation"):
        compile_kernels("'cc", tmp_path / "prefix")
    assert not (tmp_path / "prefix").exists()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo one.c: no such pragma >&2; exit 1", ": one.c: no such pragma"),
        (
            "echo In file one.c; echo one.c:1: error: bad >&2; echo valid: int >&2; exit 1",
            ": one.c:1: error: bad",
        ),
        ("exit 4", ": exit code 4"),
        ('case "$*" in *-shared*) echo no linker >&2; exit 1;; esac', ": no linker"),
    ],
)
def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(
    tiny: Path, tmp_path: Path, script: str, message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        compile_kernels(compiler(tmp_path, script), tmp_path / "prefix")
    title, *lines = str(caught.value).splitlines()
    assert title == "the kernels cannot be compiled:" and len(lines) == len(build._targets())
    assert all(line.startswith(str(tmp_path / "mycc")) and line.endswith(message) for line in lines)
    assert not (tmp_path / "prefix").exists()


def test_a_compiler_that_does_not_know_this_processor_is_asked_for_less(tiny: Path, tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no cc on PATH")
    script = 'case "$*" in *-march=*|*-mcpu=*) echo what processor >&2; exit 1;; esac; exec cc "$@"'
    library = compile_kernels(compiler(tmp_path, script), tmp_path / "prefix")
    assert library.file.is_file() and library.target == ""
    refused = [" ".join(target) for target in build._targets() if target]
    assert library.refused == tuple(f"{tmp_path / 'mycc'} {target}: what processor" for target in refused)


@pytest.mark.slow
def test_the_library_compiled_last_can_be_used(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler whose library fails its trials gives way to the next; if all fail, nothing is replaced."""
    if shutil.which("cc") is None:
        pytest.skip("no cc on PATH")
    for name in ("first", "second"):
        (tmp_path / name).write_text(f'#!/bin/sh\nexec cc -DBY=\'"{name}"\' "$@"\n', encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    (tiny / "one.c").write_text('const char *by(void) { return "compiled by " BY; }\n', encoding="utf-8")
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    monkeypatch.setattr(build, "_COMPILERS", (first, second, "no-such-compiler"))

    def problem(file: Path) -> str:
        return "wrong" if b"compiled by first" in file.read_bytes() else ""

    library = compile_kernels(prefix=tmp_path / "prefix", check=problem)
    assert library.compiler == second and not library.problem and b"by second" in library.file.read_bytes()
    assert library.refused == (f"{first} {library.target}: wrong",)
    library = compile_kernels(prefix=tmp_path / "prefix", check=lambda file: "wrong")
    assert library.compiler == first and library.problem == "wrong"
    assert b"by second" in library.file.read_bytes()  # the one that could be used stays
    assert len(library.refused) == 2 * len(build._targets())


@pytest.mark.slow
def test_the_kernels_compile_for_every_target_that_the_compiler_knows(tmp_path: Path) -> None:
    (tmp_path / "nothing.c").write_text("int nothing;\n", encoding="utf-8")
    command = next((name for name in build._COMPILERS if shutil.which(name.split()[0])), None)
    if command is None:
        pytest.skip("no C compiler on PATH")
    # an error in what is compiled for some processors alone would be hidden behind the next target
    arguments = [command, *build._OPTIONS, "-O0", "-S"]  # an assembler may know less
    supported = [
        target for target in build._targets() if not build._run([*arguments, *target, "nothing.c"], str(tmp_path))
    ]
    assert () in supported
    for target in supported:
        assert build._run([*arguments, *target, *map(str, build.sources())], str(tmp_path)) == ""


def test_a_folder_that_cannot_be_written_is_named(tiny: Path, tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no cc on PATH")
    (tmp_path / "prefix" / "lib").mkdir(parents=True)
    (tmp_path / "prefix" / "lib" / "fugaku_gpt").touch()
    with pytest.raises(UsageError, match="prefix/lib/fugaku_gpt: .*: the kernels are put into the environment"):
        compile_kernels(prefix=tmp_path / "prefix")


@pytest.mark.parametrize(("answer", "length"), [(64, 64), (64 | 1 << 17, 64), (32, 32), (-1, 0)])
def test_the_length_of_sve_vectors_is_that_of_this_process(
    answer: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit 17 says that children inherit the length; -1 that the processor has no SVE."""

    class Libc:
        @staticmethod
        def prctl(option: int, *rest: int) -> int:
            assert (option, rest) == (51, (0, 0, 0, 0))
            return answer

    monkeypatch.setattr(System, "architecture", lambda self: "aarch64")
    monkeypatch.setattr(build.ctypes, "CDLL", lambda name: Libc)
    assert build.sve_vector_bytes() == length
    options = [target for target in build._targets() if f"-msve-vector-bits={8 * length}" in target]
    assert len(options) == (3 if length else 0) and build._targets()[-1] == ()


def test_another_processor_has_no_sve_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(System, "architecture", lambda self: "x86_64")
    assert build.sve_vector_bytes() == 0
