"""Tests that attention by blocks equals its definition, for every shape of blocks and groups."""

from __future__ import annotations

from typing import Callable, Optional, Tuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fugaku_gpt import ops
from fugaku_gpt.compat.kernel_choices import RANK_CONSENSUS
from fugaku_gpt.compat.probes import TRIALS
from fugaku_gpt.kernels import attention_tiling as blocks
from fugaku_gpt.model.attention import attend_naively
from fugaku_gpt.model.attention_core import DropoutMaskFn, _Workspace, attend
from tests.ops.inputs import key_ranges

SHAPE, HEADS = (2, 3, 19, 12, 8), 4  # shards, samples, positions of each, heads of queries, keys, values, their width


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
    shards, b, positions, slots, _ = shape
    generator = torch.Generator().manual_seed(1)
    return torch.rand(b, slots // 3, shards * positions, shards * positions, generator=generator) < 0.75


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
            result_and_gradient(lambda x, f=function: f(x, HEADS, mask_fn, 0.25, keep), inputs(SHAPE, dtype))
            for function in (attend, attend_naively)
        )
        for ours, expected in zip(tiled, naive):
            assert ours.dtype == dtype and ours.shape == expected.shape
            assert float((ours - expected).abs().max()) <= tolerance * float(expected.abs().max())


def test_the_gradient_equals_finite_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(blocks._QUERIES_PER_BLOCK, False, 3)
    shape = (1, 2, 5, 6, 3)
    x = inputs(shape, torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: attend(x, 2), (x,))
    assert torch.autograd.gradcheck(lambda x: attend(x, 2, lambda: flags(shape), 0.25), (x,))
    padded = ops.KeyRanges.bidirectional([3, 5], 5)
    assert torch.autograd.gradcheck(lambda x: attend(x, 4, ranges=padded), (x,))


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
    assert ops.has_native_attention(x, HEADS)
    compiled = result_and_gradient(lambda x: attend(x, HEADS, mask_fn if drops else None, 0.25, keep), x)
    assert len(made) == (0 if not drops else 1 if keep else 2)
    expected = result_and_gradient(lambda x: attend_naively(x, HEADS, mask_fn if drops else None, 0.25), x.float())
    for ours, judge in zip(compiled, expected):
        assert ours.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
        assert float((ours.float() - judge).abs().max()) <= tolerance * float(judge.abs().max())


@pytest.mark.usefixtures("without_compiled_kernels")
@pytest.mark.parametrize("forced", [False, True], ids=["as found", "in float32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 2, 50, 6, 8), (2, 3, 25, 12, 8)], ids=["", "in parts"])
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
    tiled = result_and_gradient(lambda x: attend(x, shape[3] // 3, mask_fn, 0.25), x)
    expected = result_and_gradient(lambda x: attend_naively(x, shape[3] // 3, mask_fn, 0.25), x.float())
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
    packed, group = (
        torch.empty(1, 1, 1, 1, 1, dtype=dtype).expand(1, samples, length, 3 * heads, 8),
        (slice(1), slice(1)),
    )
    for threads in (1, 5, 48):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        work = _Workspace(packed, heads, ops.KeyRanges.causal(length), drops=True)
        block = max(tile.high - tile.low for tile in work.tiles(group))
        products = [(s.stop - s.start) * (h.stop - h.start) for s, h in work.groups()]
        assert sum(products) == samples * heads
        assert max(products) * block * length <= max(blocks._SCORES_PER_THREAD[narrow] * threads, block * length)
        assert work._scores.numel() == 3 * max(products) * block * length


@pytest.mark.usefixtures("without_compiled_kernels")
def test_the_future_has_no_influence() -> None:
    x = inputs((1, 1, 200, 6, 8), torch.float32)
    other = x.clone()
    other[:, :, 150:] = 9.0
    assert torch.equal(attend(x, 2)[:, :, :150], attend(other, 2)[:, :, :150])


TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4 * 2.0**-8}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@settings(max_examples=15)
@given(data=st.data())
def test_shared_keys_in_any_ranges_equal_the_definition(
    dtype: torch.dtype, compiled: bool, data: st.DataObject
) -> None:
    choose = data.draw
    shards, b, kv_heads = (choose(st.integers(1, 3)) for _ in range(3))
    tokens, d = choose(st.sampled_from([1, 2, 31, 65, 97])), choose(st.sampled_from([1, 8, 20]))
    heads, s = kv_heads * choose(st.integers(1, 3)), shards * tokens
    ranges = choose(key_ranges(b, s))
    shape = (shards, b, tokens, heads + 2 * kv_heads, d)
    keep_flags = None
    if choose(st.booleans()):
        drawn = torch.rand(b, heads, s, s, generator=torch.Generator().manual_seed(1)) < 0.75
        keep_flags = lambda: drawn  # noqa: E731
    x = inputs(shape, dtype)
    before = RANK_CONSENSUS.compiled
    RANK_CONSENSUS.compiled = None if compiled else False
    try:
        results = result_and_gradient(lambda x: attend(x, heads, keep_flags, 0.25, True, ranges), x)
    finally:
        RANK_CONSENSUS.compiled = before
    expected = result_and_gradient(lambda x: attend_naively(x, heads, keep_flags, 0.25, True, ranges), x.double())
    for ours, judge in zip(results, expected):
        assert ours.dtype == dtype and bool(torch.isfinite(ours.float()).all())
        assert float((ours.double() - judge).abs().max()) <= TOLERANCES[dtype] * max(1e-3, float(judge.abs().max()))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_documents_do_not_see_each_other_and_padding_sees_and_changes_nothing(
    dtype: torch.dtype, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RANK_CONSENSUS, "compiled", None if compiled else False)
    x = inputs((1, 2, 150, 8, 8), dtype)
    separate = ops.KeyRanges.documents([[0, 70, 71], [0]], 150)
    y, grad = result_and_gradient(lambda x: attend(x, 4, ranges=separate), x)
    for begin, end in ((0, 70), (70, 71), (71, 150)):
        alone = attend(x[:, :1, begin:end].contiguous(), 4)
        tolerance = 1e-6 if dtype == torch.float32 else 2.0**-7
        difference = (y[:, :1, begin:end] - alone).float().abs()
        assert float(difference.max()) <= tolerance * float(alone.float().abs().max())
    assert float(grad[0, 0, 70, 4:6].float().abs().max()) <= 8 * tolerance  # the only key that its query sees
    padded = ops.KeyRanges.bidirectional([100, 0], 150)
    changed = x.clone()
    changed[:, 0, 100:], changed[:, 1] = 9.0, -9.0
    results = [result_and_gradient(lambda x: attend(x, 4, ranges=padded), inputs) for inputs in (x, changed)]
    for ours, other in zip(*results):
        assert torch.equal(ours[:, 0, :100], other[:, 0, :100])
        assert not bool((ours[:, 0, 100:] != 0).any()) and not bool((ours[:, 1] != 0).any())


def test_ranges_of_other_samples_are_refused() -> None:
    x = inputs((1, 3, 10, 6, 4), torch.float32)
    for ranges in (ops.KeyRanges.causal(9), ops.KeyRanges.bidirectional([10, 10], 10)):
        with pytest.raises(ValueError, match="not those of 3 samples of 10 tokens"):
            attend(x, 2, ranges=ranges)
