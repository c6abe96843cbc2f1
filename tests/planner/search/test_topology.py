"""Tests of the layout search: it lists every valid layout and no other, and costs them as predictions of rows do."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, Dict, List, Set, Tuple

import numpy as np
import pytest

from fugaku_gpt.config import load_run_config
from fugaku_gpt.config.checks import problems_of
from fugaku_gpt.config.expression import parse_expression
from fugaku_gpt.config.schema import LayoutConfig, RunConfig
from fugaku_gpt.errors import UsageError
from fugaku_gpt.machine.constants import load_machine
from fugaku_gpt.planner.search import topology
from fugaku_gpt.planner.search.best import best_layouts, compare_components, explain_ranking
from fugaku_gpt.planner.search.constraints import NAMES, rules_of
from fugaku_gpt.planner.search.topology import (
    FLAG_COLUMNS,
    LAYOUT_COLUMNS,
    Columns,
    CostedLayouts,
    SearchSpace,
    candidate_layouts,
    layout_rows,
    layout_run,
    measured_range_rules,
    search_layouts,
)
from fugaku_gpt.planner.tables.predict import predict_rows

MACHINE = load_machine("a64fx")


def search_space(nodes: Tuple[int, int] = (4, 4), batches: Tuple[int, ...] = (8,), **training: Any) -> SearchSpace:
    settings = ["model.layers=6", "model.heads=4", "model.hidden=256", "model.seq_len=128"]
    config = load_run_config(None, None, settings)
    config = replace(config, training=replace(config.training, **training))
    return SearchSpace(config, MACHINE, "A64FX", "1.10", nodes, (1, 2, 4), batches)


def _all_valid(space: SearchSpace) -> Set[Tuple[int, ...]]:
    """Valid layouts, by checking every combination of small numbers against the rules between a run's settings."""
    valid = set()
    numbers = range(1, 9)
    for ppn, dp, tp, pp, chunks, mbs in itertools.product(
        (1, 2, 4), numbers, (1, 2, 4), numbers, (1, 2, 3, 6), numbers
    ):
        nodes = dp * tp * pp // ppn
        if nodes * ppn != dp * tp * pp or not space.nodes[0] <= nodes <= space.nodes[1] or 6 % (pp * chunks):
            continue
        layout = LayoutConfig(dp, tp, pp, schedule="interleaved" if chunks > 1 else "1f1b", chunks=chunks)
        run = replace(
            space.config,
            layout=layout,
            training=replace(space.config.training, micro_batch=mbs, global_batch=space.batches[0]),
            job=replace(space.config.job, nodes=nodes),
        )
        if (chunks > 1 and pp == 1) or problems_of(run, lambda key: ""):
            continue
        for recompute, zero, sequence_parallel in itertools.product(
            (0, 1), (0, 1) if dp > 1 else (0,), (0, 1) if tp > 1 else (0,)
        ):
            valid.add((nodes, ppn, dp, tp, pp, chunks, mbs, space.batches[0], recompute, zero, sequence_parallel))
    return valid


@pytest.mark.parametrize(
    "space",
    [search_space(), search_space((1, 4)), search_space(ramp_start=4, ramp_increment=4, ramp_samples=64)],
    ids=["4", "to 4", "ramp"],
)
def test_exactly_the_valid_layouts_are_listed_once_each(space: SearchSpace) -> None:
    columns = candidate_layouts(space)
    listed = list(zip(*(columns[name].tolist() for name in LAYOUT_COLUMNS)))
    assert len(listed) == len(set(listed)) > 100
    assert set(listed) == _all_valid(space)
    for index in range(0, len(listed), 7):
        config = layout_run(space, columns, index)  # refuses what is not valid
        assert config.ranks_per_node * config.job.nodes == config.layout.ranks


def test_a_growing_batch_leaves_only_replicas_that_divide_it() -> None:
    grown = candidate_layouts(search_space(ramp_start=4, ramp_increment=2, ramp_samples=64))
    assert set((grown["dp"] * grown["micro_batch"]).tolist()) == {1, 2}


def test_more_layouts_than_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "_MAX_LAYOUTS", 100)
    with pytest.raises(UsageError, match="more than 100 layouts: give constraints"):
        candidate_layouts(search_space((1, 4)))


def test_a_search_costs_layouts_as_predictions_of_rows_do() -> None:
    space = search_space((1, 4))
    costed = search_layouts(space)
    indices = range(0, len(costed.seconds), 11)
    rows = layout_rows(space, [layout_run(space, costed.columns, index) for index in indices])
    for index, prediction in zip(indices, predict_rows(MACHINE, rows)):
        assert costed.seconds[index] == pytest.approx(prediction.seconds.value)
        assert costed.memory[index] == pytest.approx(prediction.peak)
        assert bool(costed.fits[index]) == prediction.fits


def _search_on_512_nodes() -> Tuple[SearchSpace, CostedLayouts]:
    config = load_run_config(None, "1.3b", ["node.freq_mhz=2000"], check=False)
    space = SearchSpace(config, MACHINE, "A64FX", "1.10", (512, 512), (1, 2, 4), (1024,))
    return space, search_layouts(space)


@pytest.mark.slow
def test_only_layouts_that_fit_are_ranked_and_by_time() -> None:
    space, costed = _search_on_512_nodes()
    assert 0 < len(costed.ranking) < len(costed.seconds)
    assert costed.fits[costed.ranking].all() and costed.fits.sum() == len(costed.ranking)
    assert (np.diff(costed.seconds[costed.ranking]) >= 0).all()
    best, _ = best_layouts(space, costed, 20)
    times = [layout.prediction.seconds.value for layout in best]
    assert times == sorted(times) and times[0] == pytest.approx(costed.seconds[costed.ranking[0]])
    shapes = {
        (layout.config.ranks_per_node, layout.config.layout.dp, layout.config.layout.tp, layout.config.layout.pp)
        for layout in best
    }
    assert len(shapes) == 20
    listed, _ = best_layouts(space, costed, 20, variants=True)
    assert [layout.prediction.seconds.value for layout in listed] == pytest.approx(
        costed.seconds[costed.ranking[:20]].tolist()
    )


def test_no_ranked_layout_is_faster_and_smaller_than_a_frontier_layout() -> None:
    _, costed = _search_on_512_nodes()
    frontier = costed.frontier()
    assert frontier[0] in costed.ranking[costed.seconds[costed.ranking] == costed.seconds[costed.ranking[0]]]
    for index in frontier:
        better = (costed.seconds < costed.seconds[index]) & (costed.memory <= costed.memory[index])
        assert not better[costed.ranking].any()
    assert costed.memory[frontier[-1]] == costed.memory[costed.ranking].min()


def test_several_batches_are_ranked_by_the_time_of_a_sequence() -> None:
    costed = search_layouts(search_space((4, 4), (8, 16)))
    seconds_per_sequence = costed.seconds / costed.columns["global_batch"]
    assert set(costed.columns["global_batch"].tolist()) == {8, 16}
    assert (np.diff(seconds_per_sequence[costed.ranking]) >= 0).all()


def _tuples(columns: Columns) -> List[Tuple[int, ...]]:
    return list(zip(*(columns[name].tolist() for name in LAYOUT_COLUMNS)))


@pytest.mark.parametrize(
    "texts",
    [
        ["TP == 2"],
        ["GBS % 16 == 0 and TP <= 2 and not (recompute or zero == 1)"],
        ["micro_batches % 2 == 0 and ranks > 4", "MBS > 1 or pp > 1"],
        ["tp > 1 and 8 / (tp - 1) > 2 and chunks == 1"],
        ["chunks > 1 and 6 % (pp - 1) == 0", "true"],
        ["sequence_parallel", "nodes == 3", "dp > 100"],
    ],
)
def test_rules_leave_exactly_the_layouts_that_meet_them_all(texts: List[str]) -> None:
    space, rules = search_space((1, 4), (8, 16)), [parse_expression(text, "here", list(NAMES)) for text in texts]
    expected = []
    for layout in _tuples(candidate_layouts(space)):
        values: Dict[str, Any] = dict(zip(LAYOUT_COLUMNS, layout))
        values["ranks"] = values["dp"] * values["tp"] * values["pp"]
        values["micro_batches"] = values["global_batch"] // (values["dp"] * values["micro_batch"])
        values.update({name: bool(values[name]) for name in FLAG_COLUMNS})
        if all(rule.holds(lambda name, row=values: row[NAMES[name]]) for rule in rules):  # type: ignore[misc]
            expected.append(layout)
    assert _tuples(search_layouts(space, rules_of(rules)).columns) == expected


def test_a_constraint_narrows_a_search_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """A constraint, whose terms apply as soon as their columns exist, brings a search below the limit of layouts."""
    space = search_space((1, 4), tuple(range(1, 200)))
    unlimited = candidate_layouts(
        space, rules_of([parse_expression("recompute and GBS % 64 == 0 and TP == 2", "here", list(NAMES))])
    )
    monkeypatch.setattr(topology, "_MAX_LAYOUTS", 4 * len(unlimited["dp"]))
    with pytest.raises(UsageError, match="give constraints, or fewer global batches"):
        candidate_layouts(space)
    limited = candidate_layouts(
        space, rules_of([parse_expression("recompute and GBS % 64 == 0 and TP == 2", "here", list(NAMES))])
    )
    assert _tuples(limited) == _tuples(unlimited) != []


def test_layouts_within_measured_ranges_are_not_extrapolated() -> None:
    space, costed = _search_on_512_nodes()
    columns = search_layouts(space, measured_range_rules(MACHINE.time)).columns
    rows = layout_rows(space, [layout_run(space, columns, index) for index in range(0, len(columns["dp"]), 3)])
    assert 5 < len(rows) < len(costed.seconds) and all(
        not prediction.extrapolated for prediction in predict_rows(MACHINE, rows)
    )


def test_layouts_that_do_not_fit_this_trainer_are_replaced_by_the_next() -> None:
    space, costed = _search_on_512_nodes()
    oversized_tp = int(costed.columns["tp"][costed.ranking[0]])

    def check_memory(config: RunConfig) -> Tuple[int, bool]:
        return (100, False) if config.layout.tp == oversized_tp else (10, True)

    best, dropped = best_layouts(space, costed, 3, variants=True, check_memory=check_memory)
    fitting_indices = [index for index, tp in enumerate(costed.columns["tp"][costed.ranking]) if tp != oversized_tp]
    assert len(best) == 3 and all(
        layout.config.layout.tp != oversized_tp and layout.trainer_bytes == 10 for layout in best
    )
    assert dropped == fitting_indices[2] - 2 > 0


@pytest.mark.slow
def test_a_slower_variant_represents_a_shape_where_the_fastest_does_not_fit() -> None:
    space, costed = _search_on_512_nodes()
    (fastest,), _ = best_layouts(space, costed, 1)
    best, dropped = best_layouts(space, costed, 1, check_memory=lambda config: (1, config != fastest.config))
    assert dropped == 1 and best[0].config != fastest.config
    best_40, _ = best_layouts(space, costed, 40, check_memory=lambda config: (1, config != fastest.config))
    assert (fastest.config.layout.tp, 4) in {
        (layout.config.layout.tp, layout.config.ranks_per_node) for layout in best_40
    }


def test_layouts_too_large_for_the_measured_trainers_can_be_ranked_for_this_trainer() -> None:
    space, costed = _search_on_512_nodes()
    all_ranked = search_layouts(space, rank_all=True)
    assert (
        len(all_ranked.ranking) == len(all_ranked.seconds) > len(costed.ranking)
        and (all_ranked.fits == costed.fits).all()
    )


def test_the_winner_is_compared_with_the_next_by_component() -> None:
    space, costed = _search_on_512_nodes()
    (first, second), _ = best_layouts(space, costed, 2)
    differences: Dict[Any, Any] = {
        line["part"]: line["difference"] for line in compare_components(first.prediction, second.prediction)
    }
    total = differences.pop("iteration")
    assert total < 0 and sum(differences.values()) == pytest.approx(total)
    largest = min(differences, key=lambda component: differences[component])
    assert f"gains in {largest} +" in explain_ranking(first.prediction, second.prediction)


def test_settings_that_conflict_with_a_layout_are_refused() -> None:
    space = search_space()
    space = replace(space, config=replace(space.config, job=replace(space.config.job, strict="strict")))
    with pytest.raises(UsageError, match=r"job\.strict"):
        layout_run(space, candidate_layouts(space), 0)


def test_layouts_fit_the_memory_that_a_job_may_ask_for() -> None:
    """Not what a node has: 29,315 MiB, which a row of the notes that ran with 29,082 MiB is under."""
    config = load_run_config(None, "1.3b", ["node.freq_mhz=2000"], check=False)
    machine = load_machine("a64fx")
    layouts = search_layouts(SearchSpace(config, machine, "A64FX", "1.10", (1, 64), (1, 2, 4), (64,)))
    limit = machine.job_capacity("A64FX")
    assert (layouts.fits == (layouts.memory <= limit)).all()
    between = (layouts.memory > limit) & (layouts.memory <= machine.capacity("A64FX"))
    assert between.any() and not layouts.fits[between].any()
