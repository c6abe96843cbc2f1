"""Tests of the model on one rank against an independent NumPy GPT: loss and every gradient, in float64."""

from __future__ import annotations

from typing import List

import numpy as np
import pytest
import torch

from fugaku_gpt.comm import Communicator
from fugaku_gpt.config import load_run_config
from fugaku_gpt.kernels import attention_tiling as blocks
from fugaku_gpt.model import build_model
from tests.support.numpy_gpt import NumpyGPT
from tests.support.text import ByteSamples

SMALL = ["model.layers=2", "model.hidden=24", "model.heads=3", "model.seq_len=20", "training.dtype=float64"]
CASES = {
    "plain": ["model.vocab_size=256", "model.vocab_multiple=1"],
    "padded vocabulary": ["model.vocab_size=250", "model.vocab_multiple=64"],
    "tanh and a narrow MLP": ["model.vocab_size=256", "model.gelu=tanh", "model.ffn_hidden=40"],
    "LayerNorm after the embedding": ["model.vocab_size=256", "model.embedding_layernorm=true", "model.layers=3"],
    "all of these and one head": [
        "model.vocab_size=200", "model.vocab_multiple=48", "model.gelu=tanh", "model.ffn_hidden=17", "model.heads=1",
        "model.embedding_layernorm=true", "model.layernorm_eps=1e-3",
    ],
    "one layer of one token": ["model.vocab_size=256", "model.layers=1", "model.seq_len=1", "model.hidden=3"],
    "large weights": ["model.vocab_size=256", "model.init_std=0.5"],
}  # fmt: skip


@pytest.mark.parametrize("queries", [64, 5], ids=["one block of attention", "some blocks"])
@pytest.mark.parametrize("settings", list(CASES.values()), ids=list(CASES))
def test_loss_and_every_gradient_equal_those_of_the_numpy_model(
    settings: List[str], queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(blocks._QUERIES_PER_BLOCK, False, queries)
    config = load_run_config(overrides=[*SMALL, *settings])
    model = build_model(config, Communicator.alone())
    parameters = dict(model.named_parameters())
    with torch.no_grad():  # biases and gains that start at 0 and 1 would hide mistakes
        generator = torch.Generator().manual_seed(1)
        for name, parameter in parameters.items():
            if not name.endswith("embedding.weight"):
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1)
    tokens = np.minimum(ByteSamples(config.model.seq_len).batch(3, 4), config.model.vocab_size - 1)
    loss = model(torch.from_numpy(tokens[:, :-1]), torch.from_numpy(tokens[:, 1:]))
    loss.backward()
    judge = NumpyGPT(config.model, {name: p.detach().numpy().copy() for name, p in parameters.items()})
    judged, gradients = judge.loss_and_gradients(tokens[:, :-1], tokens[:, 1:])
    assert float(loss.detach()) == pytest.approx(judged, rel=1e-13)
    assert set(gradients) == set(parameters)
    for name, parameter in parameters.items():
        scale = np.abs(gradients[name]).max()
        assert parameter.grad is not None and scale > 0
        assert np.abs(parameter.grad.numpy() - gradients[name]).max() <= 1e-12 * scale, name


def test_the_numpy_model_agrees_with_finite_differences() -> None:
    config = load_run_config(overrides=[*SMALL, "model.vocab_size=256", "model.gelu=tanh"])
    rng = np.random.RandomState(0)
    model = build_model(config, Communicator.alone())
    parameters = {name: p.detach().numpy() + 0.05 * rng.randn(*p.shape) for name, p in model.named_parameters()}
    tokens = ByteSamples(config.model.seq_len).batch(0, 2)

    def loss() -> float:
        return NumpyGPT(config.model, parameters).loss_and_gradients(tokens[:, :-1], tokens[:, 1:])[0]

    _, gradients = NumpyGPT(config.model, parameters).loss_and_gradients(tokens[:, :-1], tokens[:, 1:])
    for name, value in parameters.items():
        index = np.unravel_index(np.abs(gradients[name]).argmax(), value.shape)
        original, step = value[index], 1e-6
        value[index] = original + step
        above = loss()
        value[index] = original - step
        below = loss()
        value[index] = original
        assert (above - below) / (2 * step) == pytest.approx(gradients[name][index], rel=1e-6), name
