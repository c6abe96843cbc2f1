"""A JSON Schema of the part of the trace-event format that is written: what Google's "Trace Event Format" asks of
complete events and of metadata, and of the object around them."""

from __future__ import annotations

from typing import Any, Dict

_IDS: Dict[str, Any] = {"pid": {"type": "integer", "minimum": 0}, "tid": {"type": "integer", "minimum": 0}}
_COMPLETE = {
    "type": "object",
    "required": ["ph", "name", "cat", "pid", "tid", "ts", "dur"],
    "properties": {
        "ph": {"const": "X"},
        "name": {"type": "string", "minLength": 1},
        "cat": {"type": "string"},
        "ts": {"type": "number", "minimum": 0},
        "dur": {"type": "number", "minimum": 0},
        "args": {"type": "object"},
        **_IDS,
    },
    "additionalProperties": False,
}


def _metadata(names: Any, argument: str, kind: str) -> Dict[str, Any]:
    return {
        "type": "object",
        "required": ["ph", "name", "pid", "tid", "args"],
        "properties": {
            "ph": {"const": "M"},
            "name": {"enum": names},
            "args": {
                "type": "object",
                "required": [argument],
                "properties": {argument: {"type": kind}},
                "additionalProperties": False,
            },
            **_IDS,
        },
        "additionalProperties": False,
    }


SCHEMA: Dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "traceEvents": {
            "type": "array",
            "items": {
                "oneOf": [
                    _COMPLETE,
                    _metadata(["process_name", "thread_name"], "name", "string"),
                    _metadata(["process_sort_index"], "sort_index", "integer"),
                ]
            },
        },
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "otherData": {"type": "object"},
    },
    "additionalProperties": False,
}
