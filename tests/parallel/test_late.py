"""Products that are put off are made when they are called for, once, in order, and let go of what they needed."""

from __future__ import annotations

import weakref

import torch

from fugaku_gpt.parallel.late import DeferredWeightGrads


def test_outside_a_backward_pass_that_puts_off_products_are_made_at_once() -> None:
    late, made = DeferredWeightGrads(), []
    late.add(1, lambda: made.append("now"))
    assert made == ["now"] and not late.waits(1)


def test_products_wait_for_their_pass_and_each_parameter_is_told_when_none_waits() -> None:
    late, said = DeferredWeightGrads(), []
    late.finished = lambda parameter: said.append(f"{parameter} finished")
    for micro_batch in (0, 1):
        with late.putting_off((micro_batch, 0)):
            for parameter in (7, 8):
                late.add(parameter, lambda name=f"{parameter} of {micro_batch}": said.append(name))  # type: ignore[misc]
    assert said == [] and late.waits(7) and late.waits(8) and not late.waits(9)
    late.make((0, 0))
    assert said == ["7 of 0", "8 of 0"] and late.waits(7)
    late.make((1, 0))
    assert said[2:] == ["7 of 1", "7 finished", "8 of 1", "8 finished"] and not late.waits(7)


def test_a_product_lets_go_of_its_tensors_as_soon_as_it_is_made() -> None:
    late, alive = DeferredWeightGrads(), []  # type: DeferredWeightGrads, List[int]
    tensors = [torch.ones(3) for _ in range(2)]
    watched = [weakref.ref(tensor) for tensor in tensors]

    def count() -> None:
        alive.append(sum(ref() is not None for ref in watched))

    with late.putting_off((0, 0)):
        for tensor in tensors:
            late.add(1, lambda tensor=tensor: (tensor.mul_(2.0), count()))  # type: ignore[misc]
    del tensor, tensors
    late.make((0, 0))
    assert alive == [2, 1]
    count()
    assert alive[-1] == 0


def test_a_pass_that_fails_puts_nothing_off_afterwards() -> None:
    late, made = DeferredWeightGrads(), []
    try:
        with late.putting_off((0, 0)):
            raise ValueError
    except ValueError:
        pass
    late.add(1, lambda: made.append(1))
    assert made == [1]
