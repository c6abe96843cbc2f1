"""Designs: their fractions against the published ones, their sweep files read by the sweep room."""

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
    found = parse_factors("freq,tcmalloc,retention,ranks,precision,node.arena_lock=1|0", base())
    assert [(one.name, one.low.text, one.high.text) for one in found] == [
        ("freq", "2000", "2200"),
        ("tcmalloc", "false", "true"),
        ("retention", "0", "1"),
        ("ranks", "1", "4"),
        ("precision", "float32", "bfloat16"),
        ("arena_lock", "1", "0"),
    ]
    # 2.2 GHz runs with one floating-point pipe alone: so does 2.0 GHz, or the clock's effect would be that of both
    assert found[0].high.settings == (("node.freq_mhz", "2200"), ("node.eco_state", "2"))
    assert ("node.eco_state", "2") in found[0].low.settings


def test_more_ranks_are_more_replicas_on_the_same_cores() -> None:
    run = base("layout.tp=2", "job.nodes=2", "node.ranks_per_node=1", "node.threads_per_rank=48")
    (ranks,) = parse_factors("ranks", run)
    assert dict(ranks.low.settings) == {"layout.dp": "1", "node.ranks_per_node": "1", "node.threads_per_rank": "48"}
    assert dict(ranks.high.settings) == {"layout.dp": "4", "node.ranks_per_node": "4", "node.threads_per_rank": "12"}


@pytest.mark.parametrize(
    ("text", "said"),
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
def test_what_is_no_toggle_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_factors(text, base())


def test_ranks_that_the_cores_do_not_divide_by_are_refused() -> None:
    with pytest.raises(UsageError, match="cannot be shared out to 4 ranks"):
        parse_factors("ranks", base("node.threads_per_rank=2"))
    with pytest.raises(UsageError, match="both set node.threads_per_rank"):
        parse_factors("ranks=1|2,threads=1|2", base("node.threads_per_rank=2"))


@pytest.mark.parametrize(("size", "resolution"), RESOLUTIONS.items())
def test_fractions_have_the_published_resolution(size: Any, resolution: int) -> None:
    k, p = size
    found = design(",".join(NINE.split(",")[:k]), p)
    assert found.resolution == resolution and len(found.combinations) == len(set(found.combinations)) == 2 ** (k - p)
    columns = list(zip(*found.combinations))
    for one, other in itertools.combinations(columns, 2):  # balanced, and no two toggles vary together
        assert sum(one) == sum(other) == sum(x * y for x, y in zip(one, other)) == 0


def test_the_fewest_short_words_are_taken() -> None:
    # Montgomery, Design and Analysis of Experiments: of the 2^(7-2) designs of resolution IV the one with the least
    # words of length 4 has one (D = {4, 5, 5}); of 2^(6-2), three
    assert sorted(map(len, design(",".join(NINE.split(",")[:7]), 2).defining_relation)) == [4, 5, 5]
    assert sorted(map(len, design(",".join(NINE.split(",")[:6]), 2).defining_relation)) == [4, 4, 4]


def test_aliases_are_equal_columns() -> None:
    found = design("freq,tcmalloc,retention,ranks,precision", 2)
    terms = [frozenset(one) for size in (1, 2) for one in itertools.combinations(range(5), size)]

    def column(term: Any) -> List[int]:
        return [math.prod(row[place] for place in term) for row in found.combinations]

    for one in terms:
        alike = [other for other in terms if other != one and column(other) == column(one)]
        assert set(found.aliases(one)) == set(alike)


def test_the_design_is_told() -> None:
    lines = describe(design(FOUR, 1, 3))
    assert lines[0].startswith("2^(4-1), resolution IV: 8 combinations in 3 blocks, 24 runs")
    assert "freq: 2000 | 2200 (node.freq_mhz 2000 | 2200, node.eco_state 2)" in lines
    assert "generator: ranks = freq×tcmalloc×retention" in lines
    assert "aliased: freq×tcmalloc = retention×ranks" in lines
    assert not any("aliased" in line for line in describe(design(FOUR)))
    assert describe(design("freq,tcmalloc,retention,ranks,precision", 1))[-1].startswith("all main effects and")


@pytest.mark.parametrize(("fraction", "repeats"), [(3, 1), (-1, 1), (0, 0)])
def test_what_is_no_design_is_refused(fraction: int, repeats: int) -> None:
    with pytest.raises(UsageError, match="valid"):
        design(FOUR, fraction, repeats)


def runs_of(found: Design, run: Optional[RunConfig] = None) -> List[Run]:
    text = sweep_text(found, run or base(), "toggles")
    assert read_design(text, "a file") == (found, None)
    timed = AnalysisSettings(7, 0.05)
    assert read_design(sweep_text(found, run or base(), "toggles", timed), "a file") == (found, timed)
    return list(expand_text(text, "a file", "x").runs)


def test_the_sweep_runs_each_combination_once_a_block_in_an_order_of_its_own() -> None:
    found = design(FOUR, 0, 3, seed=4)
    runs = runs_of(found)
    assert len(runs) == 48 and not any(run.refusal for run in runs)
    labels = found.labels()
    orders = []
    for block in range(3):
        part = runs[16 * block : 16 * (block + 1)]
        assert all(labels[run.row][0] == block + 1 for run in part)
        orders.append([labels[run.row][1] for run in part])
        assert sorted(orders[-1]) == sorted(found.combinations)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert [run.row for run in runs_of(design(FOUR, 0, 3, seed=4))] == [run.row for run in runs]
    assert [run.row for run in runs_of(design(FOUR, 0, 3, seed=5))] != [run.row for run in runs]


def test_the_sweeps_runs_have_the_levels_of_their_labels() -> None:
    found = design("freq,tcmalloc,ranks=1|2,precision", 1)
    run = base("training.lr=2e-4", "job.elapse=0:40:00", "data.paths=[a, b c]")
    labels = found.labels()
    for one in runs_of(found, run):
        _, (freq, tcmalloc, ranks, precision) = labels[one.row]
        assert one.config is not None
        node = one.config.node
        assert (node.freq_mhz, node.eco_state) == (2200 if freq == HIGH else 2000, 2)
        assert node.tcmalloc == (tcmalloc == HIGH) and one.config.layout.dp == (1 if ranks == LOW else 2)
        assert one.config.training.dtype == ("bfloat16" if precision == HIGH else "float32")
        assert (one.config.training.lr, one.config.job.elapse) == (2e-4, 2400.0)
        assert one.config.data.paths == ("a", "b c")


def test_labels_of_many_toggles_stay_file_names() -> None:
    long = "node.check_collectives,flight_recorder,memory_guard,memory_check,hierarchical_sum,sequence_parallel"
    found = design(long, 0)
    assert max(map(len, found.labels())) < 20
    assert len(runs_of(found)) == 64


def test_a_combination_that_cannot_run_is_told() -> None:
    with pytest.raises(UsageError, match=r"(?s)layout.dp=3.* is no valid run.*training.global_batch"):
        sweep_text(design("tcmalloc,ranks=1|3"), base(), "x")


@pytest.mark.parametrize("text", ["name: x", "# design: {}", "# design: [", '# design: {"factors": 3}'])
def test_a_sweep_of_no_design_is_told(text: str) -> None:
    with pytest.raises(UsageError, match="a file: no factorial design"):
        read_design(text, "a file")


def test_settings_of_a_combination() -> None:
    found = design("tcmalloc,retention")
    wanted: Dict[str, str] = {"node.tcmalloc": "true", "node.retention_state": "0"}
    assert settings_of(found, (HIGH, LOW)) == wanted
