"""Tests that ranks write each element to a checkpoint once, and that local regions match the flat tensors."""

from __future__ import annotations

from typing import Dict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fugaku_gpt.config import RunConfig
from fugaku_gpt.layout.flat import flat_layout_of
from fugaku_gpt.layout.grid import ORDERS, coordinates_of
from fugaku_gpt.layout.shards import local_regions, logical_shapes, regions_to_write
from tests.support.tiny import tiny_config


@st.composite
def configs(draw: st.DrawFn) -> RunConfig:
    """Draws runs of every layout feature; the last bucket is short, and the vocabulary ends within a rank's slice."""
    dp, tp, pp = (draw(st.sampled_from(sizes)) for sizes in ([1, 2, 3], [1, 2, 4], [1, 2, 4]))
    chunks = draw(st.sampled_from([1, 2])) if pp == 2 else 1
    return tiny_config(
        "model.layers=4",
        f"model.kv_heads={draw(st.sampled_from([1, 2, 4]))}",
        f"model.vocab_size={draw(st.sampled_from([250, 256]))}",
        f"layout.dp={dp}",
        f"layout.tp={tp}",
        f"layout.pp={pp}",
        f"layout.order={draw(st.sampled_from(ORDERS))}",
        f"layout.chunks={chunks}",
        f"layout.schedule={'interleaved' if chunks > 1 else '1f1b'}",
        f"layout.zero={draw(st.sampled_from([0, 1]))}",
        f"layout.hierarchical_sum={draw(st.sampled_from(['true', 'false']))}",
        f"training.dtype={draw(st.sampled_from(['float32', 'float64', 'bfloat16']))}",
        f"training.bucket_mib={draw(st.sampled_from([0.003, 0.01, 1]))}",
        "training.global_batch=24",
    )


def counts(config: RunConfig) -> "Dict[str, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]":
    return {name: np.zeros(shape, dtype=np.int64) for name, shape in logical_shapes(config.model).items()}


def cut(start: "tuple[int, ...]", shape: "tuple[int, ...]") -> "tuple[slice, ...]":
    return tuple(slice(first, first + size) for first, size in zip(start, shape))


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(configs())
def test_each_element_of_the_model_is_written_once(config: RunConfig) -> None:
    write_counts = counts(config)
    layout = config.layout
    for rank in range(layout.ranks):
        coordinates = coordinates_of(rank, layout, layout.order)
        for part in regions_to_write(config, coordinates, coordinates.dp):
            write_counts[part.name][cut(part.region.start, part.region.shape)] += 1
    assert all((count == 1).all() for count in write_counts.values())


@pytest.mark.slow
@settings(deadline=None, max_examples=20)
@given(configs(), st.data())
def test_local_regions_make_up_the_flat_tensors_of_a_rank(config: RunConfig, data: st.DataObject) -> None:
    layout = config.layout
    coordinates = coordinates_of(data.draw(st.integers(0, layout.ranks - 1)), layout, layout.order)
    flat_layout = flat_layout_of(config, coordinates.pp)
    numbers = {
        name: np.arange(count.size).reshape(count.shape) for name, count in counts(config).items()
    }  # each element of each tensor by its number
    flat = np.full(flat_layout.elements, -1, dtype=np.int64)
    cuts = sorted({0, flat_layout.elements, *data.draw(st.lists(st.integers(0, flat_layout.elements), max_size=4))})
    for first, stop in zip(cuts, cuts[1:]):
        for part in local_regions(flat_layout, layout.tp, coordinates.tp, first, stop):
            assert first <= part.first and part.stop <= stop and (flat[part.first : part.stop] == -1).all()
            flat[part.first : part.stop] = numbers[part.name][cut(part.region.start, part.region.shape)].reshape(-1)
    for placed in flat_layout.placed:
        spec = placed.spec
        local = flat[placed.start : placed.start + placed.size].reshape(spec.local_shape(layout.tp))
        padded = np.full(spec.shape, -1, dtype=np.int64)
        padded[tuple(slice(0, size) for size in numbers[spec.name].shape)] = numbers[spec.name]
        assert np.array_equal(local, padded[spec.slice_of(coordinates.tp, layout.tp)]), spec.name


@pytest.mark.parametrize("zero", [0, 1])
def test_replicas_share_the_writing(zero: int) -> None:
    config = tiny_config("layout.dp=4", f"layout.zero={zero}", "training.bucket_mib=1")
    sizes = []
    for rank in range(4):
        coordinates = coordinates_of(rank, config.layout, config.layout.order)
        sizes.append(sum(part.region.size for part in regions_to_write(config, coordinates, coordinates.dp)))
    assert sum(sizes) == sum(count.size for count in counts(config).values())
    assert max(sizes) <= 1.1 * sum(sizes) / 4


def test_a_replica_writes_the_ranges_that_it_owns() -> None:
    """With ZeRO a part of every bucket, which it has up to date; without, one stretch."""
    for zero in (0, 1):
        config = tiny_config("layout.dp=2", f"layout.zero={zero}")
        layout = flat_layout_of(config, 0)
        for rank in range(2):
            regions = regions_to_write(config, coordinates_of(rank, config.layout, config.layout.order), rank)
            if zero:
                owned = [shard.parameters for shard in layout.owned(rank, 2)]
                assert len(owned) > 2
            else:
                owned = [slice(layout.elements * rank // 2, layout.elements * (rank + 1) // 2)]
            assert all(any(own.start <= part.first and part.stop <= own.stop for own in owned) for part in regions)
