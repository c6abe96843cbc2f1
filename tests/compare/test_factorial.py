"""Tests of factorial designs: their fractions against published ones, and their sweep files."""

from __future__ import annotations

import itertools
import math
from typing import Any, Dict, List, Optional

import pytest

from fugaku_gpt.compare.factorial import (
    HIGH,
    LOW,
    AnalysisSettings,
    Design,
    describe,
    parse_factors,
    plan_design,
    read_design,
    settings_of,
    sweep_text,
)
from fugaku_gpt.config import RunConfig, load_run_config
from fugaku_gpt.errors import UsageError
from fugaku_gpt.sweep.expand import Run, expand_text

FOUR = "freq,tcmalloc,retention,ranks"
NINE = "freq,tcmalloc,retention,ranks,precision,pages,arena_lock,threads=1|2,recompute"
# Box, Hunter and Hunter, Statistics for Experimenters, table of two-level fractional designs
RESOLUTIONS = {
    (3, 1): 3, (4, 1): 4, (5, 1): 5, (5, 2): 3, (6, 1): 6, (6, 2): 4, (6, 3): 3, (7, 1): 7, (7, 2): 4, (7, 3): 4,
    (7, 4): 3, (8, 2): 5, (8, 3): 4, (8, 4): 4, (9, 2): 6, (9, 3): 4, (9, 4): 4, (9, 5): 3,
}  # fmt: skip


def base(*settings: str) -> RunConfig:
    return load_run_config(None, "tiny", ["training.global_batch=16", *settings])


def design(text: str, fraction: int = 0, repeats: int = 1, seed: int = 0, run: Optional[RunConfig] = None) -> Design:
    return plan_design(parse_factors(text, run or base()), fraction, repeats, seed)


def test_toggles_have_their_usual_levels() -> None:
    factors = parse_factors("freq,tcmalloc,retention,ranks,precision,node.arena_lock=1|0", base())
    assert [(factor.name, factor.low.text, factor.high.text) for factor in factors] == [
        ("freq", "2000", "2200"),
        ("tcmalloc", "false", "true"),
        ("retention", "0", "1"),
        ("ranks", "1", "4"),
        ("precision", "float32", "bfloat16"),
        ("arena_lock", "1", "0"),
    ]
    # 2.2 GHz runs with one floating-point pipe alone: so does 2.0 GHz, or the clock's effect would be that of both
    assert factors[0].high.settings == (("node.freq_mhz", "2200"), ("node.eco_state", "2"))
    assert ("node.eco_state", "2") in factors[0].low.settings


def test_more_ranks_are_more_replicas_on_the_same_cores() -> None:
    run = base("layout.tp=2", "job.nodes=2", "node.ranks_per_node=1", "node.threads_per_rank=48")
    (ranks,) = parse_factors("ranks", run)
    assert dict(ranks.low.settings) == {"layout.dp": "1", "node.ranks_per_node": "1", "node.threads_per_rank": "48"}
    assert dict(ranks.high.settings) == {"layout.dp": "4", "node.ranks_per_node": "4", "node.threads_per_rank": "12"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty name"),
        ("freq,", "empty name"),
        ("frequency", "no such setting"),
        ("threads", "two levels"),
        ("tcmalloc=true", "two levels"),
        ("tcmalloc=true|true", "two levels"),
        ("tcmalloc=a|b|c", "two levels"),
        ("tcmalloc,tcmalloc", "both set"),
        ("freq,eco", "both set node.eco_state"),
        ("ranks=1|x", "multiple of layout.tp"),
        (NINE + ",zero=0|1", "valid: 1 to 9"),
    ],
)
def test_invalid_toggles_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_factors(text, base())


def test_ranks_that_the_cores_do_not_divide_by_are_refused() -> None:
    with pytest.raises(UsageError, match="cannot be shared out to 4 ranks"):
        parse_factors("ranks", base("node.threads_per_rank=2"))
    with pytest.raises(UsageError, match="both set node.threads_per_rank"):
        parse_factors("ranks=1|2,threads=1|2", base("node.threads_per_rank=2"))


@pytest.mark.slow
@pytest.mark.parametrize(("size", "resolution"), RESOLUTIONS.items())
def test_fractions_have_the_published_resolution(size: Any, resolution: int) -> None:
    k, p = size
    plan = design(",".join(NINE.split(",")[:k]), p)
    assert plan.resolution == resolution and len(plan.combinations) == len(set(plan.combinations)) == 2 ** (k - p)
    columns = list(zip(*plan.combinations))
    for column, other in itertools.combinations(columns, 2):  # balanced, and no two toggles vary together
        assert sum(column) == sum(other) == sum(x * y for x, y in zip(column, other)) == 0


def test_the_design_of_minimum_aberration_is_taken() -> None:
    # Montgomery, Design and Analysis of Experiments: of the 2^(7-2) designs of resolution IV the one with the least
    # words of length 4 has one (D = {4, 5, 5}); of 2^(6-2), three
    assert sorted(map(len, design(",".join(NINE.split(",")[:7]), 2).defining_relation)) == [4, 5, 5]
    assert sorted(map(len, design(",".join(NINE.split(",")[:6]), 2).defining_relation)) == [4, 4, 4]


def test_aliases_are_equal_columns() -> None:
    plan = design("freq,tcmalloc,retention,ranks,precision", 2)
    terms = [frozenset(term) for size in (1, 2) for term in itertools.combinations(range(5), size)]

    def column(term: Any) -> List[int]:
        return [math.prod(row[toggle] for toggle in term) for row in plan.combinations]

    for term in terms:
        alike = [other for other in terms if other != term and column(other) == column(term)]
        assert set(plan.aliases(term)) == set(alike)


def test_a_design_is_described() -> None:
    lines = describe(design(FOUR, 1, 3))
    assert lines[0].startswith("2^(4-1), resolution IV: 8 combinations in 3 blocks, 24 runs")
    assert "freq: 2000 | 2200 (node.freq_mhz 2000 | 2200, node.eco_state 2)" in lines
    assert "generator: ranks = freq×tcmalloc×retention" in lines
    assert "aliased: freq×tcmalloc = retention×ranks" in lines
    assert not any("aliased" in line for line in describe(design(FOUR)))
    assert describe(design("freq,tcmalloc,retention,ranks,precision", 1))[-1].startswith("all main effects and")


@pytest.mark.parametrize(("fraction", "repeats"), [(3, 1), (-1, 1), (0, 0)])
def test_invalid_fractions_and_repeats_are_refused(fraction: int, repeats: int) -> None:
    with pytest.raises(UsageError, match="valid"):
        design(FOUR, fraction, repeats)


def runs_of(plan: Design, run: Optional[RunConfig] = None) -> List[Run]:
    text = sweep_text(plan, run or base(), "toggles")
    assert read_design(text, "a file") == (plan, None)
    timed = AnalysisSettings(7, 0.05)
    assert read_design(sweep_text(plan, run or base(), "toggles", timed), "a file") == (plan, timed)
    return list(expand_text(text, "a file", "x").runs)


def test_each_block_of_the_sweep_runs_every_combination_once_in_a_random_order() -> None:
    plan = design(FOUR, 0, 3, seed=4)
    runs = runs_of(plan)
    assert len(runs) == 48 and not any(run.refusal for run in runs)
    labels = plan.labels()
    orders = []
    for block in range(3):
        block_runs = runs[16 * block : 16 * (block + 1)]
        assert all(labels[run.row][0] == block + 1 for run in block_runs)
        orders.append([labels[run.row][1] for run in block_runs])
        assert sorted(orders[-1]) == sorted(plan.combinations)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert [run.row for run in runs_of(design(FOUR, 0, 3, seed=4))] == [run.row for run in runs]
    assert [run.row for run in runs_of(design(FOUR, 0, 3, seed=5))] != [run.row for run in runs]


def test_the_sweeps_runs_have_the_levels_of_their_labels() -> None:
    plan = design("freq,tcmalloc,ranks=1|2,precision", 1)
    run = base("training.lr=2e-4", "job.elapse=0:40:00", "data.paths=[a, b c]")
    labels = plan.labels()
    for sweep_run in runs_of(plan, run):
        _, (freq, tcmalloc, ranks, precision) = labels[sweep_run.row]
        assert sweep_run.config is not None
        node = sweep_run.config.node
        assert (node.freq_mhz, node.eco_state) == (2200 if freq == HIGH else 2000, 2)
        assert node.tcmalloc == (tcmalloc == HIGH) and sweep_run.config.layout.dp == (1 if ranks == LOW else 2)
        assert sweep_run.config.training.dtype == ("bfloat16" if precision == HIGH else "float32")
        assert (sweep_run.config.training.lr, sweep_run.config.job.elapse) == (2e-4, 2400.0)
        assert sweep_run.config.data.paths == ("a", "b c")


def test_labels_of_many_toggles_stay_file_names() -> None:
    long = "node.check_collectives,flight_recorder,memory_guard,memory_check,hierarchical_sum,sequence_parallel"
    plan = design(long, 0)
    assert max(map(len, plan.labels())) < 20
    assert len(runs_of(plan)) == 64


def test_a_combination_that_cannot_run_is_refused() -> None:
    with pytest.raises(UsageError, match=r"(?s)layout.dp=3.* is no valid run.*training.global_batch"):
        sweep_text(design("tcmalloc,ranks=1|3"), base(), "x")


@pytest.mark.parametrize("text", ["name: x", "# design: {}", "# design: [", '# design: {"factors": 3}'])
def test_a_sweep_without_a_design_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="a file: no factorial design"):
        read_design(text, "a file")


def test_settings_of_a_combination() -> None:
    plan = design("tcmalloc,retention")
    expected: Dict[str, str] = {"node.tcmalloc": "true", "node.retention_state": "0"}
    assert settings_of(plan, (HIGH, LOW)) == expected
