"""Loads a validated :class:`RunConfig` from a preset, a run file and ``--set`` overrides; writes it as YAML."""

from __future__ import annotations

import difflib
import json
import math
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Set, Tuple, Union, get_type_hints

import yaml

from fugaku_gpt.config.checks import problems_of
from fugaku_gpt.config.paths import with_paths_from
from fugaku_gpt.config.schema import RunConfig
from fugaku_gpt.config.tree import (
    Scalar,
    Tree,
    flatten,
    location_of,
    parse_override,
    parse_yaml,
    plain_values,
    quoted,
    read_yaml_file,
)
from fugaku_gpt.config.values import (
    BadValue,
    coerce_scalar,
    describe_type,
    element_type,
    format_duration,
    strip_optional,
)
from fugaku_gpt.errors import ConfigError
from fugaku_gpt.limits import MESSAGE_LINES, cut

PRESET_DIR = Path(__file__).parent / "presets"


@dataclass(frozen=True)
class SettingsLayer:
    """Dotted keys with values as written, from one origin: a preset, a run file, the command line or a sweep row."""

    origin: str
    values: Mapping[str, Tree]


def preset_names() -> List[str]:
    """Names of the presets of the package, smallest model first, classifiers of grids after the decoders."""
    names = (path.stem for path in PRESET_DIR.glob("*.yaml"))
    return sorted(names, key=lambda name: (name.startswith("arc-"), name != "tiny", _size(name), name))


# settings of a run that is only measured, such as a row of a sweep: nobody resumes it; anything written wins
MEASURED_ONLY = SettingsLayer("a run that is only measured", {"checkpoint.at_end": Scalar("false", False, "")})


def read_run_file(path: Path) -> SettingsLayer:
    """The settings of a run file, whose paths are relative to its folder
    (:func:`fugaku_gpt.config.paths.with_paths_from`).

    Raises:
        ConfigError: the file cannot be read, or is no mapping.
    """
    return SettingsLayer(str(path), with_paths_from(str(path), dict(flatten(read_yaml_file(path)))))


def load_run_config(
    file: Union[Path, SettingsLayer, None] = None,
    preset: Optional[str] = None,
    overrides: Sequence[str] = (),
    *,
    check: bool = True,
    is_only_measured: bool = False,
) -> RunConfig:
    """Load a run: a preset, overridden by a YAML file, overridden by ``key=value`` texts.

    A run file may name its preset with a top-level ``preset:``; the argument ``preset`` replaces it. It is a path, or
    what :func:`read_run_file` has read there. Without ``check`` the rules between fields are not checked; the caller
    does so after it has changed some of them. With ``is_only_measured``, defaults are those of runs that nobody resumes
    (``MEASURED_ONLY``).

    Raises:
        ConfigError: settings are wrong; it has one line for each, with file, key, value, and valid values.
    """
    layers: List[SettingsLayer] = [MEASURED_ONLY] if is_only_measured else []
    if file is not None:
        layers.append(file if isinstance(file, SettingsLayer) else read_run_file(file))
    command_line = [parse_override(text) for text in overrides]
    layers.append(SettingsLayer("--set", dict(command_line)))
    return build_run_config(layers, preset, check=check)


def build_run_config(layers: Iterable[SettingsLayer], preset: Optional[str] = None, *, check: bool = True) -> RunConfig:
    """Build a run from layers of settings; later layers override earlier ones, which override their preset.

    Raises:
        ConfigError: as :func:`load_run_config`.
    """
    merged: Dict[str, Tree] = {}
    origins: Dict[str, str] = {}  # for values without a line of their own, such as an empty list
    for layer in layers:
        for key, value in layer.values.items():
            merged[key], origins[key] = value, layer.origin
    preset_value = merged.pop("preset", None)
    if preset is None and preset_value is not None:
        if not isinstance(preset_value, Scalar):
            raise ConfigError(f"{location_of(preset_value, 'preset')}: preset: expected one name")
        preset = preset_value.text
    if preset is not None:
        location = (
            location_of(preset_value, "--preset")
            if isinstance(preset_value, Scalar) and preset_value.text == preset
            else "--preset"
        )
        merged = {**preset_settings(preset, location).values, **merged}
    locations = {key: location_of(value, origins.get(key, "")) for key, value in merged.items()}
    config, problems = _construct(merged, locations)
    if config.job.shape and "job.nodes" not in merged:
        config = replace(config, job=replace(config.job, nodes=math.prod(int(n) for n in config.job.shape.split("x"))))
    if not problems and check:
        problems = problems_of(config, lambda key: locations.get(key, ""))
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def json_layer(origin: str, sections: Mapping[str, Mapping[str, object]]) -> SettingsLayer:
    """Settings by section, as the values of another file that is JSON: its name stands where messages name a line."""
    values: Dict[str, Tree] = {}
    for section, of_section in sections.items():
        for name, value in of_section.items():
            key, tree = parse_override(f"{section}.{name}={json.dumps(value)}")
            values[key] = replace(tree, location=origin) if isinstance(tree, Scalar) else tree
    return SettingsLayer(origin, values)


def written_keys(file: Union[Path, SettingsLayer, None], overrides: Sequence[str]) -> Set[str]:
    """The dotted keys that a run file and ``key=value`` texts set, without those of their preset; with ``preset``.
    The file is a path, or what :func:`read_run_file` has read there.

    Raises:
        ConfigError: the file or a text cannot be parsed.
    """
    keys = {key for key, _ in (parse_override(text) for text in overrides)}
    if file is None:
        return keys
    return keys | set((file if isinstance(file, SettingsLayer) else read_run_file(file)).values)


def preset_settings(name: str, location: str) -> SettingsLayer:
    """The settings of a preset of the package; ``location`` is where its name was written."""
    path = PRESET_DIR / f"{name}.yaml"
    if name not in preset_names():
        raise ConfigError(f"{location}: preset: {cut(name)!r} is not a preset; valid: {', '.join(preset_names())}")
    origin = f"preset {name}"
    return SettingsLayer(origin, dict(flatten(parse_yaml(path.read_text(encoding="utf-8"), origin))))


def valid_keys() -> List[str]:
    """All dotted keys of a run file."""
    return [key for key, _, _ in _fields_of(RunConfig)]


def coerce_setting(key: str, value: Tree) -> Any:
    """Convert the value of one key of :func:`valid_keys`, without the rules between fields.

    Raises:
        BadValue: the field does not accept it.
    """
    if isinstance(value, Scalar):
        return _coerced_scalar(key, value.text, value.is_quoted)
    return _coerce(value, *_field_types()[key])


@lru_cache(maxsize=4096)
def _coerced_scalar(key: str, text: str, is_quoted: bool) -> Any:
    """The value of a field that is written as one scalar; the runs of a store have most of them in common."""
    return _coerce(Scalar(text, is_quoted, ""), *_field_types()[key])


def dump_run_config(config: RunConfig) -> str:
    """The run as YAML with all fields; :func:`load_run_config` reads an equal run from it."""
    return str(yaml.safe_dump(config_values(config), sort_keys=False, width=120))


def config_values(config: RunConfig) -> Dict[str, Dict[str, Any]]:
    """All fields of a run, section → key → value that YAML and JSON can represent (durations as H:MM:SS)."""
    return {name: section_values(name, section) for name, section in vars(config).items()}


def section_values(name: str, section: Any) -> Dict[str, Any]:
    """The fields of one section of a run as :func:`config_values` has them."""
    values: Dict[str, Any] = {
        key: list(value) if isinstance(value, tuple) else value for key, value in vars(section).items()
    }
    if name == "job":
        for key in ("elapse", "elapse_min", "stop_margin"):
            seconds = values[key]
            if seconds is not None and seconds == int(seconds):
                values[key] = format_duration(seconds)
    return values


def changed_settings(config: RunConfig) -> Dict[str, Any]:
    """The settings that differ from their defaults, dotted key → value (durations as H:MM:SS), in the schema's order.

    These settings identify a run, so that a field which is added to the schema later does not change older runs.
    """
    return changed_of_sections(config_values(config))


def changed_of_sections(sections: Mapping[str, Mapping[str, Any]]) -> Dict[str, Any]:
    """:func:`changed_settings` of sections as :func:`config_values` has them."""
    defaults = _default_settings()
    return {key: value for key, value in dotted_settings(sections).items() if value != defaults[key]}


@lru_cache(maxsize=1)
def _default_settings() -> Dict[str, Any]:
    return dotted_settings(config_values(RunConfig()))


def readable_settings(written: Mapping[str, Tree]) -> Dict[str, Any]:
    """Return the settings of a file that makes no valid run which differ from their defaults, each read by itself.

    A value that its field does not accept stays a text.
    """
    valid, defaults = set(valid_keys()), RunConfig()
    settings: Dict[str, Any] = {}
    for key, value in written.items():
        section, _, leaf = key.partition(".")
        if key not in valid:
            continue
        try:
            parsed = coerce_setting(key, value)
        except BadValue:
            parsed = plain_values(value)
        if parsed != getattr(getattr(defaults, section), leaf):
            settings[key] = list(parsed) if isinstance(parsed, tuple) else parsed
    return settings


def dotted_settings(sections: Mapping[str, Mapping[str, Any]]) -> Dict[str, Any]:
    """Dotted key → value of settings that are given as section → key → value."""
    return {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}


@lru_cache(maxsize=1)
def _section_types() -> Dict[str, Any]:
    """Name of each section → its dataclass."""
    return get_type_hints(RunConfig)


@lru_cache(maxsize=1)
def _fields_of(config: type) -> Tuple[Tuple[str, Any, Mapping[str, Any]], ...]:
    """The dotted key, type and metadata of every leaf field."""
    hints = get_type_hints(config)
    leaf_fields = []
    for section in fields(config):
        section_hints = get_type_hints(hints[section.name])
        for leaf in fields(hints[section.name]):
            leaf_fields.append((f"{section.name}.{leaf.name}", section_hints[leaf.name], leaf.metadata))
    return tuple(leaf_fields)


@lru_cache(maxsize=1)
def _field_types() -> Dict[str, Tuple[Any, Mapping[str, Any]]]:
    """Dotted key → type and metadata of its field."""
    return {key: (kind, metadata) for key, kind, metadata in _fields_of(RunConfig)}


def _construct(merged: Mapping[str, Tree], locations: Mapping[str, str]) -> Tuple[RunConfig, List[str]]:
    """The configuration of the converted values, and a line for every key or value that is not valid.

    ``locations`` has the file and line of each key.
    """
    field_types = _field_types()
    problems: List[str] = []
    sections: Dict[str, Dict[str, Any]] = {}
    for key, value in merged.items():
        location = locations[key]
        if len(problems) > MESSAGE_LINES.value:  # more are not shown
            break
        if key not in field_types:
            problems.append(_unknown_key(key, value, location, field_types))
            continue
        try:
            coerced = coerce_setting(key, value)
        except BadValue as error:
            kind, metadata = field_types[key]
            problems.append(f"{location}: {key}: {quoted(value)}: {error}; valid: {describe_type(kind, metadata)}")
            continue
        section, _, leaf = key.partition(".")
        sections.setdefault(section, {})[leaf] = coerced
    hints = _section_types()
    return RunConfig(**{name: hints[name](**values) for name, values in sections.items()}), problems


def _coerce(value: Tree, kind: Any, metadata: Mapping[str, Any]) -> Any:
    element = element_type(strip_optional(kind))
    if element is None:
        if not isinstance(value, Scalar):
            raise BadValue("expected one value")
        return coerce_scalar(value.text, value.is_quoted, kind, metadata)
    items = [value] if isinstance(value, Scalar) else value
    if not isinstance(items, list) or not all(isinstance(item, Scalar) for item in items):
        raise BadValue("expected a list")
    return tuple(
        coerce_scalar(item.text, item.is_quoted, element, metadata) for item in items if isinstance(item, Scalar)
    )


def _unknown_key(key: str, value: Tree, location: str, all_keys: Mapping[str, Any]) -> str:
    section, _, leaf = key.partition(".")
    siblings = [name for name in all_keys if name.startswith(section + ".")]
    # a misspelt key of its section; then a misspelt section; then a key of another section, or one without a section
    similar_keys = [
        f"{section}.{name}"
        for name in difflib.get_close_matches(leaf, [sibling.partition(".")[2] for sibling in siblings], n=1)
    ]
    similar_keys = similar_keys or ([] if siblings else difflib.get_close_matches(key, all_keys, n=1))
    similar_keys = similar_keys or [name for name in all_keys if name.rpartition(".")[2] == key.rpartition(".")[2]]
    if similar_keys:
        hint = f"did you mean {similar_keys[0]}?"
    else:
        hint = "valid: " + ", ".join(
            siblings or sorted({name.partition(".")[0] + ".*" for name in all_keys} | {"preset"})
        )
    return f"{location}: {key}: unknown key (value {quoted(value)}); {hint}"


def _size(name: str) -> float:
    """The parameters that the name of a preset ends in, such as 13b in fugaku-llm-13b."""
    digits = name.rpartition("-")[2].rstrip("bmk")
    try:
        return float(digits) * {"m": 1e6, "b": 1e9, "k": 1e3}.get(name[-1:], 1.0)
    except ValueError:
        return 0.0
