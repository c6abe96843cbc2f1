"""Tests of main effects and interactions: planted ones are detected, unidentified ones named, on any set of runs."""

from __future__ import annotations

import itertools
import math
from typing import Callable, Dict, Iterable, List, Sequence, Tuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fugaku_gpt.compare.effects import (
    COLUMNS,
    Effect,
    EffectEstimates,
    Observation,
    as_json,
    effect_rows,
    estimate_effects,
    remarks,
)
from fugaku_gpt.compare.factorial import parse_factors, plan_design
from fugaku_gpt.config import load_run_config
from fugaku_gpt.errors import UsageError

NAMES = ["freq", "tcmalloc", "retention", "ranks"]
LEVELS = [("2000", "2200"), ("false", "true"), ("0", "1"), ("1", "4")]
Row = Tuple[int, ...]
Truth = Callable[[Row], float]


def runs(
    rows: Iterable[Row], truth: Truth, repeats: int = 1, noise: float = 0.0, drift: float = 1.0, seed: int = 0
) -> List[Observation]:
    """Observations of every row once a block; each block is slower by ``drift`` than the block before it."""
    random = np.random.default_rng(seed)
    return [
        Observation(f"b{block}", tuple(row), f"b{block}", truth(row) * drift**block * math.exp(noise * z))
        for block in range(repeats)
        for row, z in ((row, random.standard_normal()) for row in rows)
    ]


def truth(row: Row) -> float:
    """Seconds with planted ratios: 2.2 GHz 0.85, tcmalloc 0.7, their interaction 0.9, and 1 for all other toggles."""
    seconds = 10.0 * 0.85 ** (row[0] / 2) * 0.7 ** (row[1] / 2)
    return float(seconds * 0.9 ** (row[0] * row[1] / 4))


def find(observations: Sequence[Observation], count: int = 4, tolerance: float = 0.02) -> EffectEstimates:
    return estimate_effects(observations, NAMES[:count], LEVELS[:count], tolerance)


def by_name(estimates: EffectEstimates) -> Dict[str, Effect]:
    return {effect.name: effect for effect in estimates.effects}


def full(count: int) -> List[Row]:
    return list(itertools.product((-1, 1), repeat=count))


def fraction(text: str, p: int) -> List[Row]:
    return list(plan_design(parse_factors(text, load_run_config(None, "tiny")), p).combinations)


def test_only_planted_effects_are_detected() -> None:
    estimates = find(runs(full(4), truth, repeats=3, noise=0.005, drift=1.1))
    effects = by_name(estimates)
    planted_ratios = {"freq": 0.85, "tcmalloc": 0.7, "freq×tcmalloc": 0.9}
    for name, effect in effects.items():
        assert effect.ratio == pytest.approx(planted_ratios.get(name, 1.0), abs=0.01)
        assert effect.low <= planted_ratios.get(name, 1.0) <= effect.high or name not in planted_ratios
        assert effect.verdict == ("faster" if name in planted_ratios else "same") and not effect.given
    assert len(effects) == 10 and not estimates.not_identified
    assert estimates.noise == pytest.approx(0.005, rel=0.3) and (estimates.jobs, estimates.blocks, estimates.df) == (
        48,
        3,
        35,
    )


@pytest.mark.slow
def test_a_single_toggle_in_blocks_of_two_matches_the_paired_t_test() -> None:
    stats = pytest.importorskip("scipy.stats")
    observations = runs(full(1), lambda row: 1.03 if row[0] > 0 else 1.0, repeats=6, noise=0.02, drift=1.3)
    (effect,) = find(observations, 1).effects
    low, high = (
        [math.log(observation.seconds) for observation in observations if observation.levels == (level,)]
        for level in (-1, 1)
    )
    test = stats.ttest_rel(high, low)
    assert effect.p == pytest.approx(test.pvalue, rel=1e-9)
    interval = test.confidence_interval()
    assert (math.log(effect.low), math.log(effect.high)) == pytest.approx((interval.low, interval.high), rel=1e-9)


def test_a_design_of_resolution_four_reports_sums_of_interactions() -> None:
    estimates = find(runs(fraction("freq,tcmalloc,retention,ranks", 1), truth, repeats=2, noise=0.003))
    effects = by_name(estimates)
    assert list(effects) == [
        *NAMES, "freq×tcmalloc + retention×ranks", "freq×retention + tcmalloc×ranks", "freq×ranks + tcmalloc×retention",
    ]  # fmt: skip
    assert effects["tcmalloc"].ratio == pytest.approx(0.7, abs=0.01)
    assert effects["freq×tcmalloc + retention×ranks"].ratio == pytest.approx(0.9, abs=0.01)
    assert estimates.not_identified["freq×tcmalloc"] == "aliased with retention×ranks"
    assert len(estimates.not_identified) == 6


def test_main_effects_of_resolution_three_assume_no_interactions() -> None:
    estimates = find(runs(fraction("freq,tcmalloc,retention", 1), truth, repeats=3, noise=0.003), 3)
    effects = {(effect.name, effect.given): effect for effect in estimates.effects}
    # retention = freq×tcmalloc, so their sum is seen: an interaction's ratio is that of two main effects
    assert effects["retention + 1/2 freq×tcmalloc", ""].ratio == pytest.approx(math.sqrt(0.9), abs=0.01)
    assert ("retention", "no freq×tcmalloc") in effects and ("freq", "no tcmalloc×retention") in effects
    assert estimates.not_identified["retention"] == ("aliased with freq×tcmalloc; identified if interactions are none")


def test_toggles_varied_singly_have_effects_at_fixed_levels_of_the_rest() -> None:
    rows = [(-1, -1, -1), (1, -1, -1), (-1, 1, -1), (-1, -1, 1)]
    estimates = find(runs(rows, truth, repeats=3, noise=0.003), 3)
    effects = {(effect.name, effect.given): effect for effect in estimates.effects}
    assert effects["freq where tcmalloc=false, retention=0", ""].ratio == pytest.approx(0.85 / 0.9**0.5, abs=0.01)
    conditional = effects["freq", "no interactions"]
    assert conditional.ratio == pytest.approx(effects["freq where tcmalloc=false, retention=0", ""].ratio, rel=1e-9)
    assert "its four combinations" not in " ".join(estimates.not_identified.values())
    assert set(estimates.not_identified) == {"freq", "tcmalloc", "retention", "freq×tcmalloc", "freq×retention",
                                             "tcmalloc×retention"}  # fmt: skip


def test_toggles_that_vary_together_are_not_identified() -> None:
    estimates = find(runs([(-1, -1, -1), (1, 1, -1)], truth, repeats=4, noise=0.003), 3)
    assert "varies only together with tcmalloc" in estimates.not_identified["freq"]
    assert estimates.not_identified["retention"] == "its toggle does not vary within any block"
    assert estimates.not_identified["freq×tcmalloc"] == "its four combinations do not vary within any block"
    (effect,) = (effect for effect in estimates.effects if not effect.given and "retention" not in effect.name[:9])
    assert effect.name.startswith("freq + tcmalloc") and effect.verdict == "faster"


def test_without_repeats_nothing_is_decided() -> None:
    estimates = find(runs(full(2), truth, noise=0.01), 2)
    assert [effect.verdict for effect in estimates.effects] == ["undecided"] * 3
    assert all((effect.low, effect.high, effect.p) == (0.0, math.inf, 1.0) for effect in estimates.effects)
    assert estimates.noise is None and "no interval without repeats" in estimates.notes[-1]
    assert as_json(estimates)["effects"][0]["high"] is None and as_json(estimates)["effects"][0]["low"] is None
    first = effect_rows(estimates)[0]
    assert first["effect"] == "freq" and first["95 % interval"] == first["p (Holm)"] == "unknown"
    assert remarks(estimates)[0] == "4 jobs in 1 block; no degree of freedom is left for the noise"


def test_estimates_are_shown_as_a_table_and_remarks() -> None:
    estimates = find(runs(fraction("freq,tcmalloc,retention", 1), truth, repeats=3, noise=0.003), 3)
    assert all(tuple(row) == COLUMNS for row in effect_rows(estimates)) and len(effect_rows(estimates)) == len(
        estimates.effects
    )
    assert "to" in effect_rows(estimates)[0]["95 % interval"] and effect_rows(estimates)[1]["p (Holm)"] == "< 0.001"
    lines = remarks(estimates)
    assert lines[0].startswith("12 jobs in 3 blocks; noise between jobs 0.")
    assert "not identified: freq: aliased with tcmalloc×retention; identified if interactions are none" in lines


def test_a_toggle_that_varies_only_between_blocks_is_not_identified() -> None:
    rows = [(-1, -1), (-1, 1)]
    other = [Observation("x", (1, level), "another layout", 3.0 + level) for level in (-1, 1)]
    estimates = find(runs(rows, truth, repeats=2, noise=0.01) + other, 2)
    assert estimates.not_identified["freq"].startswith("its toggle does not vary")
    assert estimates.blocks == 3


def test_a_run_without_a_match_is_left_out_and_reported() -> None:
    estimates = find([*runs(full(1), no_effect, repeats=3, noise=0.01), Observation("x", (1,), "alone", 99.0)], 1)
    assert estimates.jobs == 6 and estimates.notes[0].startswith("1 run has no like")


def no_effect(row: Row) -> float:
    return 1.0


def test_nothing_to_attribute_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="no run"):
        find([])
    with pytest.raises(UsageError, match="none of freq varies"):
        find([Observation("x", (1,), "a", 1.0), Observation("y", (-1,), "b", 1.0)], 1)


@pytest.mark.slow
def test_noise_alone_gives_a_verdict_in_at_most_5_percent_of_sets() -> None:
    rows = full(3)
    false_verdicts = 0
    for seed in range(300):
        estimates = find(runs(rows, lambda _: 1.0, repeats=2, noise=0.05, seed=seed), 3)
        false_verdicts += any(effect.verdict in ("faster", "slower") for effect in estimates.effects)
    assert false_verdicts / 300 <= 0.05 + 0.038  # three standard deviations of 300 sets


LEVEL = st.sampled_from((-1, 1))
SETS = st.lists(st.tuples(LEVEL, LEVEL, LEVEL, st.integers(0, 2), st.floats(0.5, 2.0)), min_size=2, max_size=14)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(SETS)
def test_an_effect_stands_alone_if_and_only_if_no_null_vector_touches_it(rows) -> None:  # type: ignore[no-untyped-def]
    observations = [Observation("x", (f, t, r), f"b{block}", seconds) for f, t, r, block, seconds in rows]
    try:
        estimates = find(observations, 3)
    except UsageError:
        return
    terms = [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)]
    x = np.array([[*(float(block == b) for b in range(3)), *(math.prod((f, t, r)[at] for at in term) for term in terms)]
                  for f, t, r, block, _ in rows])  # fmt: skip
    rank = np.linalg.matrix_rank(x)
    alone = {effect.name for effect in estimates.effects if not effect.given}
    for number, term in enumerate(terms):
        name = "×".join(NAMES[toggle] for toggle in term)
        unit = np.eye(9)[3 + number]
        identified = np.linalg.matrix_rank(np.vstack([x, unit])) == rank
        assert (name in alone) == identified == (name not in estimates.not_identified)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(SETS, st.floats(0.1, 10.0), st.randoms(use_true_random=False))
def test_units_order_and_names_of_levels_do_not_matter(rows, factor, random) -> None:  # type: ignore[no-untyped-def]
    observations = [Observation("x", (f, t, r), f"b{block}", seconds) for f, t, r, block, seconds in rows]
    try:
        estimates = find(observations, 3)
    except UsageError:
        return
    scaled = [
        Observation(
            "x", observation.levels, observation.block, observation.seconds * factor ** int(observation.block[1])
        )
        for observation in observations
    ]
    random.shuffle(scaled)
    swapped = [
        Observation("x", (-observation.levels[0], *observation.levels[1:]), observation.block, observation.seconds)
        for observation in observations
    ]
    same, mirror = by_name_given(find(scaled, 3)), by_name_given(find(swapped, 3))
    for key, effect in by_name_given(estimates).items():
        assert same[key].ratio == pytest.approx(effect.ratio, rel=1e-6)
        assert same[key].low == pytest.approx(effect.low, rel=1e-5)
        if effect.name in ("freq", "freq×tcmalloc", "freq×retention"):
            assert mirror[key].ratio == pytest.approx(1 / effect.ratio, rel=1e-6)


def by_name_given(estimates: EffectEstimates) -> Dict[Tuple[str, str], Effect]:
    return {(effect.name, effect.given): effect for effect in estimates.effects}
