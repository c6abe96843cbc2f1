"""Tests of parameter and operation counts against published numbers and counts by hand."""

from __future__ import annotations

import pytest

from fugaku_gpt.config import ModelConfig, load_run_config, preset_names
from fugaku_gpt.formulas.flops import aggregate_petaflops, exact_flops, notes_flops, tflops_per_node
from fugaku_gpt.formulas.parameters import parameter_count, size_name
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
    assert names == ["1.1M", "124M", "350M", "1.3B", "13B", "13B", "30B"]
    assert size_name(ModelConfig(name="my model")) == "my model"
    assert size_name(GPT2) == "124M"


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
