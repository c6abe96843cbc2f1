"""Every layout that can be, and none that cannot; costed as rows are."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, Dict, List, Set, Tuple

import numpy as np
import pytest

from fugaku_gpt.cli.plan.constraints import NAMES, rules_of
from fugaku_gpt.config import load_run_config
from fugaku_gpt.config.checks import problems_of
from fugaku_gpt.config.schema import LayoutConfig, RunConfig
from fugaku_gpt.errors import UsageError
from fugaku_gpt.machine.constants import load_machine
from fugaku_gpt.planner.search import topology
from fugaku_gpt.planner.search.best import best_layouts, compare_components, explain_ranking
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
from fugaku_gpt.sweep.expression import parse_expression

MACHINE = load_machine("a64fx")


def wanted(nodes: Tuple[int, int] = (4, 4), batches: Tuple[int, ...] = (8,), **training: Any) -> SearchSpace:
    settings = ["model.layers=6", "model.heads=4", "model.hidden=256", "model.seq_len=128"]
    config = load_run_config(None, None, settings)
    config = replace(config, training=replace(config.training, **training))
    return SearchSpace(config, MACHINE, "A64FX", "1.10", nodes, (1, 2, 4), batches)


def _all_valid(of: SearchSpace) -> Set[Tuple[int, ...]]:
    """By trial of every product of small numbers against the rules between a run's settings."""
    found = set()
    some = range(1, 9)
    for ppn, dp, tp, pp, chunks, mbs in itertools.product((1, 2, 4), some, (1, 2, 4), some, (1, 2, 3, 6), some):
        nodes = dp * tp * pp // ppn
        if nodes * ppn != dp * tp * pp or not of.nodes[0] <= nodes <= of.nodes[1] or 6 % (pp * chunks):
            continue
        layout = LayoutConfig(dp, tp, pp, schedule="interleaved" if chunks > 1 else "1f1b", chunks=chunks)
        run = replace(
            of.config,
            layout=layout,
            training=replace(of.config.training, micro_batch=mbs, global_batch=of.batches[0]),
            job=replace(of.config.job, nodes=nodes),
        )
        if (chunks > 1 and pp == 1) or problems_of(run, lambda key: ""):
            continue
        for again, zero, cut in itertools.product((0, 1), (0, 1) if dp > 1 else (0,), (0, 1) if tp > 1 else (0,)):
            found.add((nodes, ppn, dp, tp, pp, chunks, mbs, of.batches[0], again, zero, cut))
    return found


@pytest.mark.parametrize(
    "of", [wanted(), wanted((1, 4)), wanted(ramp_start=4, ramp_increment=4, ramp_samples=64)], ids=["4", "to 4", "ramp"]
)
def test_all_layouts_that_are_valid_are_there_once_and_no_others(of: SearchSpace) -> None:
    columns = candidate_layouts(of)
    listed = list(zip(*(columns[name].tolist() for name in LAYOUT_COLUMNS)))
    assert len(listed) == len(set(listed)) > 100
    assert set(listed) == _all_valid(of)
    for place in range(0, len(listed), 7):
        config = layout_run(of, columns, place)  # refuses what is not valid
        assert config.ranks_per_node * config.job.nodes == config.layout.ranks


def test_a_growing_batch_leaves_only_replicas_that_divide_it() -> None:
    grown = candidate_layouts(wanted(ramp_start=4, ramp_increment=2, ramp_samples=64))
    assert set((grown["dp"] * grown["micro_batch"]).tolist()) == {1, 2}


def test_more_layouts_than_can_be_held_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "_MAX_LAYOUTS", 100)
    with pytest.raises(UsageError, match="more than 100 layouts: give constraints"):
        candidate_layouts(wanted((1, 4)))


def test_a_search_says_what_predictions_of_rows_say() -> None:
    of = wanted((1, 4))
    found = search_layouts(of)
    places = range(0, len(found.seconds), 11)
    rows = layout_rows(of, [layout_run(of, found.columns, place) for place in places])
    for place, one in zip(places, predict_rows(MACHINE, rows)):
        assert found.seconds[place] == pytest.approx(one.seconds.value)
        assert found.memory[place] == pytest.approx(one.peak)
        assert bool(found.fits[place]) == one.fits


def _at_512() -> Tuple[SearchSpace, CostedLayouts]:
    config = load_run_config(None, "1.3b", ["node.freq_mhz=2000"], check=False)
    of = SearchSpace(config, MACHINE, "A64FX", "1.10", (512, 512), (1, 2, 4), (1024,))
    return of, search_layouts(of)


def test_what_does_not_fit_is_not_ranked_and_the_rest_is_by_time() -> None:
    of, found = _at_512()
    assert 0 < len(found.ranking) < len(found.seconds)
    assert found.fits[found.ranking].all() and found.fits.sum() == len(found.ranking)
    assert (np.diff(found.seconds[found.ranking]) >= 0).all()
    best, _ = best_layouts(of, found, 20)
    every = [one.prediction.seconds.value for one in best]
    assert every == sorted(every) and every[0] == pytest.approx(found.seconds[found.ranking[0]])
    shapes = {
        (one.config.ranks_per_node, one.config.layout.dp, one.config.layout.tp, one.config.layout.pp) for one in best
    }
    assert len(shapes) == 20
    listed, _ = best_layouts(of, found, 20, variants=True)
    assert [one.prediction.seconds.value for one in listed] == pytest.approx(found.seconds[found.ranking[:20]].tolist())


def test_none_is_both_faster_and_smaller_than_one_of_the_frontier() -> None:
    _, found = _at_512()
    frontier = found.frontier()
    assert frontier[0] in found.ranking[found.seconds[found.ranking] == found.seconds[found.ranking[0]]]
    for place in frontier:
        better = (found.seconds < found.seconds[place]) & (found.memory <= found.memory[place])
        assert not better[found.ranking].any()
    assert found.memory[frontier[-1]] == found.memory[found.ranking].min()


def test_several_batches_are_ranked_by_the_time_of_a_sequence() -> None:
    found = search_layouts(wanted((4, 4), (8, 16)))
    per = found.seconds / found.columns["global_batch"]
    assert set(found.columns["global_batch"].tolist()) == {8, 16}
    assert (np.diff(per[found.ranking]) >= 0).all()


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
def test_rules_thin_out_while_layouts_are_made_and_leave_what_meets_them_all(texts: List[str]) -> None:
    of, whole = wanted((1, 4), (8, 16)), [parse_expression(text, "here", list(NAMES)) for text in texts]
    expected = []
    for layout in _tuples(candidate_layouts(of)):
        values: Dict[str, Any] = dict(zip(LAYOUT_COLUMNS, layout))
        values["ranks"] = values["dp"] * values["tp"] * values["pp"]
        values["micro_batches"] = values["global_batch"] // (values["dp"] * values["micro_batch"])
        values.update({name: bool(values[name]) for name in FLAG_COLUMNS})
        if all(rule.holds(lambda name, known=values: known[NAMES[name]]) for rule in whole):  # type: ignore[misc]
            expected.append(layout)
    assert _tuples(search_layouts(of, rules_of(whole)).columns) == expected


def test_parts_of_a_constraint_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be held whole can with a constraint, whose parts count as soon as they can be looked at."""
    of = wanted((1, 4), tuple(range(1, 200)))
    kept = candidate_layouts(
        of, rules_of([parse_expression("recompute and GBS % 64 == 0 and TP == 2", "here", list(NAMES))])
    )
    monkeypatch.setattr(topology, "_MAX_LAYOUTS", 4 * len(kept["dp"]))
    with pytest.raises(UsageError, match="give constraints, or fewer global batches"):
        candidate_layouts(of)
    again = candidate_layouts(
        of, rules_of([parse_expression("recompute and GBS % 64 == 0 and TP == 2", "here", list(NAMES))])
    )
    assert _tuples(again) == _tuples(kept) != []


def test_layouts_like_measured_ones_have_nothing_extrapolated_of_their_own() -> None:
    of, found = _at_512()
    like = search_layouts(of, measured_range_rules(MACHINE.time)).columns
    rows = layout_rows(of, [layout_run(of, like, place) for place in range(0, len(like["dp"]), 3)])
    assert 5 < len(rows) < len(found.seconds) and all(not one.extrapolated for one in predict_rows(MACHINE, rows))


def test_what_does_not_fit_this_trainer_makes_room_for_the_next() -> None:
    of, found = _at_512()
    full = int(found.columns["tp"][found.ranking[0]])

    def judge(config: RunConfig) -> Tuple[int, bool]:
        return (100, False) if config.layout.tp == full else (10, True)

    best, dropped = best_layouts(of, found, 3, variants=True, check_memory=judge)
    others = [place for place, one in enumerate(found.columns["tp"][found.ranking]) if one != full]
    assert len(best) == 3 and all(one.config.layout.tp != full and one.trainer_bytes == 10 for one in best)
    assert dropped == others[2] - 2 > 0


def test_a_slower_variant_stands_for_its_shape_where_the_fastest_does_not_fit() -> None:
    of, found = _at_512()
    (fastest,), _ = best_layouts(of, found, 1)
    best, dropped = best_layouts(of, found, 1, check_memory=lambda config: (1, config != fastest.config))
    assert dropped == 1 and best[0].config != fastest.config
    again, _ = best_layouts(of, found, 40, check_memory=lambda config: (1, config != fastest.config))
    assert (fastest.config.layout.tp, 4) in {(one.config.layout.tp, one.config.ranks_per_node) for one in again}


def test_what_the_measured_trainers_cannot_hold_may_be_ranked_for_this_one() -> None:
    of, found = _at_512()
    every = search_layouts(of, rank_all=True)
    assert len(every.ranking) == len(every.seconds) > len(found.ranking) and (every.fits == found.fits).all()


def test_the_winner_is_told_from_the_next_by_part() -> None:
    of, found = _at_512()
    (first, second), _ = best_layouts(of, found, 2)
    lines: Dict[Any, Any] = {
        one["part"]: one["difference"] for one in compare_components(first.prediction, second.prediction)
    }
    whole = lines.pop("iteration")
    assert whole < 0 and sum(lines.values()) == pytest.approx(whole)
    largest = min(lines, key=lambda part: lines[part])
    assert f"gains in {largest} +" in explain_ranking(first.prediction, second.prediction)


def test_settings_that_do_not_go_with_a_layout_are_refused() -> None:
    of = wanted()
    of = replace(of, config=replace(of.config, job=replace(of.config.job, strict="strict")))
    with pytest.raises(UsageError, match=r"job\.strict"):
        layout_run(of, candidate_layouts(of), 0)
