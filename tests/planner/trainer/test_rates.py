"""Tests of the rates between and beyond the sizes that a probe has measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fugaku_gpt.layout.operations import ALL_REDUCE
from fugaku_gpt.machine.probed import STAND_INS
from fugaku_gpt.planner.trainer.rates import ProbeRates
from tests.planner.probes import MESSAGE_SECONDS, PASS_SECONDS, even_machine

PROBED = even_machine()
SMALL = replace(
    PROBED,
    messages=tuple(
        replace(timing, bytes=size, seconds=MESSAGE_SECONDS * size)
        for timing in PROBED.messages
        if timing.bytes == 1
        for size in (16, 256, 1024)
    ),
)


@pytest.mark.parametrize("size", [16, 100, 256, 1024, 2048, 4096, 2**20])
def test_seconds_are_proportional_to_the_size_where_they_were_measured_so(size: int) -> None:
    assert ProbeRates(SMALL, 2, 1).message(ALL_REDUCE, 2, size) == pytest.approx(MESSAGE_SECONDS * size)


def test_a_size_beyond_twice_the_largest_is_named() -> None:
    rates = ProbeRates(SMALL, 2, 1)
    for size in (16, 1024, 2047):
        rates.message(ALL_REDUCE, 2, size)
    assert rates.extrapolated == () and rates.distance == 0
    rates.message(ALL_REDUCE, 2, 4096)
    (text,) = rates.extrapolated
    assert "4096" in text and "1024 at most" in text and ALL_REDUCE in text


def test_a_large_size_beyond_the_caches_is_as_good_as_measured() -> None:
    rates = ProbeRates(PROBED, 2, 1)
    assert rates.message(ALL_REDUCE, 2, 2**24) == pytest.approx(MESSAGE_SECONDS * 2**24)
    assert rates.extrapolated == ()


@pytest.mark.parametrize("name", STAND_INS)
def test_a_similar_pass_stands_for_one_that_an_older_probe_has_not_measured(name: str) -> None:
    def factor(of: str) -> float:
        return {STAND_INS[name]: 3.0, name: 5.0}.get(of, 1.0)

    passes = tuple(replace(timing, seconds=factor(timing.name) * timing.seconds) for timing in PROBED.passes)
    rates = ProbeRates(replace(PROBED, passes=passes), 2, 1)
    assert rates.elementwise("float32", name, 2**20) == pytest.approx(5.0 * PASS_SECONDS * 2**20)
    assert rates.extrapolated == ()
    older = ProbeRates(replace(PROBED, passes=tuple(timing for timing in passes if timing.name != name)), 2, 1)
    assert older.elementwise("float32", name, 2**20) == pytest.approx(3.0 * PASS_SECONDS * 2**20)
    (text,) = older.extrapolated
    assert name in text and STAND_INS[name] in text and older.distance > 0
