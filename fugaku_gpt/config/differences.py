"""Names the settings that differ between runs, as tables and lists write them: ``lr=0.001, seed=2``."""

from __future__ import annotations

import os
from typing import AbstractSet, Any, Dict, List, Mapping, Sequence, Tuple

from fugaku_gpt.config.schema import RunConfig

_PATHS = "data.paths"
MOST_NAMED = 8  # settings that are named for one run; how many more there are is said
# where and for how long a run was submitted, and what it leaves, which is not what it computed
_SUBMISSION = ("job.", "checkpoint.")


def differing_settings(runs: Sequence[Mapping[str, Any]], in_columns: AbstractSet[str]) -> List[Tuple[str, ...]]:
    """Return for each run the settings in which it differs from another one.

    Args:
        runs: for each run, dotted key → value of the settings that differ from their defaults.
        in_columns: keys that the table shows in columns of their own.
    """
    keys = sorted({key for settings in runs for key in settings if not key.startswith(_SUBMISSION)} - in_columns)
    values = {key: [settings.get(key, _default(key)) for settings in runs] for key in keys}
    if _PATHS in values:
        values[_PATHS] = _as_they_were_named(values[_PATHS])
    texts = {key: list(map(_text, of_runs)) for key, of_runs in values.items()}
    differing = [key for key in keys if len(set(texts[key])) > 1]
    names = _names(differing)
    named: List[Tuple[str, ...]] = []
    for number in range(len(runs)):
        pairs = [f"{names[key]}={texts[key][number]}" for key in differing]
        more = len(pairs) - MOST_NAMED
        named.append((*pairs[:MOST_NAMED], f"and {more} more settings") if more > 0 else tuple(pairs))
    return named


def _as_they_were_named(runs: Sequence[Any]) -> List[Any]:
    """Lists of paths with each absolute one that ends in a relative one of another run as that one, as a submitted run
    has the absolute paths of its run file's relative ones."""
    relative = {path for paths in runs for path in paths or () if not os.path.isabs(path)}
    return [
        [next((short for short in sorted(relative) if path.endswith(f"/{short}")), path) for path in paths or ()]
        for paths in runs
    ]


def _names(keys: Sequence[str]) -> Dict[str, str]:
    """The last part of each key where no other key has the same."""
    leaves = [key.rpartition(".")[2] for key in keys]
    return {key: leaf if leaves.count(leaf) == 1 else key for key, leaf in zip(keys, leaves)}


def _default(key: str) -> Any:
    section, _, leaf = key.partition(".")
    return getattr(getattr(RunConfig(), section, None), leaf, None)


def _text(value: Any) -> str:
    if value is None:
        return "default"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "+".join(map(_text, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
