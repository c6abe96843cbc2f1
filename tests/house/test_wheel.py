"""Tests of the wheel: built from the source distribution, installed into an empty environment, and used elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import List, Set

import click
import pytest

from env.make_wheel import PROJECT_FILES, pack_again, source_files
from tests.support.corpus import write_byte_corpus

ROOT = Path(__file__).resolve().parents[2]
PROFILES = ("torch-1.7", "torch-1.10", "torch-1.13", "torch-2.13", "a64fx-torch-1.10")
DEPENDENCIES = Path(click.__file__).parents[1]  # the folder of the packages that the tests use

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution, with files that others may not read, in another place and time."""
    folder = tmp_path_factory.mktemp("wheel")
    checkout = folder / "checkout"  # a copy: setuptools leaves its work beside the sources
    for file in source_files(ROOT):
        (checkout / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(str(ROOT / file), str(checkout / file))
    for path in checkout.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
        os.utime(path, (1e9, 1e9))
    # As `python -m build`, but with the setuptools of env/build.txt instead of one from a package index.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(checkout)]
    previous = os.umask(0o077)
    try:
        _run(command, folder, LC_ALL="C", TZ="Asia/Tokyo")
    finally:
        os.umask(previous)
    shutil.rmtree(str(checkout))
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def venv(wheel: Path) -> Path:
    """An environment that holds the wheel and nothing else.

    The wheel is installed without what it requires, so that the test needs no package index and no minutes; commands
    read their dependencies from the environment of the tests, see :func:`command`.
    """
    folder = wheel.parent
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], folder)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "venv" / "bin" / "python")]
    _run([*pip, "install", "--no-index", "--no-deps", "--disable-pip-version-check", str(wheel)], folder)
    return folder / "venv"


def _run(arguments: List[str], folder: Path, **variables: str) -> str:
    """Returns the output of a command that must succeed, run in ``folder`` without this checkout's paths."""
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    environment.update(variables)
    libraries = sorted(DEPENDENCIES.parents[1].glob("libmpi.so.*"))
    if libraries:  # an MPI from a wheel, which mpi4py looks for in the environment that runs
        environment["MPI4PY_LIBMPI"] = str(libraries[0])
    done = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{arguments}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def _site_packages(venv: Path) -> Path:
    return Path(sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)}))


def command(venv: Path, folder: Path, *arguments: str) -> str:
    """Returns the output of ``fugaku-gpt`` of the wheel, run in ``folder``.

    ``DEPENDENCIES`` is a plain entry of its ``sys.path``, after the wheel's own: the ``.pth`` files there, of which one
    names this checkout, are not read.
    """
    (_site_packages(venv) / "dependencies.pth").write_text(f"{DEPENDENCIES}\n", encoding="utf-8")
    return _run([str(venv / "bin" / "fugaku-gpt"), *arguments], folder)


def _files(folder: Path) -> Set[str]:
    paths = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {str(path.relative_to(folder)) for path in paths}


def test_a_second_build_is_equal(wheel: Path, tmp_path: Path) -> None:
    """One is of the source distribution, the other as `make wheel` builds it from the checkout."""
    pack_again(wheel, tmp_path / "first.whl", 1700000000)
    variables = {"SOURCE_DATE_EPOCH": "1700000000", "PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8"}
    printed = _run([sys.executable, "-m", "env.make_wheel", "dist"], tmp_path, **variables)
    assert printed.strip() == f"dist/{wheel.name}"
    assert (tmp_path / printed.strip()).read_bytes() == (tmp_path / "first.whl").read_bytes()
    assert [path.name for path in (tmp_path / "dist").iterdir()] == [wheel.name]
    with zipfile.ZipFile(tmp_path / "first.whl") as packed:
        entries = packed.infolist()
    assert {(entry.date_time, entry.external_attr >> 16) for entry in entries} == {
        ((2023, 11, 14, 22, 13, 20), 0o100644)
    }


def test_the_sources_of_a_build_are_the_same_with_git_and_without(tmp_path: Path) -> None:
    names = ("setup.py", "fugaku_gpt/a.py", "docs/a.md")
    for name in (*names, "fugaku_gpt/__pycache__/a.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for name in PROJECT_FILES:
        (tmp_path / name).touch()
    files = source_files(tmp_path)
    assert set(map(str, files)) == {*names, *PROJECT_FILES}
    _run(["git", "init", "--quiet"], tmp_path)
    _run(["git", "add", *map(str, files)], tmp_path)
    (tmp_path / "fugaku_gpt" / "scratch.py").touch()
    assert sorted(source_files(tmp_path)) == sorted(files)


def test_the_wheel_holds_the_package_and_no_other_name(venv: Path) -> None:
    site_packages = _site_packages(venv)
    names = {path.name for path in site_packages.iterdir() if path.suffix not in (".dist-info", ".pth")}
    assert names == {"fugaku_gpt"}
    templates = {f"jobscripts/{name}" for name in _files(ROOT / "jobscripts")}
    assert _files(site_packages / "fugaku_gpt") == _files(ROOT / "fugaku_gpt") | templates
    (metadata,) = site_packages.glob("*.dist-info")
    assert (ROOT / "LICENSE").read_text(encoding="utf-8") in [
        path.read_text(encoding="utf-8") for path in metadata.rglob("LICENSE")
    ]


def test_the_wheel_s_own_package_runs(venv: Path, tmp_path: Path) -> None:
    command(venv, tmp_path, "--version")
    file = _run([str(venv / "bin" / "python"), "-c", "import fugaku_gpt; print(fugaku_gpt.__file__)"], tmp_path)
    assert Path(file.strip()) == _site_packages(venv) / "fugaku_gpt" / "__init__.py"


def test_a_job_is_rendered_and_linted_without_a_checkout(venv: Path, tmp_path: Path) -> None:
    shutil.copy(str(ROOT / "benchmarks" / "runs" / "fugaku-1.3b.yaml"), str(tmp_path / "run.yaml"))
    script = command(venv, tmp_path, "job", "render", "run.yaml")
    profile = venv / "share" / "fugaku_gpt" / "env" / "a64fx-torch-1.10.yaml"
    assert script.startswith("#!") and f'job.profile: "{profile}"' in script and "#PJM" in script
    command(venv, tmp_path, "job", "render", "run.yaml", "--out", "job.sh")
    command(venv, tmp_path, "job", "lint", "job.sh")


def test_profiles_are_listed_without_a_checkout(venv: Path, tmp_path: Path) -> None:
    listing = command(venv, tmp_path, "env", "list")
    assert all(f"\n{name} " in listing for name in PROFILES), listing


def test_a_layout_is_planned_without_a_checkout(venv: Path, tmp_path: Path) -> None:
    options = ["--preset", "1.3b", "--nodes", "384", "--ranks-per-node", "1", "--global-batch", "1536"]
    assert "ranks_per_node" in command(venv, tmp_path, "plan", "topology", *options, "--format", "json")


def test_a_single_rank_trains_without_a_checkout(venv: Path, tmp_path: Path) -> None:
    write_byte_corpus(tmp_path / "corpus")
    settings = ["--set", "training.iterations=3", "--set", "model.vocab_size=256"]
    command(venv, tmp_path, "train", "--preset", "tiny", "--data", "corpus", *settings, "--out", "run")
    assert '"status": "ok"' in (tmp_path / "run" / "result.json").read_text(encoding="utf-8")


def test_a_page_is_printed_without_a_checkout(venv: Path, tmp_path: Path) -> None:
    assert command(venv, tmp_path, "help", "glossary").startswith("# ")
