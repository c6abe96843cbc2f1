"""Tests of formulas for attention that need no PyTorch, against the code that computes it."""

from __future__ import annotations

import pytest
import torch

from fugaku_gpt import ops
from fugaku_gpt.compat.kernel_choices import RANK_CONSENSUS
from fugaku_gpt.config import load_run_config
from fugaku_gpt.kernels.attention_tiling import enough_heads_for_threads, head_slots, native_workspace_floats
from fugaku_gpt.layout.native_kernels import may_use_native_kernels
from tests.kernels.loaded import loaded_library


@pytest.mark.parametrize(
    ("length", "width"), [(1, 1), (24, 8), (25, 32), (100, 64), (1024, 64), (2048, 128), (4096, 96)]
)
def test_the_workspace_formula_is_that_of_the_compiled_kernels_or_slightly_more(length: int, width: int) -> None:
    library = loaded_library()
    formula, requested = native_workspace_floats(length, width), library.attention_workspace_floats(length, width)
    assert requested <= formula
    if width % 32 == 0:  # a multiple of whatever tile this processor has
        assert formula == requested


@pytest.mark.parametrize(
    ("samples", "heads", "threads", "is_separate"),
    [(1, 1, 1, True), (1, 12, 1, True), (1, 6, 12, True), (1, 5, 12, False), (1, 12, 12, True), (2, 8, 12, True),
     (1, 13, 12, True), (1, 12, 48, False), (2, 12, 48, True), (4, 12, 48, True), (1, 49, 48, True)],
)  # fmt: skip
def test_heads_are_computed_separately_where_there_are_half_as_many_as_threads(
    samples: int, heads: int, threads: int, is_separate: bool
) -> None:
    assert enough_heads_for_threads(samples, heads, threads) == is_separate
    rounds = head_slots(samples, heads, threads) / threads
    assert rounds == int(rounds) and rounds - 1 < samples * heads / threads <= rounds


@pytest.mark.skipif(not ops.has_native_kernels(), reason="no kernels are compiled here")
@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_attention_is_compiled_where_it_may_be(dtype: str, used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RANK_CONSENSUS, "compiled", used)
    overrides = [f"training.dtype={dtype}", f"node.compiled_kernels={used}"]
    qkv = torch.empty(1, torch.get_num_threads(), 2, 3, 4, dtype=getattr(torch, dtype))
    assert ops.has_native_attention(qkv, 1) == may_use_native_kernels(load_run_config(overrides=overrides))
