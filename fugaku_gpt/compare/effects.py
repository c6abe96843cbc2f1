"""Estimates main effects and interactions of toggles from runs of any combinations.

The method is least squares on the logarithm of seconds per iteration of jobs. Each factor is -1 at its low level and 1
at its high level; each block (of a randomised block design) has a mean of its own. A main effect is the ratio of high
over low, averaged (geometrically) over the levels of the other factors; the interaction of two factors is the change of
one factor's ratio when the other is high instead of low, a ratio of ratios. Intervals are Student's, at 95 % each; the
verdicts faster and slower are corrected for the number of effects (Holm 1979), over all rows of the table.

Recorded runs are seldom balanced, so identifiability is computed and not assumed. An effect is identified if its row
lies in the row space of the design, that is, if no vector of the design's null space touches it. The row space is
brought to reduced echelon form in exact fractions: a row with a single effect identifies it, and a row with several
gives the sum that is identified instead of its summands, which are aliased with each other. Where a main effect is
identified only if some interactions are zero, its ratio is reported together with that condition.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from fugaku_gpt.compare.factorial import HIGH, FactorLevels, Term, term_name
from fugaku_gpt.compare.statistics import (
    CONFIDENCE,
    FASTER,
    LEAST_NOISE,
    SLOWER,
    TOLERANCE,
    UNDECIDED,
    holm_adjusted,
    verdict_of,
)
from fugaku_gpt.compare.student import t_quantile, two_sided_p
from fugaku_gpt.errors import UsageError

COLUMNS = ("effect", "ratio", "95 % interval", "p (Holm)", "verdict", "given")

EffectSum = Dict[Term, Fraction]  # coefficient of each effect in the sum


@dataclass(frozen=True)
class Observation:
    """One job: the level of each factor (LOW or HIGH), its block (all other settings), and seconds per iteration."""

    name: str
    levels: FactorLevels
    block: str
    seconds: float


@dataclass(frozen=True)
class Effect:
    """One row of the table of effects.

    Attributes:
        name: such as ``freq``, ``freq×tcmalloc``, ``freq where tcmalloc=false`` or ``freq + tcmalloc×ranks``.
        ratio, low, high: high over low, with the 95 % interval; 0 and infinite where the noise is unknown.
        p, holm: probability of such a ratio without an effect, and the same corrected for the number of rows.
        verdict: faster, slower, same (the interval lies within the tolerance) or undecided.
        given: condition under which it is identified, such as ``no tcmalloc×ranks``; empty where there is none.
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
class EffectEstimates:
    """The estimated effects, and what could not be identified.

    Attributes:
        effects: the identified effects, each by itself or as a sum.
        not_identified: effect → why it is not identified, and with what it is aliased.
        jobs, blocks: number of jobs used and of their blocks; a block of a single job is not used.
        df: degrees of freedom of the noise.
        noise: standard deviation of log seconds between jobs; None without degrees of freedom.
        notes: remarks about what was left out.
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
    """Least-squares fit of T terms to centred columns [N, T]: coefficients [T], row space and noise."""

    terms: Tuple[Term, ...]
    coefficients: "np.ndarray"
    covariance: "np.ndarray"  # [T, T], in units of the noise's variance
    row_space: Tuple[EffectSum, ...]  # reduced echelon form of the row space
    df: int
    noise: Optional[float]


@dataclass(frozen=True)
class _Contrast:
    name: str
    estimate: float  # log of the ratio
    standard_error: float
    df: int
    given: str = ""


def estimate_effects(
    observations: Sequence[Observation],
    names: Sequence[str],
    levels: Sequence[Tuple[str, str]],
    tolerance: float = TOLERANCE,
    notes: Sequence[str] = (),
) -> EffectEstimates:
    """Estimates the main effects and the two-factor interactions.

    Args:
        names: names of the factors.
        levels: texts of each factor's low and high level.
        tolerance: share within which a ratio counts as the same.
        notes: remarks about what was left out before.

    Raises:
        UsageError: there is no observation, or no factor varies within any block.
    """
    if not observations:
        raise UsageError("no run with all of these toggles at one of their two levels has ended well")
    main_terms = [frozenset([factor]) for factor in range(len(names))]
    pair_terms = [frozenset(pair) for pair in itertools.combinations(range(len(names)), 2)]
    blocks = _group_by_block(observations)
    single_run_blocks = [rows for rows in blocks if len(rows) == 1]
    used_observations = [observation for rows in blocks if len(rows) > 1 for observation in rows]
    if not any(len({observation.levels for observation in rows}) > 1 for rows in blocks):
        raise UsageError(
            f"none of {', '.join(names)} varies while all else stays the same: there is nothing to tell apart in "
            f"{len(observations)} runs of {len(blocks)} configurations"
        )
    full_fit, main_fit = _fit(used_observations, [*main_terms, *pair_terms]), _fit(used_observations, main_terms)
    contrasts = [_contrast_of_row(full_fit, row, names, levels) for row in full_fit.row_space]
    conditional = _conditional_main_effects(used_observations, full_fit, names)
    contrasts += conditional
    effects = _effects_with_verdicts(contrasts, tolerance)
    all_notes = [*notes]
    if single_run_blocks:
        runs = "1 run has" if len(single_run_blocks) == 1 else f"{len(single_run_blocks)} runs have"
        all_notes.append(f"{runs} no like: no other differs by these toggles alone")
    if full_fit.df == 0:
        all_notes.append("no runs are left over to tell the noise from: no interval without repeats")
    return EffectEstimates(
        tuple(effects),
        {
            term_name(term, names): why
            for term, why in _unidentified_reasons(
                full_fit, main_fit, [contrast.name for contrast in conditional], names
            )
        },
        len(used_observations),
        len(blocks) - len(single_run_blocks),
        full_fit.df,
        full_fit.noise,
        tuple(all_notes),
    )


def _group_by_block(observations: Iterable[Observation]) -> List[List[Observation]]:
    observations_of: Dict[str, List[Observation]] = {}
    for observation in observations:
        observations_of.setdefault(observation.block, []).append(observation)
    return list(observations_of.values())


def _fit(observations: Sequence[Observation], terms: Sequence[Term]) -> _Fit:
    """Fits the terms within blocks: the mean of each block is subtracted from columns and log times."""
    centred_columns, centred_logs, integer_rows = [], [], []
    blocks = _group_by_block(observations)
    for rows in blocks:
        level_products = [
            [math.prod(observation.levels[factor] for factor in term) for term in terms] for observation in rows
        ]
        block_columns = np.array(level_products, dtype=float)
        centred_columns.append(block_columns - np.mean(block_columns, axis=0))
        logs = np.log([observation.seconds for observation in rows])
        centred_logs.append(logs - np.mean(logs))
        totals = [sum(column) for column in zip(*level_products)]
        # in integers, so that identifiability does not depend on rounding
        integer_rows += [[len(rows) * value - total for value, total in zip(row, totals)] for row in level_products]
    x, y = np.concatenate(centred_columns), np.concatenate(centred_logs)
    echelon_rows = _reduced_echelon_form(integer_rows)
    covariance = np.linalg.pinv(x.T @ x, rcond=1e-9, hermitian=True)
    values = covariance @ x.T @ y
    df = len(y) - len(blocks) - len(echelon_rows)
    residual = float(np.sum((y - x @ values) ** 2))
    noise = max(LEAST_NOISE, math.sqrt(residual / df)) if df else None
    row_space = tuple({terms[index]: value for index, value in enumerate(row) if value} for row in echelon_rows)
    return _Fit(tuple(terms), values, covariance, row_space, df, noise)


def _reduced_echelon_form(rows: Iterable[Sequence[int]]) -> List[List[Fraction]]:
    """Reduced row echelon form of an integer matrix, without rows of zeros."""
    reduced_rows: List[List[Fraction]] = []
    pivots: List[int] = []
    for integer_row in dict.fromkeys(tuple(row) for row in rows):
        if len(reduced_rows) == len(integer_row):
            break
        row = [Fraction(value) for value in integer_row]
        for pivot, reduced_row in zip(pivots, reduced_rows):
            if row[pivot]:
                row = [value - row[pivot] * reduced_value for value, reduced_value in zip(row, reduced_row)]
        leading_index = next((index for index, value in enumerate(row) if value), None)
        if leading_index is None:
            continue
        row = [value / row[leading_index] for value in row]
        reduced_rows = [
            [reduced_value - reduced_row[leading_index] * value for reduced_value, value in zip(reduced_row, row)]
            if reduced_row[leading_index]
            else reduced_row
            for reduced_row in reduced_rows
        ]
        reduced_rows.append(row)
        pivots.append(leading_index)
    return [row for _, row in sorted(zip(pivots, reduced_rows), key=lambda pivot_and_row: pivot_and_row[0])]


def _contrast_of_row(fit: _Fit, row: EffectSum, names: Sequence[str], levels: Sequence[Tuple[str, str]]) -> _Contrast:
    """The contrast that a row of the echelon form identifies: its name and its log ratio."""
    leading_term = min(row, key=fit.terms.index)
    contrast = np.array([float(row.get(term, 0)) for term in fit.terms]) * _log_ratio_scale(leading_term)
    return _Contrast(_effect_sum_name(leading_term, row, names, levels), *_estimate(fit, contrast), fit.df)


def _log_ratio_scale(term: Term) -> float:
    """Factor from a coefficient to a log ratio: 2 for a main effect (low is -1, high is 1), 4 for an interaction."""
    return 2.0 ** len(term)


def _estimate(fit: _Fit, contrast: "np.ndarray") -> Tuple[float, float]:
    """Value and standard error of an identified contrast; the error is infinite where the noise is unknown."""
    if fit.noise is None:
        return float(contrast @ fit.coefficients), math.inf
    return float(contrast @ fit.coefficients), fit.noise * math.sqrt(float(contrast @ fit.covariance @ contrast))


def _effect_sum_name(first: Term, row: EffectSum, names: Sequence[str], levels: Sequence[Tuple[str, str]]) -> str:
    """Name of a sum of effects.

    A main effect plus or minus its own interactions is the effect at fixed levels of the other factors.
    """
    other_terms = {term: value for term, value in row.items() if term != first}
    if other_terms and len(first) == 1 and all(first < term and abs(value) == 1 for term, value in other_terms.items()):
        fixed_levels = sorted((min(term - first), value) for term, value in other_terms.items())
        condition = ", ".join(f"{names[factor]}={levels[factor][value == HIGH]}" for factor, value in fixed_levels)
        return f"{term_name(first, names)} where {condition}"
    name = term_name(first, names)
    for term, value in other_terms.items():
        # in log ratios: the scale of an interaction is twice that of a main effect
        share = value * Fraction(2) ** (len(first) - len(term))
        name += f" {'-' if share < 0 else '+'} {'' if abs(share) == 1 else f'{abs(share)} '}{term_name(term, names)}"
    return name


def _conditional_main_effects(observations: Sequence[Observation], full: _Fit, names: Sequence[str]) -> List[_Contrast]:
    """Main effects that are identified only if the interactions aliased with them are zero."""
    conditional = []
    for term in full.terms:
        if len(term) > 1 or term in _identified_terms(full):
            continue
        aliased_interactions = [alias for alias in _transitive_aliases(full, term) if len(alias) > 1]
        reduced_fit = _fit(observations, [other for other in full.terms if other not in aliased_interactions])
        if term not in _identified_terms(reduced_fit):
            continue
        contrast = np.array([_log_ratio_scale(other) if other == term else 0.0 for other in reduced_fit.terms])
        drops_all_interactions = len(aliased_interactions) == sum(len(other) > 1 for other in full.terms)
        condition = (
            "no interactions"
            if drops_all_interactions
            else "no " + ", ".join(term_name(alias, names) for alias in aliased_interactions)
        )
        conditional.append(
            _Contrast(term_name(term, names), *_estimate(reduced_fit, contrast), reduced_fit.df, condition)
        )
    return conditional


def _identified_terms(fit: _Fit) -> List[Term]:
    return [term for row in fit.row_space if len(row) == 1 for term in row]


def _transitive_aliases(fit: _Fit, term: Term) -> List[Term]:
    """Effects that are aliased with this one, directly or through other effects, in the order of the terms."""
    reached = {term}
    is_growing = True
    while is_growing:
        newly_reached = {other for reached_term in reached for other in _aliases(fit, reached_term)} - reached
        reached |= newly_reached
        is_growing = bool(newly_reached)
    return [other for other in fit.terms if other in reached and other != term]


def _aliases(fit: _Fit, term: Term) -> List[Term]:
    """Effects that are directly aliased with this one, in the order of the terms.

    For the leading effect of a row of the echelon form these are the others in its row; for any other effect they are
    the leading effects of the rows that contain it.
    """
    rows = [row for row in fit.row_space if term in row]
    leading_terms = [min(row, key=fit.terms.index) for row in rows]
    aliased_terms = {other for row in rows for other in row} if term in leading_terms else set(leading_terms)
    return [other for other in fit.terms if other in aliased_terms and other != term]


def _unidentified_reasons(
    full_fit: _Fit, main_fit: _Fit, conditional_names: Sequence[str], names: Sequence[str]
) -> List[Tuple[Term, str]]:
    reasons = []
    for term in full_fit.terms:
        rows_with_term = [row for row in full_fit.row_space if term in row]
        if any(len(row) == 1 for row in rows_with_term):
            continue
        if not rows_with_term:
            cause = "its toggle does not vary" if len(term) == 1 else "its four combinations do not vary"
            reasons.append((term, f"{cause} within any block"))
            continue
        aliases = ", ".join(term_name(other, names) for other in _aliases(full_fit, term))
        reason = f"aliased with {aliases}"
        if term_name(term, names) in conditional_names:
            reason += "; identified if interactions are none"
        elif len(term) == 1:
            inseparable = [term_name(other, names) for other in _transitive_aliases(main_fit, term)]
            reason += f"; even without interactions: varies only together with {', '.join(inseparable)}"
        reasons.append((term, reason))
    return reasons


def _effects_with_verdicts(contrasts: Sequence[_Contrast], tolerance: float) -> List[Effect]:
    p_values = [
        two_sided_p(abs(contrast.estimate) / contrast.standard_error, contrast.df) if contrast.df else 1.0
        for contrast in contrasts
    ]
    effects = []
    for contrast, p, holm_p in zip(contrasts, p_values, holm_adjusted(p_values)):
        if not contrast.df:
            effects.append(
                Effect(contrast.name, math.exp(contrast.estimate), 0.0, math.inf, p, holm_p, UNDECIDED, contrast.given)
            )
            continue
        half_width = t_quantile(CONFIDENCE, contrast.df) * contrast.standard_error
        low, high = contrast.estimate - half_width, contrast.estimate + half_width
        verdict = verdict_of(low, high, tolerance)
        if verdict in (FASTER, SLOWER) and holm_p > 1 - CONFIDENCE:
            verdict = UNDECIDED
        ratio, below, above = (math.exp(value) for value in (contrast.estimate, low, high))
        effects.append(Effect(contrast.name, ratio, below, above, p, holm_p, verdict, contrast.given))
    return effects


def effect_rows(estimates: EffectEstimates) -> List[Dict[str, Any]]:
    """The effects as rows of a table with ``COLUMNS``."""
    rows = []
    for effect in estimates.effects:
        is_bounded = math.isfinite(effect.high)
        interval = f"{effect.low:.3f} to {effect.high:.3f}" if is_bounded else "unknown"
        cells = (
            effect.name,
            f"{effect.ratio:.3f}",
            interval,
            _p_text(effect.holm) if is_bounded else "unknown",
            effect.verdict,
            effect.given,
        )
        rows.append(dict(zip(COLUMNS, cells)))
    return rows


def remarks(estimates: EffectEstimates) -> List[str]:
    """Lines below the table: number of jobs and noise, effects that are not identified, and notes."""
    blocks = "1 block" if estimates.blocks == 1 else f"{estimates.blocks} blocks"
    lines = [f"{estimates.jobs} jobs in {blocks}; {_noise_text(estimates)}"]
    lines += [f"not identified: {name}: {why}" for name, why in estimates.not_identified.items()]
    return lines + [f"note: {note}" for note in estimates.notes]


def _noise_text(estimates: EffectEstimates) -> str:
    if estimates.noise is None:
        return "no degree of freedom is left for the noise"
    return f"noise between jobs {100 * estimates.noise:.1f} % ({estimates.df} degrees of freedom)"


def _p_text(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 else "< 0.001"


def as_json(estimates: EffectEstimates) -> Dict[str, Any]:
    """The estimates as JSON values; an unknown end of an interval is null, since JSON has no infinity."""
    return {
        "effects": [
            {**vars(effect), "low": effect.low or None, "high": effect.high if math.isfinite(effect.high) else None}
            for effect in estimates.effects
        ],
        "not_identified": dict(estimates.not_identified),
        "jobs": estimates.jobs,
        "blocks": estimates.blocks,
        "degrees_of_freedom": estimates.df,
        "noise": estimates.noise,
        "notes": list(estimates.notes),
    }
