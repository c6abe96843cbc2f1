"""Tests of the ratio, interval, p and verdict of two sides' jobs: against SciPy, clear answers and invariances."""

from __future__ import annotations

import math
from typing import List

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fugaku_gpt.compare.statistics import (
    Comparison,
    compare_groups,
    compare_pairs,
    holm_adjusted,
    stop_reason,
    verdict_of,
)
from fugaku_gpt.compare.student import t_quantile, two_sided_p
from fugaku_gpt.errors import UsageError

MIRRORED = {"faster": "slower", "slower": "faster", "same": "same", "undecided": "undecided"}
RANDOM = np.random.default_rng(5)
SECONDS = st.floats(0.5, 2.0)
PAIRS = st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=11)


def noisy(n: int, noise: float, seconds: float = 1.0, seed: int = 0) -> List[float]:
    """Seconds of ``n`` jobs with log-normal noise."""
    times: List[float] = (seconds * np.exp(noise * np.random.default_rng([seed, n]).standard_normal(n))).tolist()
    return times


def close(first: Comparison, second: Comparison) -> None:
    """Asserts that two comparisons are equal but for rounding."""
    assert (first.a, first.b, first.verdict, first.more) == (second.a, second.b, second.verdict, second.more)
    assert first.ratio == pytest.approx(second.ratio, rel=1e-9)
    assert (first.low, first.high) == pytest.approx((second.low, second.high), rel=1e-9)
    assert first.p == second.p


def mirrored(comparison: Comparison) -> Comparison:
    """The same comparison with its sides swapped."""
    low, high = (1 / comparison.high, 1 / comparison.low if comparison.low else math.inf)
    return Comparison(
        1 / comparison.ratio,
        low,
        high,
        comparison.p,
        comparison.b,
        comparison.a,
        comparison.paired,
        MIRRORED[comparison.verdict],
        comparison.more,
    )


@pytest.mark.slow
def test_students_t_is_scipys() -> None:
    t = pytest.importorskip("scipy.stats").t
    for df in (0.8, 1, 2, 4.5, 9, 100, 10_000):
        for confidence in (0.5, 0.95, 0.999, 0.999999):
            assert t_quantile(confidence, df) == pytest.approx(t.ppf(0.5 + confidence / 2, df), rel=1e-9)
        for value in (0.1, 1.0, 3.0, 30.0):
            assert two_sided_p(value, df) == pytest.approx(2 * t.sf(value, df), rel=1e-9)
    assert two_sided_p(math.inf, 3) == 0


def test_p_of_pairs_equals_scipys_exact_p() -> None:
    stats = pytest.importorskip("scipy.stats")
    for n in (3, 5, 8, 10):
        a, b = noisy(n, 0.03), noisy(n, 0.03, 1.03, seed=1)
        permutation_test = stats.permutation_test(
            (np.log(b) - np.log(a),), np.mean, permutation_type="samples", n_resamples=np.inf, alternative="two-sided"
        )
        assert compare_pairs(a, b).p == pytest.approx(permutation_test.pvalue, abs=1e-12)


def test_p_of_groups_equals_scipys_exact_p() -> None:
    stats = pytest.importorskip("scipy.stats")
    for sizes in ((2, 3), (4, 4), (3, 9)):
        a, b = noisy(sizes[0], 0.03), noisy(sizes[1], 0.03, 1.05, seed=1)
        permutation_test = stats.permutation_test(
            (np.log(a), np.log(b)), lambda x, y: abs(np.mean(y) - np.mean(x)), n_resamples=np.inf, alternative="greater"
        )
        assert compare_groups(a, b).p == pytest.approx(permutation_test.pvalue, abs=1e-12)


def test_p_of_many_jobs_is_sampled_close_to_the_exact_p_and_never_0() -> None:
    stats = pytest.importorskip("scipy.stats")
    a, b = noisy(16, 0.03), noisy(16, 0.03, 1.02, seed=1)
    for sampled_p, exact_p in (
        (compare_pairs(a, b).p, stats.ttest_rel(np.log(a), np.log(b)).pvalue),
        (compare_groups(a, b).p, stats.ttest_ind(np.log(a), np.log(b)).pvalue),
    ):
        assert sampled_p == pytest.approx(exact_p, abs=0.02)
    far = compare_pairs(noisy(30, 0.001), noisy(30, 0.001, 2.0, seed=1))
    assert 0 < far.p < 1e-4


def test_the_interval_is_as_wide_as_students_and_leans_as_scipys_bootstrap() -> None:
    stats = pytest.importorskip("scipy.stats")
    for n in (6, 10):
        a, b = noisy(n, 0.03), noisy(n, 0.03, seed=1)
        logs = np.log(b) - np.log(a)
        comparison = compare_pairs(a, b)
        student = stats.ttest_1samp(logs, 0).confidence_interval()
        assert math.log(comparison.high / comparison.low) == pytest.approx(student.high - student.low, rel=0.05)
        plain = stats.bootstrap((logs,), np.mean, n_resamples=20_000, method="percentile", random_state=1)
        interval = plain.confidence_interval
        below, above = np.mean(logs) - interval.low, interval.high - np.mean(logs)
        lean = math.log(comparison.high / comparison.ratio) / math.log(comparison.ratio / comparison.low)
        assert lean == pytest.approx(above / below, rel=0.08)


def test_the_groups_interval_is_as_wide_as_welchs() -> None:
    stats = pytest.importorskip("scipy.stats")
    for sizes in ((3, 3), (3, 9), (8, 5)):
        a, b = noisy(sizes[0], 0.03), noisy(sizes[1], 0.13, seed=1)
        comparison = compare_groups(a, b)
        welch = stats.ttest_ind(np.log(b), np.log(a), equal_var=False).confidence_interval()
        assert math.log(comparison.high / comparison.low) == pytest.approx(welch.high - welch.low, rel=0.12)


def test_comparisons_with_clear_answers() -> None:
    comparison = compare_pairs([1.0, 1.01, 0.99, 1.0, 1.02, 0.98], [1.1, 1.11, 1.09, 1.1, 1.12, 1.08])
    assert (comparison.verdict, comparison.more, comparison.p) == ("slower", None, 2 / 64)
    assert comparison.ratio == pytest.approx(1.1, rel=1e-3) and comparison.low > 1.09 and comparison.high < 1.11
    assert compare_pairs(noisy(8, 0.004), noisy(8, 0.004, seed=1)).verdict == "same"
    assert compare_groups([5.4, 10.4], [7.8, 8.1]).verdict == "undecided"


def test_a_single_job_each_gives_no_interval() -> None:
    for single in (compare_pairs([2.0], [1.0]), compare_groups([2.0], [1.0])):
        assert (single.ratio, single.low, single.high, single.p) == (pytest.approx(0.5), 0.0, math.inf, 1.0)
        assert (single.verdict, single.more) == ("undecided", None) and stop_reason(single) == ""


def test_a_lone_job_borrows_the_noise_of_the_other_side() -> None:
    several = [1.0, 1.03, 0.98, 1.01]
    comparison = compare_groups([1.3], several)
    assert comparison.verdict == "faster" and (comparison.a, comparison.b) == (1, 4)
    close(compare_groups(several, [1.3]), mirrored(comparison))
    error = np.std(np.log(several), ddof=1) * math.sqrt(1 + 1 / 4)
    assert math.log(comparison.high / comparison.low) == pytest.approx(2 * t_quantile(0.95, 3) * error, rel=0.15)


def test_jobs_that_agree_to_the_last_digit_are_believed_to_a_thousandth() -> None:
    comparison = compare_pairs([1.0] * 4, [1.001] * 4)
    assert comparison.verdict == "same" and comparison.low < 0.9995 and comparison.high > 1.0025
    assert compare_groups([29.0, 29.0], [30.0, 30.0]).verdict == "slower"


@pytest.mark.parametrize("wrong", [[], [0.0], [-1.0], [math.nan], [math.inf]])
def test_invalid_times_are_refused(wrong: List[float]) -> None:
    with pytest.raises(UsageError, match="side B"):
        compare_pairs([1.0] * len(wrong) or [1.0], wrong)
    with pytest.raises(UsageError, match="side A"):
        compare_groups(wrong, [1.0])
    with pytest.raises(UsageError, match="as many jobs"):
        compare_pairs([1.0], [1.0, 2.0])


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(PAIRS, st.floats(1e-4, 1e4), st.randoms(use_true_random=False))
def test_pairs_know_no_order_no_unit_and_no_favourite(pairs, factor, random) -> None:  # type: ignore[no-untyped-def]
    a, b = [seconds_a for seconds_a, _ in pairs], [seconds_b for _, seconds_b in pairs]
    comparison = compare_pairs(a, b)
    assert comparison.low <= comparison.ratio <= comparison.high and 0 < comparison.p <= 1
    close(compare_pairs(b, a), mirrored(comparison))
    close(compare_pairs([factor * x for x in a], [factor * x for x in b]), comparison)
    random.shuffle(pairs)
    close(compare_pairs([seconds_a for seconds_a, _ in pairs], [seconds_b for _, seconds_b in pairs]), comparison)


def test_resamples_that_tie_lean_to_neither_side() -> None:
    a, b = [1.0, 1.0, 1.0, 1.0, 1.25], [1.0, 1.0, 2.0, 1.25, 1.0]
    close(compare_pairs(b, a), mirrored(compare_pairs(a, b)))
    close(compare_pairs([0.7 * x for x in a[::-1]], [0.7 * x for x in b[::-1]]), compare_pairs(a, b))


@settings(max_examples=60, deadline=None)
@given(st.lists(SECONDS, min_size=1, max_size=9), st.lists(SECONDS, min_size=1, max_size=9), st.floats(1e-4, 1e4))
@pytest.mark.slow
def test_groups_know_no_order_no_unit_and_no_favourite(a: List[float], b: List[float], factor: float) -> None:
    comparison = compare_groups(a, b)
    assert comparison.low <= comparison.ratio <= comparison.high and 0 < comparison.p <= 1
    close(compare_groups(b, a), mirrored(comparison))
    close(compare_groups([factor * x for x in a], [factor * x for x in b]), comparison)
    close(compare_groups(a[::-1], b[::-1]), comparison)


def test_verdicts_hold_the_tolerance_in_both_directions() -> None:
    bound = math.log(1.02)
    assert verdict_of(-bound, bound, 0.02) == "same"
    assert verdict_of(0.001, bound, 0.02) == "same"  # slower for sure, but by no more than is the same
    assert verdict_of(0.001, 1.1 * bound, 0.02) == "slower"
    assert verdict_of(-1.1 * bound, -0.001, 0.02) == "faster"
    assert verdict_of(-0.001, 1.1 * bound, 0.02) == "undecided"


@pytest.mark.slow
def test_the_estimated_number_of_further_pairs_decides_at_the_stated_rate() -> None:
    first = compare_pairs(noisy(4, 0.03), noisy(4, 0.03, 1.04, seed=7))
    assert first.verdict == "undecided" and first.more is not None
    n = 4 + first.more
    errors = (
        math.log(first.high / first.low) / 2 / t_quantile(0.95, 3) * 2
    )  # standard deviation of one pair: the standard error times sqrt(4)
    random = np.random.default_rng(0)
    decided = 0
    for _ in range(200):
        logs = math.log(first.ratio) + errors * random.standard_normal(n)
        decided += compare_pairs([1.0] * n, np.exp(logs).tolist()).verdict != "undecided"
    assert 0.7 <= decided / 200 <= 0.97


def test_holm() -> None:
    assert holm_adjusted([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm_adjusted([]) == [] and holm_adjusted([0.9, 0.8]) == [1.0, 1.0]


def test_looking_ends_by_the_width_or_by_a_very_clear_verdict() -> None:
    quiet = compare_pairs(noisy(5, 0.002), noisy(5, 0.002, seed=1))
    assert stop_reason(quiet) == "narrow" and stop_reason(quiet, min_pairs=6) == ""
    far = compare_pairs(noisy(4, 0.03), noisy(4, 0.03, 2.0, seed=1))
    assert stop_reason(far) == "clear" and stop_reason(mirrored(far)) == "clear"
    slower = compare_pairs(noisy(6, 0.03), noisy(6, 0.03, 1.08, seed=2))
    assert slower.verdict == "slower" and stop_reason(slower) == "" and stop_reason(slower, max_pairs=6) == "budget"
    assert stop_reason(slower, max_pairs=None) == ""


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.floats(-0.05, 0.05), st.floats(0.0005, 0.02), st.integers(4, 8))
def test_a_narrow_interval_always_decides(mean: float, noise: float, n: int) -> None:
    pattern = np.array([(-1.0) ** index for index in range(n)])
    comparison = compare_pairs([1.0] * n, np.exp(mean + noise * pattern).tolist())
    if stop_reason(comparison) == "narrow":
        assert comparison.verdict != "undecided"


def test_the_pairs_asked_for_give_the_verdict_same_in_four_cases_of_five() -> None:
    noise, tolerance = 0.03, 0.02
    a = [math.exp(noise * (-1) ** number) for number in range(4)]
    comparison = compare_pairs(a, [1.0] * 4, tolerance)
    assert comparison.verdict == "undecided" and comparison.more is not None and abs(math.log(comparison.ratio)) < 1e-12
    n, rng = 4 + comparison.more, np.random.default_rng(1)
    spread = float(np.std(np.log(a), ddof=1))
    draws = rng.normal(0.0, spread, (2000, n))
    outer = t_quantile(0.95, n - 1) * np.std(draws, axis=1, ddof=1) / math.sqrt(n)
    same = np.mean(np.abs(np.mean(draws, axis=1)) + outer <= math.log1p(tolerance))
    assert 0.77 < same < 0.88
