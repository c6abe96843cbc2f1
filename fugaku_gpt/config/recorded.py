"""Loads configurations as run directories have them, thousands of which differ in a few settings.

What is equal is parsed once: a text, and each of its sections, if they are as the trainer writes them
(:func:`fugaku_gpt.config.load.dump_run_config`). Any other text, and one with a mistake, is left to the loader of run
files, which reports where it is.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, FrozenSet, List, NamedTuple, Optional, get_type_hints

from fugaku_gpt.config.checks import problems_of
from fugaku_gpt.config.load import (
    changed_of_sections,
    changed_settings,
    coerce_setting,
    load_run_config,
    section_values,
    valid_keys,
)
from fugaku_gpt.config.paths import PATH_KEYS, has_relative_paths, is_record
from fugaku_gpt.config.schema import RunConfig
from fugaku_gpt.config.tree import flatten, parse_sections, parse_yaml, read_yaml_text
from fugaku_gpt.config.values import BadValue

_LONGEST_TEXT = 16_384  # characters of a text that is remembered; the trainer's have 2,500
_TEXTS = 4096  # how many are remembered, and how many sections


class Recorded(NamedTuple):
    """A configuration and its settings that differ from their defaults, which nobody may change.

    ``is_portable``: whether it is the same wherever its folder is, and from whichever folder it is read.
    """

    config: RunConfig
    settings: Dict[str, Any]
    is_portable: bool


class _Section(NamedTuple):
    name: str
    values: Any  # the section's dataclass
    changed: Dict[str, Any]


def load_recorded(file: Path) -> Recorded:
    """Load the configuration of a run directory, equal to that of :func:`load_run_config`.

    Raises:
        ConfigError: as that function.
    """
    text = read_yaml_text(file)
    recorded = _of_text(text) if len(text) <= _LONGEST_TEXT else None
    if recorded is not None and (recorded.is_portable or is_record(file)):
        return recorded._replace(is_portable=True)
    config = load_run_config(file)
    is_portable = is_record(file) or not has_relative_paths(dict(flatten(parse_yaml(text, str(file)))))
    return Recorded(config, changed_settings(config), is_portable)


@lru_cache(maxsize=_TEXTS)
def _of_text(text: str) -> Optional[Recorded]:
    """The configuration of a text, its paths as they are written; None if it is not as the trainer writes it."""
    sections: Dict[str, _Section] = {}
    for section_text in _section_texts(text):
        section = _section_of(section_text)
        if section is None or section.name in sections:
            return None
        sections[section.name] = section
    config = RunConfig(**{name: section.values for name, section in sections.items()})
    if config.job.shape or problems_of(config, lambda key: ""):  # a shape may set the number of nodes
        return None
    changed: Dict[str, Any] = {}
    for name in _section_types():  # in the order of the schema
        changed.update(sections[name].changed if name in sections else {})
    return Recorded(config, changed, not _names_relative_paths(config))


def _section_texts(text: str) -> List[str]:
    """The lines of each section: one begins where a line is not indented."""
    lines = text.splitlines(True)
    starts = [number for number, line in enumerate(lines) if line[0] != " "]
    return ["".join(lines[start:end]) for start, end in zip([0, *starts[1:]], [*starts[1:], len(lines)])]


@lru_cache(maxsize=_TEXTS)
def _section_of(text: str) -> Optional[_Section]:
    """The one section of a text; None if it is not as the trainer writes it, or is not valid."""
    tree = parse_sections(text, "")
    if tree is None or len(tree) != 1:
        return None
    (name, values), *_ = tree.items()
    if not isinstance(values, dict) or not {f"{name}.{key}" for key in values} <= _valid_keys():
        return None
    try:
        coerced = {key: coerce_setting(f"{name}.{key}", value) for key, value in values.items()}
    except BadValue:
        return None
    section = _section_types()[name](**coerced)
    return _Section(name, section, changed_of_sections({name: section_values(name, section)}))


@lru_cache(maxsize=1)
def _valid_keys() -> FrozenSet[str]:
    return frozenset(valid_keys())


@lru_cache(maxsize=1)
def _section_types() -> Dict[str, Any]:
    return get_type_hints(RunConfig)


def _names_relative_paths(config: RunConfig) -> bool:
    for key in PATH_KEYS:
        section, _, leaf = key.partition(".")
        value = getattr(getattr(config, section), leaf)
        if any(path and not path.startswith("/") for path in ([value] if isinstance(value, str) else value or ())):
            return True
    return False
