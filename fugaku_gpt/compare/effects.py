"""What each toggle is worth, and which work together: main effects and interactions from runs of any combinations.

Least squares on the logarithm of seconds per iteration of jobs. Each factor is -1 at its low level and 1 at its high
one, each block has a mean of its own. A main effect is the ratio of high over low, averaged (geometrically) over the
levels of the others; the interaction of two is by how much the ratio of one changes where the other is high instead of
low, a ratio of ratios. Intervals are Student's, at 95 % each; verdicts faster and slower are corrected for how many
effects are asked about (Holm 1979), over all rows of the answer.

Recorded runs are seldom balanced, so nothing is taken for granted about what they tell. An effect is identified if its
row lies in the row space of the design, that is, if no vector of the design's null space touches it. The row space is
brought to reduced echelon form in exact fractions: a row with one effect alone identifies it, and a row with several
says which sum of them is identified in place of each, which is what they are aliased with. Where a main effect is
identified only if some interactions are none, its ratio is given under that condition, and the condition is said.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from fugaku_gpt.compare.factorial import HIGH, Row, Term, term_name
from fugaku_gpt.compare.statistics import (
    CONFIDENCE,
    FASTER,
    LEAST_NOISE,
    SLOWER,
    TOLERANCE,
    UNDECIDED,
    holm,
    verdict_of,
)
from fugaku_gpt.compare.student import reach, two_sided
from fugaku_gpt.errors import UsageError

COLUMNS = ("effect", "ratio", "95 % interval", "p (Holm)", "verdict", "given")

Combination = Dict[Term, Fraction]  # of effects, in units of their coefficients


@dataclass(frozen=True)
class Observation:
    """One job: the level of each factor (LOW or HIGH), what else it was, and seconds per iteration."""

    name: str
    levels: Row
    block: str
    seconds: float


@dataclass(frozen=True)
class Effect:
    """One line of the answer.

    Attributes:
        name: such as ``freq``, ``freq×tcmalloc``, ``freq where tcmalloc=false`` or ``freq + tcmalloc×ranks``.
        ratio, low, high: high over low, with the 95 % interval; 0 and infinite where no noise can be told.
        p: of no effect; ``holm``: corrected for all lines.
        verdict: faster, slower, same (the interval lies within the tolerance) or undecided.
        given: what must hold for it, such as ``no tcmalloc×ranks``; empty: nothing but what the model leaves out.
    """

    name: str
    ratio: float
    low: float
    high: float
    p: float
    holm: float
    verdict: str
    given: str = ""


@dataclass(frozen=True)
class Attribution:
    """The answer.

    Attributes:
        effects: those that are identified, each by itself or as a sum.
        not_identified: effect → why, and with what it is aliased.
        jobs, blocks: that tell something: of a block whose jobs are all alike nothing can be learned but the noise.
        df: degrees of freedom of the noise.
        noise: standard deviation of log seconds between jobs; None where it cannot be told.
        notes: what was left out.
    """

    effects: Tuple[Effect, ...]
    not_identified: Mapping[str, str]
    jobs: int
    blocks: int
    df: int
    noise: Optional[float]
    notes: Tuple[str, ...] = ()


@dataclass(frozen=True)
class _Fit:
    """Least squares of some terms: centred columns [N, T], what the rows identify, and the noise."""

    terms: Tuple[Term, ...]
    values: "np.ndarray"
    covariance: "np.ndarray"  # in units of the noise's variance
    space: Tuple[Combination, ...]  # reduced echelon form of the row space
    df: int
    noise: Optional[float]


@dataclass(frozen=True)
class _Asked:
    name: str
    estimate: float  # log of the ratio
    error: float
    df: int
    given: str = ""


def attribute(
    observations: Sequence[Observation],
    names: Sequence[str],
    levels: Sequence[Tuple[str, str]],
    tolerance: float = TOLERANCE,
    notes: Sequence[str] = (),
) -> Attribution:
    """Main effects and interactions of two factors.

    Args:
        names: of the factors.
        levels: texts of each factor's low and high level.
        notes: about what was left out before.

    Raises:
        UsageError: there is no observation, or no factor varies anywhere.
    """
    if not observations:
        raise UsageError("no run with all of these toggles at one of their two levels has ended well")
    mains = [frozenset([place]) for place in range(len(names))]
    pairs = [frozenset(pair) for pair in itertools.combinations(range(len(names)), 2)]
    groups = _in_blocks(observations)
    lone = [rows for rows in groups if len(rows) == 1]
    used = [one for rows in groups if len(rows) > 1 for one in rows]
    if not any(len({one.levels for one in rows}) > 1 for rows in groups):
        raise UsageError(
            f"none of {', '.join(names)} varies while all else stays the same: there is nothing to tell apart in "
            f"{len(observations)} runs of {len(groups)} configurations"
        )
    full, alone = _fit(used, [*mains, *pairs]), _fit(used, mains)
    asked = [_asked(full, row, names, levels) for row in full.space]
    given = _given(used, full, names)
    asked += given
    effects = _judged(asked, tolerance)
    said = [*notes]
    if lone:
        runs = "1 run has" if len(lone) == 1 else f"{len(lone)} runs have"
        said.append(f"{runs} no like: no other differs by these toggles alone")
    if full.df == 0:
        said.append("no runs are left over to tell the noise from: no interval without repeats")
    return Attribution(
        tuple(effects),
        {term_name(term, names): why for term, why in _why_not(full, alone, [one.name for one in given], names)},
        len(used),
        len(groups) - len(lone),
        full.df,
        full.noise,
        tuple(said),
    )


def _in_blocks(observations: Iterable[Observation]) -> List[List[Observation]]:
    groups: Dict[str, List[Observation]] = {}
    for one in observations:
        groups.setdefault(one.block, []).append(one)
    return list(groups.values())


def _fit(observations: Sequence[Observation], terms: Sequence[Term]) -> _Fit:
    """Least squares within blocks: of each, the mean is taken out of columns and times."""
    columns, times, exact = [], [], []
    blocks = _in_blocks(observations)
    for rows in blocks:
        products = [[math.prod(one.levels[place] for place in term) for term in terms] for one in rows]
        block = np.array(products, dtype=float)
        columns.append(block - np.mean(block, axis=0))
        logs = np.log([one.seconds for one in rows])
        times.append(logs - np.mean(logs))
        totals = [sum(column) for column in zip(*products)]
        # whole numbers, so that what is identified does not hang on rounding
        exact += [[len(rows) * value - total for value, total in zip(row, totals)] for row in products]
    x, y = np.concatenate(columns), np.concatenate(times)
    space = _echelon(exact)
    covariance = np.linalg.pinv(x.T @ x, rcond=1e-9, hermitian=True)
    values = covariance @ x.T @ y
    df = len(y) - len(blocks) - len(space)
    residual = float(np.sum((y - x @ values) ** 2))
    noise = max(LEAST_NOISE, math.sqrt(residual / df)) if df else None
    named = tuple({terms[place]: value for place, value in enumerate(row) if value} for row in space)
    return _Fit(tuple(terms), values, covariance, named, df, noise)


def _echelon(rows: Iterable[Sequence[int]]) -> List[List[Fraction]]:
    """Reduced row echelon form of a matrix of whole numbers, without rows of zeros."""
    found: List[List[Fraction]] = []
    pivots: List[int] = []
    for whole in dict.fromkeys(tuple(row) for row in rows):
        if len(found) == len(whole):
            break
        row = [Fraction(value) for value in whole]
        for pivot, other in zip(pivots, found):
            if row[pivot]:
                row = [value - row[pivot] * known for value, known in zip(row, other)]
        place = next((place for place, value in enumerate(row) if value), None)
        if place is None:
            continue
        row = [value / row[place] for value in row]
        found = [
            [known - other[place] * value for known, value in zip(other, row)] if other[place] else other
            for other in found
        ]
        found.append(row)
        pivots.append(place)
    return [row for _, row in sorted(zip(pivots, found), key=lambda one: one[0])]


def _asked(fit: _Fit, row: Combination, names: Sequence[str], levels: Sequence[Tuple[str, str]]) -> _Asked:
    """What a row of the echelon form tells, in words and as a log ratio."""
    first = min(row, key=fit.terms.index)
    contrast = np.array([float(row.get(term, 0)) for term in fit.terms]) * _scale(first)
    return _Asked(_sum_name(first, row, names, levels), *_estimate(fit, contrast), fit.df)


def _scale(term: Term) -> float:
    """From a coefficient to a log ratio: high is two away from low, and an interaction is a difference of two such."""
    return 2.0 ** len(term)


def _estimate(fit: _Fit, contrast: "np.ndarray") -> Tuple[float, float]:
    """Of an identified contrast: its value, and its standard error; infinite where no noise can be told."""
    if fit.noise is None:
        return float(contrast @ fit.values), math.inf
    return float(contrast @ fit.values), fit.noise * math.sqrt(float(contrast @ fit.covariance @ contrast))


def _sum_name(first: Term, row: Combination, names: Sequence[str], levels: Sequence[Tuple[str, str]]) -> str:
    """A sum of effects as told: of a main effect and its own interactions it is the effect where others stand still."""
    others = {term: value for term, value in row.items() if term != first}
    if others and len(first) == 1 and all(first < term and abs(value) == 1 for term, value in others.items()):
        held = sorted((min(term - first), value) for term, value in others.items())
        said = ", ".join(f"{names[place]}={levels[place][value == HIGH]}" for place, value in held)
        return f"{term_name(first, names)} where {said}"
    words = term_name(first, names)
    for term, value in others.items():
        # in log ratios, of which an interaction has twice that of a main effect to its coefficient
        share = value * Fraction(2) ** (len(first) - len(term))
        words += f" {'-' if share < 0 else '+'} {'' if abs(share) == 1 else f'{abs(share)} '}{term_name(term, names)}"
    return words


def _given(observations: Sequence[Observation], full: _Fit, names: Sequence[str]) -> List[_Asked]:
    """Main effects that are identified only if the interactions that they hang together with are none."""
    found = []
    for term in full.terms:
        if len(term) > 1 or term in _singles(full):
            continue
        doubtful = [one for one in _linked(full, term) if len(one) > 1]
        fit = _fit(observations, [one for one in full.terms if one not in doubtful])
        if term not in _singles(fit):
            continue
        contrast = np.array([_scale(one) if one == term else 0.0 for one in fit.terms])
        every = len(doubtful) == sum(len(one) > 1 for one in full.terms)
        said = "no interactions" if every else "no " + ", ".join(term_name(one, names) for one in doubtful)
        found.append(_Asked(term_name(term, names), *_estimate(fit, contrast), fit.df, said))
    return found


def _singles(fit: _Fit) -> List[Term]:
    return [term for row in fit.space if len(row) == 1 for term in row]


def _linked(fit: _Fit, term: Term) -> List[Term]:
    """The effects that vectors of the null space join with this one, directly or by others, in the terms' order."""
    seen = {term}
    grown = True
    while grown:
        more = {other for one in seen for other in _aliases(fit, one)} - seen
        seen |= more
        grown = bool(more)
    return [other for other in fit.terms if other in seen and other != term]


def _aliases(fit: _Fit, term: Term) -> List[Term]:
    """What moves with this effect in the null space's basis that belongs to the echelon form: of an effect that leads
    a row, the others of the row; of another one, all that lead a row which it is in."""
    rows = [row for row in fit.space if term in row]
    leads = [min(row, key=fit.terms.index) for row in rows]
    found = {other for row in rows for other in row} if term in leads else set(leads)
    return [other for other in fit.terms if other in found and other != term]


def _why_not(full: _Fit, alone: _Fit, given: Sequence[str], names: Sequence[str]) -> List[Tuple[Term, str]]:
    found = []
    for term in full.terms:
        sums = [row for row in full.space if term in row]
        if any(len(row) == 1 for row in sums):
            continue
        if not sums:
            single = "its toggle does not vary" if len(term) == 1 else "its four combinations do not vary"
            found.append((term, f"{single} within any block"))
            continue
        others = ", ".join(term_name(other, names) for other in _aliases(full, term))
        why = f"aliased with {others}"
        if term_name(term, names) in given:
            why += "; identified if interactions are none"
        elif len(term) == 1:
            together = [term_name(other, names) for other in _linked(alone, term)]
            why += f"; even without interactions: varies only together with {', '.join(together)}"
        found.append((term, why))
    return found


def _judged(asked: Sequence[_Asked], tolerance: float) -> List[Effect]:
    ps = [two_sided(abs(one.estimate) / one.error, one.df) if one.df else 1.0 for one in asked]
    found = []
    for one, p, corrected in zip(asked, ps, holm(ps)):
        if not one.df:
            found.append(Effect(one.name, math.exp(one.estimate), 0.0, math.inf, p, corrected, UNDECIDED, one.given))
            continue
        half = reach(CONFIDENCE, one.df) * one.error
        low, high = one.estimate - half, one.estimate + half
        verdict = verdict_of(low, high, tolerance)
        if verdict in (FASTER, SLOWER) and corrected > 1 - CONFIDENCE:
            verdict = UNDECIDED
        ratio, below, above = (math.exp(value) for value in (one.estimate, low, high))
        found.append(Effect(one.name, ratio, below, above, p, corrected, verdict, one.given))
    return found


def effect_rows(found: Attribution) -> List[Dict[str, Any]]:
    """The effects as rows of a table with ``COLUMNS``."""
    lines = []
    for one in found.effects:
        known = math.isfinite(one.high)
        interval = f"{one.low:.3f} to {one.high:.3f}" if known else "unknown"
        cells = (one.name, f"{one.ratio:.3f}", interval, _p(one.holm) if known else "unknown", one.verdict, one.given)
        lines.append(dict(zip(COLUMNS, cells)))
    return lines


def remarks(found: Attribution) -> List[str]:
    """What the table is made of, what it does not tell, and what was left out."""
    blocks = "1 block" if found.blocks == 1 else f"{found.blocks} blocks"
    lines = [f"{found.jobs} jobs in {blocks}; {_noise(found)}"]
    lines += [f"not identified: {name}: {why}" for name, why in found.not_identified.items()]
    return lines + [f"note: {note}" for note in found.notes]


def _noise(found: Attribution) -> str:
    if found.noise is None:
        return "no degree of freedom is left for the noise"
    return f"noise between jobs {100 * found.noise:.1f} % ({found.df} degrees of freedom)"


def _p(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 else "< 0.001"


def as_json(found: Attribution) -> Dict[str, Any]:
    """The answer for JSON, which knows no infinity: an unknown end is null."""
    return {
        "effects": [
            {**vars(one), "low": one.low or None, "high": one.high if math.isfinite(one.high) else None}
            for one in found.effects
        ],
        "not_identified": dict(found.not_identified),
        "jobs": found.jobs,
        "blocks": found.blocks,
        "degrees_of_freedom": found.df,
        "noise": found.noise,
        "notes": list(found.notes),
    }
