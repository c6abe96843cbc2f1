"""Tests that initial weights are a function of seed, name and position."""

from __future__ import annotations

import hashlib
from typing import Dict

import pytest
import torch

from fugaku_gpt.config import ModelConfig
from fugaku_gpt.layout.tensors import TensorSpec, model_tensors
from fugaku_gpt.model.init import fill_parameter

MODEL = ModelConfig(
    layers=2, hidden=48, heads=4, seq_len=70, vocab_size=150, vocab_multiple=8, embedding_layernorm=True
)


def filled(spec: TensorSpec, tp_rank: int = 0, tp: int = 1, seed: int = 1) -> torch.Tensor:
    tensor = torch.full(spec.local_shape(tp), float("nan"))
    fill_parameter(tensor, spec, seed, tp_rank, tp)
    return tensor


@pytest.mark.parametrize("tp", [2, 4])
def test_slices_over_ranks_make_up_the_full_tensor(tp: int) -> None:
    for spec in model_tensors(MODEL, tp):
        full_tensor = filled(spec)
        assert torch.isfinite(full_tensor).all()
        for rank in range(tp):
            assert torch.equal(filled(spec, rank, tp), full_tensor[spec.slice_of(rank, tp)]), spec.name


def test_padding_does_not_move_the_vocabulary() -> None:
    embeddings = [filled(model_tensors(MODEL, tp)[0]) for tp in (1, 4)]
    assert embeddings[0].shape != embeddings[1].shape
    assert torch.equal(embeddings[0][:150], embeddings[1][:150])
    assert all(float(embedding[150:].abs().sum()) == 0 for embedding in embeddings)


def test_values_are_normal_with_the_spec_s_deviation_and_differ_by_name_and_seed() -> None:
    by_name: Dict[str, torch.Tensor] = {spec.name: filled(spec) for spec in model_tensors(MODEL, 1)}
    up, down = by_name["blocks.0.mlp.up.weight"], by_name["blocks.0.mlp.down.weight"]
    assert float(up.std()) == pytest.approx(0.02, rel=0.05)
    assert float(down.std()) == pytest.approx(0.02 / 2, rel=0.05)  # / sqrt(2 * layers)
    assert abs(float(up.mean())) < 1e-3
    assert not torch.equal(up, by_name["blocks.1.mlp.up.weight"])
    spec = next(spec for spec in model_tensors(MODEL, 1) if spec.name == "blocks.0.mlp.up.weight")
    assert not torch.equal(up, filled(spec, seed=2))
    assert torch.equal(by_name["final_norm.weight"], torch.ones(48))


def test_the_values_are_the_same_on_every_numpy() -> None:
    spec = TensorSpec("golden", (100, 33), init="normal", std=0.02)
    assert (
        hashlib.sha256(filled(spec).numpy().tobytes()).hexdigest()
        == "c677169e463aae849dcc482566a05898128ed2188e9e7357bf44d71843e64079"
    )
