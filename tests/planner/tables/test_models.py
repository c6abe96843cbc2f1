"""Tests of the time and memory models: identities and directions of change that hold for any constants."""

from __future__ import annotations

from dataclasses import replace
from typing import Dict

import numpy as np
import pytest

from fugaku_gpt.layout.schedule_times import ideal_bubble
from fugaku_gpt.machine.constants import FittedModel, Machine, load_machine
from fugaku_gpt.planner.tables.footprint import footprint
from fugaku_gpt.planner.tables.predict import predict_rows
from fugaku_gpt.planner.tables.rows import ConfigRow
from fugaku_gpt.planner.tables.seconds import TIME_COMPONENTS, iteration_seconds, seconds_by_component
from fugaku_gpt.planner.tables.work import count_work
from tests.planner.samples import row


def _component_seconds(machine: Machine, config: ConfigRow) -> Dict[str, float]:
    components = seconds_by_component(count_work([config], machine.facts), machine.time.values, machine.facts)
    return {name: float(values[0]) for name, values in components.items()}


def _with(fitted: FittedModel, **values: float) -> FittedModel:
    constants = tuple(
        replace(constant, value=values.get(constant.name, constant.value)) for constant in fitted.constants
    )
    return replace(fitted, constants=constants)


def _memory(machine: Machine, config: ConfigRow) -> "tuple[float, float]":
    work = count_work([config], machine.facts)
    of_node = machine.memory_of == "node"
    reading, peak = footprint(work, machine.memory.values, machine.facts, machine.memory_unit, of_node)
    return float(reading[0]), float(peak[0])


def test_flops_of_a_layer_are_the_textbook_ones_where_products_are_not_cut_into_waves() -> None:
    machine = load_machine("a64fx")
    config = row(recompute=True)
    b, s, h = config.micro_batch, config.seq_len, config.hidden
    work = count_work([config], machine.facts)
    assert work.layer_flops[0] == pytest.approx(96 * b * s * h * h)
    assert work.layer_attention_flops[0] == pytest.approx(16 * b * s * s * h)
    assert work.head_flops[0] == pytest.approx(6 * b * s * h * config.vocab)


def test_a_product_takes_full_waves_of_tiles() -> None:
    """108 units: 13824 wide is 864 tiles, 8 waves; 14336 wide is 896 tiles, which take 9 waves, not 8.3."""
    facts = load_machine("a100").facts
    exact, partly = row(hidden=13824, heads=64, tp=8, dp=1, pp=1), row(hidden=14336, heads=64, tp=8, dp=1, pp=1)
    plain = {**facts, "tile_units": 0.0}
    exact_stretch = count_work([exact], facts).layer_flops / count_work([exact], plain).layer_flops
    partly_stretch = count_work([partly], facts).layer_flops / count_work([partly], plain).layer_flops
    assert 1 <= exact_stretch < partly_stretch < 1.25


@pytest.mark.parametrize("heads, width", [(64, 32), (32, 64), (16, 128), (128, 16), (512, 4)])
def test_scores_of_heads_whose_width_is_no_multiple_of_eight_are_slower(heads: int, width: int) -> None:
    config = row(hidden=2048, heads=heads)
    (elements,) = count_work([config], load_machine("v100").facts).unaligned
    assert (elements > 0) == (width % 8 != 0) and elements >= 0


@pytest.mark.parametrize("name", ["a64fx", "a100", "v100"])
def test_components_sum_up_to_the_iteration(name: str) -> None:
    machine = load_machine(name)
    config = row(dp=2, tp=2, pp=2)
    components = _component_seconds(machine, config)
    total = iteration_seconds(count_work([config], machine.facts), machine.time.values, machine.facts)[0]
    assert tuple(components) == TIME_COMPONENTS and sum(components.values()) == pytest.approx(total)
    assert all(value > 0 for value in components.values())


def test_communication_that_a_layout_does_not_have_takes_no_time() -> None:
    components = _component_seconds(load_machine("v100"), row(dp=1, tp=1, pp=1, nodes=1, ranks_per_node=1))
    assert components["tensor_parallel"] == components["pipeline"] == components["data_parallel"] == 0


def test_the_bubble_shrinks_with_more_micro_batches() -> None:
    machine = load_machine("v100")
    few, many = _component_seconds(machine, row(global_batch=64)), _component_seconds(machine, row(global_batch=1024))
    assert many["compute"] == pytest.approx(16 * few["compute"])
    assert many["pipeline"] / many["compute"] < few["pipeline"] / few["compute"]


def test_clock_allocator_and_a_rank_per_core_memory_group_help_on_a64fx() -> None:
    machine = load_machine("a64fx")
    base = row(hardware="A64FX", dp=1, pp=1, nodes=1, ranks_per_node=1, torch="1.7", freq_ghz=2.0, zero_stage=0)
    slow = iteration_seconds(count_work([base], machine.facts), machine.time.values, machine.facts)[0]
    for better in ({"freq_ghz": 2.2}, {"tcmalloc": True}, {"torch": "1.10"}, {"dp": 4, "ranks_per_node": 4}):
        changed = {**{"dp": 1, "ranks_per_node": 1, "torch": "1.7", "freq_ghz": 2.0}, **better}
        config = row(hardware="A64FX", pp=1, nodes=1, zero_stage=0, **changed)
        assert iteration_seconds(count_work([config], machine.facts), machine.time.values, machine.facts)[0] < slow, (
            better
        )


def test_interleaving_cuts_the_bubble_and_sends_more_and_holds_more() -> None:
    machine = load_machine("a64fx")
    plain, interleaved = (row(hardware="A64FX", zero_stage=0, pp=8, dp=1) for _ in range(2))
    interleaved = replace(interleaved, chunks=3)
    before, after = _component_seconds(machine, plain), _component_seconds(machine, interleaved)
    assert {name for name in TIME_COMPONENTS if before[name] != after[name]} == {"pipeline"}
    fast_network = replace(machine, time=_with(machine.time, pipeline_bandwidth=1e18))
    assert _component_seconds(fast_network, interleaved)["pipeline"] == pytest.approx(
        _component_seconds(fast_network, plain)["pipeline"] / 3
    )
    slow_network = replace(machine, time=_with(machine.time, pipeline_bandwidth=1e6))
    assert _component_seconds(slow_network, interleaved)["pipeline"] == pytest.approx(
        3 * _component_seconds(slow_network, plain)["pipeline"], rel=0.1
    )
    assert _memory(machine, interleaved)[0] > _memory(machine, plain)[0]


def test_stages_side_by_side_send_faster_than_stages_beyond_all_replicas() -> None:
    machine = load_machine("a64fx")
    distant = row(hardware="A64FX", zero_stage=0, pp=2, dp=16, tp=2, nodes=16, global_batch=512)
    adjacent = replace(distant, order="tp,pp,dp")
    assert (distant.stage_stride, adjacent.stage_stride, replace(distant, order="pp,tp,dp").stage_stride) == (32, 2, 1)
    before, after = _component_seconds(machine, distant), _component_seconds(machine, adjacent)
    assert {name for name in TIME_COMPONENTS if before[name] != after[name]} == {"pipeline"}
    assert after["pipeline"] < before["pipeline"]
    assert "order tp,pp,dp: measured tp,dp,pp" in predict_rows(machine, [adjacent])[0].extrapolated


def test_sequence_parallelism_stores_less_and_reduces_as_much() -> None:
    machine = load_machine("a64fx")
    plain = row(hardware="A64FX", zero_stage=0, tp=4, pp=1, dp=2)
    sharded = replace(plain, sequence_parallel=True)
    assert _component_seconds(machine, sharded)["tensor_parallel"] == pytest.approx(
        _component_seconds(machine, plain)["tensor_parallel"]
    )
    assert _component_seconds(machine, sharded)["memory_bound"] < _component_seconds(machine, plain)["memory_bound"]
    assert _memory(machine, sharded)[1] < _memory(machine, plain)[1]
    assert "sequence_parallel: measured without" in predict_rows(machine, [sharded])[0].extrapolated


def _a64fx(**changes: object) -> float:
    """Seconds of the 124M model at 1024 sequences."""
    machine = load_machine("a64fx")
    model = {"layers": 12, "hidden": 768, "heads": 12, "seq_len": 1024, "zero_stage": 0, "torch": "1.10"}
    base = {"dp": 1, "pp": 1, "nodes": 1, "ranks_per_node": 1, "micro_batch": 1, "global_batch": 1024}
    config = row(hardware="A64FX", **{**model, **base, **changes})
    return float(iteration_seconds(count_work([config], machine.facts), machine.time.values, machine.facts)[0])


def test_ranks_on_a_node_and_tcmalloc_save_the_same_time_of_allocation() -> None:
    """Together they gain less than their product: ranks cannot speed up allocations that tcmalloc has removed."""
    slow, allocator = _a64fx(), _a64fx(tcmalloc=True)
    ranks, both = _a64fx(dp=4, ranks_per_node=4), _a64fx(dp=4, ranks_per_node=4, tcmalloc=True)
    two = _a64fx(dp=2, ranks_per_node=2)
    assert both < min(allocator, ranks) < slow and slow / both < slow / allocator * slow / ranks
    assert ranks < two < slow


@pytest.mark.parametrize("ranks, power", [(1, 0.0), (2, 0.5), (4, 1.0), (8, 1.0)])
def test_bandwidth_grows_with_ranks_up_to_the_groups_of_memory(ranks: int, power: float) -> None:
    machine = load_machine("a64fx")
    config = row(hardware="A64FX", dp=ranks, pp=1, nodes=1, ranks_per_node=ranks, zero_stage=0, tcmalloc=True)
    work = count_work([config], machine.facts)
    plain, gained = (
        seconds_by_component(work, {**machine.time.values, "ranks_gain": gain}, machine.facts)["optimiser"][0]
        for gain in (1.0, 3.0)
    )
    assert machine.facts["memory_groups"] == 4 and plain / gained == pytest.approx(3.0**power)


def test_tcmalloc_makes_the_sum_over_many_replicas_slow() -> None:
    few, many = {"dp": 4, "nodes": 4}, {"dp": 512, "nodes": 512}
    assert _a64fx(tcmalloc=True, **few) < _a64fx(**few)
    assert _a64fx(tcmalloc=True, **many) > _a64fx(**many)


def test_distant_stages_send_slower_on_a_torus() -> None:
    machine = load_machine("a64fx")
    shape = {"hardware": "A64FX", "pp": 8, "ranks_per_node": 1, "zero_stage": 0, "micro_batch": 1, "torch": "1.10"}
    adjacent = _component_seconds(machine, row(dp=1, nodes=8, global_batch=64, **shape))
    distant = _component_seconds(machine, row(dp=64, nodes=512, global_batch=64 * 64, **shape))
    assert distant["compute"] == pytest.approx(adjacent["compute"]) and distant["pipeline"] > 1.2 * adjacent["pipeline"]


def test_a_card_that_is_nearly_full_is_slower() -> None:
    machine = load_machine("a100")
    work = count_work([row(hardware="A100-80GB", nodes=1, ranks_per_node=8)] * 3, machine.facts)
    taken = iteration_seconds(replace(work, fullness=np.array([0.5, 0.9, 1.0])), machine.time.values, machine.facts)
    assert taken[0] == taken[1] < taken[2] < 1.2 * taken[0]


def test_a_rank_does_not_use_free_cards_of_the_node() -> None:
    machine = load_machine("v100")
    half_filled, filled = row(nodes=4, ranks_per_node=2), row(nodes=2, ranks_per_node=4)
    assert _component_seconds(machine, half_filled)["compute"] == pytest.approx(
        _component_seconds(machine, filled)["compute"]
    )


def test_recompute_costs_time_and_saves_memory() -> None:
    machine = load_machine("a64fx")
    stored, recomputed = (row(hardware="A64FX", zero_stage=0, recompute=flag) for flag in (False, True))
    assert sum(_component_seconds(machine, recomputed).values()) > sum(_component_seconds(machine, stored).values())
    assert _memory(machine, recomputed)[1] < _memory(machine, stored)[1]


def test_the_last_stage_may_be_the_fullest() -> None:
    """The first stage's reading fits where the logits make the last stage run out of memory."""
    machine = load_machine("v100")
    small, large = _memory(machine, row(micro_batch=1)), _memory(machine, row(micro_batch=8))
    assert large[1] - large[0] > small[1] - small[0]
    assert large[1] > machine.capacity("V100-16GB") > large[0]


def test_zero_saves_the_memory_that_replicas_share() -> None:
    machine = load_machine("v100")
    replicated, sharded = _memory(machine, row(zero_stage=0))[0], _memory(machine, row(zero_stage=1))[0]
    sharded_more = _memory(machine, row(dp=8, nodes=4, zero_stage=1))[0]
    assert replicated > sharded > sharded_more


def test_intervals_hold_the_prediction_and_inputs_beyond_the_rows_are_named() -> None:
    machine = load_machine("v100")
    inside, outside = predict_rows(machine, [row(), row(dp=64, nodes=32, layers=96)])
    assert inside.seconds.low < inside.seconds.value < inside.seconds.high
    assert inside.extrapolated == ()
    assert outside.extrapolated[0] == "layers 96: measured 24 to 24" and any(
        "dp 64" in text for text in outside.extrapolated
    )
    wide = np.log(outside.seconds.high / outside.seconds.low)
    assert wide > np.log(inside.seconds.high / inside.seconds.low)


@pytest.mark.parametrize(
    "stages, chunks, micro_batches", [(4, 1, 2), (4, 3, 1), (4, 3, 2), (4, 3, 4), (4, 6, 16), (8, 3, 3)]
)
def test_pipeline_waiting_time_is_that_of_the_schedule(stages: int, chunks: int, micro_batches: int) -> None:
    """Also with fewer micro-batches than stages, where interleaving gains little."""
    machine = load_machine("v100")
    free_network = replace(machine, time=_with(machine.time, pipeline_bandwidth=1e30, fixed=1e-30))
    config = row(layers=48, vocab=64, pp=stages, dp=1, nodes=stages // 4, micro_batch=1, global_batch=micro_batches)
    components = _component_seconds(free_network, replace(config, chunks=chunks))
    busy = components["compute"] + components["memory_bound"] + components["tensor_parallel"]
    expected = ideal_bubble("interleaved" if chunks > 1 else "1f1b", stages, micro_batches, chunks)
    assert components["pipeline"] / busy == pytest.approx(expected, rel=0.02)
