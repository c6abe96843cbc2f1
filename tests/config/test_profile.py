"""Tests of profile files, and of the profiles in ``env/``."""

from __future__ import annotations

from pathlib import Path

import pytest

from fugaku_gpt.config.profile import Build, Expected, Profile, load_profile, with_absolute_paths
from fugaku_gpt.environments.check import is_version_of
from fugaku_gpt.environments.registry import profile_files, read_pins, resolve
from fugaku_gpt.errors import ConfigError

FILES = profile_files()


def test_a_profile_has_the_expected_environment_and_the_build_steps(tmp_path: Path) -> None:
    file = tmp_path / "b.yaml"
    file.write_text(
        "python_version: 3.10\nexpected: {torch: 1.10, blas: [MKL], fused_adamw: no, bfloat16_without_kernel: []}\n"
        "build:\n  repository: a/b\n  steps: [bash 1.sh, 'cp a b']\n",
        encoding="utf-8",
    )
    profile = load_profile(file)
    assert profile.python_version == "3.10"  # not the number 3.1
    assert profile.expected == Expected("1.10", ("MKL",), fused_adamw=False, bfloat16_without_kernel=())
    assert profile.build == Build(repository="a/b", steps=("bash 1.sh", "cp a b")) and profile.in_tarball
    assert Profile().expected.bfloat16_without_kernel is None and not Profile().in_tarball


def test_every_error_in_a_section_is_reported_with_line_and_key(tmp_path: Path) -> None:
    file = tmp_path / "b.yaml"
    file.write_text(
        "expected:\n  torhc: 1.7\n  fused_adamw: maybe\n  torch: new\nbuild: x\n  \nexpect: {}\n", encoding="utf-8"
    )
    with pytest.raises(ConfigError) as caught:
        load_profile(file)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{file}:2: expected.torhc: unknown key of a profile; did you mean expected.torch?"
    assert lines[1].startswith(f"{file}:3: expected.fused_adamw: 'maybe': expected true or false")
    assert lines[2].startswith(f"{file}:4: expected.torch: 'new'") and "such as 1.10" in lines[2]
    assert lines[3].startswith(f"{file}:5: build: 'x': expected a mapping; its keys: repository, branch")
    assert lines[4] == f"{file}: expect: unknown key of a profile; did you mean expected?"


def test_relative_paths_are_from_a_folder_and_bare_names_are_left(tmp_path: Path) -> None:
    written = Profile(
        python="t/bin/python", library_path=("t/lib", "/lib64"), tcmalloc="libtcmalloc.so", preload=("t/a.so",)
    )
    profile = with_absolute_paths(written, tmp_path)
    assert profile.python == f"{tmp_path}/t/bin/python" and profile.tcmalloc == "libtcmalloc.so"
    assert profile.library_path == (f"{tmp_path}/t/lib", "/lib64") and profile.preload == (f"{tmp_path}/t/a.so",)


@pytest.mark.parametrize("name", FILES)
def test_a_profile_of_the_repository_is_complete(name: str) -> None:
    profile = resolve(name)
    assert profile.name == name and profile.note and profile.limits and profile.python_version
    assert is_version_of(name.rpartition("-")[2], profile.expected.torch)
    if not profile.in_tarball:
        pins = read_pins(Path(profile.pins))
        assert pins["torch"] == profile.expected.torch and pins["mpi4py"] == profile.expected.mpi4py
        assert Path(profile.python).is_absolute()


def test_the_repository_has_a_profile_for_each_build() -> None:
    builds = ["torch-1.7", "torch-1.10", "torch-1.13", "torch-2.13"]
    for_a64fx = ["a64fx-torch-1.7", "a64fx-torch-1.10", "a64fx-torch-1.13", "a64fx-torch-2.9"]
    assert list(FILES) == [*builds, *for_a64fx, "aarch64-torch-2.10"]
