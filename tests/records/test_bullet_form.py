"""Tests of the form of settings and rates in bullets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fugaku_gpt.records.bullet_form import (
    pair_of,
    pair_text,
    quoted_pair_text,
    rate_text,
    rounding_of,
    setting_key,
    short_name,
)


@given(st.floats(1e-9, 1e12))
def test_a_written_rate_says_how_it_is_rounded(rate: float) -> None:
    text = rate_text(rate)
    assert "e" not in text and abs(float(text) - rate) <= rounding_of(text) * (1 + 1e-9)
    assert rounding_of(text) <= rate * (0.0051 if rate >= 1000 else 0.00051)  # of four digits, or three and zeros


def test_rates_have_four_digits_and_their_zeros() -> None:
    rates = (8.0, 0.5, 46.28, 999.96, 1234.5, 12345.0, 1.25e-5)
    assert [rate_text(rate) for rate in rates] == ["8.000", "0.5000", "46.28", "1000", "1234", "12345", "0.00001250"]


@pytest.mark.parametrize(
    ("key", "name"),
    [("node.memory_limit", "memory_limit"), ("model.name", "model.name"), ("layout.split", "layout.split")],
)
def test_a_name_is_short_where_no_other_section_has_it(key: str, name: str) -> None:
    assert short_name(key) == name and setting_key(name) == key
    assert setting_key("name") is None and setting_key("flat") is None


@pytest.mark.parametrize("text", ["flat", "a=", 'a="b', 'a="\\d"', "=b", "a=b c"])
def test_a_text_of_another_form_is_no_pair(text: str) -> None:
    assert pair_of(text) is None


def test_quotes_are_where_a_value_needs_them() -> None:
    assert pair_text("a", "b-1.5") == "a=b-1.5" and pair_text("a", "b,c") == 'a="b,c"'
    assert quoted_pair_text("dtype", "int8") == 'dtype="int8"'
