"""Compares B with A from one number a job: ratio, interval, permutation p, verdict, and number of further jobs.

A job is one start of a run and gives one number, the median of its iterations after the warm-up; two jobs of the same
configuration differ in ways that no iteration of either shows (location of memory, nodes, other load). So jobs are the
unit of all statistics here, on the scale of log seconds: noise is a share of the time, and B over A is the exact
inverse of A over B.

**Interval.** A bootstrap of jobs: the quantiles at 2.5 % and 97.5 % of the mean log ratio over resampled jobs, of every
resample where these are few. Without correction such an interval covers far too seldom, 74 % of the time with 3 pairs:
it cannot leave the range of the data, and resamples vary by 1/n where jobs vary by 1/(n - 1). Widening the level
(Hesterberg 2015, "What teachers should know about the bootstrap", expanded percentile interval) meets the end of that
range too. So the distances from the mean are stretched instead, until the resamples' standard deviation is the unbiased
standard error and the normal quantile is Student's: an interval as wide as Student's that leans as the data do. For two
groups error and degrees of freedom are Welch's, so that sides may be unequally noisy; a group of one job borrows the
other's noise. ``benchmarks/comparison.py`` measures its coverage: 93 to 97 % with pairs; less with groups of unequal
size, 90 to 95 % with 3 and 10 jobs.

**p** is exact: the share of all ways to exchange A and B within pairs (or to label the jobs of two groups) that
separate the sides at least as far. Beyond ``MAX_ENUMERATED`` ways as many are drawn, and p is (hits + 1) / (draws + 1)
(Phipson and Smyth 2010), never 0. The verdict depends on the interval: with 5 pairs or fewer p is at least 2/32.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Callable, List, Optional, Sequence, Tuple

import numpy as np

from fugaku_gpt.compare.student import t_quantile
from fugaku_gpt.errors import UsageError

FASTER, SLOWER, SAME, UNDECIDED = "faster", "slower", "same", "undecided"
NARROW, CLEAR, BUDGET = "narrow", "clear", "budget"
TOLERANCE = 0.02
CONFIDENCE = 0.95
CLEAR_CONFIDENCE = 0.999  # of the interval that ends a comparison early
POWER = 0.8  # probability that the requested number of pairs decides
MAX_ENUMERATED = 20_000  # up to this number of ways to exchange sides, all are tried
RESAMPLES = 10_000  # number of drawn resamples, for more pairs than
MAX_ENUMERATED_PAIRS = 8  # pairs whose n^n resamples are all taken: C(2n - 1, n) different ones, 6435
# Lower bound of the standard deviation of log seconds: medians of a coarse clock may agree to the last digit.
LEAST_NOISE = 1e-3
_NORMAL = 1.959963984540054  # 95 % of a normal distribution lie within this number of standard deviations
_ROUNDING = 1e-9  # rounding error of log seconds


@dataclass(frozen=True)
class Comparison:
    """Comparison of B with A; ratios are B over A of seconds per iteration: below 1, B is faster.

    Attributes:
        ratio: geometric mean of the pairs' ratios, or ratio of the groups' geometric means.
        low, high: ends of the 95 % interval; 0 and infinite where it is unknown, with one job a side.
        p: probability that equal sides are separated as far; 1 where it is unknown.
        a, b: number of jobs of each side.
        paired: True if the jobs are pairs, a == b.
        verdict: ``same`` where the interval lies within the tolerance, otherwise ``faster`` or ``slower`` where it
            lies on one side of 1, otherwise ``undecided``.
        more: number of further pairs (jobs of each side, where not paired) that decide in four cases of five, if ratio
            and noise are as estimated; None where the verdict is decided or the noise is unknown.
    """

    ratio: float
    low: float
    high: float
    p: float
    a: int
    b: int
    paired: bool
    verdict: str
    more: Optional[int]


def compare_pairs(a: Sequence[float], b: Sequence[float], tolerance: float = TOLERANCE, seed: int = 0) -> Comparison:
    """Compares jobs that ran alternately: ``a[i]`` and ``b[i]`` [seconds per iteration] are one pair.

    Args:
        tolerance: ratios from 1 / (1 + tolerance) to 1 + tolerance count as the same.
        seed: seed of random draws where not all cases are enumerated.

    Raises:
        UsageError: the sides differ in length, are empty, or hold a value that is no time.
    """
    first, second = _log_seconds(a, "A"), _log_seconds(b, "B")
    if len(first) != len(second):
        raise UsageError(f"pairs need as many jobs of A as of B: {len(first)} and {len(second)}")
    differences = np.sort(second - first)
    n, mean = len(differences), float(np.mean(differences))
    if n < 2:
        return _single_job_comparison(mean, 1, 1, True)
    error = max(float(np.std(differences, ddof=1)), math.sqrt(2) * LEAST_NOISE) / math.sqrt(n)
    shares, weights = _resamples(n, seed)
    low, high = _stretched_interval(shares @ differences - mean, weights, error, n - 1)
    verdict = verdict_of(mean + low, mean + high, tolerance)
    more = None
    if verdict == UNDECIDED:
        more = _pairs_needed(mean, lambda jobs: error * math.sqrt(n / jobs), lambda jobs: jobs - 1, n, tolerance)
    return Comparison(
        *_ratios(mean, low, high),
        _p_of_flips(differences, seed),
        n,
        n,
        True,
        verdict,
        more,
    )


def compare_groups(a: Sequence[float], b: Sequence[float], tolerance: float = TOLERANCE, seed: int = 0) -> Comparison:
    """Compares jobs that are not pairs, such as recorded ones: ``a`` and ``b`` [seconds per iteration] of any number.

    Args:
        tolerance: ratios from 1 / (1 + tolerance) to 1 + tolerance count as the same.
        seed: seed of random draws where not all cases are enumerated.

    Raises:
        UsageError: a side is empty, or holds a value that is no time.
    """
    first, second = np.sort(_log_seconds(a, "A")), np.sort(_log_seconds(b, "B"))
    mean = float(np.mean(second) - np.mean(first))
    if max(len(first), len(second)) < 2:
        return _single_job_comparison(mean, 1, 1, False)
    noises = _variances(first, second)
    error, df = _welch(noises, (len(first), len(second)))
    low, high = _stretched_interval(_resampled_difference(first, second, seed), None, error, df)
    verdict = verdict_of(mean + low, mean + high, tolerance)
    more = None
    if verdict == UNDECIDED:
        n = min(len(first), len(second))

        def welch(jobs: int) -> Tuple[float, float]:
            return _welch(noises, (len(first) + jobs - n, len(second) + jobs - n))

        more = _pairs_needed(mean, lambda jobs: welch(jobs)[0], lambda jobs: welch(jobs)[1], n, tolerance)
    return Comparison(
        *_ratios(mean, low, high),
        _p_of_labels(first, second, seed),
        len(first),
        len(second),
        False,
        verdict,
        more,
    )


def holm_adjusted(p: Sequence[float]) -> List[float]:
    """Adjusts the p values of several tests so that they bound the probability of any false positive (Holm 1979).

    The smallest is multiplied by the number of tests, the next by one less, and none becomes less than the previous.
    """
    adjusted = [0.0] * len(p)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=lambda index: p[index])):
        highest = max(highest, min(1.0, (len(p) - rank) * p[index]))
        adjusted[index] = highest
    return adjusted


def stop_reason(
    comparison: Comparison, tolerance: float = TOLERANCE, min_pairs: int = 4, max_pairs: Optional[int] = 10
) -> str:
    """Why no more pairs are to be run after these; empty where one more is needed.

    Examining every pair and stopping at the first verdict is wrong three times as often as the interval promises. So a
    comparison ends by the interval's width, which does not depend on the ratio, or by a verdict far clearer than the
    final one has to be (Haybittle 1971, Peto 1976):

    * ``narrow``: neither end is further from the ratio than half the tolerance, which decides whatever the ratio is;
    * ``clear``: an interval of 99.9 % instead of 95 % still excludes 1;
    * ``budget``: there are ``max_pairs`` pairs.

    Args:
        min_pairs: number of pairs before which only the budget ends the comparison.
    """
    pairs = min(comparison.a, comparison.b)
    if min_pairs <= pairs and pairs > 1:
        below, above = math.log(comparison.ratio / comparison.low), math.log(comparison.high / comparison.ratio)
        if max(below, above) <= math.log1p(tolerance) / 2 + _ROUNDING:
            return NARROW
        wider = t_quantile(CLEAR_CONFIDENCE, pairs - 1) / t_quantile(CONFIDENCE, pairs - 1)
        mean = math.log(comparison.ratio)
        if comparison.verdict != SAME and (mean - wider * below > 0 or mean + wider * above < 0):
            return CLEAR
    return BUDGET if max_pairs is not None and pairs >= max_pairs else ""


def check_tolerance(tolerance: float) -> None:
    """Check the share within which two times count as the same.

    Raises:
        ValueError: it is not more than 0 and at most 1.
    """
    if not 0 < tolerance <= 1:
        raise ValueError(f"tolerance {tolerance!r}: valid: more than 0 and at most 1")


def verdict_of(low: float, high: float, tolerance: float) -> str:
    """The verdict of an interval of the log ratio."""
    bound = math.log1p(tolerance) + _ROUNDING
    if -bound <= low and high <= bound:
        return SAME
    if high < 0:
        return FASTER
    return SLOWER if low > 0 else UNDECIDED


def _pairs_needed(
    mean: float,
    error: Callable[[int], float],
    df: Callable[[int], float],
    n: int,
    tolerance: float,
) -> int:
    """Number of pairs beyond the current ``n`` that are expected to decide, with the power ``POWER``.

    n is the least for which (t(97.5 %) + t) * standard error of n pairs is at most the distance to what decides,
    whichever of the two needs fewer: for faster or slower the distance |log ratio| and t at the power; for the same,
    where both ends must lie within, tolerance - |log ratio| and t at half of what the power leaves on each side
    (sample sizes of a paired t test and of equivalence, as in Chow, Shao and Wang 2008, "Sample Size Calculations in
    Clinical Research", 3.1 and 3.2; with t in place of normal quantiles).

    Args:
        error, df: standard error and degrees of freedom of a number of pairs that are as noisy as these.
    """
    distance, margin = abs(mean), math.log1p(tolerance) - abs(mean)

    def is_decisive(jobs: int) -> bool:
        degrees, standard_error = df(jobs), error(jobs)
        t_confidence = t_quantile(CONFIDENCE, degrees)
        return (t_confidence + t_quantile(2 * POWER - 1, degrees)) * standard_error <= distance or (
            (t_confidence + t_quantile(POWER, degrees)) * standard_error <= margin
        )

    too_few, sufficient = n, n + 1
    while not is_decisive(sufficient):
        too_few, sufficient = sufficient, 2 * sufficient
    while sufficient - too_few > 1:
        middle = (too_few + sufficient) // 2
        too_few, sufficient = (too_few, middle) if is_decisive(middle) else (middle, sufficient)
    return sufficient - n


def _log_seconds(seconds: Sequence[float], side: str) -> "np.ndarray":
    values = np.asarray(seconds, dtype=float)
    if values.ndim != 1 or not len(values):
        raise UsageError(f"side {side} has no jobs; one number a job is needed")
    invalid = [value for value in values.tolist() if not (math.isfinite(value) and value > 0)]
    if invalid:
        raise UsageError(f"side {side}: {invalid[0]!r} is no time of an iteration; valid: seconds above 0")
    logs: "np.ndarray" = np.log(values)
    return logs


def _single_job_comparison(mean: float, a: int, b: int, paired: bool) -> Comparison:
    """The comparison of a single job each, whose interval is unknown."""
    return Comparison(math.exp(mean), 0.0, math.inf, 1.0, a, b, paired, UNDECIDED, None)


def _ratios(mean: float, low: float, high: float) -> Tuple[float, float, float]:
    return math.exp(mean), math.exp(mean + low), math.exp(mean + high)


def _stretched_interval(
    deviations: "np.ndarray", weights: "Optional[np.ndarray]", error: float, df: float
) -> Tuple[float, float]:
    """How far the interval's ends are from the mean, below and above, from resamples' deviations [M] from it."""
    outer = t_quantile(CONFIDENCE, df) * error
    if weights is None:
        weights = np.full(len(deviations), 1 / len(deviations))
    spread = math.sqrt(float(np.sum(weights * deviations**2)))
    if spread < LEAST_NOISE * error:  # all jobs agree up to rounding
        return -outer, outer
    tail = (1 - CONFIDENCE) / 2
    low, high = (_quantile(deviations, weights, share, _ROUNDING * spread) for share in (tail, 1 - tail))
    stretch = outer / (_NORMAL * spread)
    return stretch * low, stretch * high


def _quantile(values: "np.ndarray", weights: "np.ndarray", share: float, min_gap: float) -> float:
    """Quantile of a weighted distribution, interpolated between the middles of its steps, so that it is symmetric.

    Values closer than ``min_gap`` form one step, so that their order, a matter of rounding, has no influence.
    """
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    first = np.flatnonzero(np.diff(ordered, prepend=-math.inf) > min_gap)
    steps = np.add.reduceat(weights[order], first)
    return float(np.interp(share, np.cumsum(steps) - steps / 2, ordered[first]))


def _resamples(n: int, seed: int) -> "Tuple[np.ndarray, Optional[np.ndarray]]":
    """Shares [M, n] of each of n jobs in each resample, and the weights [M]; None where all weights are equal."""
    if n <= MAX_ENUMERATED_PAIRS:
        return _all_resamples(n)
    drawn = _drawn_resamples(n, seed, 0)
    # with each its mirror image: the jobs are sorted, and A over B sorts them the other way round
    return np.concatenate([drawn, drawn[:, ::-1]]), None


@lru_cache(maxsize=16)
def _all_resamples(n: int) -> "Tuple[np.ndarray, np.ndarray]":
    chosen = np.array(list(itertools.combinations_with_replacement(range(n), n)))
    counts = np.sum(chosen[:, :, None] == np.arange(n), axis=1)
    factorials = np.array([math.factorial(k) for k in range(n + 1)], dtype=float)
    return counts / n, factorials[n] / np.prod(factorials[counts], axis=1) / float(n) ** n


@lru_cache(maxsize=64)
def _drawn_resamples(n: int, seed: int, stream: int) -> "np.ndarray":
    drawn = np.random.default_rng([seed, n, stream]).integers(0, n, size=(RESAMPLES // 2, n))
    counts = np.zeros((len(drawn), n))
    np.add.at(counts, (np.arange(len(drawn))[:, None], drawn), 1.0)
    return counts / n


def _resampled_difference(a: "np.ndarray", b: "np.ndarray", seed: int) -> "np.ndarray":
    """Mean of B minus mean of A in each resample [M], minus the same difference in the data."""
    first, second = (logs - np.mean(logs) for logs in (a, b))
    # a single job has no spread to draw from; it is drawn from the other group, one at a time
    sides = [other_logs if len(logs) == 1 else logs for logs, other_logs in ((first, second), (second, first))]
    shares = [
        [_drawn_resamples(len(values), seed, stream) if len(own) > 1 else _drawn_single_jobs(len(values), seed, stream)
         for stream in (0, 1)]
        for values, own in zip(sides, (first, second))
    ]  # fmt: skip
    # both ways round, so that exchanging A and B exchanges the resamples too
    return np.concatenate([shares[1][1] @ sides[1] - shares[0][0] @ sides[0],
                           shares[1][0] @ sides[1] - shares[0][1] @ sides[0]])  # fmt: skip


def _drawn_single_jobs(n: int, seed: int, stream: int) -> "np.ndarray":
    return np.eye(n)[np.random.default_rng([seed, n, stream, 1]).integers(0, n, size=RESAMPLES // 2)]


def _variances(a: "np.ndarray", b: "np.ndarray") -> Tuple[Tuple[float, int], Tuple[float, int]]:
    """Variance and degrees of freedom of each group; 0 degrees where the variance is that of the other group."""
    own_variances = [(float(np.var(logs, ddof=1)), len(logs) - 1) if len(logs) > 1 else (-1.0, 0) for logs in (a, b)]
    first, second = (max(value, LEAST_NOISE**2) for value, _ in own_variances)
    if own_variances[0][1] == 0:
        return (second, 0), (second, own_variances[1][1])
    if own_variances[1][1] == 0:
        return (first, own_variances[0][1]), (first, 0)
    return (first, own_variances[0][1]), (second, own_variances[1][1])


def _welch(noises: Sequence[Tuple[float, int]], sizes: Tuple[int, int]) -> Tuple[float, float]:
    """Standard error of the difference of two means and its degrees of freedom (Welch 1947, Satterthwaite 1946)."""
    squared_errors = [variance / size for (variance, _), size in zip(noises, sizes)]
    if any(df == 0 for _, df in noises):
        (df,) = (size - 1 for (_, degrees), size in zip(noises, sizes) if degrees)
        return math.sqrt(sum(squared_errors)), df
    denominator = sum(squared_error**2 / (size - 1) for squared_error, size in zip(squared_errors, sizes))
    return math.sqrt(sum(squared_errors)), sum(squared_errors) ** 2 / denominator


def _p_of_flips(differences: "np.ndarray", seed: int) -> float:
    sizes = np.sort(np.abs(differences))  # the original signs do not matter: all signs are tried
    n = len(sizes)
    if 2**n <= MAX_ENUMERATED:
        signs = _all_signs(n)
        return float(np.mean(np.abs(signs @ sizes) >= abs(float(np.sum(differences))) - n * _ROUNDING))
    signs = 2.0 * np.random.default_rng([seed, n]).integers(0, 2, size=(MAX_ENUMERATED, n)) - 1
    hits = int(np.sum(np.abs(signs @ sizes) >= abs(float(np.sum(differences))) - n * _ROUNDING))
    return (hits + 1) / (MAX_ENUMERATED + 1)


@lru_cache(maxsize=16)
def _all_signs(n: int) -> "np.ndarray":
    bits = (np.arange(2**n)[:, None] >> np.arange(n)) & 1
    return 2.0 * bits - 1


def _p_of_labels(a: "np.ndarray", b: "np.ndarray", seed: int) -> float:
    pooled = np.sort(np.concatenate([a, b]))
    pooled = pooled - np.mean(pooled)
    few, n = min(len(a), len(b)), len(pooled)
    # the distance of the means is proportional to the sum over the smaller group
    seen = abs(float(np.mean(b) - np.mean(a))) * few * (n - few) / n - n * _ROUNDING
    if math.comb(n, few) <= MAX_ENUMERATED:
        return float(np.mean(np.abs(np.sum(pooled[_all_choices(n, few)], axis=1)) >= seen))
    hits = int(np.sum(np.abs(np.sum(pooled[_drawn_choices(n, few, seed)], axis=1)) >= seen))
    return (hits + 1) / (MAX_ENUMERATED + 1)


@lru_cache(maxsize=8)
def _drawn_choices(n: int, few: int, seed: int) -> "np.ndarray":
    order = np.argsort(np.random.default_rng([seed, n, few]).random((MAX_ENUMERATED, n)), axis=1)
    return order[:, :few]


@lru_cache(maxsize=64)
def _all_choices(n: int, few: int) -> "np.ndarray":
    return np.array(list(itertools.combinations(range(n), few)))
