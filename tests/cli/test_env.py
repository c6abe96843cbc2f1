"""Tests of ``fugaku-gpt env``."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import List

import pytest

from fugaku_gpt.cli.main import run
from fugaku_gpt.kernels import build, check, product_check
from fugaku_gpt.kernels.product_check import MeasuredProducts
from fugaku_gpt.kernels.product_verdicts import ProductTimes, ProductVerdict

CURRENT_PYTHON_PROFILE = f"name: here\npython: {sys.executable}\n"


def test_list_prints_every_profile(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["env", "list", "--format", "json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["torch-1.7"]["pytorch"] == "1.7.1" and rows["torch-1.7"]["python"] == "3.8"
    assert rows["a64fx-torch-1.13"]["made"] == "by a job" and rows["a64fx-torch-1.13"]["where"] == "in a tar file"
    assert "CUDA" in rows["torch-1.13"]["note"]
    assert run(["env", "list"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["name", "pytorch", "python", "where", "made", "note"]


@pytest.fixture
def only_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources that compile at once, into a library that has no kernels."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "one.c").write_text("int one(void) { return 1; }\n", encoding="utf-8")
    monkeypatch.setattr(build, "SOURCE", tmp_path / "source")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def _compiler() -> str:
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("no C compiler on PATH")
    return compiler


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> List[MeasuredProducts]:
    """Replaces measuring, by which this environment's verdicts would change; a test appends what is to be printed."""
    answers: List[MeasuredProducts] = []

    def answer(again: bool) -> MeasuredProducts:
        return answers[-1] if answers else MeasuredProducts(measured_anew=str(again))

    monkeypatch.setattr(product_check, "measure_products", answer)
    return answers


@pytest.mark.slow
@pytest.mark.usefixtures("measured")
@pytest.mark.long
def test_kernels_are_compiled_and_tried_once_and_again_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler = _compiler()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    options = ["-O0" if option == "-O3" else option for option in build._OPTIONS]  # compiles faster
    monkeypatch.setattr(build, "_OPTIONS", tuple(options))
    assert run(["env", "kernels", "--compiler", compiler]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("compiling kernels for this processor\n")
    first, last = captured.out.splitlines()
    library = Path(first.rpartition(", in ")[2])
    assert first.startswith(f"kernels: compiled by {compiler}") and last.endswith("each computes correct results here")
    assert library.is_file() and library.parent == Path("lib", "fugaku_gpt")
    assert run(["env", "kernels"]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[0].startswith(f"kernels: are compiled already, in {library}; ")
    assert captured.out.splitlines()[1] == last and not captured.err
    library.write_text("broken", encoding="utf-8")
    assert run(["env", "kernels"]) == 0 and library.read_bytes().startswith(b"\x7fELF")
    assert f"those in {library} cannot be used: they do not load: file too short" in capsys.readouterr().err
    assert run(["env", "kernels", "--again"]) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("only_function")
def test_kernels_that_cannot_be_used_are_exit_code_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "_targets", lambda: [()])  # each is tried by a process that imports PyTorch
    assert run(["env", "kernels", "--compiler", _compiler()]) == 3
    error = capsys.readouterr().err
    assert "PyTorch's own are used in place of these: they do not load: undefined symbol: sve_vector_bytes" in error
    assert not (tmp_path / "lib").exists()


@pytest.mark.usefixtures("only_function")
def test_a_target_that_the_compiler_refuses_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no cc on PATH")
    compiler = tmp_path / "mycc"
    script = 'case "$*" in *-march=*|*-mcpu=*) echo; echo x.c: error: no processor >&2; exit 1;; esac; exec cc "$@"'
    compiler.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    compiler.chmod(0o755)
    monkeypatch.setattr("fugaku_gpt.cli.env.find_spec", lambda name: None)
    assert run(["env", "kernels", "--compiler", str(compiler)]) == 0
    captured = capsys.readouterr()
    notes = [line for line in captured.err.splitlines() if line.startswith("note: the kernels may be slower")]
    assert notes and all(note.endswith("=native: x.c: error: no processor") or "-m" in note for note in notes)
    assert captured.out.splitlines()[0].startswith(f"kernels: compiled by {compiler}, in ")
    assert captured.out.splitlines()[1] == "kernels: not tried: this Python has no PyTorch, whose threads they use"


@pytest.mark.usefixtures("only_function")
def test_the_products_that_were_measured_are_listed_with_their_ratios(
    measured: List[MeasuredProducts],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(check, "check_library", lambda file: "")
    times = ProductTimes("forward", 512, 768, 3072, 0.01, {"compiled": 1.25})
    verdict, file = ProductVerdict("float32", 12, 9, (times,)), tmp_path / "lib" / "products.json"
    text = "products of layers by our own kernels; measured: ours 1.25 times as fast as PyTorch's (float32, 12 threads)"
    measured.append(MeasuredProducts(file, (verdict,)))
    assert run(["env", "kernels", "--compiler", _compiler()]) == 0
    output = capsys.readouterr().out.splitlines()
    assert output[-2:] == [text, "products of layers: verdicts are in lib/products.json"]
    measured.append(MeasuredProducts(file, (verdict,), problem=f"{file}: cannot be written: Read-only file system"))
    assert run(["env", "kernels"]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1] == text
    note = f"note: runs measure them at their start: {file}: cannot be written: Read-only file system\n"
    assert captured.err == note
    measured.append(MeasuredProducts(problem="measurements of products ended by SIGILL"))
    assert run(["env", "kernels"]) == 0  # the kernels can be used all the same
    captured = capsys.readouterr()
    assert captured.err == "note: PyTorch's own are used: measurements of products ended by SIGILL\n"
    assert captured.out.splitlines()[-1] == "kernels: each computes correct results here"


def test_kernels_without_a_compiler_are_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert run(["env", "kernels", "--compiler", "no-such-cc"]) == 2
    assert "fugaku-gpt: no C compiler (no-such-cc) on PATH: install one" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow  # the Python of this profile imports PyTorch to report its version
@pytest.mark.parametrize(("expected", "code"), [("{}", 0), ("{torch: 0.1}", 3)])
def test_a_difference_from_the_profile_is_exit_code_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], expected: str, code: int
) -> None:
    (tmp_path / "here.yaml").write_text(f"{CURRENT_PYTHON_PROFILE}expected: {expected}\n", encoding="utf-8")
    assert run(["env", "check", str(tmp_path / "here.yaml"), "--format", "json"]) == code
    rows = {row["what"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["PyTorch"]["status"] == ("differs" if code else "not stated")
    assert rows["PyTorch"]["mend"] == (f"fugaku-gpt env create {tmp_path}/here.yaml --again" if code else None)


def test_create_of_a_build_in_a_tar_file_writes_a_job_and_an_activation_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["env", "create", "a64fx-torch-1.10", "--set", "job.group=hp000000"]) == 0
    out = capsys.readouterr().out
    assert "cd build-a64fx-torch-1.10 && pjsub build.sh" in out
    assert f"job.tarball={tmp_path}/build-a64fx-torch-1.10/a64fx-torch-1.10.tar" in out
    script = (tmp_path / "build-a64fx-torch-1.10" / "build.sh").read_text(encoding="utf-8")
    assert "module load lang/tcsds" in (tmp_path / "build-a64fx-torch-1.10" / "activate.sh").read_text(encoding="utf-8")
    assert run(["env", "recipe", "a64fx-torch-1.10", "--set", "job.group=hp000000"]) == 0
    assert capsys.readouterr().out == script
    assert run(["env", "recipe", "a64fx-torch-1.10", "--package", "/vol0004/our.whl"]) == 0
    assert " install --no-cache-dir /vol0004/our.whl\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "torch-1.8"], "no profile has this name; did you mean"),
        (["check", "a64fx-torch-1.7"], "name the folder with --at FOLDER"),
        (
            ["check", "torch-1.7", "--at", "nowhere"],
            "the environment is not made: fugaku-gpt env create torch-1.7 --at nowhere",
        ),
        (["create", "a64fx-torch-1.7", "--python", "python3"], "is compiled by a job"),
        (["create", "torch-1.7", "--set", "job.group=x"], "is installed by pip, not by a job"),
        (["create", "torch-1.7", "--at", "new", "--pip-args", "'"], "--pip-args ': No closing quotation"),
        (["recipe", "torch-1.7"], "is installed by pip, not compiled"),
    ],
)
def test_a_mistake_is_exit_code_2_with_a_remedy(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: "list[str]",
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["env", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_missing_python_is_refused_before_anything_is_created(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pins.txt").write_text("tiny==1\n", encoding="utf-8")
    (tmp_path / "old.yaml").write_text("python: v/bin/python\npins: pins.txt\npython_version: 3.99\n", encoding="utf-8")
    assert run(["env", "create", str(tmp_path / "old.yaml")]) == 2
    assert "no Python 3.99 on PATH and none in pyenv" in capsys.readouterr().err and not (tmp_path / "v").exists()


def test_a_profile_without_pins_cannot_be_created(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "here.yaml").write_text(CURRENT_PYTHON_PROFILE, encoding="utf-8")
    assert run(["env", "create", str(tmp_path / "here.yaml")]) == 2
    assert "its profile names no pins: there is nothing to make" in capsys.readouterr().err
