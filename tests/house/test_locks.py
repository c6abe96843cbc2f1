"""Tests of the lock files of env/: what is in them, how they are made, and that nothing else is installed."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Dict, List, Set

import pytest
from packaging.requirements import Requirement

from env import make_locks
from env.lockfile import LockedFile, LockedPackage, LockError, format_lock, normalized, parse_lock, read_lock
from tests.environments.wheels import write_wheel

ROOT = Path(__file__).resolve().parents[2]
ENV = ROOT / "env"
FILES = sorted(path.name for path in ENV.glob("*.lock"))
DIGEST = "0123456789abcdef" * 4


def versions(*names: str) -> Dict[str, str]:
    """Package → version, in locks."""
    return {package.name: package.version for name in names for package in read_lock(ENV / f"{name}.lock")}


def pins(name: str) -> Dict[str, str]:
    """Package → version, in a file of pins."""
    matches = re.findall(r"^([\w.-]+)==(\S+)$", (ENV / f"{name}.txt").read_text(encoding="utf-8"), re.MULTILINE)
    return {normalized(package): version for package, version in matches}


def test_there_is_a_lock_of_every_file_of_pins() -> None:
    pinned = {path.stem for path in ENV.glob("*.txt")} - {"aarch64-packages"}
    assert pinned == {pin for lock in make_locks.LOCKS for pin in lock.pins}
    made = {lock.name for lock in make_locks.LOCKS}
    assert {Path(name).stem for name in FILES} == made | {"torch-2.13-cpu", "torch-2.13-cuda", "torch-1.13-cuda"}


@pytest.mark.parametrize("lock", make_locks.LOCKS, ids=lambda lock: lock.name)
def test_a_lock_has_the_pins_and_nothing_of_the_locks_beside_it(lock: make_locks.Lock) -> None:
    locked = versions(lock.name)
    for name in lock.pins:
        assert pins(name).items() <= locked.items(), f"{name}.txt has changed: make locks"
    assert not set(locked) & set(versions(*lock.beside))


@pytest.mark.parametrize("name", FILES)
def test_a_lock_is_as_the_program_writes_it_and_names_no_index(name: str) -> None:
    text = (ENV / name).read_text(encoding="utf-8")
    heading = "\n".join(
        line[2:] for line in text.splitlines() if line.startswith("# ") and not line.endswith((".whl", ".gz"))
    )
    assert format_lock(read_lock(ENV / name), heading) == text
    assert "://" not in text


@pytest.mark.parametrize("lock", make_locks.LOCKS, ids=lambda lock: lock.name)
def test_every_python_and_machine_of_a_lock_has_a_file(lock: make_locks.Lock) -> None:
    for package in read_lock(ENV / f"{lock.name}.lock"):
        assert package.version in {file.name.split("-")[1].replace(".tar.gz", "") for file in package.files}
        for python in lock.pythons:
            for machine in lock.machines:
                fitting = [file for file in package.files if make_locks.fits(file.name, python, machine)]
                sources = [file for file in package.files if file.name.endswith(".tar.gz")]
                assert fitting or sources, (package.name, python, machine)


def test_cpu_and_arm_builds_agree_with_the_default_build() -> None:
    assert versions("torch-2.13-cpu") == {"torch": versions("torch-2.13")["torch"] + "+cpu"}
    x86, arm = versions("torch-2.13"), versions("aarch64-torch-2.10")
    assert {name for name in {**x86, **arm} if x86.get(name) != arm.get(name)} == {"torch"}


@pytest.mark.slow
def test_the_locks_have_all_that_the_packages_of_this_environment_require() -> None:
    """On every Python and machine: the metadata of the installed packages is read with the values of each."""
    locked = versions("torch-2.13", "tests", "dev")
    checked = 0
    for name, version in locked.items():
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if distribution.version.partition("+")[0] != version:
            continue  # an environment that was made from other locks
        checked += 1
        for text in distribution.requires or ():
            requirement = Requirement(text)
            for python, machine in itertools.product(("3.11", "3.12", "3.13"), ("x86_64", "aarch64")):
                values = make_locks.marker_values(python, machine)
                if requirement.marker is None or requirement.marker.evaluate(values):
                    needed = normalized(requirement.name)
                    assert needed in locked, f"{name} requires {text}"
                    assert requirement.specifier.contains(locked[needed], prereleases=True), f"{name} requires {text}"
    assert checked > len(locked) // 2


@pytest.mark.parametrize(
    ("file", "python", "fits"),
    [
        ("a-1-py3-none-any.whl", "3.8", True),
        ("a-1-py2.py3-none-any.whl", "3.13", True),
        ("a-1-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", "3.11", True),
        ("a-1-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", "3.12", False),
        ("a-1-cp313-cp313t-manylinux_2_17_x86_64.whl", "3.13", False),
        ("a-1-cp38-abi3-manylinux2014_x86_64.whl", "3.13", True),
        ("a-1-cp312-abi3-manylinux2014_x86_64.whl", "3.11", False),
        ("a-1-py3-none-linux_x86_64.whl", "3.11", True),
        ("a-1-cp311-cp311-manylinux2014_aarch64.whl", "3.11", False),
        ("a-1-cp311-cp311-musllinux_1_2_x86_64.whl", "3.11", False),
        ("a-1-cp311-cp311-win_amd64.whl", "3.11", False),
        ("a-1-pp310-pypy310_pp73-manylinux2014_x86_64.whl", "3.11", False),
        ("a-1-macosx.whl", "3.11", False),
    ],
)
def test_which_wheels_fit(file: str, python: str, fits: bool) -> None:
    assert make_locks.fits(file, python, "x86_64") is fits


def entry(name: str, *files: str, **more: object) -> Dict[str, object]:
    """A package of uv's pylock.toml."""
    wheels = [{"url": f"https://index.invalid/a/{file}", "hashes": {"sha256": DIGEST}} for file in files]
    return {"name": name, "version": "1", "wheels": wheels, **more}


SOURCES = {"url": "https://index.invalid/a/a-1.tar.gz", "hashes": {"sha256": DIGEST}}


def test_packages_of_a_resolution() -> None:
    lock = make_locks.Lock("mine", ("mine",), ("3.11", "3.12"), ("x86_64",))
    packages = make_locks.packages_of(
        {
            "packages": [
                entry("windows", "a-1-py3-none-any.whl", marker="sys_platform == 'win32'"),
                entry("one", "a-1-cp311-cp311-linux_x86_64.whl", marker="python_full_version < '3.12'"),
                entry("both", "a-1%2Bb-py3-none-any.whl", "a-1-cp311-cp311-win_amd64.whl"),
                entry("built", "a-1-cp311-cp311-linux_x86_64.whl", sdist=SOURCES),
            ]
        },
        lock,
    )
    assert packages == [
        LockedPackage("both", "1", (LockedFile("a-1+b-py3-none-any.whl", DIGEST),)),
        LockedPackage(
            "built", "1", (LockedFile("a-1-cp311-cp311-linux_x86_64.whl", DIGEST), LockedFile("a-1.tar.gz", DIGEST))
        ),
        LockedPackage(
            "one", "1", (LockedFile("a-1-cp311-cp311-linux_x86_64.whl", DIGEST),), 'python_version == "3.11"'
        ),
    ]
    assert parse_lock(format_lock(packages, "ours"), "x.lock") == packages
    with pytest.raises(LockError, match=r"mine: alone 1 has no file for Python 3\.12 on x86_64"):
        make_locks.packages_of({"packages": [entry("alone", "a-1-cp311-cp311-linux_x86_64.whl")]}, lock)


def test_packages_for_cuda_have_a_separate_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("torch", "nvidia-cublas", "cuda-bindings", "triton", "numpy", "cudata")
    resolution = {"packages": [entry(name, "a-1-py3-none-any.whl") for name in names]}
    monkeypatch.setattr(make_locks, "_resolve", lambda lock, made: resolution)
    lock = make_locks.Lock("mine", ("mine",), ("3.11",), ("x86_64",), beside=("base",))
    numpy = LockedPackage("numpy", "1", (LockedFile("numpy-1-py3-none-any.whl", DIGEST),))
    texts = make_locks.make(lock, {"base": [numpy]})
    packages = {name: [package.name for package in parse_lock(text, name)] for name, text in texts.items()}
    assert packages == {
        "mine.lock": ["cudata", "torch"],
        "mine-cuda.lock": ["cuda-bindings", "nvidia-cublas", "triton"],
    }
    assert "mine.txt with what they need, beside base.lock" in texts["mine.lock"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("click\n", r"x\.lock:1: 'click' is no line of a lock file"),
        ("# a.whl\nclick==1\n", r"x\.lock:2: 'click==1' is no line of a lock file"),
        ("# a.whl\nclick==1 \\\n", r"x\.lock:3: no hash where one must be"),
        (f"# a.whl\nclick==1 \\\n    --hash=sha256:{DIGEST} \\\n", r"x\.lock:4: no hash where one must be"),
        (f"# a.whl\nclick==1 \\\n    --hash=sha256:{DIGEST[1:]}\n", r"x\.lock:3: no hash where one must be"),
        (f"click==1 \\\n    --hash=sha256:{DIGEST}\n", r"x\.lock:2: click has 1 hashes and 0 files"),
        (f"# a.whl\nclick==1 \\\n    --hash=sha256:{DIGEST}\n" * 2, r"x\.lock: click stands there twice"),
    ],
)
def test_a_text_that_is_no_lock_is_refused(text: str, message: str) -> None:
    with pytest.raises(LockError, match=message):
        parse_lock(text, "x.lock")


def test_a_lock_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(LockError, match=r"none\.lock: cannot be read"):
        read_lock(tmp_path / "none.lock")


def install(python: str, locks: List[Path], *options: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run env/install_locked.sh."""
    return subprocess.run(
        [str(ENV / "install_locked.sh"), python, ":".join(map(str, locks)), *options],
        env={**os.environ, "UNCHECKED": "", "PIP_NO_INDEX": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def lock_of(folder: Path, name: str, **sha256_of: str) -> Path:
    """Write a lock of packages of version 1.2."""
    packages = [
        LockedPackage(package, "1.2", (LockedFile(f"{package}-1.2-py3-none-any.whl", sha256),))
        for package, sha256 in sha256_of.items()
    ]
    (folder / name).write_text(format_lock(packages, "ours"), encoding="utf-8")
    return folder / name


def wheel(folder: Path, name: str) -> str:
    """Write a wheel of version 1.2; returns its hash."""
    write_wheel(folder, name, "1.2", {f"{name}.py": ""})
    return hashlib.sha256((folder / f"{name}-1.2-py3-none-any.whl").read_bytes()).hexdigest()


@pytest.mark.slow
def test_a_file_with_another_hash_is_refused_unless_unchecked(tmp_path: Path) -> None:
    lock = lock_of(tmp_path, "mine.lock", tiny=wheel(tmp_path, "tiny"), small=DIGEST)
    wheel(tmp_path, "small")  # another file than the lock is for
    options = ("--find-links", str(tmp_path), "--target", str(tmp_path / "there"))

    done = install(sys.executable, [lock], *options)
    assert done.returncode == 2 and "DO NOT MATCH THE HASHES" in done.stdout
    assert f"pip has refused a file that is not in {lock}" in done.stdout and "UNCHECKED='PACKAGE...'" in done.stdout
    assert not (tmp_path / "there").exists()

    (tmp_path / "tiny-1.2-py3-none-any.whl").rename(tmp_path / "tiny.zip")
    done = install(sys.executable, [lock], *options)
    assert done.returncode == 2 and "No matching distribution found for tiny" in done.stdout
    assert "UNCHECKED" not in done.stdout  # it would not help
    (tmp_path / "tiny.zip").rename(tmp_path / "tiny-1.2-py3-none-any.whl")

    done = install(sys.executable, [lock], *options, UNCHECKED="Small")
    assert done.returncode == 0, done.stdout
    assert "=== NOT CHECKED by hash, as UNCHECKED asks: small==1.2 and what only they need ===" in done.stdout
    assert {path.name for path in (tmp_path / "there").glob("*.py")} == {"tiny.py", "small.py"}


# Notes what it is asked to install as pip would; a CPU build is there if the file `cpu` is, and PyTorch lacks CUDA's
# libraries until a second lock is installed if the file `lacking` is there.
_STAND_IN = """#!/bin/sh
folder=$(dirname "$0")
if [ "$3" = check ]; then
    [ ! -e "$folder/lacking" ] || echo "torch 1.2 requires triton, which is not installed."
    exit
fi
hashed=no
case " $* " in *" --require-hashes "*) hashed=yes ;; esac
for argument; do
    if [ "${before:-}" = -r ]; then
        if grep -q +cpu "$argument" && [ ! -e "$folder/cpu" ]; then
            echo "ERROR: No matching distribution found for torch==1.2+cpu" >&2
            exit 1
        fi
        sed -n "s/^\\([a-z]*\\)==\\([0-9.+cpu]*\\).*/$3 \\1 \\2 hashed: $hashed/p" "$argument" >> "$folder/log"
    fi
    before=$argument
done
"""


def asked_of_pip(folder: Path, locks: List[Path], **variables: str) -> Set[str]:
    """The lines of a stand-in for pip: each package that it was asked to install, with or without hashes."""
    (folder / "log").write_text("", encoding="utf-8")
    (folder / "python").write_text(_STAND_IN, encoding="utf-8")
    (folder / "python").chmod(0o755)
    done = install(str(folder / "python"), locks, **variables)
    assert done.returncode == 0, done.stdout
    return set((folder / "log").read_text(encoding="utf-8").splitlines())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder whose name is two words."""
    (tmp_path / "my checkout").mkdir()
    return tmp_path / "my checkout"


def test_packages_are_left_out_and_selected(folder: Path) -> None:
    locks = [lock_of(folder, "a.lock", numpy=DIGEST, mpich=DIGEST), lock_of(folder, "b.lock", pytest=DIGEST)]
    numpy, mpich, tests = (f"install {name} 1.2 hashed: yes" for name in ("numpy", "mpich", "pytest"))
    assert asked_of_pip(folder, locks) == {numpy, mpich, tests}
    assert asked_of_pip(folder, locks, LOCKED_WITHOUT="mpich") == {numpy, tests}
    assert asked_of_pip(folder, locks, LOCKED_ONLY="mpich", LOCKED_COMMAND="download") == {
        "download mpich 1.2 hashed: yes"
    }
    unchecked = {line.replace("yes", "no") for line in (numpy, mpich, tests)}
    assert asked_of_pip(folder, locks, UNCHECKED="all") == unchecked
    assert asked_of_pip(folder, locks, UNCHECKED="numpy,PyTest") == {
        mpich,
        *(unchecked - {mpich.replace("yes", "no")}),
    }


def test_a_cpu_build_is_preferred_and_libraries_of_cuda_follow_their_build(folder: Path) -> None:
    base = lock_of(folder, "a.lock", torch=DIGEST, numpy=DIGEST)
    lock_of(folder, "a-cuda.lock", triton=DIGEST)
    text = lock_of(folder, "a-cpu.lock", torch=DIGEST).read_text(encoding="utf-8")
    (folder / "a-cpu.lock").write_text(text.replace("torch==1.2", "torch==1.2+cpu"), encoding="utf-8")
    numpy, torch, triton = (f"install {name} 1.2 hashed: yes" for name in ("numpy", "torch", "triton"))
    assert asked_of_pip(folder, [base]) == {torch, numpy}
    (folder / "lacking").touch()
    assert asked_of_pip(folder, [base]) == {torch, numpy, triton}
    (folder / "lacking").unlink()
    (folder / "cpu").touch()
    assert asked_of_pip(folder, [base]) == {torch.replace("1.2", "1.2+cpu"), numpy}
    assert asked_of_pip(folder, [base], UNCHECKED="torch") == {numpy, torch.replace("yes", "no")}
