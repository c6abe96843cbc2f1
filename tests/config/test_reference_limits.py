"""Tests that each field has the default of the reference, and accepts what its limits there say, and no more."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, List, NamedTuple, Tuple

import pytest

from fugaku_gpt.config.load import coerce_setting, valid_keys
from fugaku_gpt.config.schema import RunConfig
from fugaku_gpt.config.tree import Scalar
from fugaku_gpt.config.values import BadValue

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "config.md"
DEFAULTS = RunConfig()


class Row(NamedTuple):
    """A row of the page: key of the field, its type, default, and meaning with limits."""

    key: str
    kind: str
    default: str
    meaning: str


ROWS = [
    Row(*matched.groups())
    for matched in re.finditer(
        r"^\| `([a-z]+\.\w+)` \| ([^|]*) \| ([^|]*) \| (.*) \|$", PAGE.read_text("utf-8"), re.MULTILINE
    )
]
LIMIT = re.compile(r"\b(at least|at most|above|below) (-?\d+(?:\.\d+)?(?:e[-+]?\d+)?)\b", re.IGNORECASE)


def limits_of(row: Row) -> List[Tuple[str, float]]:
    """The limits at the end of the meaning, in the order in which they are there."""
    sentence = row.meaning.rstrip(".").rpartition(". ")[2]
    return [(matched[1].lower(), float(matched[2])) for matched in LIMIT.finditer(sentence)]


def accepts(row: Row, number: float) -> bool:
    text = str(int(number)) if "integer" in row.kind else repr(number)
    try:
        coerce_setting(row.key, Scalar(text, False, ""))
    except BadValue:
        return False
    return True


def test_the_page_has_all_fields() -> None:
    assert [row.key for row in ROWS] == valid_keys()


@pytest.mark.parametrize("row", ROWS, ids=[row.key for row in ROWS])
def test_a_field_has_the_default_and_the_limits_of_the_reference(row: Row) -> None:
    section, _, name = row.key.partition(".")
    default: Any = getattr(getattr(DEFAULTS, section), name)
    if isinstance(default, bool) or default is None:
        assert row.default == f"`{default}`".lower().replace("none", "null")
    elif isinstance(default, (int, float)) and ":" not in row.default:
        assert float(row.default.strip("`")) == default
    step = 1.0 if "integer" in row.kind else 1e-6
    for name, number in limits_of(row):
        outwards = step if name in ("at most", "below") else -step
        if name.startswith("at "):
            assert accepts(row, number) and not accepts(row, number + outwards), f"{name} {number}"
        else:
            assert accepts(row, number - outwards) and not accepts(row, number), f"{name} {number}"
