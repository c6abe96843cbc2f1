"""Tests of the global batch and its ramp, of sequence lengths, and of skipped samples."""

from __future__ import annotations

from typing import List

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fugaku_gpt.config import load_run_config
from fugaku_gpt.errors import ConfigError
from fugaku_gpt.layout.batch import SkippedSamples, batch_sizes, first_sample, global_batch, sequence_length

RAMP = ("training.global_batch=32", "training.ramp_start=8", "training.ramp_increment=8", "training.ramp_samples=300")


def test_the_global_batch_grows_in_equal_shares_of_the_samples() -> None:
    config = load_run_config(overrides=RAMP)
    sizes = [global_batch(config, consumed) for consumed in range(400)]
    assert sizes == [8] * 100 + [16] * 100 + [24] * 100 + [32] * 100


def test_without_a_ramp_every_iteration_has_the_full_size() -> None:
    config = load_run_config(overrides=("training.global_batch=32",))
    assert {global_batch(config, consumed) for consumed in (0, 1, 10**12)} == {32}
    assert {sequence_length(config, iteration) for iteration in (0, 1, 10**12)} == {config.model.seq_len}


def test_samples_grow_with_the_iterations() -> None:
    config = load_run_config(
        overrides=(
            "model.seq_len=64",
            "training.seq_ramp_start=16",
            "training.seq_ramp_increment=24",
            "training.seq_ramp_iterations=10",
        )
    )
    assert [sequence_length(config, iteration) for iteration in range(12)] == [16] * 5 + [40] * 5 + [64] * 2


@given(start=st.integers(1, 9), increment=st.integers(1, 9), steps=st.integers(0, 9), samples=st.integers(1, 200))
def test_a_ramp_matches_megatron(start: int, increment: int, steps: int, samples: int) -> None:
    full = start + increment * steps
    config = load_run_config(
        overrides=(
            f"training.global_batch={full}",
            f"training.ramp_start={start}",
            f"training.ramp_increment={increment}",
            f"training.ramp_samples={samples}",
        )
    )
    for consumed in range(0, 220, 7):
        # num_microbatches_calculator.py: int(consumed / (samples / steps)), up to and with the ramp's end
        expected = full if consumed >= samples else start + increment * (consumed * steps // samples)
        assert global_batch(config, consumed) == expected


LENGTHS = ("training.seq_ramp_start=32", "training.seq_ramp_increment=32", "training.seq_ramp_iterations=30")


@pytest.mark.parametrize(
    "overrides, sizes",
    [
        ((), [(32, 128)]),
        (RAMP, [(8, 128), (16, 128), (24, 128), (32, 128)]),
        (LENGTHS, [(32, 32), (32, 64), (32, 96), (32, 128)]),
        # 13 iterations of 8, 6 of 16 (the first of them the 14th), 5 of 24; lengths change after 10, 20 and 30
        ((*RAMP, *LENGTHS), [(8, 32), (8, 64), (16, 64), (24, 64), (24, 96), (32, 96), (32, 128)]),
        ((*RAMP, "training.iterations=14"), [(8, 128), (16, 128), (32, 128)]),  # the last only validates
        ((*RAMP, "training.skip_samples=[8-210]"), [(8, 128), (24, 128), (32, 128)]),
    ],
)
def test_batch_sizes_lists_each_size_of_a_run_once(overrides: List[str], sizes: "List[tuple[int, int]]") -> None:
    config = load_run_config(overrides=("training.global_batch=32", *overrides))
    assert config.model.seq_len == 128 and batch_sizes(config) == sizes


@pytest.mark.parametrize(
    "overrides, message",
    [
        (("training.ramp_start=6",), r"ramp_start: 6: must be a multiple of .* = 4, at most .* 32; valid: 4, 8"),
        (("training.ramp_start=40",), r"ramp_start: 40: must be a multiple of .* = 4, at most .* 32; valid: 32"),
        (("training.ramp_increment=6",), r"ramp_increment: 6: must be .* 32 - 8 = 24; valid: 4, 8, 12, 24"),
        (("training.ramp_increment=16",), r"ramp_increment: 16: must be .* 32 - 8 = 24; valid: 4, 8, 12, 24"),
        (("training.ramp_samples=null",), r"ramp_samples: null: is needed with training.ramp_start; valid: all of"),
    ],
)
def test_a_ramp_that_does_not_divide_is_refused_with_valid_values(overrides: List[str], message: str) -> None:
    layout = ("layout.dp=2", "training.micro_batch=2")
    load_run_config(overrides=(*RAMP, *layout))
    with pytest.raises(ConfigError, match=message):
        load_run_config(overrides=(*RAMP, *layout, *overrides))


def test_short_samples_must_divide_over_the_ranks_of_sequence_parallelism() -> None:
    ramp = ("training.seq_ramp_start=31", "training.seq_ramp_increment=97", "training.seq_ramp_iterations=10")
    load_run_config(overrides=ramp)
    with pytest.raises(ConfigError, match=r"seq_ramp_start: 31: .* layout.tp 2 .*; valid: 30, 32"):
        load_run_config(overrides=(*ramp, "layout.tp=2", "layout.sequence_parallel=true"))


@pytest.mark.parametrize("text", ["9-3", "a", "1-", "-2", "1-2-3"])
def test_an_invalid_range_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="skip_samples"):
        load_run_config(overrides=(f"training.skip_samples=[{text}]",))


ranges = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=6)


@pytest.mark.slow
@given(ranges)
def test_skipped_samples_are_those_in_the_ranges(pairs: "List[tuple[int, int]]") -> None:
    skipped = SkippedSamples([f"{first}-{first + more}" if more else str(first) for first, more in pairs])
    skipped_numbers = {number for first, more in pairs for number in range(first, first + more + 1)}
    remaining = [number for number in range(100) if number not in skipped_numbers]
    assert [skipped.number(used) for used in range(len(remaining))] == remaining
    for consumed in range(100):
        assert skipped.count_used(consumed) == sum(number < consumed for number in remaining)


def test_replicas_read_consecutive_micro_batches_of_samples() -> None:
    config = load_run_config(overrides=["layout.dp=4", "training.micro_batch=3", "training.global_batch=24"])
    firsts = [first_sample(config, 100, micro_batch, dp_rank) for micro_batch in range(2) for dp_rank in range(4)]
    assert firsts == [100, 103, 106, 109, 112, 115, 118, 121]
