"""Tests of the attention layer against its definition."""

from __future__ import annotations

from typing import List, Tuple

import pytest
import torch

from fugaku_gpt.comm import Communicator
from fugaku_gpt.config import load_run_config
from fugaku_gpt.model import attention, build_model
from fugaku_gpt.model.attention import CausalSelfAttention
from tests.model.test_attention_core import result_and_gradient
from tests.support.text import ByteSamples
from tests.support.tiny import tiny_config


def test_the_reference_layer_computes_naive_attention_with_equal_results(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs_and_gradients: List[Tuple[torch.Tensor, torch.Tensor]] = []
    calls: List[int] = []
    attend_naively = attention.attend_naively
    monkeypatch.setattr(attention, "attend_naively", lambda *inputs: calls.append(1) or attend_naively(*inputs))
    for reference in (True, False):
        layer = CausalSelfAttention(
            tiny_config().model, Communicator.alone(), torch.float64, seed=1, site=1, reference=reference
        )
        for number, parameter in enumerate(layer.parameters()):
            parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(number))
        x = torch.randn(2, 24, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
        outputs_and_gradients.append(result_and_gradient(lambda x, layer=layer: layer(x, 3), x))
    assert calls == [1]
    for ours, judge in zip(*outputs_and_gradients):
        assert float((ours - judge).abs().max()) <= 1e-12 * float(judge.abs().max())


def test_shorter_sequences_have_the_beginning_of_the_output_of_longer_sequences() -> None:
    model = load_run_config(preset="tiny").model
    layer = CausalSelfAttention(model, Communicator.alone(), torch.float64, seed=1, site=1)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x = torch.randn(1, model.seq_len, model.hidden, dtype=torch.float64)
    full_output, prefix_output = layer(x, 0), layer(x[:, :50], 0)
    assert float((full_output[:, :50] - prefix_output).detach().abs().max()) <= 1e-12


def test_a_model_is_built_with_either_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: List[int] = []
    attend_naively = attention.attend_naively
    monkeypatch.setattr(attention, "attend_naively", lambda *inputs: calls.append(1) or attend_naively(*inputs))
    config = tiny_config("training.dtype=float64")
    tokens = torch.from_numpy(ByteSamples(config.model.seq_len).batch(0, 1))
    losses = [
        float(build_model(config, Communicator.alone(), reference)(tokens[:, :-1], tokens[:, 1:]).detach())
        for reference in (False, True)
    ]
    assert len(calls) == config.model.layers
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
