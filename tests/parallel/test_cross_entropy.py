"""Tests of the chunked loss, which never holds all logits, against full logits."""

from __future__ import annotations

import math
from typing import Tuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fugaku_gpt.comm import Communicator
from fugaku_gpt.layout.communications import CHUNK_TOKENS
from fugaku_gpt.parallel.cross_entropy import NO_TARGET, CorrectCount, LossOptions, vocab_parallel_cross_entropy
from fugaku_gpt.parallel.gradient_path import DeferredWeightGrads, GradientSlot, attach_main_grad

VOCABULARY, PADDED, HIDDEN, TOKENS = 50, 64, 12, 37


def inputs(dtype: torch.dtype) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(PADDED, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)


def chunked_loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunk: int) -> torch.Tensor:
    return vocab_parallel_cross_entropy(hidden, weight, targets, Communicator.alone(), VOCABULARY, chunk)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_tokens_without_a_target_have_no_loss_and_no_gradient(dtype: torch.dtype) -> None:
    hidden, weight, targets = inputs(dtype)
    gaps = torch.tensor([0, 4, 5, TOKENS - 1])
    options, alone = LossOptions(has_gaps=True), Communicator.alone()
    loss = vocab_parallel_cross_entropy(
        hidden, weight, targets.index_fill(0, gaps, NO_TARGET), alone, VOCABULARY, 5, options=options
    )
    loss.backward()
    rest = torch.tensor([token for token in range(TOKENS) if token not in gaps.tolist()])
    judge_hidden, judge_weight, _ = inputs(dtype)
    judge = chunked_loss(judge_hidden[rest], judge_weight, targets[rest], 256)
    judge.backward()
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    assert float(loss.detach()) == pytest.approx(float(judge.detach()), rel=min(tolerance, 1e-3))  # logits are rounded
    for actual, expected in ((hidden.grad, judge_hidden.grad), (weight.grad, judge_weight.grad)):
        assert actual is not None and expected is not None
        judged = expected.double()  # PyTorch 1.7 has no largest value of bfloat16
        assert float((actual.double() - judged).abs().max()) <= tolerance * float(judged.abs().max())
    assert hidden.grad is not None and float(hidden.grad[gaps].double().abs().sum()) == 0


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("chunk", [1, 5, 36, 37, 256])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_loss_and_gradients_equal_those_of_full_logits(
    dtype: torch.dtype, tolerance: float, chunk: int, scale: float
) -> None:
    hidden, weight, targets = inputs(dtype)
    loss = chunked_loss(hidden, weight, targets, chunk)
    (loss * scale).backward()
    judge_hidden, judge_weight, _ = inputs(dtype)
    judge = F.cross_entropy(judge_hidden.matmul(judge_weight[:VOCABULARY].t()), targets, reduction="sum")
    (judge * scale).backward()
    assert float(loss.detach()) == pytest.approx(float(judge.detach()), rel=tolerance)
    for actual, expected in ((hidden.grad, judge_hidden.grad), (weight.grad, judge_weight.grad)):
        assert actual is not None and expected is not None
        assert float((actual - expected).abs().max()) <= tolerance * float(expected.abs().max())
    assert weight.grad is not None and float(weight.grad[VOCABULARY:].abs().sum()) == 0


def test_a_weight_with_a_main_grad_is_added_to_at_once_and_cannot_be_scaled_later() -> None:
    hidden, weight, targets = inputs(torch.float64)
    (judge_weight,) = torch.autograd.grad(chunked_loss(hidden, weight, targets, 8), [weight])
    sums = torch.ones_like(weight)
    attach_main_grad(weight, GradientSlot(sums, DeferredWeightGrads()))
    loss = chunked_loss(hidden, weight, targets, 8)
    assert torch.allclose(sums, judge_weight + 1.0, rtol=0, atol=1e-14)
    with pytest.raises(RuntimeError, match="gradient_scale"):
        (2.0 * loss).backward()
    chunked_loss(hidden, weight, targets, 8).backward()
    assert weight.grad is None and hidden.grad is not None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_content_of_padding_affects_neither_loss_nor_gradients(dtype: torch.dtype) -> None:
    losses_and_gradients = []
    for padding in (0.0, math.nan):
        hidden, weight, targets = inputs(dtype)
        weight.detach()[VOCABULARY:] = padding
        loss = chunked_loss(hidden, weight, targets, 8)
        loss.backward()
        losses_and_gradients.append((loss.detach(), hidden.grad, weight.grad))
    for with_zeros, with_nan in zip(*losses_and_gradients):
        assert with_zeros is not None and with_nan is not None and torch.equal(with_zeros, with_nan)


def test_a_weight_that_requires_no_gradient_gets_none() -> None:
    hidden, weight, targets = inputs(torch.float64)
    weight.requires_grad_(False)
    sums = torch.ones_like(weight)
    attach_main_grad(weight, GradientSlot(sums, DeferredWeightGrads()))
    chunked_loss(hidden, weight, targets, 8).backward()
    assert hidden.grad is not None and bool((sums == 1.0).all())


def test_large_logits_do_not_overflow() -> None:
    hidden, weight, targets = inputs(torch.float32)
    loss = chunked_loss(hidden.detach() * 1e4, weight, targets, 8)
    assert torch.isfinite(loss)


def test_without_gradients_only_the_loss_is_computed() -> None:
    hidden, weight, targets = inputs(torch.float64)
    with torch.no_grad():
        loss = chunked_loss(hidden, weight, targets, 8)
    assert not loss.requires_grad
    assert float(loss) == pytest.approx(float(chunked_loss(hidden, weight, targets, 8).detach()), rel=1e-15)


def test_a_second_backward_pass_is_refused() -> None:
    loss = chunked_loss(*inputs(torch.float64), 8)
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
    gradients = torch.autograd.grad(loss, (hidden, weight))
    for actual, expected in zip(gradients, torch.autograd.grad(judge, (hidden, weight))):
        assert float((actual - expected).abs().max()) <= 1e-12 * max(1.0, spread)


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
    chunked_loss(hidden, weight, targets, 8).backward()
    second_hidden, second_weight, _ = inputs(torch.float64)
    (second_hidden if frozen == "hidden" else second_weight).requires_grad_(False)
    chunked_loss(second_hidden, second_weight, targets, 8).backward()
    expected, actual = (weight, second_weight) if frozen == "hidden" else (hidden, second_hidden)
    assert expected.grad is not None and actual.grad is not None and torch.equal(expected.grad, actual.grad)


def test_inputs_are_left_as_they_were() -> None:
    hidden, weight, targets = inputs(torch.float32)
    originals = hidden.detach().clone(), weight.detach().clone(), targets.clone()
    chunked_loss(hidden, weight, targets, 8).backward()
    assert all(
        torch.equal(current.detach(), original) for current, original in zip((hidden, weight, targets), originals)
    )


def test_a_sum_over_many_tokens_does_not_round_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(20_000, 4, generator=generator)
    weight = torch.randn(50, 4, generator=generator)
    targets = torch.randint(0, 50, (20_000,), generator=generator)
    loss = vocab_parallel_cross_entropy(hidden, weight, targets, Communicator.alone(), 50)
    judge = F.cross_entropy(hidden.double().matmul(weight.double().t()), targets, reduction="sum")
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(float(judge), rel=2e-7)


@pytest.mark.parametrize("chunk", [5, 256])
@pytest.mark.parametrize("with_gradient", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_targets_with_the_largest_logit_are_counted(dtype: torch.dtype, with_gradient: bool, chunk: int) -> None:
    hidden, weight, targets = inputs(dtype)
    with torch.no_grad():
        logits = hidden.matmul(weight.t()).double()
        weight[VOCABULARY:] = 100.0 * weight[:1]  # padding, whose logits are the largest where they count
        targets[::2] = logits[:, :VOCABULARY].argmax(1)[::2]
    expected = int((logits[:, :VOCABULARY].argmax(1) == targets).sum())
    assert TOKENS // 2 <= expected < TOKENS
    correct = CorrectCount()
    arguments = (hidden, weight, targets, Communicator.alone(), VOCABULARY, chunk)
    with torch.set_grad_enabled(with_gradient):
        counted = vocab_parallel_cross_entropy(*arguments, options=LossOptions(correct=correct))
        assert torch.equal(counted, vocab_parallel_cross_entropy(*arguments))
    assert (correct.take(), correct.take()) == (expected, 0)


def test_of_equal_logits_the_first_counts() -> None:
    correct = CorrectCount()
    targets = torch.tensor([0, 1, 0, 2, 3])
    vocab_parallel_cross_entropy(
        torch.ones(5, 2), torch.ones(4, 2), targets, Communicator.alone(), 4, options=LossOptions(correct=correct)
    )
    assert correct.take() == 2
