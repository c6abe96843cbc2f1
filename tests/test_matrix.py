"""Tests that the parity matrix and the random layouts cover every feature and every combination of two features."""

from __future__ import annotations

from itertools import combinations
from typing import Dict, FrozenSet, List, Set, Tuple

import pytest

from fugaku_gpt.config.schema import LR_SCHEDULES, PIPELINE_SCHEDULES, SIXTEEN_BIT_DTYPES
from fugaku_gpt.layout.stages import chunks_of
from fugaku_gpt.model import recompute_of
from tests.mpi.cases import NARROW, WIDE, config_of
from tests.mpi.layouts import draw_layouts, from_arguments
from tests.support.features import FEATURES, features_of

# features of which a run has one at most, and why
EXCLUSIVE_FEATURES: Dict[str, Tuple[str, ...]] = {
    "a pipeline has one schedule": PIPELINE_SCHEDULES,
    "layers are recomputed in one way, or by a budget that may mix both": ("selective", "full"),
    "a budget chooses the layers": ("some layers", "budget"),
    "weights have one type": SIXTEEN_BIT_DTYPES,
    "a run has one schedule of learning rates": LR_SCHEDULES,
    "some products have biases, or none": ("no biases", "biases of qkv"),
}
TRIPLES: List[Tuple[str, ...]] = [
    ("tp", "pp", "dp"),
    ("pp", "zero", "selective"),
    ("pp", "zero", "full"),
    ("tp", "sequence parallel", "zero"),
    ("interleaved", "selective", "bfloat16"),
    ("interleaved", "full", "bfloat16"),
    ("zero_bubble", "dp", "zero"),
    ("zero_bubble", "full", "bfloat16"),
]
SOAK_LAYOUT_COUNTS = {1: 4, 2: 8, 3: 12, 4: 14, 5: 8, 6: 18, 7: 8, 8: 28}  # layouts of one seed in `make soak`


@pytest.fixture(scope="module")
def matrix() -> Dict[str, FrozenSet[str]]:
    """The features of each case of the parity tests."""
    return {case: features_of(config_of(case)) for case in WIDE + NARROW}


def can_be_combined(features: Tuple[str, ...]) -> bool:
    """Whether a run can have all of them."""
    return not any(len(set(exclusive) & set(features)) > 1 for exclusive in EXCLUSIVE_FEATURES.values())


def test_parity_has_every_pair_of_features_that_can_be_combined(matrix: Dict[str, FrozenSet[str]]) -> None:
    covered = {pair for features in matrix.values() for pair in combinations(sorted(features), 2)}
    pairs = set(combinations(sorted(FEATURES), 2))
    assert [pair for pair in sorted(pairs - covered) if can_be_combined(pair)] == []
    assert [pair for pair in sorted(covered) if not can_be_combined(pair)] == []
    assert (len(pairs), len([pair for pair in pairs if not can_be_combined(pair)])) == (741, 16)


@pytest.mark.parametrize("triple", TRIPLES, ids="-".join)
def test_parity_has_the_triples_that_matter_most(matrix: Dict[str, FrozenSet[str]], triple: Tuple[str, ...]) -> None:
    assert [case for case, features in matrix.items() if set(triple) <= features]


def test_no_two_cases_are_the_same() -> None:
    for cases in (WIDE, NARROW):
        assert len({config_of(case) for case in cases}) == len(cases)


def test_a_budget_in_the_matrix_makes_a_difference(matrix: Dict[str, FrozenSet[str]]) -> None:
    for case in (case for case, features in matrix.items() if "budget" in features):
        types = ("float64", "float32") if case in WIDE else (config_of(case).training.dtype,)
        configs = [config_of(case, f"training.dtype={dtype}") for dtype in types]
        assert any(len(set(recompute_of(config, chunks_of(config)))) > 1 for config in configs), case


@pytest.mark.slow
@pytest.mark.long
def test_random_layouts_have_every_feature_and_many_grids() -> None:
    features: Set[str] = set()
    grids = set()
    spoilt, nodes = 0, 0
    for ranks, count in SOAK_LAYOUT_COUNTS.items():
        drawn = draw_layouts(ranks, count, 1)
        assert len(set(drawn)) == count
        for layout in drawn:
            assert layout.config.layout.ranks == ranks and from_arguments(layout.arguments) == layout
            features |= features_of(layout.config)
            grids.add((layout.config.layout.dp, layout.config.layout.tp, layout.config.layout.pp))
            spoilt += layout.spoilt_rank is not None
            nodes += layout.node_replicas is not None
    assert features == set(FEATURES)
    assert {dp for dp, _, _ in grids} >= {1, 2, 3, 4, 5, 7} and {tp for _, tp, _ in grids} >= {1, 2, 3, 4}
    assert {pp for _, _, pp in grids} >= {1, 2, 3, 4, 5, 7} and (2, 2, 2) in grids
    assert spoilt and nodes
    assert draw_layouts(4, 3, 7) == draw_layouts(4, 3, 7) != draw_layouts(4, 3, 8)
