"""Builds dataclasses from values of JSON whose types are checked, so that no reader of a record meets another type."""

from __future__ import annotations

import math
from collections import abc
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from typing import Any, Callable, Dict, Mapping, Tuple, Type, TypeVar, Union, get_args, get_origin, get_type_hints

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
    arguments: Dict[str, Any] = {}
    for name, is_required, convert in _fields(kind):  # type: ignore[arg-type]
        if name in values:
            arguments[name] = convert(values[name], name)
        elif is_required:
            raise KeyError(name)
    return kind(**arguments)


def value_of(hint: Any, value: Any, name: str) -> Any:
    """Return a value of JSON as a field of a type has it.

    Raises:
        ValueError: it is not of this type, or is a number that nothing has; the message begins with ``name``.
    """
    return _converter(hint)(value, name)


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


Convert = Callable[[Any, str], Any]


@lru_cache(maxsize=None)
def _fields(kind: type) -> Tuple[Tuple[str, bool, Convert], ...]:
    """Name of each field of a dataclass, whether it has no default, and the function that converts its value."""
    hints = get_type_hints(kind)
    return tuple(
        (spec.name, spec.default is MISSING and spec.default_factory is MISSING, _converter(hints[spec.name]))
        for spec in fields(kind)
    )


@lru_cache(maxsize=None)
def _converter(hint: Any) -> Convert:
    """The function that converts values of a type, as :func:`value_of`: types are analysed once, not for each value."""
    origin, parameters = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value, name: value
    if origin is Union:
        others = [parameter for parameter in parameters if parameter is not type(None)]
        of_value = _converter(others[0])
        if len(others) == len(parameters):
            return of_value
        return lambda value, name: None if value is None else of_value(value, name)
    if origin is tuple:
        return _sequence_converter(parameters[0])
    if origin in (dict, abc.Mapping):
        return _mapping_converter(parameters[1])
    if is_dataclass(hint):
        return _only(dict, "an object", lambda value, name: record_of(hint, value))  # type: ignore[arg-type]
    return _scalar_converter(hint)


def _only(kinds: Any, expected: str, convert: Convert) -> Convert:
    """A function that converts values of these types of JSON, and refuses others."""

    def checked(value: Any, name: str) -> Any:
        if not isinstance(value, kinds):
            raise _unlike(value, name, expected)
        return convert(value, name)

    return checked


def _sequence_converter(item: Any) -> Convert:
    of_item = _converter(item)
    return _only((list, tuple), "a list", lambda value, name: tuple([of_item(entry, name) for entry in value]))


def _mapping_converter(item: Any) -> Convert:
    if item is Any:
        return _only(dict, "an object", lambda value, name: dict(value))
    of_item = _converter(item)
    return _only(
        dict, "an object", lambda value, name: {key: of_item(entry, f"{name}.{key}") for key, entry in value.items()}
    )


def _scalar_converter(hint: Any) -> Convert:
    expected = _NAMES.get(hint, "an object")

    def scalar(value: Any, name: str) -> Any:
        is_of_type = isinstance(value, hint) if hint in (str, bool) else is_number(value) and hint in (int, float)
        if not is_of_type or (hint is int and not isinstance(value, int)):
            raise _unlike(value, name, expected)
        return value

    return scalar


def _unlike(value: Any, name: str, expected: str) -> ValueError:
    return ValueError(f"{name} is {cut(repr(value))}, not {expected}")
