"""Tests of parameter and operation counts against published numbers and counts by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fugaku_gpt.config import ModelConfig, load_run_config, preset_names
from fugaku_gpt.formulas.flops import (
    EXACT_DECODER_FORMULA,
    EXACT_FORMULA,
    NOTES_FORMULA,
    aggregate_petaflops,
    exact_flops,
    exact_formula,
    notes_flops,
    notes_formula,
    tflops_per_node,
)
from fugaku_gpt.formulas.parameters import parameter_count, size_name
from fugaku_gpt.formulas.rotary import rotary_frequencies
from fugaku_gpt.layout.tensors import model_tensors

GPT2 = ModelConfig(layers=12, hidden=768, heads=12, seq_len=1024, vocab_size=50257)


def test_gpt2_has_the_published_number_of_parameters() -> None:
    assert parameter_count(GPT2) == 124_439_808
    medium = ModelConfig(layers=24, hidden=1024, heads=16, seq_len=1024, vocab_size=50257)
    assert parameter_count(medium) == 354_823_168


@pytest.mark.parametrize("preset", preset_names())
def test_the_count_equals_the_table_of_tensors(preset: str) -> None:
    model = load_run_config(preset=preset).model
    count = 0
    for tensor in model_tensors(model, 1):
        size = 1
        for length in (tensor.rows or tensor.shape[0], *tensor.shape[1:]):
            size *= length
        count += size
    assert count == parameter_count(model)


def test_sizes_as_tables_write_them() -> None:
    names = [size_name(load_run_config(preset=preset).model) for preset in preset_names()]
    assert names == [
        "1.1M",
        "1.3M",
        "124M",
        "135M",
        "350M",
        "0.5B",
        "1.1B",
        "1.3B",
        "8B",
        "13B",
        "13B",
        "30B",
        "ARC-nano",
        "ARC-small",
    ]
    assert size_name(ModelConfig(name="my model")) == "my model"
    assert size_name(GPT2) == "124M"


# counts that the publishers of these models state
@pytest.mark.parametrize(
    ("preset", "count"),
    [("124m", 124_439_808), ("smollm2-135m", 134_515_008), ("qwen-0.5b", 494_032_768), ("llama-1.1b", 1_100_048_384),
     ("llama-8b", 8_030_261_248)],
)  # fmt: skip
def test_presets_have_the_published_number_of_parameters(preset: str, count: int) -> None:
    model = load_run_config(preset=preset).model
    assert parameter_count(model) == count
    unpadded = replace(model, vocab_multiple=1)
    assert sum(math.prod(spec.shape) for spec in model_tensors(unpadded, 1)) == count


def test_operations_of_shared_keys_and_swiglu_by_hand() -> None:
    model = ModelConfig(
        layers=1, hidden=4, heads=2, kv_heads=1, head_dim=3, ffn_hidden=5, seq_len=3, vocab_size=7, mlp="swiglu",
        positions="rope",
    )  # fmt: skip
    # per token: queries and output 2 * 4 * 6, keys and values 2 * 4 * 3, MLP 3 * 4 * 5, logits 7 * 4, and attention
    # 2 * 3 * 6
    per_token = 48 + 24 + 60 + 28 + 36
    assert exact_flops(model, 7, 7) == 3 * 2 * per_token * 3 * 7
    assert notes_flops(model, 7, 7, recompute=True) == exact_flops(model, 7, 7)
    assert exact_formula(model) == notes_formula(model) == EXACT_DECODER_FORMULA
    assert (exact_formula(GPT2), notes_formula(GPT2)) == (EXACT_FORMULA, NOTES_FORMULA)


@pytest.mark.parametrize(
    ("count", "name"),
    [(1_249_999, "1.2M"), (1_250_001, "1.3M"), (9_949_999, "9.9M"), (9_950_001, "10M"), (123_500_001, "124M"),
     (999_499_999, "999M"), (999_500_000, "1.0B"), (1_249_999_999, "1.2B"), (1_250_000_001, "1.3B"),
     (9_949_999_999, "9.9B"), (9_950_000_001, "10B"), (13_499_999_999, "13B"), (13_500_000_001, "14B")],
)  # fmt: skip
def test_a_size_is_rounded_to_two_digits_at_least(count: int, name: str) -> None:
    tiny = ModelConfig(layers=1, hidden=1, heads=1, seq_len=1, vocab_size=0)
    model = ModelConfig(layers=1, hidden=1, heads=1, seq_len=1, vocab_size=count - parameter_count(tiny))
    assert parameter_count(model) == count and size_name(model) == name


def test_operations_by_hand() -> None:
    model = ModelConfig(layers=1, hidden=2, heads=1, seq_len=3, vocab_size=5)
    # per token: weights 4h² + 8h² = 48 and logits 5·2 = 10; attention 2·s·h = 12 multiply-adds; two operations each,
    # and the backward pass twice the forward; 3 tokens, 7 sequences
    assert exact_flops(model, 7, 5) == 3 * 2 * 3 * 7 * (48 + 10 + 12)
    assert exact_flops(model, 7, 5) == pytest.approx(72 * 7 * 3 * 1 * 4 * (1 + 3 / 12 + 5 / 24))
    assert notes_flops(model, 7, 5) == pytest.approx(72 * 7 * 3 * 4 * (1 + 3 / 12 + 5 / 32))
    assert notes_flops(model, 7, 5, recompute=True) == pytest.approx(notes_flops(model, 7, 5) * 4 / 3)


def test_the_count_of_the_notes_is_below_the_exact_count() -> None:
    assert 1 - notes_flops(GPT2, 1, 50304) / exact_flops(GPT2, 1, 50304) == pytest.approx(0.068, abs=0.001)


def test_rates() -> None:
    assert tflops_per_node(4e12, 2.0, 2) == 1.0
    assert aggregate_petaflops(0.5, 512) == 0.25 and aggregate_petaflops(0.5, 512, si=True) == 0.256


def test_operations_of_grids_by_hand() -> None:
    model = replace(
        ModelConfig(layers=2, hidden=4, heads=1, seq_len=9, vocab_size=5),
        kind="grid_classifier", positions="rope", tied_embeddings=False,
    )  # fmt: skip
    # weights 12h² = 192 and attention 2·s·h = 72 multiply-adds of each of 9 cells and 2 layers, and a row of 8 logits
    assert exact_flops(model, 7, 8) == 3 * 2 * 7 * (9 * 2 * (192 + 72) + 8 * 4)


def test_positions_are_stretched_as_their_kind_says() -> None:
    plain = ModelConfig(hidden=8, heads=1, positions="rope", seq_len=64, rope_theta=100.0)
    assert rotary_frequencies(plain).tolist() == pytest.approx([1.0, 100**-0.25, 0.1, 100**-0.75])
    linear = replace(plain, rope_scaling=" linear".strip(), rope_factor=4.0)  # a text of its own, as read from a file
    assert rotary_frequencies(linear).tolist() == pytest.approx((rotary_frequencies(plain) / 4).tolist())
    llama = replace(
        plain, rope_scaling=" llama3".strip(), rope_factor=4.0, rope_original_seq_len=20, rope_low_freq_factor=0.5,
        rope_high_freq_factor=2.0,
    )  # fmt: skip
    # 20 tokens hold 3.18, 1.007, 0.318 and 0.1 wavelengths: all, a blend, and a quarter of two
    blend = (20 * 100**-0.25 / (2 * math.pi) - 0.5) / 1.5
    expected = [1.0, 100**-0.25 * (blend + (1 - blend) / 4), 0.1 / 4, 100**-0.75 / 4]
    assert rotary_frequencies(llama).tolist() == pytest.approx(expected)
