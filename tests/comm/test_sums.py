"""Tests of the sums of 16-bit types that MPI calls, by PyTorch and by NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fugaku_gpt.comm import sums
from fugaku_gpt.comm.sums import array_of, operation_for


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("can_view", [True, False])
def test_the_body_of_the_sum_adds_and_rounds_as_pytorch_does(
    dtype: torch.dtype, can_view: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if can_view and not sums._can_view():
        pytest.skip("this PyTorch cannot look at memory as another type")
    monkeypatch.setattr(sums, "_can_view", lambda: can_view)
    generator = torch.Generator().manual_seed(3)
    special = torch.tensor([0.0, -0.0, 1.0, 256.0, float("inf"), -float("inf"), float("nan"), 6e4, 3e38, 1e-39, 1e-41])
    x = torch.cat([torch.randn(5000, generator=generator) * 100, special]).to(dtype)
    y = torch.cat([torch.randn(5000, generator=generator), special.flip(0)]).to(dtype)
    expected = x + y
    sums._adder(dtype)(array_of(x), array_of(y), None)  # type: ignore[arg-type]
    same = (y == expected) | (torch.isnan(y.float()) & torch.isnan(expected.float()))
    assert bool(same.all())


def test_an_array_shares_the_tensor_s_memory_and_keeps_it_alive() -> None:
    flat = torch.zeros(6, dtype=torch.bfloat16)
    array = array_of(flat)
    array[2] = 0x3F80
    assert array.dtype == np.int16 and flat.tolist() == [0, 0, 1, 0, 0, 0]
    again = array_of(torch.ones(1000, dtype=torch.float16))  # nothing else refers to that tensor
    later_tensors = [torch.zeros(1000, dtype=torch.float16) for _ in range(50)]
    assert len(later_tensors) == 50 and bool((again == 0x3C00).all())
    assert array_of(torch.arange(3)).tolist() == [0, 1, 2]


def test_16_bit_types_can_only_be_summed() -> None:
    assert operation_for("max", torch.float32) != operation_for("sum", torch.float32)
    with pytest.raises(ValueError, match="only be summed"):
        operation_for("max", torch.bfloat16)
