"""Tests that operations for which 16 bits are too few are computed in float32."""

from __future__ import annotations

from typing import Any, Dict, List

import pytest
import torch
import torch.nn.functional as F

from fugaku_gpt import ops
from fugaku_gpt.compat.kernel_choices import RANK_CONSENSUS
from fugaku_gpt.compat.probes import TRIALS, builtin_gelu_tanh
from fugaku_gpt.ops import activation
from tests.ops.inputs import SIXTEEN_BITS, random

OPERATIONS: Dict[str, Any] = {
    "linear": (ops.linear, F.linear, [random(5, 7, 16), random(12, 16), random(12)]),
    "matmul": (ops.matmul, torch.matmul, [random(5, 7, 16), random(16, 12)]),
    "layer_norm": (
        lambda *x: ops.layer_norm(*x, eps=1e-5),
        lambda x, weight, bias: F.layer_norm(x, (16,), weight, bias),
        [random(2000, 16), random(16), random(16)],
    ),
    "gelu": (ops.gelu, F.gelu, [random(9, 16)]),
    "gelu_tanh": (ops.gelu_tanh, builtin_gelu_tanh, [random(9, 16)]),
}


@pytest.mark.parametrize("forced", [False, True], ids=["as probed", "in float32"])
@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_operations_in_16_bits_are_those_in_float32_rounded(
    name: str, dtype: torch.dtype, forced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if forced:
        monkeypatch.setitem(RANK_CONSENSUS.in_float32, dtype, frozenset(TRIALS))
    ours, judge, inputs = OPERATIONS[name]
    results: List[List[torch.Tensor]] = []
    for function, kind in ((ours, dtype), (judge, torch.float32)):
        leaves = [x.to(dtype).to(kind).requires_grad_() for x in inputs]
        y = function(*leaves)
        assert y.dtype == kind
        y.backward((1.0 + 0.5 * random(*y.shape)).to(dtype).to(kind))
        results.append([y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    assert len(results[0]) == len(results[1]) == 1 + len(inputs)
    for actual, expected in zip(*results):
        assert actual.dtype == dtype
        scale = float(expected.abs().max())
        assert float((actual.float() - expected).abs().max()) <= 4 * torch.finfo(dtype).eps * scale


@pytest.mark.parametrize("dtype", [*SIXTEEN_BITS, torch.float32, torch.float64], ids=str)
def test_sums_over_tokens_are_not_rounded_and_do_not_overflow_in_16_bits(dtype: torch.dtype) -> None:
    sums = ops.sum_of_rows(torch.full((300, 2), 256.0).to(dtype))
    assert sums.dtype == (torch.float32 if dtype in SIXTEEN_BITS else dtype)
    assert sums.tolist() == [76800.0] * 2  # more than float16 can hold


def test_wide_types_are_computed_by_pytorch_s_own_operations_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "uses_gelu_by_erf", lambda: False)
    ops.choose_native_kernels(False)
    for ours, judge, inputs in OPERATIONS.values():
        for dtype in (torch.float32, torch.float64):
            wide = [x.to(dtype) for x in inputs]
            assert torch.equal(ours(*wide), judge(*wide))
