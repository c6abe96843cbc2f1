"""Tests of the communications of a step, and of the check that those of all ranks match and do not deadlock."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any, Callable, Dict, List, Sequence, Tuple, Union

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fugaku_gpt.config import LayoutConfig, ModelConfig, load_run_config
from fugaku_gpt.layout import grid
from fugaku_gpt.layout.communication_check import check_grid
from fugaku_gpt.layout.communications import (
    NORM_ELEMENTS,
    Collective,
    Communication,
    CommunicationPlan,
    Transfer,
    bucket_elements,
    chunk_times,
    plan_of,
    program,
    schedule_of,
)
from fugaku_gpt.layout.grid import ORDERS, Coordinates, coordinates_of
from fugaku_gpt.layout.group_check import GROUPS, GridError, groups_of
from fugaku_gpt.layout.nodes import ACROSS_NODES, ACROSS_NODES_GATHER, NODE, NODE_GATHER, Nodes, node_groups, nodes_of
from fugaku_gpt.layout.schedule_times import simulate
from fugaku_gpt.layout.schedules import KINDS, Exchange
from fugaku_gpt.layout.stages import stage_tensors

BY_NODES = LayoutConfig(dp=6, hierarchical_sum=True)
MODEL = ModelConfig(layers=12, hidden=24, heads=6, seq_len=12, vocab_size=100, vocab_multiple=8)


@st.composite
def plans(draw: Any, most_ranks: int = 24) -> CommunicationPlan:
    """Draws any mixture of dp, tp, pp, chunks, ZeRO, sequence parallelism and recompute."""
    tp = draw(st.sampled_from([1, 2, 3]))
    kv_heads = draw(
        st.sampled_from([kv_heads for kv_heads in (1, 2, 3, 6) if kv_heads % tp == 0 or tp % kv_heads == 0])
    )
    pp = draw(st.integers(1, 4))
    dp = draw(st.integers(1, max(1, min(4, most_ranks // (tp * pp)))))
    kind = draw(st.sampled_from(KINDS))
    is_hierarchical = draw(st.booleans())
    per_node = draw(st.sampled_from([size for size in range(1, dp * tp * pp + 1) if dp * tp * pp % size == 0]))
    return CommunicationPlan(
        model=replace(MODEL, kv_heads=kv_heads),
        layout=LayoutConfig(dp=dp, tp=tp, pp=pp, hierarchical_sum=is_hierarchical),
        nodes=Nodes(dp * tp * pp // per_node, per_node, round_robin=draw(st.booleans())) if is_hierarchical else None,
        micro_batches=draw(st.integers(1, 5)),
        micro_batch=draw(st.integers(1, 2)),
        order=draw(st.sampled_from(ORDERS)),
        schedule=kind,
        chunks=draw(st.integers(1, 3)) if kind == "interleaved" else 1,
        zero=draw(st.sampled_from([0, 1])),
        sequence_parallel=draw(st.booleans()),
        recompute=tuple(draw(st.lists(st.sampled_from(["none", "selective", "full"]), min_size=12, max_size=12))),
        bucket_bytes=draw(st.sampled_from([4096, 30000, 2**20])),
        loss_tokens=draw(st.sampled_from([5, 256])),
    )


def program_of(plan: CommunicationPlan, rank: int, is_calibration: bool = False) -> Sequence[Communication]:
    """Returns the communications of one rank."""
    coordinates, on_node = coordinates_of(rank, plan.layout, plan.order), 1
    if plan.is_hierarchical and plan.nodes is not None:
        on_node = len(node_groups(coordinates, plan.layout, plan.order, plan.nodes)[0])
    return program(plan, coordinates.pp, on_node, is_calibration)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(plans())
def test_every_layout_passes_the_check_run_by_stages_and_run_by_ranks(plan: CommunicationPlan) -> None:
    by_stages, by_ranks = check_grid(plan), check_grid(plan, run_all=True)
    assert (by_stages.ran, by_ranks.ran) == (plan.layout.pp, plan.layout.ranks)
    assert by_stages.communications == sum(len(program_of(plan, rank)) for rank in range(plan.layout.ranks))
    layout = plan.layout
    check_grid(plan, lambda rank: program_of(plan, rank, is_calibration=True))
    assert by_stages.groups.get("kv", 0) == layout.dp * layout.pp * (
        plan.model.kv_head_count if plan.kv_copies > 1 else 0
    )
    assert {kind: by_stages.groups[kind] for kind in (*GROUPS, "world")} == {
        "tp": layout.dp * layout.pp * (layout.tp > 1),
        "pp": layout.dp * layout.tp * (layout.pp > 1),
        "dp": layout.tp * layout.pp * (layout.dp > 1),
        "embedding": layout.dp * layout.tp * (layout.pp > 1),
        "world": int(layout.ranks > 1),
    }


def operations_on(steps: Sequence[Communication], communicator: str) -> Dict[Tuple[str, int], int]:
    """Counts each operation on one communicator."""
    collectives = (step for step in steps if isinstance(step, Collective) and step.communicator == communicator)
    return Counter((step.operation, step.elements) for step in collectives)


def test_tensor_parallel_operations_are_four_per_layer_as_in_megatron() -> None:
    plan = CommunicationPlan(MODEL, LayoutConfig(tp=2, pp=3), micro_batches=5, micro_batch=2)
    hidden_elements = 2 * 12 * 24
    assert [len(chunk.layers) for chunk in plan.model_chunks] == [4, 4, 4]
    middle = operations_on(program(plan, 1), "tp")
    assert middle == {("all_reduce_sum", hidden_elements): 5 * 4 * 4}
    assert operations_on(program(plan, 0), "tp") == {("all_reduce_sum", hidden_elements): 5 * (4 * 4 + 1)}
    assert operations_on(program(plan, 2), "tp") == {
        ("all_reduce_sum", hidden_elements): 5 * (4 * 4 + 1),
        ("all_gather", 3 * 24): 5,
    }
    recomputing = replace(plan, recompute=("none",) * 4 + ("full", "selective", "full", "none") + ("none",) * 4)
    assert operations_on(program(recomputing, 1), "tp") == {("all_reduce_sum", hidden_elements): 5 * (4 * 4 + 2 * 2)}
    sequence_parallel = replace(plan, sequence_parallel=True)
    # of each of 4 layers: two LayerNorms, two biases of row-parallel outputs; 24 elements each, aligned to 32
    norms_and_biases = (4 * 6 - 1) * 32 + 24
    assert operations_on(program(sequence_parallel, 1), "tp") == {
        ("reduce_scatter_sum", hidden_elements): 5 * 4 * 4,
        ("all_gather", hidden_elements // 2): 5 * 4 * 6,
        ("all_reduce_sum", norms_and_biases): 1,
    }


def test_pipeline_messages_are_hidden_states_or_their_shares() -> None:
    plan = CommunicationPlan(MODEL, LayoutConfig(tp=2, pp=2), micro_batches=3, micro_batch=2)
    for sequence_parallel, elements in ((False, 2 * 12 * 24), (True, 12 * 24)):
        steps = program(replace(plan, sequence_parallel=sequence_parallel), 0)
        assert {step.elements for step in steps if isinstance(step, Transfer)} == {elements}
        assert [step.exchange for step in steps if isinstance(step, Transfer)] == [
            action for action in schedule_of(plan, 0) if isinstance(action, Exchange)
        ]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(plans())
def test_all_gradients_are_summed_once(plan: CommunicationPlan) -> None:
    layout = plan.layout
    for stage in range(layout.pp):
        steps = program(plan, stage)
        specs = stage_tensors(plan.model, layout.tp, plan.model_chunks, stage)
        parameter_elements = sum(math.prod(spec.local_shape(layout.tp)) for spec in specs)
        buckets = bucket_elements(plan, stage)
        copied_elements = [math.prod(spec.local_shape(layout.tp)) for spec in specs if spec.copies > 1]
        assert bool(copied_elements) == (layout.tp > plan.model.kv_head_count)
        for (operation, elements), count in operations_on(steps, "kv").items():
            assert (operation, count) == ("all_reduce_sum", 1)
            assert sum(copied_elements) <= elements < sum(copied_elements) + 16 * len(copied_elements)
        assert len(operations_on(steps, "kv")) == bool(copied_elements)
        unit = 16 * (layout.dp if plan.zero or layout.hierarchical_sum else 1)
        assert parameter_elements <= sum(buckets) < parameter_elements + 16 * len(specs) + 2 * unit
        assert max(buckets) <= max(plan.bucket_bytes // 4, unit)
        sums = "reduce_scatter_sum" if plan.zero else "all_reduce_sum"
        expected = Counter((sums, elements) for elements in buckets)
        if plan.zero:
            assert all(elements % layout.dp == 0 for elements in buckets)
            expected += Counter(("all_gather", elements // layout.dp) for elements in buckets)
        assert operations_on(steps, "dp") == (expected if layout.dp > 1 else {})
        assert operations_on(steps, "world") == ({("all_reduce_sum", NORM_ELEMENTS): 1} if layout.ranks > 1 else {})
        embedding = plan.vocab // layout.tp * 24
        if layout.pp == 1 or stage not in (0, layout.pp - 1):
            assert operations_on(steps, "embedding") == {}
        elif plan.zero and layout.dp > 1:
            shares = Counter(("all_reduce_sum", elements // layout.dp) for elements in buckets)
            tied = operations_on(steps, "embedding")
            assert (
                not tied - shares
                and embedding <= layout.dp * sum(n * c for (_, n), c in tied.items()) < embedding + unit
            )
        else:
            assert operations_on(steps, "embedding") == {("all_reduce_sum", embedding): 1}


def test_the_smallest_buckets_hold_a_cache_line_for_each_shard() -> None:
    plan = CommunicationPlan(MODEL, LayoutConfig(dp=3, pp=6), micro_batches=1, zero=1, bucket_bytes=1)
    assert set(bucket_elements(plan, 3)) == {3 * 16}  # a cache line each
    assert set(bucket_elements(replace(plan, zero=0), 3)) == {16}


def test_chunk_times_are_those_of_the_formula_of_flops() -> None:
    plan = CommunicationPlan(MODEL, LayoutConfig(pp=2), micro_batches=4, recompute=("full",) * 12)
    timing = chunk_times(plan)
    head = 3 * plan.vocab / (12 * 24 + 2 * 12)
    assert timing.forward == pytest.approx([len(plan.model_chunks[0].layers), len(plan.model_chunks[1].layers) + head])
    assert timing.backward == [3.0 * len(chunk.layers) for chunk in plan.model_chunks]
    selective = replace(plan, recompute=("selective",) * 12)
    assert chunk_times(selective) == chunk_times(replace(plan, recompute=()))
    assert simulate([schedule_of(plan, stage) for stage in range(2)], timing).makespan > 0


def test_the_plan_of_a_run_follows_the_configuration() -> None:
    config = load_run_config(overrides=["layout.dp=2", "layout.tp=2", "training.dtype=float64"])
    plan = plan_of(config)
    assert (plan.layout, plan.micro_batches, plan.element_bytes) == (config.layout, config.micro_batches, 8)
    assert check_grid(plan).ranks == 4


def groups_of_replicas(plan: CommunicationPlan, rank: int) -> List[List[int]]:
    """Returns the group of a rank's replicas on its node, and the group across nodes."""
    groups = groups_of(plan)
    coordinates = coordinates_of(rank, plan.layout, plan.order)
    assert groups[NODE] == groups[NODE_GATHER] and groups[ACROSS_NODES] == groups[ACROSS_NODES_GATHER]
    return [list(groups[kind](coordinates, plan.layout, plan.order)) for kind in (NODE, ACROSS_NODES)]


def test_groups_of_replicas_follow_the_placement_of_ranks_on_nodes() -> None:
    plan = CommunicationPlan(MODEL, BY_NODES, micro_batches=1, nodes=Nodes(2, 3))
    assert [groups_of_replicas(plan, rank) for rank in (0, 5)] == [[[0, 1, 2], [0, 3]], [[3, 4, 5], [2, 5]]]
    round_robin = replace(plan, nodes=Nodes(3, 2, round_robin=True))
    assert groups_of_replicas(round_robin, 4) == [[1, 4], [3, 4, 5]]
    for nodes in (Nodes(1, 6), Nodes(6, 1)):  # all on one node; each on its own
        assert groups_of_replicas(replace(plan, nodes=nodes), 4) == [[4], [4]]
    assert groups_of(replace(plan, layout=LayoutConfig(dp=6))) == GROUPS


@pytest.mark.parametrize("nodes", [Nodes(12, 4), Nodes(12, 4, round_robin=True)])
@pytest.mark.parametrize("order", ORDERS)
def test_a_group_of_any_number_of_ranks_takes_no_memory(order: str, nodes: Nodes) -> None:
    layout = LayoutConfig(dp=12, tp=2, pp=2, hierarchical_sum=True, order=order)
    plan = CommunicationPlan(replace(MODEL, kv_heads=1), layout, micro_batches=1, order=order, nodes=nodes)
    for group_of in groups_of(plan).values():
        for rank in range(layout.ranks):
            assert isinstance(group_of(coordinates_of(rank, layout, order), layout, order), range)


def test_a_hierarchical_sum_reduces_shares_across_nodes() -> None:
    plan = CommunicationPlan(MODEL, BY_NODES, micro_batches=1, nodes=Nodes(2, 3), bucket_bytes=2**30)
    blocks, embedding = bucket_elements(plan, 0)
    steps = [(s.communicator, s.operation, s.elements) for s in program(plan, 0, 3) if isinstance(s, Collective)]
    world = ("world", "all_reduce_sum", NORM_ELEMENTS)
    assert steps == [
        (NODE, "reduce_scatter_sum", blocks),
        (ACROSS_NODES, "all_reduce_sum", blocks // 3),
        (NODE_GATHER, "all_gather", blocks // 3),
        (NODE, "reduce_scatter_sum", embedding),
        (ACROSS_NODES, "all_reduce_sum", embedding // 3),
        (NODE_GATHER, "all_gather", embedding // 3),
        world,
    ]
    zero = program(replace(plan, zero=1), 0, 3)
    assert [(s.communicator, s.operation, s.elements) for s in zero if isinstance(s, Collective)] == [
        (NODE, "reduce_scatter_sum", blocks),
        (ACROSS_NODES, "reduce_scatter_sum", blocks // 3),
        (NODE, "reduce_scatter_sum", embedding),
        (ACROSS_NODES, "reduce_scatter_sum", embedding // 3),
        world,
        (ACROSS_NODES_GATHER, "all_gather", embedding // 6),
        (NODE_GATHER, "all_gather", embedding // 3),
        (ACROSS_NODES_GATHER, "all_gather", blocks // 6),
        (NODE_GATHER, "all_gather", blocks // 3),
    ]


def test_replicas_spread_unevenly_over_nodes_are_summed_without_hierarchy() -> None:
    layout = LayoutConfig(dp=4, tp=3, hierarchical_sum=True)
    # replicas 0 to 3 are on one node, 4 to 7 two on each, 8 to 11 on one
    plan = CommunicationPlan(MODEL, layout, micro_batches=2, order="dp,tp,pp", nodes=Nodes(2, 6))
    by_stages, by_ranks = check_grid(plan), check_grid(plan, run_all=True)
    assert (by_stages.programs, by_stages.ran, by_ranks.ran) == (1, 1, 12)
    assert {kind: by_stages.groups[kind] for kind in ("dp", NODE, ACROSS_NODES)} == {"dp": 3, NODE: 0, ACROSS_NODES: 0}
    # of four replicas, those of one stage as 0 1 and 2 3, those of the other as 0 2 and 1 3
    crossed = replace(
        plan, layout=LayoutConfig(dp=4, pp=2, hierarchical_sum=True), order="dp,tp,pp", nodes=Crossed(2, 4)
    )
    assert check_grid(crossed).groups[NODE] == 0
    assert check_grid(replace(crossed, nodes=Nodes(4, 2))).groups[NODE] == 4


class Crossed(Nodes):
    """Nodes over which each stage is spread in another way."""

    def of(self, rank: int) -> int:
        return rank % 4 // 2 if rank < 4 else rank % 2


@pytest.mark.parametrize(
    ("kind", "wrong", "message"),
    [
        (NODE, {0: [0, 3], 3: [0, 3], 1: [1, 4], 4: [1, 4], 2: [2, 5], 5: [2, 5]}, "rank 0, .* is on several nodes"),
        (
            ACROSS_NODES,
            {0: [0, 4], 4: [0, 4], 1: [1, 3], 3: [1, 3], 2: [2, 5], 5: [2, 5]},
            "rank 0, .* group 0, 4 it meets",
        ),
        (ACROSS_NODES, {rank: [rank] for rank in range(6)}, "rank 0, .* it meets 0, 1, 2; its replicas are 0, 1, 2, 3"),
        (NODE, {rank: [rank] for rank in range(6)}, "rank 0, .* it meets 0, 3; its replicas are 0, 1, 2, 3, 4, 5"),
    ],
)
def test_node_groups_that_miss_replicas_are_refused(kind: str, wrong: Dict[int, List[int]], message: str) -> None:
    plan = CommunicationPlan(MODEL, BY_NODES, micro_batches=1, nodes=Nodes(2, 3))
    with pytest.raises(GridError, match=message) as error:
        check_grid(plan, groups={**groups_of(plan), kind: lambda coordinates, layout, order: wrong[coordinates.dp]})
    assert error.value.position == -1  # the group itself is wrong


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["job.nodes=3"], Nodes(3, 4)),
        (["node.ranks_per_node=6", "job.rank_map=bychip:XYZ"], Nodes(2, 6)),
        (["node.ranks_per_node=6", "job.rank_map=bynode"], Nodes(2, 6, round_robin=True)),
        (["job.nodes=5"], "job.nodes 5 must divide the 12 ranks; valid: 4 or 6"),
        (["job.nodes=13"], "job.nodes 13 must divide the 12 ranks; valid: 12"),
        (["node.ranks_per_node=8"], "node.ranks_per_node 8 must divide the 12 ranks; valid: 6 or 12"),
        (["job.rank_map_file=ranks.txt"], "job.rank_map_file says which ranks share a node"),
    ],
)
def test_nodes_are_those_of_the_run_file(overrides: List[str], expected: Union[Nodes, str]) -> None:
    settings = ["layout.dp=12", "layout.hierarchical_sum=true", "training.global_batch=12"]
    config = load_run_config(overrides=[*settings, *overrides], check=False)
    if isinstance(expected, Nodes):
        assert nodes_of(config) == plan_of(config).nodes == expected
    else:
        with pytest.raises(ValueError, match=expected):
            plan_of(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": LayoutConfig(tp=5)}, "tp 5 must divide the heads, 6"),
        ({"model": replace(MODEL, kv_heads=3)}, "tp 2 must divide the heads of keys, 3, or be a multiple of them"),
        ({"model": replace(MODEL, seq_len=7), "sequence_parallel": True}, "must divide the sequence length, 7"),
        ({"zero": 2}, "zero 2: valid: 0, 1"),
        ({"order": "tp,dp"}, "valid: tp,pp,dp"),
        ({"recompute": ("full",)}, "one for each of 12"),
        ({"recompute": ("all",) * 12}, "valid: none, selective, full"),
        ({"split": (12,)}, "valid: 2, one for each chunk"),
        ({"schedule": "2f2b"}, "valid: gpipe, 1f1b, interleaved"),
        ({"layout": BY_NODES}, "which ranks share a node must be given"),
        ({"chunks": 2}, "or the schedule interleaved"),
        ({"schedule": "interleaved", "chunks": 7}, "valid: stages \\* chunks up to 12"),
    ],
)
def test_invalid_plans_are_refused(change: Dict[str, Any], message: str) -> None:
    plan = CommunicationPlan(MODEL, LayoutConfig(tp=2, pp=2), micro_batches=4)
    with pytest.raises(ValueError, match=message):
        replace(plan, **change)


@pytest.mark.slow
def test_the_grid_of_the_run_on_13824_nodes() -> None:
    model = load_run_config(preset="13b").model
    plan = CommunicationPlan(model, LayoutConfig(dp=288, tp=6, pp=8), micro_batches=7, zero=1)
    report = check_grid(plan)
    assert (report.ranks, report.programs, report.ran) == (13824, 8, 8)
    assert report.groups == {"tp": 2304, "pp": 1728, "dp": 48, "embedding": 1728, "world": 1}


# Mutations: one rank, or one group, that is almost right.


def _with_odd_rank(
    plan: CommunicationPlan, odd: int, steps: Sequence[Communication]
) -> Callable[[int], Sequence[Communication]]:
    return lambda rank: steps if rank == odd else program_of(plan, rank)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(plans(), st.data())
def test_a_rank_that_omits_repeats_or_resizes_a_collective_is_named(plan: CommunicationPlan, data: Any) -> None:
    rank = data.draw(st.integers(0, plan.layout.ranks - 1))
    steps = list(program_of(plan, rank))
    positions = [n for n, step in enumerate(steps) if isinstance(step, Collective)]
    if not positions:
        assert plan.layout.ranks == 1
        return
    position = data.draw(st.sampled_from(positions))
    step = steps[position]
    assert isinstance(step, Collective)
    steps[position : position + 1] = data.draw(
        st.sampled_from(
            [
                [],
                [step, step],
                [Collective(step.communicator, step.operation, step.elements + 1)],
                [Collective(step.communicator, "broadcast", step.elements)],
            ]
        )
    )
    with pytest.raises(GridError) as error:
        check_grid(plan, _with_odd_rank(plan, rank, steps))
    assert error.value.communicator == step.communicator
    assert f"rank {rank}" in str(error.value)
    # in a run of equal operations, a missing one shows at the end of the run
    before = [s for s in steps[:position] if isinstance(s, Collective) and s.communicator == step.communicator]
    assert error.value.position >= len(before)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(plans(), st.data())
def test_a_rank_whose_messages_differ_is_named(plan: CommunicationPlan, data: Any) -> None:
    if plan.layout.pp == 1:
        return
    rank = data.draw(st.integers(0, plan.layout.ranks - 1))
    stage = coordinates_of(rank, plan.layout, plan.order).pp
    steps = list(program_of(plan, rank))
    position = data.draw(st.sampled_from([n for n, step in enumerate(steps) if isinstance(step, Transfer)]))
    step = steps[position]
    assert isinstance(step, Transfer)
    side = data.draw(st.sampled_from([name for name in ("sends", "receives") if getattr(step.exchange, name)]))
    message = getattr(step.exchange, side)[0]
    remaining = getattr(step.exchange, side)[1:]
    values = {name: getattr(message, name) for name in ("kind", "micro_batch", "chunk", "peer")}
    changed = data.draw(
        st.sampled_from([None, "size", *({name: values[name] + 1} for name in ("micro_batch", "chunk", "peer"))])
    )
    if changed == "size":
        steps[position] = replace(step, elements=step.elements + 1)
    else:
        first = () if changed is None else (type(message)(**{**values, **changed}),)
        steps[position] = replace(step, exchange=replace(step.exchange, **{side: (*first, *remaining)}))
    with pytest.raises(GridError) as error:
        check_grid(plan, _with_odd_rank(plan, rank, steps))
    assert error.value.communicator == "pp"
    assert f"rank {rank}" in str(error.value) or f"stage {stage}" in str(error.value)


def test_a_deadlock_over_communicators_that_are_valid_by_themselves_is_detected() -> None:
    plan = CommunicationPlan(MODEL, LayoutConfig(dp=2, tp=2), micro_batches=1)
    tp, dp = Collective("tp", "all_reduce_sum", 8), Collective("dp", "all_reduce_sum", 8)
    # tp groups 0 1 and 2 3, dp groups 0 2 and 1 3: 0 waits for 1, 1 for 3, 3 for 2, 2 for 0
    circle: List[Tuple[Communication, ...]] = [(tp, dp), (dp, tp), (dp, tp), (tp, dp)]
    with pytest.raises(GridError, match="rank 0, communicator tp, position 0: deadlock.*rank 1 at 0.*rank 3 at 0"):
        check_grid(plan, lambda rank: circle[rank])
    # the same operations in an order that differs between replicas only: unusual, but it completes
    report = check_grid(plan, lambda rank: [(tp, dp), (tp, dp), (dp, tp), (dp, tp)][rank])
    assert (report.ran, report.programs) == (4, 2)


def test_a_deadlock_between_stages_is_detected_from_a_rank_of_each() -> None:
    plan = CommunicationPlan(MODEL, LayoutConfig(dp=3, tp=2, pp=2), micro_batches=1)

    def crossed(rank: int) -> Sequence[Communication]:
        steps = list(program(plan, coordinates_of(rank, plan.layout, plan.order).pp))
        if coordinates_of(rank, plan.layout, plan.order).pp == 0:
            tied = next(n for n, s in enumerate(steps) if isinstance(s, Collective) and s.communicator == "embedding")
            steps.insert(0, steps.pop(tied))  # the first stage sums the embedding before it has sent anything
        return steps

    for run_all, ran in ((False, 2), (True, 12)):
        with pytest.raises(GridError, match="deadlock") as error:
            check_grid(plan, crossed, run_all=run_all)
        assert error.value.communicator == "embedding" and error.value.rank == 0, ran


def test_a_communicator_that_does_not_exist_is_refused() -> None:
    plan = CommunicationPlan(MODEL, LayoutConfig(dp=2), micro_batches=1)
    with pytest.raises(GridError, match="rank 0, communicator node, position 0: .*valid: tp, dp, embedding, world"):
        check_grid(plan, lambda rank: (Collective("node", "all_reduce_sum", 1),))


@pytest.mark.parametrize("kind", [*sorted(GROUPS), "kv"])
def test_groups_whose_members_disagree_are_refused(kind: str) -> None:
    plan = CommunicationPlan(replace(MODEL, kv_heads=1), LayoutConfig(dp=2, tp=2, pp=3), micro_batches=1)
    right = groups_of(plan)

    def reversed_on_the_first(coordinates: Coordinates, layout: LayoutConfig, order: str) -> Sequence[int]:
        group = right[kind](coordinates, layout, order)
        return group[::-1] if grid.rank_of(coordinates, layout, order) == group[0] else group

    def reversed_on_all(coordinates: Coordinates, layout: LayoutConfig, order: str) -> Sequence[int]:
        return right[kind](coordinates, layout, order)[::-1]

    def only_own_rank(coordinates: Coordinates, layout: LayoutConfig, order: str) -> List[int]:
        return [grid.rank_of(coordinates, layout, order)]

    for wrong in (reversed_on_the_first, reversed_on_all, only_own_rank):
        with pytest.raises(GridError) as error:
            check_grid(plan, groups={**right, kind: wrong})
        assert (error.value.communicator, error.value.position) == (kind, -1)


def test_groups_that_cross_stages_are_refused_even_where_members_agree() -> None:
    plan = CommunicationPlan(MODEL, LayoutConfig(dp=1, tp=2, pp=2), micro_batches=1)
    pairs = {0: [0, 2], 2: [0, 2], 1: [1, 3], 3: [1, 3]}
    with pytest.raises(GridError, match="rank 0, communicator tp: its group 0, 2 is not the ranks along tp"):
        check_grid(
            plan,
            groups={**GROUPS, "tp": lambda coordinates, layout, order: pairs[grid.rank_of(coordinates, layout, order)]},
        )
