"""Tests of looking up profiles by name or path, and of the location of their environments."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import List, Optional, Tuple

import pytest

import fugaku_gpt
from fugaku_gpt.config import load_run_config
from fugaku_gpt.config.profile import Profile
from fugaku_gpt.environments.create import create
from fugaku_gpt.environments.registry import (
    is_profile,
    location_of,
    missing_modules,
    profile_files,
    require_created,
    resolve,
    with_profile_file,
)
from fugaku_gpt.errors import ConfigError, UsageError
from fugaku_gpt.machine.checkout import checkout
from fugaku_gpt.machine.system import System, use_system

ROOT = Path(fugaku_gpt.__file__).resolve().parents[1]


def _profile(folder: Path, more: str = "") -> Path:
    file = folder / "mine.yaml"
    (folder / "pins.txt").write_text("a==1\n", encoding="utf-8")
    file.write_text(f"python: ../venv/bin/python\npins: pins.txt\n{more}", encoding="utf-8")
    return file


def test_a_profile_is_looked_up_by_name_in_env_and_by_path_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve("torch-1.7").python == str(ROOT / ".venv-torch17" / "bin" / "python")
    (tmp_path / "env").mkdir()
    _profile(tmp_path / "env")
    monkeypatch.chdir(tmp_path)
    profile = resolve("env/mine.yaml")
    assert (profile.name, profile.python) == ("mine", str(tmp_path / "venv/bin/python"))
    assert profile.pins == str(tmp_path / "env" / "pins.txt")
    assert resolve("env/mine.yaml", at=tmp_path / "other").python == str(tmp_path / "other/bin/python")
    assert resolve("env/mine.yaml", unpacked=tmp_path / "disk" / "x").python == str(tmp_path / "disk/venv/bin/python")
    names = ["torch-1.7", "env/mine.yaml", "torch-1.8", "env/no.yaml", "env"]
    assert [is_profile(word) for word in names] == [True, True, False, False, False]


def test_a_run_s_profile_is_looked_up_beside_the_run_file_in_the_checkout_and_among_shipped_profiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout_, elsewhere = tmp_path / "checkout", tmp_path / "elsewhere"
    for folder in (checkout_ / "env", checkout_ / "runs" / "env", elsewhere):
        folder.mkdir(parents=True)
    (checkout_ / "setup.cfg").touch()
    run_file = checkout_ / "runs" / "run.yaml"
    of_checkout, beside = checkout_ / "env" / "mine.yaml", checkout_ / "runs" / "env" / "mine.yaml"
    monkeypatch.chdir(elsewhere)

    def profile(written: str, file: Optional[Path] = run_file) -> str:
        return with_profile_file(load_run_config(overrides=[f"job.profile={written}"]), file).job.profile

    with pytest.raises(ConfigError) as caught:
        profile("env/mine.yaml")
    searched = f"env/mine.yaml: no such file in {elsewhere}, {checkout_ / 'runs'}, {checkout_}; valid: "
    assert searched in str(caught.value) and "one of torch-1.7, " in str(caught.value)
    of_checkout.touch()
    assert profile("env/mine.yaml") == str(of_checkout)
    beside.touch()
    assert profile("env/mine.yaml") == str(beside)
    assert profile("env/mine.yaml", Path("../checkout/runs/run.yaml")) == str(beside)
    with pytest.raises(ConfigError, match="no such file in [^,]*elsewhere; "):
        profile("env/mine.yaml", None)
    (elsewhere / "env").mkdir()
    (elsewhere / "env" / "mine.yaml").touch()  # as written, as for the other paths of a run
    assert profile("env/mine.yaml") == "env/mine.yaml"

    shipped = str(ROOT / "env" / "torch-2.13.yaml")
    assert profile("torch-2.13") == profile("env/torch-2.13.yaml") == shipped
    for written in ("other/torch-2.13.yaml", "torch-2.13.yaml", str(elsewhere / "torch-2.13")):
        with pytest.raises(ConfigError, match="no such file"):
            profile(written)
    assert profile("") == ""


def test_the_file_that_names_a_profile_comes_before_the_present_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("project", "elsewhere"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.yaml").touch()
    run_file = tmp_path / "project" / "run.yaml"
    run_file.write_text("job: {profile: mine.yaml}\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = load_run_config(run_file)
    assert with_profile_file(config, Path("../project/run.yaml")).job.profile == str(tmp_path / "project" / "mine.yaml")
    (tmp_path / "project" / "mine.yaml").unlink()
    assert with_profile_file(config, run_file).job.profile == str(tmp_path / "elsewhere" / "mine.yaml")
    run_file.write_text("preset: tiny\n", encoding="utf-8")  # now the command line names it
    (tmp_path / "project" / "mine.yaml").touch()
    assert with_profile_file(config, run_file).job.profile == "mine.yaml"


def test_an_unknown_name_is_refused_with_the_valid_names() -> None:
    with pytest.raises(UsageError, match=r"torch-1\.8: no profile has this name; did you mean .*valid: torch-1\.7, "):
        resolve("torch-1.8")
    with pytest.raises(UsageError, match=r"env/no\.yaml: there is no such profile"):
        resolve("env/no.yaml")


def test_an_incomplete_environment_is_not_accepted(tmp_path: Path) -> None:
    (tmp_path / "env").mkdir()
    profile = resolve(str(_profile(tmp_path / "env")))
    assert location_of(profile).state == "no"
    with pytest.raises(UsageError, match="the environment is not made: fugaku-gpt env create mine"):
        require_created(profile)
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").symlink_to(sys.executable)
    assert location_of(profile).state == "half"
    with pytest.raises(UsageError, match="was not finished"):
        require_created(profile)
    (tmp_path / "venv" / ".installed-mine").touch()
    require_created(profile)


def test_a_folder_made_for_another_build_is_not_accepted(tmp_path: Path) -> None:
    (tmp_path / "env").mkdir()
    file = _profile(tmp_path / "env")
    (tmp_path / "env" / "pins.txt").write_text("torch==1.10.2\nmpich==5\n", encoding="utf-8")
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    (venv / ".installed-1.7").touch()
    (venv / "pins.txt").write_text("# others\ntorch==1.7.1\nmpich==5\n", encoding="utf-8")
    profile = resolve(str(file))
    assert location_of(profile).state == "other"
    with pytest.raises(UsageError, match=r"than mine: torch 1\.7\.1 where the profile has 1\.10\.2; choose"):
        require_created(profile)
    (venv / "pins.txt").write_text("torch==1.10.2\n", encoding="utf-8")  # the MPI of its own is left out
    assert location_of(profile).state == "other"
    (venv / ".mpi").write_text("system\n", encoding="utf-8")
    assert location_of(profile).state == "yes"


class _OtherArchitecture(System):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def architecture(self) -> str:
        return self._name


def test_pins_for_another_architecture_are_not_installed_here(tmp_path: Path) -> None:
    with use_system(_OtherArchitecture("aarch64")):
        assert location_of(resolve("aarch64-torch-2.10", at=tmp_path / "new")).state == "no"
    message = r"its pins are for aarch64, and this machine is x86_64; valid: torch-1\.7, .*torch-2\.13$"
    with use_system(_OtherArchitecture("x86_64")):
        profile = resolve("aarch64-torch-2.10")
        assert location_of(profile).state == "not here"
        with pytest.raises(UsageError, match=message):
            require_created(profile)
        with pytest.raises(UsageError, match=message):
            create(profile, tmp_path / "new", sys.executable, [], print)
    assert not (tmp_path / "new").exists()


def test_a_build_in_a_tar_file_is_made_where_that_is_unpacked(tmp_path: Path) -> None:
    profile = resolve("a64fx-torch-1.10")
    assert profile.python == "torch-1.10/bin/python3" and location_of(profile).state == "by a job"
    with pytest.raises(UsageError, match="name the folder with --at FOLDER"):
        require_created(profile)
    unpacked = resolve("a64fx-torch-1.10", at=tmp_path)
    assert unpacked.library_path == (f"{tmp_path}/torch-1.10/lib",) and location_of(unpacked).state == "no"
    (tmp_path / "torch-1.10" / "bin").mkdir(parents=True)
    (tmp_path / "torch-1.10" / "bin" / "python3").symlink_to(sys.executable)
    require_created(resolve("a64fx-torch-1.10", at=tmp_path))


def test_an_installation_without_a_checkout_has_the_profiles_it_brought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checkout() == ROOT
    package = tmp_path / "lib" / "python3.8" / "site-packages" / "fugaku_gpt"  # as of `pip install --user`
    monkeypatch.setattr(fugaku_gpt, "__file__", str(package / "__init__.py"))
    assert checkout() is None
    with pytest.raises(UsageError, match="installed without them"):
        profile_files()
    shipped = tmp_path / "share" / "fugaku_gpt" / "env"
    shipped.mkdir(parents=True)
    _profile(shipped)
    assert list(profile_files()) == ["mine"]


@pytest.mark.parametrize(
    ("modules", "loaded", "missing"),
    [
        (("foo/1.2",), "foo/1.2", []),
        (("foo/1.2",), "foo", ["foo/1.2"]),
        (("foo/1.2",), "foo/1.3:bar/2", ["foo/1.2"]),
        (("foo",), "bar/2:foo/1.2", []),
        (("foo",), "foobar/1:foo-bar", ["foo"]),
        (("bar", "foo/1.2"), "", ["bar", "foo/1.2"]),
    ],
)
def test_a_module_without_a_version_is_loaded_in_any(
    modules: Tuple[str, ...], loaded: str, missing: List[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOADEDMODULES", loaded)
    assert missing_modules(Profile("p", modules=modules)) == missing
