"""Tests of the simulation of the statistics: a short simulation confirms the figures quoted from the long one."""

from __future__ import annotations

import pytest

from benchmarks import comparison


@pytest.mark.parametrize("noise", ["log-normal 3 %", "heavy tails 13 %"])
@pytest.mark.slow
def test_intervals_cover_and_alarms_are_rare(noise: str) -> None:
    tallies, looks = comparison.simulate_pairs(noise, 400, seed=1, pairs=(3, 6))
    assert looks is None
    for tally in tallies.values():
        # 90 to 98 % and at most 6 %, with three standard deviations of 400 trials for the seed
        assert 0.90 <= tally.covered <= 0.98 + 0.02
        assert tally.alarms <= 0.06 + 0.035
    assert tallies[6].detected > tallies[3].detected - 0.02


@pytest.mark.slow
def test_looking_after_each_pair_misleads_no_more_than_a_single_look() -> None:
    _, looks = comparison.simulate_pairs("log-normal 3 %", 150, seed=1)
    assert looks is not None
    assert looks.alarms <= 0.06 + 0.05 and looks.first_verdict_alarms > looks.alarms
    assert looks.covered >= 0.88 and looks.detected >= 0.75 and looks.missed <= 0.03 and 4 <= looks.pairs <= 10


@pytest.mark.slow
def test_the_table_is_the_same_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--trials", "5", "--noise", "log-normal 1 %"]
    assert comparison.main(arguments) == 0
    first = capsys.readouterr().out
    comparison.main(arguments)
    assert capsys.readouterr().out == first
    assert first.count("| log-normal 1 % |") == 6 and "looking after each pair, from 4 to 10, 5 trials" in first
