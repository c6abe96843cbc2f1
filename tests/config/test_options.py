"""Tests of fields of settings: what they accept, and how it is described."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Optional, get_type_hints

import pytest

from fugaku_gpt.config.options import duration, option
from fugaku_gpt.config.values import BadValue, coerce_scalar, describe_type


@dataclass(frozen=True)
class Settings:
    wait: Optional[float] = duration(None, "a time", at_least=30)
    pause: float = duration(1.5, "a time", above=0)
    share: float = option(0.5, "a share", above=0, below=1)
    count: int = option(3, "a number", at_least=1, at_most=9)


FIELDS = {field.name: field for field in fields(Settings)}
TYPES = get_type_hints(Settings)


@pytest.mark.parametrize(
    ("name", "description", "accepted", "refused"),
    [
        (
            "wait",
            "seconds or H:MM:SS, at least 30, or null",
            {"1:00:30": 3630.0, "30": 30.0, "null": None},
            ["29", "x"],
        ),
        ("pause", "seconds or H:MM:SS, above 0", {"0:00:01": 1.0, "0.25": 0.25}, ["0", "null"]),
        ("share", "a number, above 0 and below 1", {"0.25": 0.25}, ["0", "1", "1:00:30"]),
        ("count", "a whole number, at least 1 and at most 9", {"1": 1, "9": 9}, ["0", "10", "1.5"]),
    ],
)
def test_a_field_accepts_the_values_of_the_description(
    name: str, description: str, accepted: "dict[str, object]", refused: "list[str]"
) -> None:
    kind, metadata = TYPES[name], FIELDS[name].metadata
    assert describe_type(kind, metadata) == description
    assert {text: coerce_scalar(text, False, kind, metadata) for text in accepted} == accepted
    for text in refused:
        with pytest.raises(BadValue):
            coerce_scalar(text, False, kind, metadata)


def test_defaults_are_those_given() -> None:
    assert Settings() == Settings(None, 1.5, 0.5, 3)
