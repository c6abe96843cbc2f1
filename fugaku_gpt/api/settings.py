"""Settings as callers of the interface give them: ``key=value`` texts, or a mapping of dotted keys to values."""

from __future__ import annotations

import json
import os
from typing import Any, Mapping, Sequence, Tuple, Union

from fugaku_gpt.errors import UsageError

Settings = Union[Mapping[str, object], Sequence[str]]
FilePath = Union[str, "os.PathLike[str]"]


def setting_texts(settings: Settings) -> Tuple[str, ...]:
    """Settings as the ``key=value`` texts that ``--set`` takes; values of a mapping are written as JSON.

    Raises:
        UsageError: a value is neither a text, a number, true or false, None, a path, nor a list of these.
    """
    if isinstance(settings, str):
        raise UsageError(f"settings {settings!r}: one text; valid: a list of key=value texts, or a mapping")
    if isinstance(settings, Mapping):
        return tuple(f"{key}={_value_text(key, value)}" for key, value in settings.items())
    return tuple(settings)


def _value_text(key: str, value: object) -> str:
    def plain(other: Any) -> Any:
        if isinstance(other, os.PathLike):
            return os.fspath(other)
        raise TypeError(type(other).__name__)

    try:
        return json.dumps(value, default=plain, allow_nan=False)
    except (TypeError, ValueError):
        raise UsageError(
            f"{key}: {value!r} is no setting; valid: texts, finite numbers, true or false, None, paths, lists of these"
        ) from None
