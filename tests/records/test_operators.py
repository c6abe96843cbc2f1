"""Tests of ``operators.json``: it is written completely and read strictly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict

import pytest

from fugaku_gpt.errors import UsageError
from fugaku_gpt.records.operators import CLASSES, OPERATORS_FILE, Operators, read_operators, write_operators

OPERATORS = Operators(3, 1.1, 4, dict.fromkeys(CLASSES, 0.1), 1.0)


def test_operators_round_trip_in_the_order_of_the_classes(tmp_path: Path) -> None:
    assert read_operators(tmp_path) is None
    write_operators(tmp_path, OPERATORS)
    assert read_operators(tmp_path) == OPERATORS and OPERATORS.slowdown == pytest.approx(1.1)
    values = json.loads((tmp_path / OPERATORS_FILE).read_text())
    assert values["version"] == 1 and tuple(values["classes"]) == CLASSES
    assert [path.name for path in tmp_path.iterdir()] == [OPERATORS_FILE]


CHANGES: Dict[str, Dict[str, Any]] = {
    "another version": {"version": 2},
    "no classes": {"classes": None},
    "a class too few": {"classes": dict.fromkeys(CLASSES[1:], 0.11)},
    "a class nobody knows": {"classes": {**OPERATORS.classes, "sorcery": 0.0}},
    "not the sum": {"seconds_per_iteration": 1.2},
    "negative": {"classes": {**OPERATORS.classes, "GELU": -0.1, "cast": 0.3}},
    "no number": {"unprofiled_seconds": "1.0"},
    "takes no time": {"unprofiled_seconds": 0.0},
    "infinite": {"unprofiled_seconds": float("inf")},
}


@pytest.mark.parametrize("change", CHANGES)
def test_invalid_records_of_operators_are_refused(tmp_path: Path, change: str) -> None:
    write_operators(tmp_path, OPERATORS)
    file = tmp_path / OPERATORS_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), **CHANGES[change]}))
    message = r"operators\.json: (not a record of operators: .*|version 2 of this format; .*); remove it$"
    with pytest.raises(UsageError, match=message):
        read_operators(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / OPERATORS_FILE).write_text(text)
    with pytest.raises(UsageError, match="operators.json: not a record of operators"):
        read_operators(tmp_path)
