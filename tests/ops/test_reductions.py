"""Tests of sums of squares by each method that a build may have."""

from __future__ import annotations

from typing import Optional

import pytest
import torch

from fugaku_gpt import ops
from fugaku_gpt.compat.kernel_choices import RANK_CONSENSUS
from fugaku_gpt.ops import reductions

METHODS = pytest.mark.parametrize("by_norms", [True, False, None], ids=["norms of rows", "dot products", "compiled"])


def _have(monkeypatch: pytest.MonkeyPatch, by_norms: Optional[bool]) -> None:
    if by_norms is None:
        if not ops.has_native_kernels():
            pytest.skip("no compiled kernels")
        return
    if by_norms and not hasattr(getattr(torch, "linalg", None), "vector_norm"):
        pytest.skip("this build has no norms of rows")
    monkeypatch.setattr(RANK_CONSENSUS, "compiled", False)
    monkeypatch.setattr(reductions, "_norms_add_in_lanes", lambda: by_norms)


@METHODS
@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 65536, 200_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_number_counts_once(
    by_norms: Optional[bool], count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    _have(monkeypatch, by_norms)
    x = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)
    judge = float((x.double() ** 2).sum())
    assert ops.sum_of_squares(x) == pytest.approx(judge, rel=1e-6)


@METHODS
@pytest.mark.parametrize("position", [0, 1023, 1024, 9999])
@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_a_number_that_is_not_finite_is_not_lost(
    by_norms: Optional[bool], position: int, bad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _have(monkeypatch, by_norms)
    x = torch.ones(10_000)
    x[position] = float(bad)
    assert not torch.isfinite(torch.tensor(ops.sum_of_squares(x)))


def test_the_method_of_this_build_is_precise_where_every_addition_rounds_alike() -> None:
    x = torch.full((2**20,), 0.1)
    # by dot products of 65536 numbers 2e-5 in the lanes of AVX2 and 7e-5 in four, by norms of rows 1e-6
    assert ops.sum_of_squares(x) == pytest.approx(2**20 * float(x[0]) ** 2, rel=1e-4)


@pytest.mark.skipif(not hasattr(getattr(torch, "linalg", None), "vector_norm"), reason="this build has no such norms")
@pytest.mark.parametrize("lanes", [1, 4, 8, 16])
def test_a_kernel_that_adds_sequentially_is_distinguished_from_a_kernel_that_adds_in_lanes(
    lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def norm(x: torch.Tensor, dim: int) -> torch.Tensor:
        assert dim == 1 and len(x) == 1
        total = torch.zeros(lanes)
        for numbers in (x.view(-1, lanes) ** 2).unbind(0):
            total += numbers
        return total.sum().sqrt()

    monkeypatch.setattr(torch.linalg, "vector_norm", norm)
    assert reductions._norms_add_in_lanes.__wrapped__() is (lanes > 1)
