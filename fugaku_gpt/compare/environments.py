"""The environments of a comparison's sides, ready to start ranks with."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, Dict, Optional

from fugaku_gpt.config.profile import Profile, load_profile
from fugaku_gpt.environments.registry import find_profile, require_created, resolve
from fugaku_gpt.errors import UsageError

# of a profile: words about it, which change nothing
_DESCRIPTIVE_KEYS = ("name", "note", "limits", "expected")


def usable_profile(text: str, unpacked: Optional[Path] = None) -> Optional[Profile]:
    """The profile of a side's environment, its Python as a path that is there; None for the present Python.

    Args:
        unpacked: folder that a job's tar file was unpacked to, from which relative Pythons are meant.

    Raises:
        UsageError: the environment was not made here, or needs modules that are not loaded.
    """
    if not text:
        return None
    profile = resolve(text, unpacked=unpacked)
    require_created(profile)
    loaded = os.environ.get("LOADEDMODULES", "").split(":")
    missing = [name for name in profile.modules if not any(module in (name, name.split("/")[0]) for module in loaded)]
    if missing:
        raise UsageError(f"{text}: needs modules that are not loaded: module load {' '.join(missing)}")
    return profile


def side_profile(text: str, absolute: bool = False) -> Optional[Profile]:
    """The profile of a side's environment; None for the present Python.

    Args:
        absolute: with paths from the file's folder as whole paths.
    """
    if not text:
        return None
    return resolve(text) if absolute else load_profile(find_profile(text))


def build_json(text: str) -> Dict[str, Any]:
    """What a side's environment says of how its ranks are started, as JSON keeps it; empty for the present Python."""
    profile = side_profile(text)
    if profile is None:
        return {}
    values: Dict[str, Any] = json.loads(json.dumps(asdict(profile)))
    return {key: value for key, value in values.items() if key not in _DESCRIPTIVE_KEYS}
