"""The chunked loss that never has the logits whole, against full logits."""

from __future__ import annotations

import math
from typing import Tuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fugaku_gpt.comm import Communicator
from fugaku_gpt.layout.sequence import CHUNK_TOKENS
from fugaku_gpt.parallel.cross_entropy import vocab_parallel_cross_entropy
from fugaku_gpt.parallel.gradient_path import DeferredWeightGrads, GradientSlot, attach_main_grad

VOCABULARY, PADDED, HIDDEN, TOKENS = 50, 64, 12, 37


def inputs(dtype: torch.dtype) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(PADDED, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)


def ours(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunk: int) -> torch.Tensor:
    return vocab_parallel_cross_entropy(hidden, weight, targets, Communicator.alone(), VOCABULARY, chunk)


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("chunk", [1, 5, 36, 37, 256])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_loss_and_gradients_equal_those_of_full_logits(
    dtype: torch.dtype, tolerance: float, chunk: int, scale: float
) -> None:
    hidden, weight, targets = inputs(dtype)
    loss = ours(hidden, weight, targets, chunk)
    (loss * scale).backward()
    judge_hidden, judge_weight, _ = inputs(dtype)
    judge = F.cross_entropy(judge_hidden.matmul(judge_weight[:VOCABULARY].t()), targets, reduction="sum")
    (judge * scale).backward()
    assert float(loss.detach()) == pytest.approx(float(judge.detach()), rel=tolerance)
    for mine, theirs in ((hidden.grad, judge_hidden.grad), (weight.grad, judge_weight.grad)):
        assert mine is not None and theirs is not None
        assert float((mine - theirs).abs().max()) <= tolerance * float(theirs.abs().max())
    assert weight.grad is not None and float(weight.grad[VOCABULARY:].abs().sum()) == 0


def test_a_weight_with_a_sum_adds_to_it_at_once_and_takes_no_factor_afterwards() -> None:
    hidden, weight, targets = inputs(torch.float64)
    (judge_weight,) = torch.autograd.grad(ours(hidden, weight, targets, 8), [weight])
    sums = torch.ones_like(weight)
    attach_main_grad(weight, GradientSlot(sums, DeferredWeightGrads()))
    loss = ours(hidden, weight, targets, 8)
    assert torch.allclose(sums, judge_weight + 1.0, rtol=0, atol=1e-14)
    with pytest.raises(RuntimeError, match="gradient_scale"):
        (2.0 * loss).backward()
    ours(hidden, weight, targets, 8).backward()
    assert weight.grad is None and hidden.grad is not None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_padding_takes_no_part_whatever_it_holds(dtype: torch.dtype) -> None:
    found = []
    for padding in (0.0, math.nan):
        hidden, weight, targets = inputs(dtype)
        weight.detach()[VOCABULARY:] = padding
        loss = ours(hidden, weight, targets, 8)
        loss.backward()
        found.append((loss.detach(), hidden.grad, weight.grad))
    for mine, judge in zip(*found):
        assert mine is not None and judge is not None and torch.equal(mine, judge)


def test_a_weight_that_wants_no_gradient_is_given_none() -> None:
    hidden, weight, targets = inputs(torch.float64)
    weight.requires_grad_(False)
    sums = torch.ones_like(weight)
    attach_main_grad(weight, GradientSlot(sums, DeferredWeightGrads()))
    ours(hidden, weight, targets, 8).backward()
    assert hidden.grad is not None and bool((sums == 1.0).all())


def test_large_logits_do_not_overflow() -> None:
    hidden, weight, targets = inputs(torch.float32)
    loss = ours(hidden.detach() * 1e4, weight, targets, 8)
    assert torch.isfinite(loss)


def test_without_gradients_only_the_loss_is_made() -> None:
    hidden, weight, targets = inputs(torch.float64)
    with torch.no_grad():
        loss = ours(hidden, weight, targets, 8)
    assert not loss.requires_grad
    assert float(loss) == pytest.approx(float(ours(hidden, weight, targets, 8).detach()), rel=1e-15)


def test_a_second_backward_pass_is_refused() -> None:
    loss = ours(*inputs(torch.float64), 8)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        loss.backward()


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 20), vocabulary=st.integers(1, 12), padding=st.integers(0, 5), chunk=st.integers(1, 25),
    spread=st.sampled_from([0.01, 1.0, 30.0]), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_shape_and_chunk_equal_full_logits(
    tokens: int, vocabulary: int, padding: int, chunk: int, spread: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = (torch.randn(tokens, 3, generator=generator, dtype=torch.float64) * spread).requires_grad_()
    weight = torch.randn(vocabulary + padding, 3, generator=generator, dtype=torch.float64).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    loss = vocab_parallel_cross_entropy(hidden, weight, targets, Communicator.alone(), vocabulary, chunk)
    judge = F.cross_entropy(hidden.matmul(weight[:vocabulary].t()), targets, reduction="sum")
    assert float(loss.detach()) == pytest.approx(float(judge.detach()), rel=1e-12, abs=1e-12)
    ours_gradients = torch.autograd.grad(loss, (hidden, weight))
    for mine, theirs in zip(ours_gradients, torch.autograd.grad(judge, (hidden, weight))):
        assert float((mine - theirs).abs().max()) <= 1e-12 * max(1.0, spread)


def test_the_default_chunk_is_crossed_without_a_seam() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2 * CHUNK_TOKENS + 1, 4, generator=generator, dtype=torch.float64)
    weight = torch.randn(9, 4, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 9, (len(hidden),), generator=generator)
    loss = vocab_parallel_cross_entropy(hidden, weight, targets, Communicator.alone(), 9)
    judge = F.cross_entropy(hidden.matmul(weight.t()), targets, reduction="sum")
    assert float(loss) == pytest.approx(float(judge), rel=1e-13)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_an_input_that_needs_no_gradient_may_be_frozen(frozen: str) -> None:
    hidden, weight, targets = inputs(torch.float64)
    ours(hidden, weight, targets, 8).backward()
    part_hidden, part_weight, _ = inputs(torch.float64)
    (part_hidden if frozen == "hidden" else part_weight).requires_grad_(False)
    ours(part_hidden, part_weight, targets, 8).backward()
    whole, part = (weight, part_weight) if frozen == "hidden" else (hidden, part_hidden)
    assert whole.grad is not None and part.grad is not None and torch.equal(whole.grad, part.grad)


def test_inputs_are_left_as_they_were() -> None:
    hidden, weight, targets = inputs(torch.float32)
    before = hidden.detach().clone(), weight.detach().clone(), targets.clone()
    ours(hidden, weight, targets, 8).backward()
    assert all(torch.equal(now.detach(), then) for now, then in zip((hidden, weight, targets), before))


def test_a_sum_over_many_tokens_does_not_round_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(20_000, 4, generator=generator)
    weight = torch.randn(50, 4, generator=generator)
    targets = torch.randint(0, 50, (20_000,), generator=generator)
    loss = vocab_parallel_cross_entropy(hidden, weight, targets, Communicator.alone(), 50)
    judge = F.cross_entropy(hidden.double().matmul(weight.double().t()), targets, reduction="sum")
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(float(judge), rel=2e-7)
