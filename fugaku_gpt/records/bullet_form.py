"""The form of settings and rates in bullets: ``name=value`` and numbers whose last digit says how they are rounded.

:mod:`fugaku_gpt.report.bullets` reads whole bullets; searches for the largest batch write them.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Optional, Tuple

from fugaku_gpt.config import valid_keys

PAIR = re.compile(r'([A-Za-z][\w.]{0,39})\s*=\s*(\d{1,3}(?:,\d{3})+|[\w.+-]{1,40}|"(?:[^"\\]|\\.){0,1000}")')
_PLAIN = re.compile(r"[\w.+-]{1,40}")


def short_name(key: str) -> str:
    """The name of a setting in bullets: without its section, where no other one has a setting of that name."""
    leaf = key.rpartition(".")[2]
    return leaf if setting_key(leaf) == key else key


def setting_key(name: str) -> Optional[str]:
    """The dotted key of a setting by its name in bullets; None if there is none, or more than one."""
    keys = [key for key in valid_keys() if name in (key, key.rpartition(".")[2])]
    return keys[0] if len(keys) == 1 else None


def pair_of(text: str) -> Optional[Tuple[str, str]]:
    """(name, value without quotes) of a setting ``name=value``; None for any other text."""
    pair = PAIR.fullmatch(text)
    if pair is None:
        return None
    try:
        return pair[1], str(json.loads(pair[2])) if pair[2].startswith('"') else pair[2]
    except ValueError:  # a backslash before some other character
        return None


def pair_text(name: str, value: str) -> str:
    """A setting ``name=value`` of which :func:`pair_of` gives both back, with quotes where the value needs them."""
    return f"{name}={value}" if _PLAIN.fullmatch(value) else quoted_pair_text(name, value)


def quoted_pair_text(name: str, value: str) -> str:
    """A setting whose value is not of its field's form: quotes keep it from being read as that field."""
    text = json.dumps(value, ensure_ascii=not value.isprintable())
    return f"{name}={text}".replace("  ", " \\u0020")  # readers of lines make one blank of several


def rate_text(rate: float) -> str:
    """A rate with four significant digits, or all those before the point; without an exponent. Zeros at the end are
    written, so that the last digit says how the rate is rounded."""
    return f"{rate:.0f}" if rate >= 1000 else f"{Decimal(f'{rate:.3e}'):f}"


def rounding_of(text: str) -> float:
    """Half a unit of the last digit of a rate that is surely not rounded away.

    Rates are often written with three significant digits, 1230 for 1234.5: zeros before the point, behind the first
    three digits, with no other digit among them, may stand for others. In 1,230 and 1230.0 they stand for themselves.
    """
    digits = text.strip()
    zeros = len(digits) - max(3, len(digits.rstrip("0")))
    return half_digit(text) * 10.0 ** max(0, zeros if digits.isdecimal() else 0)


def half_digit(text: str) -> float:
    """Half a unit of the last digit of a number that is written without an exponent; 0 for any other text."""
    integer, _, decimals = text.strip().replace(",", "").partition(".")
    return 0.5 * 10.0 ** -len(decimals) if (integer + decimals).isdecimal() else 0.0
