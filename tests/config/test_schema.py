"""Tests of the fields of a run as users know them."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import get_type_hints

import pytest

from docs.generate_reference import FOLDER, config_page
from fugaku_gpt.config.schema import RunConfig

SECTIONS = {name: kind for name, kind in get_type_hints(RunConfig).items() if is_dataclass(kind)}


@pytest.fixture(scope="module")
def documented() -> str:
    return (FOLDER / "config.md").read_text(encoding="utf-8")


def test_defaults_limits_and_presets_are_those_of_the_documented_reference(documented: str) -> None:
    """A run file that leaves a field out means what it has always meant."""
    assert config_page().strip() in documented  # else: python -m docs.generate_reference


@pytest.mark.parametrize("section", SECTIONS)
def test_each_field_of_a_section_is_documented(section: str, documented: str) -> None:
    assert all(f"| `{section}.{field.name}` |" in documented for field in fields(SECTIONS[section]))
