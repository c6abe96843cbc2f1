"""Tests that setup.cfg ships the files of the package, and that each build pins what it requires."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Dict, List

import pytest
import tomllib
import yaml
from packaging.requirements import Requirement

import fugaku_gpt
from env.lockfile import normalized, read_lock
from fugaku_gpt.config.profile import load_profile

ROOT = Path(__file__).resolve().parents[2]
BUILDS = sorted(path.name for path in (ROOT / "env").glob("*torch-*.txt"))

DISTRIBUTIONS = sorted((ROOT / "integrations").glob("*/pyproject.toml"))


def setup_cfg() -> configparser.ConfigParser:
    """The parsed setup.cfg."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(str(ROOT / "setup.cfg"), encoding="utf-8")
    return parser


def package_names(requirements: str) -> List[str]:
    """Names of packages in a list of requirements, as pip compares them."""
    lines = [line.strip() for line in requirements.splitlines()]
    names = [re.match(r"[A-Za-z0-9_.-]+", line) for line in lines if not line.startswith("#")]
    return [re.sub(r"[-_.]+", "-", name[0]).lower() for name in names if name]


def pins(name: str) -> Dict[str, str]:
    """Returns package name to exact version, from a file of ``env/``; anything but ``name==version`` fails."""
    lines = [
        line for line in (ROOT / "env" / name).read_text(encoding="utf-8").splitlines() if not line.startswith("#")
    ]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9.]+", line) for line in lines), lines
    return {package_names(line)[0]: line.partition("==")[2] for line in lines}


@pytest.mark.parametrize("build", BUILDS)
def test_a_build_pins_all_that_the_package_needs(build: str) -> None:
    config = setup_cfg()
    needed = package_names(config["options"]["install_requires"])
    for extra in ("train", "mpi", "data"):
        needed += package_names(config["options.extras_require"][extra])
    assert set(needed) <= set(pins(build)), build


@pytest.mark.parametrize("build", BUILDS)
def test_a_build_is_named_after_the_pytorch_version(build: str) -> None:
    assert f"-{build}".endswith("-torch-" + ".".join(pins(build)["torch"].split(".")[:2]) + ".txt")


@pytest.mark.parametrize(("machine", "build"), [("x86_64", "torch-2.13"), ("aarch64", "aarch64-torch-2.10")])
def test_make_installs_the_default_build_of_the_architecture(tmp_path: Path, machine: str, build: str) -> None:
    uname = tmp_path / "uname"
    uname.write_text(f"#!/bin/sh\necho {machine}\n", encoding="utf-8")
    uname.chmod(0o755)
    done = subprocess.run(
        ["make", "--no-print-directory", "--eval", "pins: ; @echo $(PINS)", "pins"],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [f"env/{build}.txt"]
    assert load_profile(ROOT / "env" / f"{build}.yaml").python == "../.venv/bin/python"


def test_the_emulated_machine_takes_the_locks_of_the_default_build_on_arm() -> None:
    script = (ROOT / "env" / "make_aarch64.sh").read_text(encoding="utf-8")
    assert "$scripts/aarch64-torch-2.10.lock" in script and "$scripts/tests.lock" in script


def test_the_tools_are_pinned_once() -> None:
    files = [pins(name) for name in ("torch-2.13.txt", "build.txt", "tests.txt", "dev.txt")]
    names = [name for file in files for name in file]
    assert set(package_names(setup_cfg()["options.extras_require"]["dev"])) <= set(names)
    assert len(set(names)) == len(names)


def test_the_tools_of_the_documentation_are_pinned() -> None:
    assert set(package_names(setup_cfg()["options.extras_require"]["docs"])) <= set(pins("docs.txt"))


def test_the_environments_of_integrations_pin_all_that_the_package_needs_on_a_login_node() -> None:
    assert set(package_names(setup_cfg()["options"]["install_requires"])) <= set(pins("integrations.txt"))


@pytest.mark.parametrize(
    "project", sorted((ROOT / "integrations").glob("*/pyproject.toml")), ids=lambda path: path.parent.name
)
def test_a_distribution_accepts_the_present_package_and_the_host_that_it_is_tested_with(project: Path) -> None:
    described = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    assert described["name"] == project.parent.name
    versions = {"fugaku-gpt": fugaku_gpt.__version__}
    for name in ("snakemake", "psij"):
        lock = read_lock(ROOT / "env" / f"{name}.lock")
        versions.update((package.name, package.version) for package in lock)
    for text in described["dependencies"]:
        requirement = Requirement(text)
        assert versions[normalized(requirement.name)] in requirement.specifier, text


# The one package whose folder is not where its name says; see setup.py.
TEMPLATES = "fugaku_gpt.jobscripts"


def test_the_hooks_before_a_commit_are_those_of_make_lint() -> None:
    """The hooks and the recipe of ``lint`` in the Makefile are the same commands in the same order."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert recipe is not None
    commands = [line.strip().replace("@$(BIN)/", ".venv/bin/") for line in recipe[1].splitlines()]
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert [hook["entry"] for hook in repository["hooks"]] == commands
    assert all(hook["language"] == "system" and not hook["pass_filenames"] for hook in repository["hooks"])


def test_every_data_file_of_the_package_is_shipped() -> None:
    shipped = set()
    for package, patterns in setup_cfg()["options.package_data"].items():
        folder = ROOT / ("jobscripts" if package == TEMPLATES else package.replace(".", "/"))
        for pattern in patterns.split():
            shipped |= set(folder.glob(pattern))
    present = {
        path
        for package in ("fugaku_gpt", "jobscripts")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert present == shipped


def test_every_profile_is_shipped_with_pins() -> None:
    patterns = setup_cfg()["options.data_files"]["share/fugaku_gpt/env"].split()
    shipped = {path for pattern in patterns for path in ROOT.glob(pattern)}
    assert shipped == {path for path in (ROOT / "env").iterdir() if path.suffix in (".yaml", ".txt")}


def test_every_folder_with_python_is_a_package() -> None:
    folders = {path.parent for path in (ROOT / "fugaku_gpt").rglob("*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").is_file()]


def test_a_python_that_does_not_run_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", str(ROOT / "env" / "make_venv.sh"), "no-such-python", str(tmp_path / "venv")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "no-such-python does not run" in done.stdout
    assert not (tmp_path / "venv").exists()


def test_python_m_runs_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fugaku_gpt", "--version"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.split()[0]) == (0, "fugaku-gpt,")
