"""Tests of rotary positions and of the order of heads that attention reads."""

from __future__ import annotations

import math
from typing import List, Tuple

import pytest
import torch

from fugaku_gpt import ops
from fugaku_gpt.config import ModelConfig
from fugaku_gpt.model.attention import pack_naively
from fugaku_gpt.ops.rotary import rotation
from tests.ops.inputs import SIXTEEN_BITS, random

ROPE = ModelConfig(hidden=48, heads=6, seq_len=20, positions="rope")


def heads_of(dtype: torch.dtype, kv_heads: int, shards: int) -> Tuple[torch.Tensor, ...]:
    """Queries, keys and values: keys and values are views of one tensor, as a product makes them."""
    q = random(shards, 2, 10, 6, 8).to(dtype).requires_grad_()
    kv = random(shards, 2, 10, 2, kv_heads, 8).to(dtype).requires_grad_()
    return (q, *kv.unbind(3), kv)


@pytest.mark.parametrize("has_rotary", [False, True])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_heads_are_packed_as_by_the_definition(kv_heads: int, shards: int, has_rotary: bool) -> None:
    rotary = rotation(ROPE, shards, 10, torch.float64) if has_rotary else None
    weights = random(shards, 2, 10, 6 + 2 * kv_heads, 8, 1)[..., 0].double()
    results: List[List[torch.Tensor]] = []
    for pack in (ops.pack_heads, pack_naively):
        q, k, v, kv = heads_of(torch.float64, kv_heads, shards)
        packed = pack(q, k, v, rotary)
        (packed * weights).sum().backward()
        results.append([packed.detach(), q.grad, kv.grad])  # type: ignore[list-item]
    for ours, expected in zip(*results):
        assert ours.shape == expected.shape and float((ours - expected).abs().max()) <= 1e-14


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_sixteen_bits_are_rounded_once(dtype: torch.dtype) -> None:
    wide = [x.detach() for x in heads_of(dtype, 2, 1)[:3]]
    expected = ops.pack_heads(*(x.double() for x in wide), rotation(ROPE, 1, 10, torch.float64))
    packed = ops.pack_heads(*wide, rotation(ROPE, 1, 10, dtype))
    assert packed.dtype == dtype
    assert float(((packed.double() - expected).abs() - torch.finfo(dtype).eps * expected.abs()).max()) <= 1e-6


def test_a_rotation_depends_on_the_distance_alone() -> None:
    """So do products of queries and keys, which are all that attention sees of positions."""
    cosines, sines = rotation(ROPE, 1, 20, torch.float64)
    q, k = (random(1, 1, 1, 1, 8, *(1,) * extra).double().view(1, 1, 1, 1, 8) for extra in (0, 1))
    rotated = [
        pack_naively(x.expand(1, 1, 20, 1, 8), x.expand(1, 1, 20, 1, 8), x.expand(1, 1, 20, 1, 8), (cosines, sines))
        for x in (q, k)
    ]
    scores = rotated[0][0, 0, :, 0] @ rotated[1][0, 0, :, 1].t()
    for distance in range(10):
        diagonal = scores.diagonal(-distance)
        assert float((diagonal - diagonal[0]).abs().max()) <= 1e-13
    assert float((scores.diagonal(-1)[0] - scores.diagonal(-2)[0]).abs()) > 1e-3


def test_positions_run_over_shards_first() -> None:
    for single, sharded in zip(rotation(ROPE, 1, 20, torch.float64), rotation(ROPE, 4, 5, torch.float64)):
        assert torch.equal(single.reshape(-1), sharded.reshape(-1))


def angles(model: ModelConfig) -> torch.Tensor:
    """The angle of each pair of coordinates from a position to the next."""
    cosines, sines = rotation(model, 1, 2, torch.float64)
    return torch.atan2(sines, cosines)[0, 0, 1, 0]


def test_angles_are_powers_of_the_base() -> None:
    expected = [10000.0 ** (-2 * pair / 8) for pair in range(4)]
    assert angles(ROPE).tolist() == pytest.approx(expected, rel=1e-12)
    stretched = ModelConfig(hidden=48, heads=6, positions="rope", rope_scaling="linear", rope_factor=4.0)
    assert (4 * angles(stretched)).tolist() == pytest.approx(expected, rel=1e-12)


def test_llama3_stretches_long_wavelengths_alone() -> None:
    model = ModelConfig(
        hidden=128, heads=1, positions="rope", rope_theta=500000.0, rope_scaling="llama3", rope_factor=8.0,
        rope_original_seq_len=8192,
    )  # fmt: skip
    plain = ModelConfig(hidden=128, heads=1, positions="rope", rope_theta=500000.0)
    kinds = []
    for before, after in zip(angles(plain).tolist(), angles(model).tolist()):
        wavelength = 2 * math.pi / before
        if wavelength < 8192 / 4:
            kinds.append("short")
            assert after == pytest.approx(before, rel=1e-12)
        elif wavelength > 8192:
            kinds.append("long")
            assert after == pytest.approx(before / 8, rel=1e-12)
        else:
            kinds.append("between")
            smooth = (8192 / wavelength - 1) / (4 - 1)
            assert after == pytest.approx((1 - smooth) * before / 8 + smooth * before, rel=1e-12)
    assert set(kinds) == {"short", "between", "long"} and kinds == sorted(kinds, key=["short", "between", "long"].index)
