"""From what a person wrote to the value that was meant.

YAML 1.1 reads ``1:00:00`` as the integer 3600, ``2e-4`` as a string, ``no`` as False and ``0777`` as 511. So YAML's own
reading is not used at all: a scalar arrives here as its text, and the declared type of the field decides.
"""

from __future__ import annotations

import math
import re
from typing import Any, Mapping, Tuple, Union, get_args, get_origin

_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
_CLOCK = re.compile(r"(?:(\d+):)?(\d+):(\d{1,2}(?:\.\d+)?)")
_LETTERS = re.compile(r"(?:(\d+)d)?\s*(?:(\d+)h)?\s*(?:(\d+)m)?\s*(?:(\d+(?:\.\d+)?)s)?", re.IGNORECASE)
_TRUE = ("true", "yes", "on")
_FALSE = ("false", "no", "off")
NULLS = ("", "null", "~", "none")
_LONGEST_NUMBER = 100  # characters; Python refuses to read numbers of thousands of digits
_INT_LIMIT = 2**63  # what NumPy, torch and MPI count with


class BadValue(ValueError):
    """A scalar that the field's type cannot take; the message says what would be valid."""


def parse_int(text: str) -> int:
    """A whole number; ``1e6`` and ``1_000_000`` are whole numbers too."""
    value = parse_float(text)
    if not math.isfinite(value) or value != int(value):
        raise BadValue("expected a whole number")
    if abs(value) >= _INT_LIMIT:
        raise BadValue("past the largest whole number, 2^63 - 1")
    plain = text.replace("_", "")
    return int(plain) if re.fullmatch(r"[-+]?\d+", plain) else int(value)


def parse_float(text: str) -> float:
    """A number, with or without point and exponent (``2e-4`` included)."""
    if len(text) > _LONGEST_NUMBER or not _NUMBER.fullmatch(text):
        raise BadValue("expected a number, such as 0.1 or 2e-4")
    return float(text.replace("_", ""))


def parse_bool(text: str) -> bool:
    """true/yes/on or false/no/off, any case."""
    lower = text.lower()
    if lower in _TRUE:
        return True
    if lower in _FALSE:
        return False
    raise BadValue("expected true or false")


def parse_duration(text: str) -> float:
    """Seconds from ``3600``, ``H:MM:SS``, ``MM:SS`` or ``1h30m``."""
    if len(text) > _LONGEST_NUMBER:
        raise BadValue("expected seconds or H:MM:SS, such as 3600 or 1:00:00")
    clock = _CLOCK.fullmatch(text)
    if clock:
        hours, minutes, seconds = int(clock[1] or 0), int(clock[2]), float(clock[3])
        if seconds < 60 and (clock[1] is None or minutes < 60):
            return hours * 3600.0 + minutes * 60.0 + seconds
        raise BadValue("expected H:MM:SS with minutes and seconds below 60")
    if _NUMBER.fullmatch(text):
        return float(text.replace("_", ""))
    letters = _LETTERS.fullmatch(text)
    if text and letters and any(letters.groups()):
        days, hours_, minutes_, seconds_ = (float(group or 0) for group in letters.groups())
        return ((days * 24 + hours_) * 60 + minutes_) * 60 + seconds_
    raise BadValue("expected seconds or H:MM:SS, such as 3600 or 1:00:00")


def format_duration(seconds: float) -> str:
    """``H:MM:SS`` of whole seconds, the inverse of :func:`parse_duration`."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def size_bytes(text: str) -> int:
    """``28Gi`` as bytes."""
    return int(text[:-2]) << 10 * (1 + "KMGT".index(text[-2]))


def is_optional(kind: Any) -> bool:
    """Whether a field's type takes None."""
    return get_origin(kind) is Union and type(None) in get_args(kind)


def strip_optional(kind: Any) -> Any:
    """``Optional[T]`` → ``T``; other types as they are."""
    if is_optional(kind):
        (kind,) = (inner for inner in get_args(kind) if inner is not type(None))
    return kind


def element_type(kind: Any) -> Any:
    """``Tuple[T, ...]`` → ``T``, else None."""
    return get_args(kind)[0] if get_origin(kind) is tuple else None


def type_words(kind: Any, metadata: Mapping[str, Any]) -> str:
    """What a field takes, in words, for error messages and help."""
    inner = strip_optional(kind)
    if metadata.get("choices"):
        words = "one of " + ", ".join(str(choice) for choice in metadata["choices"])
    elif metadata.get("duration"):
        words = "seconds or H:MM:SS"
    elif element_type(inner) is not None:
        words = "a list of " + {int: "whole numbers", float: "numbers", str: "texts"}[element_type(inner)]
    else:
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[inner]
    limits = [
        f"{word} {metadata[key]:g}"
        for key, word in (("at_least", "at least"), ("above", "above"), ("below", "below"))
        if metadata.get(key) is not None
    ]
    if metadata.get("form"):
        words += ": " + metadata["form"][1]
    if limits:
        words += ", " + " and ".join(limits)
    return words + (", or null" if is_optional(kind) else "")


def coerce_scalar(text: str, quoted: bool, kind: Any, metadata: Mapping[str, Any]) -> Any:
    """The value of one scalar for a field of type ``kind``.

    Raises:
        BadValue: the text is not of that type or is outside the field's limits.
    """
    if is_optional(kind) and not quoted and text.lower() in NULLS:
        return None
    inner = strip_optional(kind)
    if inner is str:
        value: Any = "" if not quoted and text.lower() in ("null", "~") else text
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
    lowest, above, below = (metadata.get(key) for key in ("at_least", "above", "below"))
    if (
        (lowest is not None and value < lowest)
        or (above is not None and value <= above)
        or (below is not None and value >= below)
    ):
        raise BadValue("outside the limits")
