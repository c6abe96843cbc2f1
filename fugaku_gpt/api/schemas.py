"""JSON Schemas of the files by which other programs speak with this one; generated from the code that reads them.

* ``run``: a run file, and ``config.yaml`` of a run directory. JSON is YAML, so a run file may be written as JSON.
* ``sweep``: a sweep file, which may be written as JSON as well.
* ``job``: one line of ``job.jsonl``, the history of the jobs of a run directory.
* ``result``: ``result.json`` of a run directory, which says how the run ended.

A schema states types, limits, choices and forms of each field. Rules between fields are checked when a file is loaded.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from dataclasses import MISSING, fields
from typing import Any, Callable, Dict, List, Mapping, Sequence, Tuple, get_args, get_origin, get_type_hints

from fugaku_gpt import __version__
from fugaku_gpt.config import preset_names
from fugaku_gpt.config.schema import RunConfig
from fugaku_gpt.config.values import element_type, is_optional, strip_optional
from fugaku_gpt.errors import UsageError
from fugaku_gpt.limits import NUMBER
from fugaku_gpt.records.job import STATES, JobStatus
from fugaku_gpt.records.run import STATUSES, Result
from fugaku_gpt.sweep.file import GROUPED, INTERLEAVED

Schema = Dict[str, Any]
SCHEMA_NAMES = ("run", "sweep", "job", "result")
DRAFT = "https://json-schema.org/draft/2020-12/schema"
_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean"}
_END = r"(?![\s\S])"  # of a text; in Python, $ is also before a newline at its end
_SPACE = r"[ \t\n\r\f\v]*"
_CLOCK = r"([0-9]+:0*[0-5]?[0-9]|[0-9]+):[0-5]?[0-9](\.[0-9]+)?"
_NUMBER = r"([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]{1,2})?"
_UNITS = rf"([0-9]+[dD])?{_SPACE}([0-9]+[hH])?{_SPACE}([0-9]+[mM])?{_SPACE}([0-9]+(\.[0-9]+)?[sS])?"
# durations as fugaku_gpt.config.values.parse_duration reads them; above 0, a digit other than 0 is there
_DURATION = rf"^({_CLOCK}|(\+?|-(?![^eE]*[1-9])){_NUMBER}|(?=[^0-9]*[0-9]){_UNITS}){_END}"
_DURATION_ABOVE_0 = rf"^((?=[^1-9]*[1-9])({_CLOCK}|{_UNITS})|\+?(?=[^1-9eE]*[1-9]){_NUMBER}){_END}"
_LARGEST_DURATION = 1e100
_LIMITS = (
    ("at_least", "minimum"),
    ("at_most", "maximum"),
    ("above", "exclusiveMinimum"),
    ("below", "exclusiveMaximum"),
)


def json_schema(name: str) -> Schema:
    """The JSON Schema of a form, one of ``SCHEMA_NAMES``.

    Raises:
        UsageError: there is no such form.
    """
    if name not in _SCHEMAS:
        raise UsageError(f"{name!r}: no JSON form; valid: {', '.join(SCHEMA_NAMES)}")
    title, make = _SCHEMAS[name]
    return {"$schema": DRAFT, "title": title, "$comment": f"fugaku_gpt {__version__}", **make()}


def attribute_texts(record: type) -> Dict[str, str]:
    """The ``Attributes:`` section of a class's docstring: field → meaning. One entry may name several fields."""
    _, _, section = (inspect.getdoc(record) or "").partition("Attributes:\n")
    meanings: Dict[str, str] = {}
    for entry in re.split(r"\n(?=\S)", textwrap.dedent(section.split("\n\n")[0])):
        names, colon, text = entry.partition(":")
        if colon:
            meanings.update((name.strip(), " ".join(text.split())) for name in names.split(","))
    return meanings


def record_schema(record: type) -> Schema:
    """The schema of a dataclass that ``fugaku_gpt.typed_json.record_of`` reads; later versions may have more
    fields, which are ignored."""
    hints, meanings = get_type_hints(record), attribute_texts(record)
    properties: Dict[str, Schema] = {}
    required: List[str] = []
    for spec in fields(record):
        properties[spec.name] = _of_hint(hints[spec.name])
        if spec.name in meanings:
            properties[spec.name]["description"] = meanings[spec.name]
        if spec.default is MISSING and spec.default_factory is MISSING:
            required.append(spec.name)
    return {"type": "object", "properties": properties, "required": required}


def _of_hint(hint: Any) -> Schema:
    if hint is Any:
        return {}
    if is_optional(hint):
        return _or_null(_of_hint(strip_optional(hint)))
    if get_origin(hint) is tuple:
        return {"type": "array", "items": _of_hint(get_args(hint)[0])}
    return {"type": _TYPES.get(hint, "object")}


def _or_null(schema: Schema) -> Schema:
    kinds = schema["type"] if isinstance(schema.get("type"), list) else [schema["type"]]
    choices = {"enum": [*schema["enum"], None]} if "enum" in schema else {}
    return {**schema, "type": [*kinds, "null"], **choices}


# ---- runs and sweeps -------------------------------------------------------------------------------------------------


def _settings_schema(of_field: Callable[[Schema], Schema]) -> Schema:
    """The settings of a run as sections, or as dotted keys.

    Args:
        of_field: makes the schema of what stands for a field of that of its value.
    """
    sections: Dict[str, Schema] = {}
    dotted: Dict[str, Schema] = {}
    for name, config in get_type_hints(RunConfig).items():
        hints = get_type_hints(config)
        members = {spec.name: of_field(_of_setting(hints[spec.name], spec)) for spec in fields(config)}
        sections[name] = {"type": "object", "properties": members, "additionalProperties": False}
        dotted.update((f"{name}.{key}", {"$ref": _pointer(name, key)}) for key in members)
    return {"type": "object", "properties": {**sections, **dotted}, "additionalProperties": False}


def _pointer(section: str, key: str) -> str:
    return f"#/properties/{section}/properties/{key}"


def _of_setting(hint: Any, spec: Any) -> Schema:
    about: Mapping[str, Any] = spec.metadata
    inner = strip_optional(hint)
    element = element_type(inner)
    schema = _of_scalar(element if element is not None else inner, about)
    if element is not None:
        schema = {"type": "array", "items": schema}
    if is_optional(hint):
        schema = _or_null(schema)
    unit = f" [{about['unit']}]" if about["unit"] else ""
    default = list(spec.default) if isinstance(spec.default, tuple) else spec.default
    return {**schema, "description": about["meaning"] + unit, "default": default}


def _of_scalar(kind: Any, about: Mapping[str, Any]) -> Schema:
    schema: Schema = {"type": _TYPES[kind]}
    if about["duration"]:
        pattern = _DURATION_ABOVE_0 if about["above"] == 0 else _DURATION
        schema = {"type": ["number", "string"], "pattern": pattern, "maxLength": NUMBER.value}
        schema["exclusiveMaximum"] = _LARGEST_DURATION
    if about["choices"]:
        schema["enum"] = list(about["choices"])
    if about["form"] is not None:
        schema["pattern"] = f"^({about['form'][0]})?{_END}"
    schema.update((keyword, about[limit]) for limit, keyword in _LIMITS if about[limit] is not None)
    return schema


def _run_schema() -> Schema:
    schema = _settings_schema(lambda value: value)
    preset = {"enum": preset_names(), "description": "preset that the settings are over"}
    return {**schema, "properties": {"preset": preset, **schema["properties"]}}


def _sweep_schema() -> Schema:
    settings = _within("settings", _settings_schema(lambda value: value))
    axes = _within("axes", _settings_schema(lambda value: {"type": "array", "items": value, "minItems": 1}))
    values, axis_values = {"$ref": "#/$defs/settings"}, {"$ref": "#/$defs/axes"}
    texts = {"type": ["string", "array"], "items": {"type": "string"}}
    named = {"type": "object", "additionalProperties": values}
    row = {"type": "object", "properties": {"label": {"type": "string"}}}
    properties: Dict[str, Schema] = {
        "name": {"type": "string", "description": "name of the sweep; default: that of the file"},
        "preset": {"enum": preset_names()},
        "defaults": {**values, "description": "settings of every row"},
        "matrix": {**axis_values, "description": "every combination of these is a row; the last key changes fastest"},
        "zip": {
            "anyOf": [axis_values, {"type": "array", "items": axis_values}],
            "description": "lists that advance together",
        },
        "variants": {"anyOf": [named, {"type": "array", "items": named}], "description": "named settings"},
        "where": {**texts, "description": "expressions that combinations must meet"},
        "exclude": {
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": [{"type": "string"}, values]}}],
            "description": "combinations that are left out",
        },
        "include": {"type": "array", "items": row, "description": "more rows: a label, and settings"},
        "repeats": {"type": "integer", "minimum": 1, "description": "number of runs of each row"},
        "order": {"enum": [INTERLEAVED, GROUPED]},
    }
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "$defs": {"settings": settings, "axes": axes},
    }


def _within(name: str, schema: Schema) -> Schema:
    """A schema of settings as a definition of this name: its references point into the definition."""

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: moved(entry) for key, entry in value.items()}
        if isinstance(value, str) and value.startswith("#/properties/"):
            return f"#/$defs/{name}{value[1:]}"
        return value

    moved_schema: Schema = moved(schema)
    return moved_schema


# ---- jobs and results ------------------------------------------------------------------------------------------------

_TEXT: Schema = {"type": "string"}
_LINKS: Mapping[str, Schema] = {
    "scheduler": _TEXT,
    "tag": {"type": "string", "description": "unique; the job carries it as its comment"},
    "link": {"type": "integer", "minimum": 1, "description": "number of the link in the chain"},
    "chain": {"type": "integer", "minimum": 1, "description": "number of links"},
    "bulk": {"type": "string", "description": "numbers of the sub-jobs, such as 0-9; empty if it is no bulk job"},
    "folder": {"type": "string", "description": "folder in which the job of a script starts that is of no run"},
}
_ENDINGS = {"tag": _TEXT, "reason": _TEXT}
_EVENTS: Sequence[Tuple[Sequence[str], Mapping[str, Schema], Sequence[str]]] = (
    (("intent",), _LINKS, ("scheduler", "tag", "link", "chain", "bulk")),
    (
        ("submitted",),
        {
            **_LINKS,
            "job_id": _TEXT,
            "script": {"type": "string", "description": "name of the script in the run directory"},
            "command": {"type": "array", "items": _TEXT, "description": "the words of the command that submitted it"},
        },
        ("scheduler", "job_id"),
    ),
    (("refused", "abandoned"), _ENDINGS, ("tag", "reason")),
    (("cancelled", "held", "released"), {"job_id": _TEXT}, ("job_id",)),
    (("attempt",), {"number": {"type": "integer", "minimum": 1}}, ("number",)),
)


def _job_schema() -> Schema:
    kinds = [_event(names, properties, required) for names, properties, required in _EVENTS]
    status = record_schema(JobStatus)
    status["properties"]["state"]["enum"] = list(STATES)
    return {"oneOf": [*kinds, _event(("status",), status["properties"], status["required"])]}


def _event(kinds: Sequence[str], properties: Mapping[str, Schema], required: Sequence[str]) -> Schema:
    time = {"type": "number", "description": "seconds since the epoch"}
    return {
        "type": "object",
        "properties": {"kind": {"enum": list(kinds)}, "time": time, **properties},
        "required": ["kind", "time", *required],
    }


def _result_schema() -> Schema:
    schema = record_schema(Result)
    schema["properties"]["status"]["enum"] = list(STATUSES)
    schema["properties"]["summary"]["additionalProperties"] = {"type": ["number", "null"]}
    return schema


_SCHEMAS: Mapping[str, Tuple[str, Callable[[], Schema]]] = {
    "run": ("A run file of fugaku_gpt", _run_schema),
    "sweep": ("A sweep file of fugaku_gpt", _sweep_schema),
    "job": ("A line of job.jsonl of fugaku_gpt", _job_schema),
    "result": ("result.json of fugaku_gpt", _result_schema),
}
