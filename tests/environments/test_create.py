"""Tests of creating an environment from wheels in a folder."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import List

import psutil
import pytest
import yaml

from env.lockfile import LockedFile, LockedPackage, format_lock
from fugaku_gpt.environments.check import OK, check_environment
from fugaku_gpt.environments.create import create, find_python
from fugaku_gpt.environments.registry import location_of, require_created, resolve
from fugaku_gpt.errors import RunFailed, UsageError
from tests.environments.wheels import write_backend, write_mpi4py_source, write_open_mpi, write_wheel

ROOT = Path(__file__).resolve().parents[2]
PYTHON_VERSION = ".".join(map(str, sys.version_info[:2]))


def _profile(tmp_path: Path, pins: str) -> Path:
    file = tmp_path / "mine.yaml"
    (tmp_path / "pins.txt").write_text(pins, encoding="utf-8")
    file.write_text(
        f"name: mine-1\npython: venv/bin/python\npins: pins.txt\npython_version: {PYTHON_VERSION}\n", encoding="utf-8"
    )
    return file


@pytest.mark.slow
@pytest.mark.long
def test_an_incomplete_environment_is_marked_and_finished_by_the_same_command(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_backend(wheels)
    profile = resolve(str(_profile(tmp_path, "# ours\ntiny==1.2\n")))
    pip_arguments = ["--no-index", "--find-links", str(wheels)]
    lines: List[str] = []

    with pytest.raises(RunFailed) as caught:  # there is no such wheel yet
        create(profile, tmp_path / "venv", sys.executable, pip_arguments, lines.append)
    assert "tiny==1.2" in str(caught.value) and "the same command continues from here" in str(caught.value)
    assert location_of(profile).state == "half"
    made = (tmp_path / "venv" / "pyvenv.cfg").stat().st_mtime_ns

    write_wheel(wheels, "tiny", "1.2", {"tiny.py": ""})
    create(profile, tmp_path / "venv", sys.executable, pip_arguments, lines.append)
    assert location_of(profile).state == "yes" and (tmp_path / "venv" / ".installed-1").is_file()
    assert (tmp_path / "venv" / "pyvenv.cfg").stat().st_mtime_ns == made  # the existing files are used again
    require_created(profile)
    assert any("Installing collected packages: tiny" in line for line in lines)
    # our command lacks its packages, so it compiles no kernels: that is reported, and the environment is complete
    assert any("kernels: not usable, see above: PyTorch's own will be used" in line for line in lines)
    rows = {row.subject: row for row in check_environment(profile, "")}
    assert [rows[subject].status for subject in ("Python", "packages", "fugaku_gpt")] == [OK] * 3


@pytest.mark.slow
@pytest.mark.long
def test_mpi4py_is_compiled_anew_for_another_mpi_on_path(tmp_path: Path) -> None:
    """Though pip has kept what it compiled for the first: its cache is looked up by the version alone."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_backend(wheels)
    # of this Python's packages, those that the check of two ranks needs: kernels are not compiled with them
    (tmp_path / "packages").mkdir()
    for package in (psutil, yaml):
        (tmp_path / "packages" / package.__name__).symlink_to(Path(str(package.__file__)).parent)
    write_wheel(wheels, "tiny", "1.2", {"tiny.pth": f"{tmp_path / 'packages'}\n"})
    write_mpi4py_source(wheels, "9.9")
    (tmp_path / "pins.txt").write_text("tiny==1.2\nmpi4py==9.9\n", encoding="utf-8")
    outputs = []
    for folder, version in (("first", "4.1.4"), ("second", "5.0.1")):
        programs = tmp_path / f"{folder}-mpi"
        write_open_mpi(programs, version)
        done = subprocess.run(
            [
                *(str(ROOT / "env" / "make_environment.sh"), sys.executable, str(tmp_path / folder)),
                *(str(tmp_path / "pins.txt"), "mine", "--no-index", "--find-links", str(wheels)),
            ],
            env={
                **os.environ,
                "MPI": "system",
                "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
                "PIP_CACHE_DIR": str(tmp_path / "cache"),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0 and (tmp_path / folder / ".installed-mine").exists(), done.stdout
        outputs.append(done.stdout)
    assert "compiling mpi4py for the MPI on PATH" in outputs[1]


@pytest.mark.slow
@pytest.mark.long
def test_a_lock_beside_the_pins_is_installed_by_hashes(tmp_path: Path) -> None:
    """With all that it lists; fugaku_gpt itself is built by its setuptools."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_backend(wheels)
    for name in ("tiny", "needed"):
        write_wheel(wheels, name, "1.2", {f"{name}.py": ""})
    profile = resolve(str(_profile(tmp_path, "tiny==1.2\n")))
    files = [LockedFile(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in sorted(wheels.iterdir())]
    packages = [LockedPackage(*file.name.split("-")[:2], (file,)) for file in files]
    lock = tmp_path / "pins.lock"
    lock.write_text(format_lock(packages, "ours"), encoding="utf-8")
    write_wheel(wheels, "needed", "1.2", {"needed.py": "import another\n"})  # another file than that of the lock
    pip_arguments = ["--no-index", "--find-links", str(wheels)]
    lines: List[str] = []

    with pytest.raises(RunFailed) as caught:
        create(profile, tmp_path / "venv", sys.executable, pip_arguments, lines.append)
    assert "DO NOT MATCH THE HASHES" in str(caught.value) and "--unchecked PACKAGE" in str(caught.value)
    assert location_of(profile).state == "half"

    create(profile, tmp_path / "venv", sys.executable, pip_arguments, lines.append, unchecked=["needed"])
    assert location_of(profile).state == "yes"
    assert any(f"installing 3 packages by the hashes of {lock}" in line for line in lines)
    assert any("=== NOT CHECKED by hash, as UNCHECKED asks: needed==1.2 and" in line for line in lines)
    rows = {row.subject: row for row in check_environment(profile, "")}
    assert [rows[subject].status for subject in ("packages", "fugaku_gpt")] == [OK] * 2

    # what is there without a check is installed again by the next call that checks all
    with pytest.raises(RunFailed) as caught:
        create(profile, tmp_path / "venv", sys.executable, pip_arguments, lines.append)
    assert "DO NOT MATCH THE HASHES" in str(caught.value)

    # a pin that was changed after the lock was made is not ignored
    (tmp_path / "pins.txt").write_text("tiny==1.3\n", encoding="utf-8")
    with pytest.raises(RunFailed) as caught:
        create(profile, tmp_path / "venv", sys.executable, pip_arguments, lines.append)
    assert "has what its lock has not: tiny==1.3" in str(caught.value)


def test_an_environment_that_cannot_be_created_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    profile = resolve(str(_profile(tmp_path, "tiny==1.2\n")))
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "thesis.tex").touch()
    with pytest.raises(UsageError, match="exists and is no virtual environment"):
        create(profile, taken, sys.executable, [], print)
    with pytest.raises(UsageError, match=r"thesis\.tex: is a file, not a folder"):
        create(profile, taken / "thesis.tex", sys.executable, [], print)
    foreign = tmp_path / "theirs"
    foreign.mkdir()
    (foreign / "pyvenv.cfg").write_text("home = /usr/bin\n", encoding="utf-8")
    with pytest.raises(UsageError, match="is a virtual environment of your own; choose another"):
        create(profile, foreign, sys.executable, [], print)
    assert [path.name for path in foreign.iterdir()] == ["pyvenv.cfg"]
    (tmp_path / "pins.txt").unlink()
    with pytest.raises(UsageError, match="the pins of mine-1 are not there"):
        create(profile, tmp_path / "venv", sys.executable, [], print)
    with pytest.raises(UsageError, match=r"no Python 3\.99 on PATH and none in pyenv"):
        find_python("3.99")
    assert not (tmp_path / "venv").exists() and (taken / "thesis.tex").exists()


@pytest.mark.slow
def test_a_python_is_looked_up_by_version() -> None:
    assert PYTHON_VERSION in find_python(PYTHON_VERSION)
