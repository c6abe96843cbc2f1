"""Tests of the comparison of an environment with its profile."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
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
from fugaku_gpt.kernels import library_file

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
REPORT: Dict[str, Any] = {
    "python": "3.8.18",
    "packages": {"numpy": "1.24.4", "fugaku_gpt": fugaku_gpt.__version__},
    "build": BUILD,
    "kernels": {"compiled": True, "problem": ""},
    "mpi": MPI,
}


def rows_of(report: Dict[str, Any], profile: Profile = PROFILE) -> Dict[str, Tuple[str, str, str, str]]:
    rows = compare_with_profile(profile, report, 3, {"numpy": "1.24.4"}, FLAGS, "make it")
    return {row.subject: (row.expected, row.actual, row.status, row.mend) for row in rows}


def test_rows_as_expected_are_ok_and_need_no_mending() -> None:
    rows = rows_of(REPORT)
    assert {status for _, _, status, _ in rows.values()} == {OK, UNSTATED}
    assert not any(mend for _, _, _, mend in rows.values())
    assert rows["instruction set"][:2] == ("AVX2", "AVX2") and rows["MPI library"][1] == "MPICH Version: 5.0.2"


@pytest.mark.parametrize(
    ("subject", "section", "key", "value"),
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
def test_only_the_differing_subject_is_reported_with_a_mend(
    subject: str, section: str, key: str, value: object
) -> None:
    report = {**REPORT, section: {**REPORT[section], key: value}} if section else {**REPORT, key: value}
    rows = rows_of(report)
    assert [name for name, row in rows.items() if row[2] != OK and row[2] != UNSTATED] == [subject]
    assert rows[subject][2] == DIFFERS and rows[subject][3]


def test_absent_packages_are_missing_and_the_rest_is_reported() -> None:
    report = {key: value for key, value in REPORT.items() if key not in ("build", "mpi")}
    report.update(build_error="ImportError: no torch", mpi_error="ImportError: no libmpi.so", packages={})
    rows = rows_of(report)
    assert {name for name, row in rows.items() if row[2] == MISSING} == {
        "packages", "fugaku_gpt", "PyTorch", "MPI library",
    }  # fmt: skip
    assert rows["packages"][:2] == ("numpy 1.24.4", "numpy -") and rows["PyTorch"][1] == "ImportError: no torch"


def test_subjects_that_a_profile_omits_are_reported_and_not_judged() -> None:
    rows = rows_of({**REPORT, "build": {**BUILD, "fused_adamw": True}}, Profile("p"))
    assert {row[2] for name, row in rows.items() if name not in ("packages", "fugaku_gpt", "threads", "kernels")} == {
        UNSTATED
    }
    assert rows["fused AdamW"][1] == "yes"


@pytest.mark.parametrize(
    ("report", "actual", "mend"),
    [
        (
            {"kernels": {"compiled": False, "problem": "none are compiled for this processor and version"}},
            "PyTorch's own are used: none are compiled for this processor and version",
            "env kernels",
        ),
        (
            {"kernels": {"compiled": True, "problem": "they compute wrong results: loss"}},
            "PyTorch's own are used: they compute wrong results: loss",
            "env kernels --again",
        ),
        ({"kernels": None, "build_error": "OSError: no /proc"}, "OSError: no /proc", "env kernels --again"),
    ],
)
def test_unused_kernels_are_reported_with_a_mend_and_are_no_fault(
    report: Dict[str, Any], actual: str, mend: str
) -> None:
    profile = replace(PROFILE, python="/my env/python")
    rows = {row.subject: row for row in compare_with_profile(profile, {**REPORT, **report}, 3, {}, FLAGS, "make it")}
    row = rows["kernels"]
    assert row.status == OPTIONAL and row.actual.startswith(actual)
    assert row.mend == f"'/my env/python' -m fugaku_gpt {mend}"
    assert not any(row.is_wrong for row in rows.values())


def test_versions_are_compared_numerically() -> None:
    assert is_version_of("1.13.1", "1.13.1a0+git664058f") and is_version_of("1.10", "1.10.2")
    assert not is_version_of("1.1", "1.10.2") and not is_version_of("1.10.2", "1.10") and not is_version_of("1", "")


def test_the_best_kernels_are_those_that_the_processor_has() -> None:
    compiled = ("AVX512", "AVX2", "DEFAULT")
    assert best_instruction_set(compiled, ("avx512f", "avx2", "fma")) == "AVX512"
    assert best_instruction_set(compiled, ("avx2",)) == "DEFAULT" and best_instruction_set((), ("avx2",)) == ""


def test_the_thread_count_of_the_check_is_no_default() -> None:
    assert [unusual_thread_count(cores) for cores in (1, 2, 4, 48)] == [1, 1, 1, 23]


@pytest.mark.slow
def test_an_environment_is_checked_by_the_profile_s_python(tmp_path: Path) -> None:
    python_version = ".".join(map(str, sys.version_info[:2]))
    profile = Profile(
        "this", python=sys.executable, python_version=python_version, environment=("ATEN_CPU_CAPABILITY=default",)
    )
    profile = replace(profile, expected=Expected(torch="0.1", mpi="MPI of none"), preload=(str(tmp_path / "no.so"),))
    rows = {row.subject: row for row in check_environment(profile, "make it")}
    assert rows["Python"].status == OK and rows["threads"].status == OK
    assert rows["PyTorch"].status == DIFFERS and rows["MPI library"].status == DIFFERS
    assert rows["preload"].status == MISSING
    assert rows["kernels"].status in (OK, OPTIONAL)
    # the variables of the profile reach it
    assert "AVX" not in rows["instruction set"].actual.replace("NO AVX", "")


@pytest.mark.slow
def test_an_environment_without_packages_names_the_missing_packages(tmp_path: Path) -> None:
    bare = tmp_path / "bin" / "python"
    bare.parent.mkdir()
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n', encoding="utf-8")
    bare.chmod(0o755)
    rows = {row.subject: row for row in check_environment(Profile("bare", python=str(bare)), "make it")}
    assert rows["PyTorch"].status == MISSING and "No module named" in rows["PyTorch"].actual
    assert rows["MPI library"].status == MISSING and rows["fugaku_gpt"].status in (MISSING, OK)


@pytest.mark.slow
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
    rows = rows_of({**REPORT, "build": {**BUILD, "blas": "MKL + oneDNN + OpenBLAS"}})
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


def test_measured_products_are_reported_and_not_judged() -> None:
    lines = ["PyTorch; measured: ours 0.8 times as fast", "our own kernels; measured: ours 1.2 times as fast"]
    profile = replace(PROFILE, python="/my env/python")
    rows = compare_with_profile(profile, {**REPORT, "products": (lines, "")}, 3, {}, FLAGS, "make it")
    assert [row.actual for row in rows if row.subject == "products of layers"] == lines
    assert all(row.status == UNSTATED for row in rows if row.subject == "products of layers")
    rows = compare_with_profile(profile, {**REPORT, "products": ((), "not measured")}, 3, {}, FLAGS, "make it")
    (row,) = [row for row in rows if row.subject == "products of layers"]
    assert (row.actual, row.status, row.mend) == (
        "not measured",
        OPTIONAL,
        "'/my env/python' -m fugaku_gpt env kernels",
    )
    assert not row.is_wrong


@pytest.mark.slow
def test_a_library_that_cannot_be_read_does_not_hide_the_build(tmp_path: Path) -> None:
    library_file(tmp_path).mkdir(parents=True)  # not even root can read a folder as a file
    program = f"import sys; sys.prefix = '{tmp_path}'; program = sys.argv[2]; del sys.argv[1:3]; exec(program)"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{program}" "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    rows = {row.subject: row for row in check_environment(Profile("unreadable", python=str(python)), "make it")}
    assert (
        rows["PyTorch"].actual.startswith(metadata.version("torch").split("+")[0])
        and rows["kernels"].status == OPTIONAL
    )
    assert rows["products of layers"].actual.startswith("IsADirectoryError: ")
