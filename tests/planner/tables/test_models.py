"""Seconds and memory follow from what is to be done: the directions and identities that any constants must keep."""

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


def _parts(machine: Machine, one: ConfigRow) -> Dict[str, float]:
    found = seconds_by_component(count_work([one], machine.facts), machine.time.values, machine.facts)
    return {name: float(values[0]) for name, values in found.items()}


def _with(fitted: FittedModel, **values: float) -> FittedModel:
    constants = tuple(replace(one, value=values.get(one.name, one.value)) for one in fitted.constants)
    return replace(fitted, constants=constants)


def _memory(machine: Machine, one: ConfigRow) -> "tuple[float, float]":
    work = count_work([one], machine.facts)
    of_node = machine.memory_of == "node"
    reading, peak = footprint(work, machine.memory.values, machine.facts, machine.memory_unit, of_node)
    return float(reading[0]), float(peak[0])


def test_flops_of_a_layer_are_the_textbook_ones_where_products_are_not_cut_into_waves() -> None:
    machine = load_machine("a64fx")
    one = row(recompute=True)
    b, s, h = one.micro_batch, one.seq_len, one.hidden
    work = count_work([one], machine.facts)
    assert work.layer_flops[0] == pytest.approx(96 * b * s * h * h)
    assert work.layer_attention_flops[0] == pytest.approx(16 * b * s * s * h)
    assert work.head_flops[0] == pytest.approx(6 * b * s * h * one.vocab)


def test_a_product_takes_whole_waves_of_tiles() -> None:
    """108 units: 13824 wide is 864 tiles, 8 waves; 14336 wide is 896 tiles, which take 9 waves, not 8.3."""
    facts = load_machine("a100").facts
    exact, partly = row(hidden=13824, heads=64, tp=8, dp=1, pp=1), row(hidden=14336, heads=64, tp=8, dp=1, pp=1)
    plain = {**facts, "tile_units": 0.0}
    exact_stretch = count_work([exact], facts).layer_flops / count_work([exact], plain).layer_flops
    partly_stretch = count_work([partly], facts).layer_flops / count_work([partly], plain).layer_flops
    assert 1 <= exact_stretch < partly_stretch < 1.25


@pytest.mark.parametrize("name", ["a64fx", "a100", "v100"])
def test_parts_sum_up_to_the_iteration(name: str) -> None:
    machine = load_machine(name)
    one = row(dp=2, tp=2, pp=2)
    parts = _parts(machine, one)
    whole = iteration_seconds(count_work([one], machine.facts), machine.time.values, machine.facts)[0]
    assert tuple(parts) == TIME_COMPONENTS and sum(parts.values()) == pytest.approx(whole)
    assert all(value > 0 for value in parts.values())


def test_parts_that_a_layout_does_not_have_take_no_time() -> None:
    parts = _parts(load_machine("v100"), row(dp=1, tp=1, pp=1, nodes=1, ranks_per_node=1))
    assert parts["tensor_parallel"] == parts["pipeline"] == parts["data_parallel"] == 0


def test_the_bubble_shrinks_with_more_micro_batches() -> None:
    machine = load_machine("v100")
    few, many = _parts(machine, row(global_batch=64)), _parts(machine, row(global_batch=1024))
    assert many["compute"] == pytest.approx(16 * few["compute"])
    assert many["pipeline"] / many["compute"] < few["pipeline"] / few["compute"]


def test_clock_allocator_and_a_rank_per_core_memory_group_help_on_a64fx() -> None:
    machine = load_machine("a64fx")
    base = row(hardware="A64FX", dp=1, pp=1, nodes=1, ranks_per_node=1, torch="1.7", freq_ghz=2.0, zero_stage=0)
    slow = iteration_seconds(count_work([base], machine.facts), machine.time.values, machine.facts)[0]
    for better in ({"freq_ghz": 2.2}, {"tcmalloc": True}, {"torch": "1.10"}, {"dp": 4, "ranks_per_node": 4}):
        changed = {**{"dp": 1, "ranks_per_node": 1, "torch": "1.7", "freq_ghz": 2.0}, **better}
        one = row(hardware="A64FX", pp=1, nodes=1, zero_stage=0, **changed)
        assert iteration_seconds(count_work([one], machine.facts), machine.time.values, machine.facts)[0] < slow, better


def test_interleaving_cuts_the_bubble_and_sends_more_and_holds_more() -> None:
    machine = load_machine("a64fx")
    plain, cut = (row(hardware="A64FX", zero_stage=0, pp=8, dp=1) for _ in range(2))
    cut = replace(cut, chunks=3)
    before, after = _parts(machine, plain), _parts(machine, cut)
    assert {name for name in TIME_COMPONENTS if before[name] != after[name]} == {"pipeline"}
    cheap = replace(machine, time=_with(machine.time, pipeline_bandwidth=1e18))
    assert _parts(cheap, cut)["pipeline"] == pytest.approx(_parts(cheap, plain)["pipeline"] / 3)
    dear = replace(machine, time=_with(machine.time, pipeline_bandwidth=1e6))
    assert _parts(dear, cut)["pipeline"] == pytest.approx(3 * _parts(dear, plain)["pipeline"], rel=0.1)
    assert _memory(machine, cut)[0] > _memory(machine, plain)[0]


def test_stages_side_by_side_send_faster_than_stages_beyond_all_replicas() -> None:
    machine = load_machine("a64fx")
    far = row(hardware="A64FX", zero_stage=0, pp=2, dp=16, tp=2, nodes=16, global_batch=512)
    near = replace(far, order="tp,pp,dp")
    assert (far.stage_stride, near.stage_stride, replace(far, order="pp,tp,dp").stage_stride) == (32, 2, 1)
    before, after = _parts(machine, far), _parts(machine, near)
    assert {name for name in TIME_COMPONENTS if before[name] != after[name]} == {"pipeline"}
    assert after["pipeline"] < before["pipeline"]
    assert "order tp,pp,dp: measured tp,dp,pp" in predict_rows(machine, [near])[0].extrapolated


def test_sequence_parallelism_keeps_less_and_reduces_as_much() -> None:
    machine = load_machine("a64fx")
    whole = row(hardware="A64FX", zero_stage=0, tp=4, pp=1, dp=2)
    cut = replace(whole, sequence_parallel=True)
    assert _parts(machine, cut)["tensor_parallel"] == pytest.approx(_parts(machine, whole)["tensor_parallel"])
    assert _parts(machine, cut)["memory_bound"] < _parts(machine, whole)["memory_bound"]
    assert _memory(machine, cut)[1] < _memory(machine, whole)[1]
    assert "sequence_parallel: measured without" in predict_rows(machine, [cut])[0].extrapolated


def _a64fx(**changes: object) -> float:
    """Seconds of the 124M model at 1024 sequences."""
    machine = load_machine("a64fx")
    model = {"layers": 12, "hidden": 768, "heads": 12, "seq_len": 1024, "zero_stage": 0, "torch": "1.10"}
    base = {"dp": 1, "pp": 1, "nodes": 1, "ranks_per_node": 1, "micro_batch": 1, "global_batch": 1024}
    one = row(hardware="A64FX", **{**model, **base, **changes})
    return float(iteration_seconds(count_work([one], machine.facts), machine.time.values, machine.facts)[0])


def test_ranks_on_a_node_and_tcmalloc_save_the_same_time_of_allocation() -> None:
    """Together they gain less than their product: what tcmalloc leaves no allocation of, ranks cannot speed up."""
    slow, allocator = _a64fx(), _a64fx(tcmalloc=True)
    ranks, both = _a64fx(dp=4, ranks_per_node=4), _a64fx(dp=4, ranks_per_node=4, tcmalloc=True)
    two = _a64fx(dp=2, ranks_per_node=2)
    assert both < min(allocator, ranks) < slow and slow / both < slow / allocator * slow / ranks
    assert ranks < two < slow


def test_tcmalloc_makes_the_sum_over_many_replicas_slow() -> None:
    few, many = {"dp": 4, "nodes": 4}, {"dp": 512, "nodes": 512}
    assert _a64fx(tcmalloc=True, **few) < _a64fx(**few)
    assert _a64fx(tcmalloc=True, **many) > _a64fx(**many)


def test_stages_that_lie_further_apart_send_slower_on_a_torus() -> None:
    machine = load_machine("a64fx")
    shape = {"hardware": "A64FX", "pp": 8, "ranks_per_node": 1, "zero_stage": 0, "micro_batch": 1, "torch": "1.10"}
    near = _parts(machine, row(dp=1, nodes=8, global_batch=64, **shape))
    far = _parts(machine, row(dp=64, nodes=512, global_batch=64 * 64, **shape))
    assert far["compute"] == pytest.approx(near["compute"]) and far["pipeline"] > 1.2 * near["pipeline"]


def test_a_card_that_is_nearly_full_is_slower() -> None:
    machine = load_machine("a100")
    work = count_work([row(hardware="A100-80GB", nodes=1, ranks_per_node=8)] * 3, machine.facts)
    taken = iteration_seconds(replace(work, fullness=np.array([0.5, 0.9, 1.0])), machine.time.values, machine.facts)
    assert taken[0] == taken[1] < taken[2] < 1.2 * taken[0]


def test_a_rank_does_not_use_the_cards_that_others_leave_free() -> None:
    machine = load_machine("v100")
    half, whole = row(nodes=4, ranks_per_node=2), row(nodes=2, ranks_per_node=4)
    assert _parts(machine, half)["compute"] == pytest.approx(_parts(machine, whole)["compute"])


def test_recompute_costs_time_and_saves_memory() -> None:
    machine = load_machine("a64fx")
    kept, again = (row(hardware="A64FX", zero_stage=0, recompute=flag) for flag in (False, True))
    assert sum(_parts(machine, again).values()) > sum(_parts(machine, kept).values())
    assert _memory(machine, again)[1] < _memory(machine, kept)[1]


def test_the_last_stage_may_be_the_fullest() -> None:
    """The first stage's reading stays where the logits make the last stage die."""
    machine = load_machine("v100")
    small, large = _memory(machine, row(micro_batch=1)), _memory(machine, row(micro_batch=8))
    assert large[1] - large[0] > small[1] - small[0]
    assert large[1] > machine.capacity("V100-16GB") > large[0]


def test_zero_saves_what_the_replicas_share() -> None:
    machine = load_machine("v100")
    whole, cut = _memory(machine, row(zero_stage=0))[0], _memory(machine, row(zero_stage=1))[0]
    cut_more = _memory(machine, row(dp=8, nodes=4, zero_stage=1))[0]
    assert whole > cut > cut_more


def test_intervals_hold_the_prediction_and_inputs_beyond_the_rows_are_named() -> None:
    machine = load_machine("v100")
    known, far = predict_rows(machine, [row(), row(dp=64, nodes=32, layers=96)])
    assert known.seconds.low < known.seconds.value < known.seconds.high
    assert known.extrapolated == ()
    assert far.extrapolated[0] == "layers 96: measured 24 to 24" and any("dp 64" in one for one in far.extrapolated)
    wide = np.log(far.seconds.high / far.seconds.low)
    assert wide > np.log(known.seconds.high / known.seconds.low)


@pytest.mark.parametrize(
    "stages, chunks, micro_batches", [(4, 1, 2), (4, 3, 1), (4, 3, 2), (4, 3, 4), (4, 6, 16), (8, 3, 3)]
)
def test_the_pipeline_waits_as_its_schedule_does(stages: int, chunks: int, micro_batches: int) -> None:
    """Also with fewer micro-batches than stages, where interleaving gains little."""
    machine = load_machine("v100")
    free = replace(machine, time=_with(machine.time, pipeline_bandwidth=1e30, fixed=1e-30))
    one = row(layers=48, vocab=64, pp=stages, dp=1, nodes=stages // 4, micro_batch=1, global_batch=micro_batches)
    found = _parts(free, replace(one, chunks=chunks))
    busy = found["compute"] + found["memory_bound"] + found["tensor_parallel"]
    expected = ideal_bubble("interleaved" if chunks > 1 else "1f1b", stages, micro_batches, chunks)
    assert found["pipeline"] / busy == pytest.approx(expected, rel=0.02)
