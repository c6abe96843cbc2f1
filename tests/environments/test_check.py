"""What an environment is found to be, against its profile."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, Tuple

import pytest

import fugaku_gpt
from fugaku_gpt.config.profile import Expected, Profile
from fugaku_gpt.environments.check import (
    DIFFERS,
    MISSING,
    OK,
    OPTIONAL,
    UNSTATED,
    best_instruction_set,
    check_environment,
    compare_with_profile,
    is_version_of,
    unusual_thread_count,
)

EXPECTED = Expected(
    torch="1.10",
    blas=("MKL", "oneDNN"),
    instruction_sets=("AVX512", "AVX2", "DEFAULT"),
    fused_adamw=False,
    flush_denormals=True,
    bfloat16_without_kernel=("bmm", "softmax"),
    mpi="MPICH",
    mpi4py="4.1",
)
PROFILE = Profile("p", python_version="3.8", expected=EXPECTED)
FLAGS = ("avx2", "fma")
BUILD: Dict[str, Any] = {
    "torch": "1.10.2+cu102",
    "blas": "MKL + oneDNN",
    "instruction_set": "AVX2",
    "torch_threads": 3,
    "fused_adamw": False,
    "flush_denormals": True,
    "bfloat16_without_kernel": ["softmax", "bmm"],
}
MPI = {"library": "MPICH Version:      5.0.2", "mpi4py": "4.1.2", "thread_level": "multiple"}
TOLD: Dict[str, Any] = {
    "python": "3.8.18",
    "packages": {"numpy": "1.24.4", "fugaku_gpt": fugaku_gpt.__version__},
    "build": BUILD,
    "kernels": {"compiled": True, "used": True},
    "mpi": MPI,
}


def rows_of(told: Dict[str, Any], profile: Profile = PROFILE) -> Dict[str, Tuple[str, str, str, str]]:
    found = compare_with_profile(profile, told, 3, {"numpy": "1.24.4"}, FLAGS, "make it")
    return {row.subject: (row.expected, row.actual, row.status, row.mend) for row in found}


def test_what_is_as_expected_is_ok_and_needs_no_mending() -> None:
    rows = rows_of(TOLD)
    assert {status for _, _, status, _ in rows.values()} == {OK, UNSTATED}
    assert not any(mend for _, _, _, mend in rows.values())
    assert rows["instruction set"][:2] == ("AVX2", "AVX2") and rows["MPI library"][1] == "MPICH Version: 5.0.2"


@pytest.mark.parametrize(
    ("what", "part", "key", "value"),
    [
        ("Python", "", "python", "3.9.1"),
        ("packages", "packages", "numpy", "1.24.3"),
        ("fugaku_gpt", "packages", "fugaku_gpt", "0.0.1"),
        ("PyTorch", "build", "torch", "1.1.0"),
        ("BLAS", "build", "blas", "oneDNN"),
        ("instruction set", "build", "instruction_set", "DEFAULT"),
        ("threads", "build", "torch_threads", 4),
        ("fused AdamW", "build", "fused_adamw", True),
        ("flush denormals", "build", "flush_denormals", False),
        ("bfloat16 without kernel", "build", "bfloat16_without_kernel", ["bmm"]),
        ("MPI library", "mpi", "library", "Open MPI v5.0.11"),
        ("mpi4py", "mpi", "mpi4py", "3.1.6"),
    ],
)
def test_what_differs_is_named_alone_with_its_mend(what: str, part: str, key: str, value: object) -> None:
    told = {**TOLD, part: {**TOLD[part], key: value}} if part else {**TOLD, key: value}
    rows = rows_of(told)
    assert [name for name, row in rows.items() if row[2] != OK and row[2] != UNSTATED] == [what]
    assert rows[what][2] == DIFFERS and rows[what][3]


def test_what_is_not_there_is_missing_and_the_rest_is_told() -> None:
    told = {key: value for key, value in TOLD.items() if key not in ("build", "mpi")}
    told.update(build_error="ImportError: no torch", mpi_error="ImportError: no libmpi.so", packages={})
    rows = rows_of(told)
    assert {name for name, row in rows.items() if row[2] == MISSING} == {
        "packages", "fugaku_gpt", "PyTorch", "MPI library",
    }  # fmt: skip
    assert rows["packages"][:2] == ("numpy 1.24.4", "numpy -") and rows["PyTorch"][1] == "ImportError: no torch"


def test_what_a_profile_leaves_out_is_told_and_not_judged() -> None:
    rows = rows_of({**TOLD, "build": {**BUILD, "fused_adamw": True}}, Profile("p"))
    assert {row[2] for name, row in rows.items() if name not in ("packages", "fugaku_gpt", "threads", "kernels")} == {
        UNSTATED
    }
    assert rows["fused AdamW"][1] == "yes"


@pytest.mark.parametrize(
    ("told", "found", "mend"),
    [
        ({"kernels": {"compiled": False, "used": False}}, "not for this processor", "env kernels"),
        ({"kernels": {"compiled": True, "used": False}}, "do not run with this PyTorch", "env kernels --again"),
        ({"kernels": None, "build_error": "OSError: no /proc"}, "OSError: no /proc", "env kernels --again"),
    ],
)
def test_kernels_that_are_not_used_are_told_with_their_mend_and_are_no_fault(
    told: Dict[str, Any], found: str, mend: str
) -> None:
    profile = replace(PROFILE, python="/my env/python")
    rows = {row.subject: row for row in compare_with_profile(profile, {**TOLD, **told}, 3, {}, FLAGS, "make it")}
    row = rows["kernels"]
    assert row.status == OPTIONAL and row.actual.startswith(found)
    assert row.mend == f"'/my env/python' -m fugaku_gpt {mend}"
    assert not any(row.is_wrong for row in rows.values())


def test_a_version_is_compared_by_its_numbers() -> None:
    assert is_version_of("1.13.1", "1.13.1a0+git664058f") and is_version_of("1.10", "1.10.2")
    assert not is_version_of("1.1", "1.10.2") and not is_version_of("1.10.2", "1.10") and not is_version_of("1", "")


def test_the_best_kernels_are_those_that_the_processor_has() -> None:
    compiled = ("AVX512", "AVX2", "DEFAULT")
    assert best_instruction_set(compiled, ("avx512f", "avx2", "fma")) == "AVX512"
    assert best_instruction_set(compiled, ("avx2",)) == "DEFAULT" and best_instruction_set((), ("avx2",)) == ""


def test_threads_are_asked_for_by_a_number_that_is_no_default() -> None:
    assert [unusual_thread_count(cores) for cores in (1, 2, 4, 48)] == [1, 1, 1, 23]


@pytest.mark.slow
def test_an_environment_tells_by_its_own_python(tmp_path: Path) -> None:
    mine = ".".join(map(str, sys.version_info[:2]))
    profile = Profile("this", python=sys.executable, python_version=mine, environment=("ATEN_CPU_CAPABILITY=default",))
    profile = replace(profile, expected=Expected(torch="0.1", mpi="MPI of none"), preload=(str(tmp_path / "no.so"),))
    rows = {row.subject: row for row in check_environment(profile, "make it")}
    assert rows["Python"].status == OK and rows["threads"].status == OK
    assert rows["PyTorch"].status == DIFFERS and rows["MPI library"].status == DIFFERS
    assert rows["preload"].status == MISSING
    assert rows["kernels"].status in (OK, OPTIONAL)
    # the variables of the profile reach it
    assert "AVX" not in rows["instruction set"].actual.replace("NO AVX", "")


def test_an_environment_without_its_packages_says_which(tmp_path: Path) -> None:
    bare = tmp_path / "bin" / "python"
    bare.parent.mkdir()
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n', encoding="utf-8")
    bare.chmod(0o755)
    rows = {row.subject: row for row in check_environment(Profile("bare", python=str(bare)), "make it")}
    assert rows["PyTorch"].status == MISSING and "No module named" in rows["PyTorch"].actual
    assert rows["MPI library"].status == MISSING and rows["fugaku_gpt"].status in (MISSING, OK)


def test_packages_of_the_caller_s_path_are_not_the_environment_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    (tmp_path / "path").mkdir()
    for name, folder in (("tiny", "path"), ("fugaku_gpt", "path")):
        info = tmp_path / folder / f"{name}-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n", encoding="utf-8")
    (tmp_path / "pins.txt").write_text("tiny==0.1.0\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    profile = Profile("bare", python=str(tmp_path / "venv" / "bin" / "python"), pins=str(tmp_path / "pins.txt"))
    rows = {row.subject: row for row in check_environment(profile, "make it")}
    assert rows["packages"].actual == "tiny -" and rows["fugaku_gpt"].actual == "not installed"


def test_more_libraries_than_expected_are_no_difference() -> None:
    rows = rows_of({**TOLD, "build": {**BUILD, "blas": "MKL + oneDNN + OpenBLAS"}})
    assert rows["BLAS"][:3] == ("has MKL + oneDNN", "MKL + oneDNN + OpenBLAS", OK)


def test_a_python_that_dies_is_a_row_and_not_an_error(tmp_path: Path) -> None:
    dying = tmp_path / "python"
    dying.write_text("#!/bin/sh\necho illegal instruction >&2\nexit 132\n", encoding="utf-8")
    dying.chmod(0o755)
    (row,) = check_environment(Profile("dying", python=str(dying)), "make it")
    assert row.status == MISSING and row.actual == "exit code 132: illegal instruction"
    os.remove(dying)
    (row,) = check_environment(Profile("dying", python=str(dying)), "make it")
    assert row.status == MISSING and "is not there" in row.actual
