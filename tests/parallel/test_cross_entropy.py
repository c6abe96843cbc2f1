"""The chunked loss that never has the logits whole, against full logits."""

from __future__ import annotations

from typing import Tuple

import pytest
import torch
import torch.nn.functional as F

from fugaku_gpt.comm import Communicator
from fugaku_gpt.parallel.cross_entropy import vocab_parallel_cross_entropy

VOCABULARY, PADDED, HIDDEN, TOKENS = 50, 64, 12, 37


def inputs(dtype: torch.dtype) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(PADDED, HIDDEN, generator=generator, dtype=dtype).requires_grad_()
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
