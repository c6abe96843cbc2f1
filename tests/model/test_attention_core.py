"""Tests that attention by blocks equals its definition, for every shape of blocks and groups."""

from __future__ import annotations

from typing import Callable, Optional, Tuple

import pytest
import torch

from fugaku_gpt import ops
from fugaku_gpt.compat.kernel_choices import RANK_CONSENSUS
from fugaku_gpt.compat.probes import TRIALS
from fugaku_gpt.kernels import attention_tiling as blocks
from fugaku_gpt.model.attention import attend_naively
from fugaku_gpt.model.attention_core import DropoutMaskFn, _Workspace, attend

SHAPE = (2, 3, 19, 3, 4, 8)  # shards, samples, positions of each, query key value, heads, width of a head


def inputs(shape: Tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def result_and_gradient(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> Tuple[torch.Tensor, torch.Tensor]:
    leaf = x.clone().requires_grad_()
    y = function(leaf)
    y.backward(torch.linspace(-1.0, 2.0, y.numel(), dtype=torch.float64).sin().view(y.shape).to(y.dtype))
    assert leaf.grad is not None
    return y.detach(), leaf.grad


def flags(shape: Tuple[int, ...]) -> torch.Tensor:
    shards, b, positions, _, heads, _ = shape
    generator = torch.Generator().manual_seed(1)
    return torch.rand(b, heads, shards * positions, shards * positions, generator=generator) < 0.75


@pytest.fixture
def without_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute attention with PyTorch's operators, even if there are compiled kernels."""
    monkeypatch.setattr(RANK_CONSENSUS, "compiled", False)


@pytest.mark.usefixtures("without_compiled_kernels")
@pytest.mark.parametrize("keep", [True, False], ids=["flags kept", "flags made again"])
@pytest.mark.parametrize("drops", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize("scores", [1, 38 * 8 * 3, 38 * 8 * 4, 2**18], ids=["a head", "heads", "a sample", "all"])
@pytest.mark.parametrize("queries", [1, 8, 64])
def test_blocks_of_any_size_equal_the_definition(
    queries: int, scores: int, drops: bool, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(blocks._QUERIES_PER_BLOCK, False, queries)
    monkeypatch.setitem(blocks._SCORES_PER_THREAD, False, -(-scores // torch.get_num_threads()))
    mask_fn: Optional[DropoutMaskFn] = (lambda: flags(SHAPE)) if drops else None
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        tiled, naive = (
            result_and_gradient(lambda x, f=function: f(x, mask_fn, 0.25, keep), inputs(SHAPE, dtype))
            for function in (attend, attend_naively)
        )
        for ours, expected in zip(tiled, naive):
            assert ours.dtype == dtype and ours.shape == expected.shape
            assert float((ours - expected).abs().max()) <= tolerance * float(expected.abs().max())


def test_the_gradient_equals_finite_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(blocks._QUERIES_PER_BLOCK, False, 3)
    shape = (1, 2, 5, 3, 2, 3)
    x = inputs(shape, torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(attend, (x,))
    assert torch.autograd.gradcheck(lambda x: attend(x, lambda: flags(shape), 0.25), (x,))


@pytest.mark.skipif(not ops.has_native_kernels(), reason="no compiled kernels")
@pytest.mark.parametrize("keep", [True, False], ids=["flags kept", "flags made again"])
@pytest.mark.parametrize("drops", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_compiled_kernel_equals_the_definition(dtype: torch.dtype, drops: bool, keep: bool) -> None:
    made = []

    def mask_fn() -> torch.Tensor:
        made.append(None)
        return flags(SHAPE)

    x = inputs(SHAPE, dtype)
    assert ops.has_native_attention(x)
    compiled = result_and_gradient(lambda x: attend(x, mask_fn if drops else None, 0.25, keep), x)
    assert len(made) == (0 if not drops else 1 if keep else 2)
    expected = result_and_gradient(lambda x: attend_naively(x, mask_fn if drops else None, 0.25), x.float())
    for ours, judge in zip(compiled, expected):
        assert ours.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
        assert float((ours.float() - judge).abs().max()) <= tolerance * float(judge.abs().max())


@pytest.mark.usefixtures("without_compiled_kernels")
@pytest.mark.parametrize("forced", [False, True], ids=["as found", "in float32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 2, 50, 3, 2, 8), (2, 3, 25, 3, 4, 8)], ids=["", "in parts"])
@pytest.mark.parametrize("drops", [False, True], ids=["", "dropout"])
def test_attention_in_16_bits_equals_that_in_float32_but_for_rounding(
    drops: bool, shape: Tuple[int, ...], dtype: torch.dtype, forced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if forced:
        monkeypatch.setitem(RANK_CONSENSUS.in_float32, dtype, frozenset(TRIALS))
    monkeypatch.setitem(blocks._QUERIES_PER_BLOCK, True, 4)
    monkeypatch.setitem(blocks._SCORES_PER_THREAD, not forced, 50 * 8 * 6)  # some heads at once
    mask_fn: Optional[DropoutMaskFn] = (lambda: flags(shape)) if drops else None
    x = inputs(shape, dtype)
    tiled = result_and_gradient(lambda x: attend(x, mask_fn, 0.25), x)
    expected = result_and_gradient(lambda x: attend_naively(x, mask_fn, 0.25), x.float())
    for ours, judge in zip(tiled, expected):
        assert ours.dtype == dtype
        assert float((ours.float() - judge).abs().max()) <= 4 * torch.finfo(dtype).eps * float(judge.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("samples", "heads", "length"), [(64, 48, 16), (9, 12, 256), (3, 40, 2048), (1, 2, 8192)])
def test_scores_fit_into_the_cache_of_each_thread_or_are_a_single_block(
    samples: int, heads: int, length: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RANK_CONSENSUS.in_float32, torch.bfloat16, frozenset())
    narrow = dtype == torch.bfloat16
    qkv = torch.empty(1, 1, 1, 3, 1, 1, dtype=dtype).expand(1, samples, length, 3, heads, 8)
    for threads in (1, 5, 48):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        work = _Workspace(qkv, drops=True)
        block = max(high - low for low, high in work.query_tiles())
        products = [(s.stop - s.start) * (h.stop - h.start) for s, h in work.groups()]
        assert sum(products) == samples * heads
        assert max(products) * block * length <= max(blocks._SCORES_PER_THREAD[narrow] * threads, block * length)
        assert work._scores.numel() == 3 * max(products) * block * length


@pytest.mark.usefixtures("without_compiled_kernels")
def test_the_future_has_no_influence() -> None:
    x = inputs((1, 1, 200, 3, 2, 8), torch.float32)
    other = x.clone()
    other[:, :, 150:] = 9.0
    assert torch.equal(attend(x)[:, :, :150], attend(other)[:, :, :150])
