"""Names the settings that differ between runs, as tables and lists write them: ``lr=0.001, seed=2``."""

from __future__ import annotations

from functools import lru_cache
from typing import AbstractSet, Any, Dict, List, Mapping, Sequence, Tuple

from fugaku_gpt.config.paths import PATH_KEYS
from fugaku_gpt.config.schema import RunConfig

_DEFAULTS = RunConfig()
_PATHS = "data.paths"
MOST_NAMED = 8  # settings that are named for one run; how many more there are is said
# where, by whom and for how long a run was submitted, and what it leaves, which is not what it computed
_SUBMISSION = frozenset(
    f"job.{name}"
    for name in (
        *("name", "scheduler", "elapse", "elapse_min", "stop_margin", "group", "resource_group", "resource_unit"),
        *("statistics", "volumes", "tarball", "transfer", "transfer_dirs", "profile", "template", "bulk", "chain"),
    )
) | {f"checkpoint.{name}" for name in ("at_end", "keep_last", "keep_every", "keep_best")}
_OF_JOB = ("job.", "checkpoint.")  # sections whose settings are named with the section, as checkpoint.interval


def differing_settings(runs: Sequence[Mapping[str, Any]], in_columns: AbstractSet[str]) -> List[Tuple[str, ...]]:
    """Return for each run the settings in which it differs from another one.

    Args:
        runs: for each run, dotted key → value of the settings that differ from their defaults.
        in_columns: keys that the table shows in columns of their own.
    """
    keys = sorted({key for settings in runs for key in settings} - _SUBMISSION - in_columns)
    values = {key: [settings.get(key, _default(key)) for settings in runs] for key in keys}
    values.update({key: _absolute_paths(values[key]) for key in keys if key in PATH_KEYS})
    texts = {key: list(map(_text, values[key])) for key in keys}
    differing = [key for key in keys if len(set(texts[key])) > 1]
    names = _names(differing)
    named: List[Tuple[str, ...]] = []
    for number in range(len(runs)):
        pairs = [f"{names[key]}={texts[key][number]}" for key in differing]
        more = len(pairs) - MOST_NAMED
        named.append((*pairs[:MOST_NAMED], f"and {more} more settings") if more > 0 else tuple(pairs))
    return named


def _absolute_paths(values: Sequence[Any]) -> List[List[str]]:
    """Lists of paths with an absolute one in place of each relative one that it alone ends in: a job's paths are made
    absolute when it is submitted, those of a run that was started by hand stay as they were written. A relative one
    that several end in may be any of them, and stays."""
    lists = [[value] if isinstance(value, str) else list(value or ()) for value in values]
    absolute = sorted({path for paths in lists for path in paths if path.startswith("/")})

    @lru_cache(maxsize=None)
    def absolute_form(path: str) -> str:
        candidates = [candidate for candidate in absolute if candidate.endswith(f"/{path}")]
        return candidates[0] if len(candidates) == 1 else path

    return [list(map(absolute_form, paths)) for paths in lists]


def _names(keys: Sequence[str]) -> Dict[str, str]:
    """The last part of each key where no other key has the same; the whole key in ``_OF_JOB``."""
    leaves = [key.rpartition(".")[2] for key in keys]
    return {
        key: leaf if leaves.count(leaf) == 1 and not key.startswith(_OF_JOB) else key for key, leaf in zip(keys, leaves)
    }


def _default(key: str) -> Any:
    section, _, leaf = key.partition(".")
    return getattr(getattr(_DEFAULTS, section, None), leaf, None)


def _text(value: Any) -> str:
    if value is None:
        return "default"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "+".join(map(_text, value)) or "none"
    short = f"{value:g}" if isinstance(value, float) else str(value)
    return (
        short if not isinstance(value, float) or float(short) == value else repr(value)
    )  # 0.0001 is not 0.00010000001
