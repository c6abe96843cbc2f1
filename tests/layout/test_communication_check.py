"""Tests of the check of communications: small layouts in which one rank is not like the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Callable, List, Sequence

import pytest

from fugaku_gpt.config import LayoutConfig, ModelConfig
from fugaku_gpt.layout.communication_check import check_grid
from fugaku_gpt.layout.communications import Collective, Communication, CommunicationPlan, Transfer, program
from fugaku_gpt.layout.grid import coordinates_of
from fugaku_gpt.layout.group_check import GridError

MODEL = ModelConfig(layers=4, hidden=24, heads=6, seq_len=12, vocab_size=100, vocab_multiple=8)
Steps = List[Communication]


def with_odd_rank(
    plan: CommunicationPlan, odd: int, change: Callable[[Steps], Steps]
) -> Callable[[int], Sequence[Communication]]:
    def steps_of(rank: int) -> Sequence[Communication]:
        steps = list(program(plan, coordinates_of(rank, plan.layout, plan.order).pp))
        return change(steps) if rank == odd else steps

    return steps_of


def resized(kind: str) -> Callable[[Steps], Steps]:
    """Makes the first collective of a kind of communicator one element longer."""

    def change(steps: Steps) -> Steps:
        number = next(n for n, step in enumerate(steps) if isinstance(step, Collective) and step.communicator == kind)
        return [*steps[:number], replace(steps[number], elements=steps[number].elements + 1), *steps[number + 1 :]]

    return change


@pytest.mark.parametrize(
    ("layout", "kind", "group"),
    [
        (LayoutConfig(tp=3), "tp", "0, 1, 2"),
        (LayoutConfig(dp=3), "dp", "0, 1, 2"),
        (LayoutConfig(dp=2, tp=2), "tp", "0, 1"),
        (LayoutConfig(dp=2, tp=2), "dp", "1, 3"),
        (LayoutConfig(pp=2, tp=2), "embedding", "1, 3"),
    ],
)
def test_a_rank_with_another_size_than_the_group_is_named(layout: LayoutConfig, kind: str, group: str) -> None:
    plan = CommunicationPlan(MODEL, layout, micro_batches=2)
    assert check_grid(plan).ranks == layout.ranks
    with pytest.raises(
        GridError, match=rf"rank 1\b.*of the same group|where rank 1 of the same group \({group}\)"
    ) as error:
        check_grid(plan, with_odd_rank(plan, 1, resized(kind)))
    assert error.value.communicator == kind and f"({group})" in str(error.value)


def test_a_collective_that_a_rank_omits_is_named() -> None:
    plan = CommunicationPlan(MODEL, LayoutConfig(tp=2), micro_batches=2)
    with pytest.raises(GridError, match="rank 1") as error:
        check_grid(plan, with_odd_rank(plan, 1, lambda steps: steps[:-1]))
    assert error.value.communicator in ("tp", "world")


def test_a_message_that_nobody_receives_is_named() -> None:
    plan = CommunicationPlan(MODEL, LayoutConfig(pp=2, dp=2), micro_batches=2)
    report = check_grid(plan)
    assert report.ranks == 4 and len(report.of_stage) == 2 and report.ran == 2
    assert check_grid(plan, run_all=True).ran == 4
    last_transfer = lambda steps: [  # noqa: E731
        step for number, step in enumerate(steps)
        if number != max(n for n, other in enumerate(steps) if isinstance(other, Transfer))
    ]  # fmt: skip
    with pytest.raises(GridError) as error:
        check_grid(plan, with_odd_rank(plan, 0, last_transfer))
    assert error.value.communicator == "pp"
