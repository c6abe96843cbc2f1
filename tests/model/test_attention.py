"""The attention kernels are one function."""

from __future__ import annotations

import math
from typing import Callable, List

import pytest
import torch

from fugaku_gpt import compat
from fugaku_gpt.comm import Communicator
from fugaku_gpt.config import load_run_config
from fugaku_gpt.layout.memory import FUSED_FROM_TOKENS
from fugaku_gpt.model.attention import (
    CausalSelfAttention,
    attend_batched,
    attend_fused,
    attend_naively,
)

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _batched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    s = q.shape[2]
    return attend_batched(q, k, v, torch.full((s, s), -math.inf, dtype=q.dtype).triu(1))


def _result_and_gradients(kernel: Kernel, dtype: torch.dtype) -> List[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (2, 3, 37, 8)
    inputs = [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for _ in range(3)]
    y = kernel(*inputs)
    y.backward(torch.randn(shape, generator=generator, dtype=dtype))
    return [y.detach(), *(x.grad for x in inputs if x.grad is not None)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("kernel", [_batched, attend_fused], ids=["batched", "fused"])
def test_each_kernel_equals_the_naive_one(kernel: Kernel, dtype: torch.dtype, tolerance: float) -> None:
    if kernel is attend_fused and compat.scaled_dot_product_attention is None:
        pytest.skip("this PyTorch has no fused attention")
    results = _result_and_gradients(kernel, dtype)
    assert len(results) == 4
    for ours, judge in zip(results, _result_and_gradients(attend_naively, dtype)):
        assert float((ours - judge).abs().max()) <= tolerance * float(judge.abs().max())


def test_the_future_has_no_influence() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 10, 4, generator=generator) for _ in range(3))
    k2, v2 = k.clone(), v.clone()
    k2[:, :, 6:], v2[:, :, 6:] = 9.0, -9.0
    assert torch.equal(_batched(q, k, v)[:, :, :6], _batched(q, k2, v2)[:, :, :6])


@pytest.mark.parametrize(
    ("seq_len", "dropout", "wants_fused"),
    [(FUSED_FROM_TOKENS, 0.0, True), (64, 0.0, False), (FUSED_FROM_TOKENS, 0.1, False)],
)
def test_the_kernel_is_chosen_by_probe_length_and_dropout(seq_len: int, dropout: float, wants_fused: bool) -> None:
    settings = [f"model.seq_len={seq_len}", f"model.attention_dropout={dropout}"]
    model = load_run_config(preset="tiny", overrides=settings).model
    layer = CausalSelfAttention(model, Communicator.alone(), torch.float32, seed=1, site=1)
    has_mask = "future" in dict(layer.named_buffers())
    assert has_mask == (not (wants_fused and compat.scaled_dot_product_attention is not None))


def test_sequences_shorter_than_the_model_takes_are_the_beginning_of_longer_ones() -> None:
    model = load_run_config(preset="tiny").model
    layer = CausalSelfAttention(model, Communicator.alone(), torch.float64, seed=1, site=1)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x = torch.randn(1, model.seq_len, model.hidden, dtype=torch.float64)
    whole, part = layer(x, 0), layer(x[:, :50], 0)
    assert float((whole[:, :50] - part).detach().abs().max()) <= 1e-12
