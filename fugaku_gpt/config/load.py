"""Preset, run file and ``--set`` overrides → one validated :class:`RunConfig`, and back to YAML."""

from __future__ import annotations

import difflib
import math
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, get_type_hints

import yaml

from fugaku_gpt.config.checks import problems_of
from fugaku_gpt.config.schema import RunConfig
from fugaku_gpt.config.tree import Scalar, Tree, flatten, parse_override, parse_yaml, plain, read_yaml_file, where
from fugaku_gpt.config.values import BadValue, coerce_scalar, element_type, format_duration, strip_optional, type_words
from fugaku_gpt.errors import ConfigError

PRESET_DIR = Path(__file__).parent / "presets"


@dataclass(frozen=True)
class Settings:
    """Dotted keys and their values as written, from one origin (a preset, a run file, the command line, a sweep
    row)."""

    origin: str
    values: Mapping[str, Tree]


def preset_names() -> List[str]:
    """The presets that ship with the package, smallest model first."""
    return sorted((path.stem for path in PRESET_DIR.glob("*.yaml")), key=lambda name: (name != "tiny", _size(name)))


def load_run_config(
    file: Optional[Path] = None, preset: Optional[str] = None, overrides: Sequence[str] = (), *, check: bool = True
) -> RunConfig:
    """The run described by a preset, then a YAML file over it, then ``key=value`` overrides over both.

    Without ``check`` the rules between fields are left to the caller, who will change some of them.

    A run file may name its own preset with a top-level ``preset:``; ``--preset`` on the command line replaces that.

    Raises:
        ConfigError: with one line for each thing that is wrong: file, key, value, and what would be valid.
    """
    layers: List[Settings] = []
    if file is not None:
        layers.append(Settings(str(file), dict(flatten(read_yaml_file(file)))))
    command_line = [parse_override(text) for text in overrides]
    layers.append(Settings("--set", dict(command_line)))
    return build_run_config(layers, preset, check=check)


def build_run_config(layers: Iterable[Settings], preset: Optional[str] = None, *, check: bool = True) -> RunConfig:
    """The run described by settings, later layers over earlier ones, over their preset (see :func:`load_run_config`).

    Raises:
        ConfigError: as :func:`load_run_config`.
    """
    merged: Dict[str, Tree] = {}
    origins: Dict[str, str] = {}  # of what has no line of its own: an empty list
    for layer in layers:
        for key, value in layer.values.items():
            merged[key], origins[key] = value, layer.origin
    named = merged.pop("preset", None)
    if preset is None and named is not None:
        if not isinstance(named, Scalar):
            raise ConfigError(f"{where(named, 'preset')}: preset: expected one name")
        preset = named.text
    if preset is not None:
        at = where(named, "--preset") if isinstance(named, Scalar) and named.text == preset else "--preset"
        merged = {**preset_settings(preset, at).values, **merged}
    places = {key: where(value, origins.get(key, "")) for key, value in merged.items()}
    config, problems = _construct(merged, places)
    if config.job.shape and "job.nodes" not in merged:
        config = replace(config, job=replace(config.job, nodes=math.prod(int(n) for n in config.job.shape.split("x"))))
    if not problems and check:
        problems = problems_of(config, lambda key: places.get(key, ""))
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def preset_settings(name: str, at: str) -> Settings:
    """The settings of a preset that ships with the package; ``at`` names who asked for it."""
    path = PRESET_DIR / f"{name}.yaml"
    if name not in preset_names():
        raise ConfigError(f"{at}: preset: {name!r} is not a preset; valid: {', '.join(preset_names())}")
    origin = f"preset {name}"
    return Settings(origin, dict(flatten(parse_yaml(path.read_text(encoding="utf-8"), origin))))


def valid_keys() -> List[str]:
    """Every dotted key of a run file."""
    return [key for key, _, _ in _fields_of(RunConfig)]


def coerce_setting(key: str, value: Tree) -> Any:
    """The value of one setting of :func:`valid_keys`, looked at by itself.

    Raises:
        BadValue: the field cannot take it.
    """
    known = {name: (kind, metadata) for name, kind, metadata in _fields_of(RunConfig)}
    return _coerce(value, *known[key])


def dump_run_config(config: RunConfig) -> str:
    """The run as YAML with every field written out; :func:`load_run_config` reads it back equal."""
    return str(yaml.safe_dump(config_values(config), sort_keys=False, width=120))


def config_values(config: RunConfig) -> Dict[str, Dict[str, Any]]:
    """Every field of a run, section → key → value as YAML and JSON can hold it (durations as H:MM:SS)."""
    tree: Dict[str, Dict[str, Any]] = asdict(config)
    for section in tree.values():
        for key, value in section.items():
            if isinstance(value, tuple):
                section[key] = list(value)
    for key in ("elapse", "elapse_min", "stop_margin"):
        seconds = tree["job"][key]
        if seconds is not None and seconds == int(seconds):
            tree["job"][key] = format_duration(seconds)
    return tree


def changed_settings(config: RunConfig) -> Dict[str, Any]:
    """The settings that differ from their defaults, dotted key → value (durations as H:MM:SS), in the schema's order.

    A run is known by these: a field that is added to the schema later changes nothing about older runs.
    """
    now, usual = config_values(config), config_values(RunConfig())
    return {
        f"{section}.{key}": value
        for section, values in now.items()
        for key, value in values.items()
        if value != usual[section][key]
    }


@lru_cache(maxsize=1)
def _fields_of(config: type) -> Tuple[Tuple[str, Any, Mapping[str, Any]], ...]:
    """(dotted key, type, metadata) of every leaf field."""
    hints = get_type_hints(config)
    found = []
    for section in fields(config):
        section_hints = get_type_hints(hints[section.name])
        for leaf in fields(hints[section.name]):
            found.append((f"{section.name}.{leaf.name}", section_hints[leaf.name], leaf.metadata))
    return tuple(found)


def _construct(merged: Mapping[str, Tree], places: Mapping[str, str]) -> Tuple[RunConfig, List[str]]:
    """The config of coerced values, and a line for every key or value that is not valid; ``places`` says where each
    was written."""
    known = {key: (kind, metadata) for key, kind, metadata in _fields_of(RunConfig)}
    problems: List[str] = []
    sections: Dict[str, Dict[str, Any]] = {}
    for key, value in merged.items():
        at = places[key]
        if key not in known:
            problems.append(_unknown_key(key, value, at, known))
            continue
        kind, metadata = known[key]
        try:
            coerced = _coerce(value, kind, metadata)
        except BadValue as error:
            problems.append(f"{at}: {key}: {plain(value)!r}: {error}; valid: {type_words(kind, metadata)}")
            continue
        section, _, leaf = key.partition(".")
        sections.setdefault(section, {})[leaf] = coerced
    hints = get_type_hints(RunConfig)
    return RunConfig(**{name: hints[name](**values) for name, values in sections.items()}), problems


def _coerce(value: Tree, kind: Any, metadata: Mapping[str, Any]) -> Any:
    element = element_type(strip_optional(kind))
    if element is None:
        if not isinstance(value, Scalar):
            raise BadValue("expected one value")
        return coerce_scalar(value.text, value.quoted, kind, metadata)
    items = [value] if isinstance(value, Scalar) else value
    if not isinstance(items, list) or not all(isinstance(item, Scalar) for item in items):
        raise BadValue("expected a list")
    return tuple(coerce_scalar(item.text, item.quoted, element, metadata) for item in items if isinstance(item, Scalar))


def _unknown_key(key: str, value: Tree, at: str, known: Mapping[str, Any]) -> str:
    section, _, leaf = key.partition(".")
    siblings = [name for name in known if name.startswith(section + ".")]
    # a slip within the right section; then in the section's name; then the right name in the wrong section, or in none
    near = [
        f"{section}.{name}" for name in difflib.get_close_matches(leaf, [s.partition(".")[2] for s in siblings], n=1)
    ]
    near = near or ([] if siblings else difflib.get_close_matches(key, known, n=1))
    near = near or [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
    if near:
        hint = f"did you mean {near[0]}?"
    else:
        hint = "valid: " + ", ".join(siblings or sorted({name.partition(".")[0] + ".*" for name in known} | {"preset"}))
    return f"{at}: {key}: unknown key (value {plain(value)!r}); {hint}"


def _size(name: str) -> float:
    digits = name.rstrip("bmk")
    try:
        return float(digits) * {"m": 1e6, "b": 1e9, "k": 1e3}.get(name[-1:], 1.0)
    except ValueError:
        return 0.0
