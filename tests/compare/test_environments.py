"""Tests of the checks that an environment passes before a comparison starts ranks in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fugaku_gpt.compare.environments import usable_profile
from fugaku_gpt.environments.check import MISSING, OK, check_environment
from fugaku_gpt.environments.registry import resolve
from fugaku_gpt.errors import UsageError


def profile_with_module(folder: Path, module: str) -> str:
    """Write a profile that needs a module, and has a Python that reports nothing."""
    python = folder / "python"
    python.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    python.chmod(0o755)
    file = folder / "mine.yaml"
    file.write_text(f"python: {python}\nmodules: [{module}]\n", encoding="utf-8")
    return str(file)


@pytest.mark.parametrize(
    ("module", "loaded", "is_loaded"),
    [
        ("foo/1.2", "bar:foo/1.2", True),
        ("foo", "foo/1.2", True),
        ("foo/1.2", "foo", False),
        ("foo/1.2", "foo/1", False),
    ],
)
def test_a_comparison_and_env_check_agree_on_the_modules_that_are_loaded(
    module: str, loaded: str, is_loaded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOADEDMODULES", loaded)
    text = profile_with_module(tmp_path, module)
    (row,) = [row for row in check_environment(resolve(text), "make it") if row.subject == "modules"]
    assert row.status == (OK if is_loaded else MISSING)
    if is_loaded:
        assert usable_profile(text) is not None
    else:
        with pytest.raises(UsageError, match=f"modules that are not loaded: module load {module}$"):
            usable_profile(text)
