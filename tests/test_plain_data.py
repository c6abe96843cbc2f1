"""Tests of what holds in every room of plain data."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

import pytest

from tests.mutants.rooms import modules

ROOT = Path(__file__).resolve().parents[1]
# what is added up while it is read
ADDED_UP = {"fugaku_gpt.planner.trainer.work.Tally", "fugaku_gpt.report.trainer_logs._OpenLine"}


@pytest.mark.parametrize("file", modules(ROOT))
def test_dataclasses_cannot_be_changed(file: str) -> None:
    """A configuration, row or record that is shared, cached or a key of a dictionary stays what it was."""
    name = file[: -len(".py")].replace("/", ".").replace(".__init__", "")
    for item in vars(importlib.import_module(name)).values():
        if isinstance(item, type) and item.__module__ == name and dataclasses.is_dataclass(item):
            is_frozen = item.__dataclass_params__.frozen  # type: ignore[attr-defined]
            assert is_frozen == (f"{name}.{item.__qualname__}" not in ADDED_UP), item
