"""Converts the text of a setting to the value of its field.

YAML 1.1 reads ``1:00:00`` as the integer 3600, ``2e-4`` as a string, ``no`` as False and ``0777`` as 511. So YAML's own
conversion is not used: a scalar arrives here as its text, and the declared type of the field decides.
"""

from __future__ import annotations

import math
import re
from typing import Any, Mapping, Tuple, Union, get_args, get_origin

from fugaku_gpt.limits import NUMBER

_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
# The forms of durations; fugaku_gpt.api.schemas has them as patterns.
_CLOCK = re.compile(r"(?:(\d+):)?(\d+):(\d{1,2})(\.\d+)?", re.ASCII)
_SECONDS = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)(e[-+]?\d{1,2})?", re.ASCII | re.IGNORECASE)
_DURATION_WITH_UNITS = re.compile(
    r"(?:(\d+)d)?\s*(?:(\d+)h)?\s*(?:(\d+)m)?\s*(?:(\d+(?:\.\d+)?)s)?", re.ASCII | re.IGNORECASE
)
_TRUE = ("true", "yes", "on")
_FALSE = ("false", "no", "off")
NULLS = ("", "null", "~", "none")
_INT_LIMIT = 2**63  # the limit of integers in NumPy, torch and MPI


class BadValue(ValueError):
    """A scalar that the field's type does not accept; the message describes valid values."""


def parse_int(text: str) -> int:
    """Parse a whole number; ``1e6`` and ``1_000_000`` are accepted too."""
    value = parse_float(text)
    if not math.isfinite(value) or value != int(value):
        raise BadValue("expected a whole number")
    digits = text.replace("_", "")
    number = int(digits) if re.fullmatch(r"[-+]?\d+", digits) else int(value)  # a float has 53 bits
    if abs(number) >= _INT_LIMIT:
        raise BadValue("past the largest whole number, 2^63 - 1")
    return number


def parse_float(text: str) -> float:
    """Parse a number, with or without a decimal point and an exponent, such as ``2e-4``."""
    if len(text) > NUMBER.value or not _NUMBER.fullmatch(text):
        raise BadValue("expected a number, such as 0.1 or 2e-4")
    return float(text.replace("_", ""))


def parse_bool(text: str) -> bool:
    """Parse true, yes or on, or false, no or off, in any case."""
    lower = text.lower()
    if lower in _TRUE:
        return True
    if lower in _FALSE:
        return False
    raise BadValue("expected true or false")


def parse_duration(text: str) -> float:
    """Parse a duration such as ``3600``, ``H:MM:SS``, ``MM:SS`` or ``1h30m``; return seconds."""
    if len(text) > NUMBER.value:
        raise BadValue("expected seconds or H:MM:SS, such as 3600 or 1:00:00")
    clock = _CLOCK.fullmatch(text)
    if clock:
        hours, minutes = int(clock[1] or 0), int(clock[2])
        if int(clock[3]) < 60 and (clock[1] is None or minutes < 60):
            return hours * 3600.0 + minutes * 60.0 + float(clock[3] + (clock[4] or ""))
        raise BadValue("expected H:MM:SS with minutes and seconds below 60")
    if _SECONDS.fullmatch(text):
        return float(text.replace("_", ""))
    with_units = _DURATION_WITH_UNITS.fullmatch(text)
    if text and with_units and any(with_units.groups()):
        days, unit_hours, unit_minutes, unit_seconds = (float(group or 0) for group in with_units.groups())
        return ((days * 24 + unit_hours) * 60 + unit_minutes) * 60 + unit_seconds
    raise BadValue("expected seconds or H:MM:SS, such as 3600 or 1:00:00")


def format_duration(seconds: float) -> str:
    """A duration in whole seconds as ``H:MM:SS``, the inverse of :func:`parse_duration`."""
    total_seconds = int(seconds)
    return f"{total_seconds // 3600}:{total_seconds // 60 % 60:02d}:{total_seconds % 60:02d}"


def size_bytes(text: str) -> int:
    """A size such as ``28Gi`` in bytes."""
    return int(text[:-2]) << 10 * (1 + "KMGT".index(text[-2]))


def is_optional(kind: Any) -> bool:
    """Whether a field's type accepts None."""
    return get_origin(kind) is Union and type(None) in get_args(kind)


def strip_optional(kind: Any) -> Any:
    """``T`` for ``Optional[T]``; other types unchanged."""
    if is_optional(kind):
        (kind,) = (inner for inner in get_args(kind) if inner is not type(None))
    return kind


def element_type(kind: Any) -> Any:
    """``T`` for ``Tuple[T, ...]``; None for other types."""
    return get_args(kind)[0] if get_origin(kind) is tuple else None


def describe_type(kind: Any, metadata: Mapping[str, Any]) -> str:
    """A description of the values that a field accepts, for error messages and help."""
    inner = strip_optional(kind)
    if metadata.get("choices"):
        description = "one of " + ", ".join(str(choice) for choice in metadata["choices"])
    elif metadata.get("duration"):
        description = "seconds or H:MM:SS"
    elif element_type(inner) is not None:
        description = "a list of " + {int: "whole numbers", float: "numbers", str: "texts"}[element_type(inner)]
    else:
        description = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[inner]
    limits = [
        f"{limit_name} {metadata[key]:.10g}"
        for key, limit_name in (
            ("at_least", "at least"),
            ("at_most", "at most"),
            ("above", "above"),
            ("below", "below"),
        )
        if metadata.get(key) is not None
    ]
    if metadata.get("form"):
        description += ": " + metadata["form"][1]
    if limits:
        description += ", " + " and ".join(limits)
    return description + (", or null" if is_optional(kind) else "")


def is_null_text(text: str, is_quoted: bool) -> bool:
    """Whether a scalar of a setting that is a text means that there is none: ``null`` or ``~``, without quotes."""
    return not is_quoted and text.lower() in ("null", "~")


def coerce_scalar(text: str, is_quoted: bool, kind: Any, metadata: Mapping[str, Any]) -> Any:
    """Convert one scalar to a field of type ``kind``.

    Raises:
        BadValue: the text is not of that type, or is outside the field's limits.
    """
    is_choice = text in (metadata.get("choices") or ())  # `none` is a value of node.large_pages
    if is_optional(kind) and not is_quoted and text.lower() in NULLS and not is_choice:
        return None
    inner = strip_optional(kind)
    if inner is str:
        value: Any = "" if is_null_text(text, is_quoted) else text
    elif inner is bool:
        value = parse_bool(text)
    elif inner is int:
        value = parse_int(text)
    else:
        value = parse_duration(text) if metadata.get("duration") else parse_float(text)
    _check_limits(value, metadata)
    return value


def _check_limits(value: Any, metadata: Mapping[str, Any]) -> None:
    choices: Tuple[Any, ...] = metadata.get("choices") or ()
    form = metadata.get("form")
    if form is not None and value and not re.fullmatch(form[0], value):
        raise BadValue("not of the form of this field")
    if choices and value not in choices:
        raise BadValue("not one of the choices")
    if isinstance(value, float) and not math.isfinite(value):
        raise BadValue("not a finite number")
    at_least, at_most, above, below = (metadata.get(key) for key in ("at_least", "at_most", "above", "below"))
    if (
        (at_least is not None and value < at_least)
        or (at_most is not None and value > at_most)
        or (above is not None and value <= above)
        or (below is not None and value >= below)
    ):
        raise BadValue("outside the limits")
