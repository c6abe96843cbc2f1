"""The environments of a comparison's sides, ready to start ranks with."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Optional

import fugaku_gpt
from fugaku_gpt.errors import UsageError
from fugaku_gpt.jobs.environments.profile import Profile, load_profile

_FOLDER = Path(fugaku_gpt.__file__).resolve().parent.parent / "env"


def is_environment(text: str) -> bool:
    """Whether a word names an environment, or a file of one."""
    return _file_of(text).is_file()


def environment_of(text: str, unpacked: Optional[Path] = None) -> Optional[Profile]:
    """The profile of a side's environment, its Python as a path that is there; None for the present Python.

    Args:
        unpacked: folder that a job's tar file was unpacked to, from which relative Pythons are meant.

    Raises:
        UsageError: the environment was not made here, or needs modules that are not loaded.
    """
    profile = profile_of(text)
    if profile is None:
        return None
    folder = unpacked if unpacked is not None else _file_of(text).parent
    python = os.path.abspath(folder / profile.python) if "/" in profile.python else shutil.which(profile.python)
    if python is None or not os.access(python, os.X_OK):
        raise UsageError(
            f"{text}: its Python, {python or profile.python}, is not there; `fugaku-gpt env create {text}`"
        )
    loaded = os.environ.get("LOADEDMODULES", "").split(":")
    missing = [name for name in profile.modules if not any(one in (name, name.split("/")[0]) for one in loaded)]
    if missing:
        raise UsageError(f"{text}: needs modules that are not loaded: module load {' '.join(missing)}")
    return replace(profile, python=python)


def profile_of(text: str, absolute: bool = False) -> Optional[Profile]:
    """The profile of a side's environment; None for the present Python.

    Args:
        absolute: its Python, where that is a path from the file's folder, as a whole path.
    """
    if not text:
        return None
    profile = load_profile(_file_of(text))
    if absolute and "/" in profile.python:  # links are left as they are: an environment's Python is one
        return replace(profile, python=os.path.abspath(_file_of(text).parent / profile.python))
    return profile


def _file_of(text: str) -> Path:
    return Path(text) if text.endswith((".yaml", ".yml")) else _FOLDER / f"{text}.yaml"
