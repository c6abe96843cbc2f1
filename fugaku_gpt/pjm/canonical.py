"""A script as canonical JSON: what it asks for, whatever way it was written."""

from __future__ import annotations

from typing import Any, Callable, Dict, Mapping, Optional

from fugaku_gpt.pjm.options import (
    KEYS,
    OPTIONS,
    parse_axes,
    parse_bulk,
    parse_count,
    parse_elapse,
    parse_flags,
    parse_limit,
    parse_node,
    parse_shape,
    parse_size,
    parse_step,
    parse_switch,
    parse_vnode,
)
from fugaku_gpt.pjm.script import PjmScript

MAIL_FLAGS = "bersS"


def script_as_json(script: PjmScript) -> Dict[str, Any]:
    """Return the script as JSON data.

    Values are typed where they can be parsed (sizes in bytes) and remain text where they cannot. ``node`` and
    ``elapse`` stay as written under ``resources`` and are parsed into ``nodes`` and ``elapse``; the ``sparam`` of a
    bulk or step job is parsed into ``bulk_numbers`` and ``step_parameters``. Never raises.
    """
    data: Dict[str, Any] = {
        "directives": [
            {
                "line": directive.line,
                "option": directive.option,
                "key": directive.key,
                "value": directive.value,
                "known": directive.is_supported,
            }
            for directive in script.directives
        ],
        "resources": {},
        "mpi": {},
        "llio": {},
    }
    for name, value in script.options.items():
        data[name] = _typed(name, value)
    resources = script.resources
    nodes = _parsed(_nodes, resources.get("node"))
    if nodes is not None:
        data["nodes"] = nodes
    elapse = _parsed(_elapse, resources.get("elapse"))
    if elapse is not None:
        data["elapse"] = elapse
    sparam = script.options.get("sparam")
    if isinstance(sparam, str):
        for mode, key, reader in (("bulk", "bulk_numbers", _bulk), ("step", "step_parameters", _step)):
            typed = _parsed(reader, sparam) if mode in script.options else None
            if typed is not None:
                data[key] = typed
    data["body_line"] = script.body_line
    for name, numbers in (("late", script.ignored_lines), ("disabled", script.disabled_lines)):
        data[name] = [{"line": number, "text": script.lines[number - 1]} for number in numbers]
    data["problems"] = [
        {"line": directive.line, "kind": directive.kind, "text": directive.text} for directive in script.problems
    ]
    return data


def _parsed(reader: Callable[[str], Any], text: Optional[str]) -> Any:
    """Return the value that ``reader`` parses from ``text``; None where it cannot parse it."""
    if text is None:
        return None
    try:
        return reader(text)
    except ValueError:
        return None


def _nodes(text: str) -> Dict[str, Any]:
    node = parse_node(text)
    return {
        "shape": list(node.dims),
        "count": node.count,
        "allocation": node.allocation or None,
        "strict": node.strict or None,
        "io": node.io or None,
    }


def _elapse(text: str) -> Dict[str, Any]:
    elapse = parse_elapse(text)
    return {"min_seconds": elapse.minimum, "max_seconds": elapse.maximum, "range": elapse.is_range}


def _bulk(text: str) -> Any:
    return list(parse_bulk(text))


def _step(text: str) -> Dict[str, Any]:
    step = parse_step(text)
    return {
        "jid": step.job_id,
        "jnam": step.job_name,
        "sn": step.number,
        "condition": step.condition or None,
        "deletion": step.deletion or None,
        "steps": list(step.steps),
    }


def _int(text: str) -> int:
    return -parse_count(text[1:]) if text.startswith("-") else parse_count(text)


def _text(text: str) -> str:
    return text


# kind of value, as in options.KEYS, to its reader; node and elapse stay text
_KEY_READERS: Mapping[str, Callable[[str], Any]] = {
    "size": parse_size,
    "count": parse_count,
    "int": _int,
    "switch": parse_switch,
    "shape": lambda text: list(parse_shape(text)),
    "axes": parse_axes,
    "vnode": parse_vnode,
    "size?": parse_limit,
    "count?": lambda text: parse_limit(text, parse_count),
}
_OPTION_READERS: Mapping[str, Callable[[str], Any]] = {
    "gid": parse_count,
    "priority": parse_count,
    "mail": lambda text: list(parse_flags(text, MAIL_FLAGS)),
    "mail_list": lambda text: text.split(","),
}
_KINDS = {option.name: option.kind for option in OPTIONS}


def _typed(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _typed_key(name, key, text) for key, text in value.items()}
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, str) and name in _OPTION_READERS:
        return _value_or_text(_OPTION_READERS[name], value)
    return value


def _typed_key(name: str, key: str, text: Optional[str]) -> Any:
    if text is None:
        return True if name in ("mpi", "llio") else None
    return _value_or_text(_KEY_READERS.get(KEYS.get(name, {}).get(key, ""), _text), text)


def _value_or_text(reader: Callable[[str], Any], text: str) -> Any:
    """Return the value that ``reader`` parses from ``text``; the text itself if it cannot, or for ``unlimited``."""
    value = _parsed(reader, text)
    return text if value is None else value
