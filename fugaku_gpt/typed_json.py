"""Builds dataclasses from values of JSON whose types are checked, so that no reader of a record meets another type."""

from __future__ import annotations

import math
from collections import abc
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from typing import Any, Dict, Mapping, Type, TypeVar, Union, get_args, get_origin, get_type_hints

from fugaku_gpt.limits import cut

T = TypeVar("T")

LATEST = 253402300800.0  # the year 10000, in seconds since the epoch: no calendar of Python's goes further
_LARGEST_INTEGER = 2**63
_LARGEST_FLOAT = 1e100  # products of such a figure with sizes and counts are finite
_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def record_of(kind: Type[T], values: Mapping[str, Any]) -> T:
    """Build a dataclass from the values of a record; keys that it has no field for are of a later version, and ignored.

    Raises:
        KeyError: a field without a default is missing.
        ValueError: a value is not of its field's type, or is a number that nothing has.
        TypeError: ``values`` is not a mapping.
    """
    if not isinstance(values, abc.Mapping):
        raise TypeError("not a JSON object")
    hints = _hints(kind)  # type: ignore[arg-type]
    arguments: Dict[str, Any] = {}
    for spec in fields(kind):  # type: ignore[arg-type]
        if spec.name in values:
            arguments[spec.name] = value_of(hints[spec.name], values[spec.name], spec.name)
        elif spec.default is MISSING and spec.default_factory is MISSING:
            raise KeyError(spec.name)
    return kind(**arguments)


def value_of(hint: Any, value: Any, name: str) -> Any:
    """Return a value of JSON as a field of a type has it.

    Raises:
        ValueError: it is not of this type, or is a number that nothing has; the message begins with ``name``.
    """
    origin, parameters = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin is Union:
        others = [parameter for parameter in parameters if parameter is not type(None)]
        return None if value is None and len(others) < len(parameters) else value_of(others[0], value, name)
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(value_of(parameters[0], item, name) for item in value)
    if origin in (dict, abc.Mapping) and isinstance(value, dict):
        return {key: value_of(parameters[1], item, f"{name}.{key}") for key, item in value.items()}
    if is_dataclass(hint) and isinstance(value, dict):
        return record_of(hint, value)  # type: ignore[arg-type]
    if hint is str and isinstance(value, str):
        return value
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and is_number(value) and isinstance(value, int):
        return value
    if hint is float and is_number(value):
        return value
    expected = _NAMES.get(hint) or ("a list" if origin is tuple else "an object")
    raise ValueError(f"{name} is {cut(repr(value))}, not {expected}")


def is_number(value: Any) -> bool:
    """True for a number that a record may have: finite, and within what integers and products of floats hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    if isinstance(value, int):
        return abs(value) < _LARGEST_INTEGER
    return math.isfinite(value) and abs(value) < _LARGEST_FLOAT


def check_times(**times: Any) -> None:
    """Check times in seconds since the epoch; None is no time.

    Raises:
        ValueError: one is before 1970, or after the year 9999.
    """
    for name, seconds in times.items():
        if seconds is not None and not 0 <= seconds < LATEST:
            raise ValueError(f"{name} is {seconds:g}, not a time in seconds since 1970")


@lru_cache(maxsize=None)
def _hints(kind: type) -> Dict[str, Any]:
    return get_type_hints(kind)
