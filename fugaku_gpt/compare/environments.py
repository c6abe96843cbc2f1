"""Finds the environments of a comparison's sides and checks that ranks can be started in them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Dict, Optional

from fugaku_gpt.config.profile import Profile, load_profile
from fugaku_gpt.environments.registry import find_profile, missing_modules, require_created, resolve
from fugaku_gpt.errors import UsageError

# keys of a profile that only describe it
_DESCRIPTIVE_KEYS = ("name", "note", "limits", "expected")


def usable_profile(text: str, unpacked: Optional[Path] = None) -> Optional[Profile]:
    """Returns the profile of a side's environment with the path of its Python; None for the current Python.

    Args:
        unpacked: folder into which a job's tar file was unpacked; relative paths of Pythons start there.

    Raises:
        UsageError: the environment was not made here, or needs modules that are not loaded.
    """
    if not text:
        return None
    profile = resolve(text, unpacked=unpacked)
    require_created(profile)
    missing = missing_modules(profile)
    if missing:
        raise UsageError(f"{text}: needs modules that are not loaded: module load {' '.join(missing)}")
    return profile


def side_profile(text: str, absolute: bool = False) -> Optional[Profile]:
    """Returns the profile of a side's environment; None for the current Python.

    Args:
        absolute: if True, relative paths in the file are made absolute.
    """
    if not text:
        return None
    return resolve(text) if absolute else load_profile(find_profile(text))


def build_json(text: str) -> Dict[str, Any]:
    """The settings of a side's environment that affect how ranks start, as JSON; empty for the current Python."""
    profile = side_profile(text)
    if profile is None:
        return {}
    values: Dict[str, Any] = json.loads(json.dumps(asdict(profile)))
    return {key: value for key, value in values.items() if key not in _DESCRIPTIVE_KEYS}
