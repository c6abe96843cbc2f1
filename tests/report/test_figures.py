"""Tests of cells as figures: units, the values that a printed number stands for, and what is no number."""

from __future__ import annotations

from typing import Optional, Tuple

import pytest

from fugaku_gpt.report.figures import (
    EMPTY,
    FAILED,
    NUMBER,
    TEXT,
    Figure,
    Interval,
    bytes_of,
    is_thousands,
    read_figure,
    seconds_of,
    simplest_integer,
)


@pytest.mark.parametrize("power, letter", [(1, "K"), (2, "M"), (3, "G"), (4, "T")])
def test_bytes_are_counted_in_1024_unless_the_unit_ends_in_b(power: int, letter: str) -> None:
    for unit, base in ((f"{letter}iB", 1024), (f"{letter}i", 1024), (letter, 1024), (f"{letter}B", 1000)):
        for written in (f"3 {unit}", f"3{unit.lower()}", f"3 {unit} / GPU", f"3 {unit}/nodes"):
            size = bytes_of(read_figure(written))
            assert size is not None and size.middle == pytest.approx(3.0 * base**power), written
        of_title = bytes_of(read_figure("3"), unit)
        assert of_title is not None and of_title.middle == pytest.approx(3.0 * base**power)


@pytest.mark.parametrize(
    "seconds, units",
    [
        (3600.0, ("h",)),
        (60.0, ("min", "m")),
        (1.0, ("s", "s/it", "sec", "secs", "sec/it", "seconds", "s/iter", "S")),
        (1e-3, ("ms", "msec", "ms/it")),
        (1e-6, ("us", "µs")),
    ],
)
def test_each_unit_of_time(seconds: float, units: Tuple[str, ...]) -> None:
    for unit in units:
        for measured in (seconds_of(read_figure(f"8 {unit}")), seconds_of(read_figure("8"), unit)):
            assert measured is not None and measured.middle == pytest.approx(8 * seconds), unit


def test_the_unit_of_a_cell_wins_over_that_of_the_title() -> None:
    assert seconds_of(read_figure("8 ms"), "h") == Interval(7.5e-3, 8.5e-3)
    assert bytes_of(read_figure("8 GB"), "MiB") == Interval(7.5e9, 8.5e9)
    assert bytes_of(read_figure("x"), "MiB") is None and seconds_of(read_figure("-"), "s") is None
    assert bytes_of(read_figure("8 GB/s")) is None


@pytest.mark.parametrize(
    "text, low, high",
    [
        ("36.1", 36.05, 36.15),
        ("1,234", 1233.5, 1234.5),
        ("1.5e3", 1450.0, 1550.0),
        ("2e-3", 1.5e-3, 2.5e-3),
        ("0.2", 0.15, 0.25),
        ("0", 0.0, 0.5),
        ("-2", -2.5, -1.5),
        ("~30", 27.0, 33.0),
        ("30?", 27.0, 33.0),
        ("~3", 2.5, 3.5),
        ("30 ± 2", 27.5, 32.5),
        ("1e3 ± 2", 0.0, 3500.0),
        ("4.0-5.0", 3.95, 5.05),
        ("4.0 to 4.0", 3.95, 4.05),
    ],
)
def test_a_number_stands_for_all_values_that_are_printed_so(text: str, low: float, high: float) -> None:
    figure = read_figure(text)
    assert figure.kind == NUMBER
    assert (figure.interval.low, figure.interval.high) == (pytest.approx(low), pytest.approx(high))


@pytest.mark.parametrize(
    "text, kind",
    [
        (">32GiB", FAILED),
        ("≥ 32", FAILED),
        ("> many", TEXT),
        ("5.0-4.0", TEXT),
        ("GiB", EMPTY),
        ("- ms", EMPTY),
        ("timed out", FAILED),
        ("nan", FAILED),
        ("xx", FAILED),
    ],
)
def test_a_bound_a_falling_range_and_a_unit_alone_are_no_numbers(text: str, kind: str) -> None:
    assert read_figure(text).kind == kind and not read_figure(text).is_number


def test_the_middle_of_a_range_is_the_value_and_a_comment_follows() -> None:
    assert read_figure("4.0-5.0").value == 4.5
    figure = read_figure("0.25^ (OOM after it)")
    assert (figure.value, figure.decimals, figure.marks, figure.comment) == (0.25, 2, "^", "OOM after it")


@pytest.mark.parametrize(
    "text, count",
    [("1", 1), ("1,024", 1024), ("0", None), ("-3", None), ("4.0", None), ("4 GB", None), ("4 (half)", None),
     ("x", None), ("1e3", 1000), ("15e-1", None)],
)  # fmt: skip
def test_a_count_is_a_positive_integer_alone(text: str, count: Optional[int]) -> None:
    assert read_figure(text).as_count == count


def test_thousands_are_integers_of_k() -> None:
    assert [is_thousands(read_figure(text)) for text in ("1K", "2k", "2.5K", "0K", "2M", "2")] == [True, True] + [
        False
    ] * 4
    assert not is_thousands(Figure(TEXT, "k", unit="k", value=2.0))


def test_intervals_overlap_where_they_share_a_value() -> None:
    interval = Interval(1.0, 2.0)
    assert all(interval.overlaps(other) for other in (Interval(2.0, 3.0), Interval(0.0, 1.0), Interval(1.5, 1.6)))
    assert interval.overlaps(Interval(2.0 + 1e-9, 3.0)) and not interval.overlaps(Interval(2.001, 3.0))
    assert not interval.overlaps(Interval(0.0, 0.999))
    assert interval.divided_by(Interval(2.0, 4.0)) == Interval(0.25, 1.0)
    assert interval.divided_by(Interval(0.0, 4.0)) == Interval(0.25, float("inf"))


@pytest.mark.parametrize(
    "low, high, value",
    [(0.5, 1.0, 1), (4.0, 7.0, 4), (5.0, 8.0, 8), (5.0, 7.0, None), (4.5, 5.4, 5), (4.5, 5.5, None), (0.2, 0.4, None)],
)
def test_without_preference_a_power_of_two_or_the_only_integer(low: float, high: float, value: Optional[int]) -> None:
    assert simplest_integer(Interval(low, high), ()) == value
