"""Tests of logits against Hugging Face's GPT-2 with the same weights."""

from __future__ import annotations

from typing import Any, Dict

import pytest
import torch

from fugaku_gpt.comm import Communicator
from fugaku_gpt.config import load_run_config
from fugaku_gpt.model import GPT, build_model
from tests.support.text import ByteSamples

INNER = {"erf": "gelu", "tanh": "gelu_new"}


@pytest.fixture(scope="module")
def transformers() -> Any:
    """The library, which takes seconds to import: only where a test of this file runs, not where it is collected."""
    return pytest.importorskip("transformers", reason="transformers is not installed: make dev")


def with_our_weights(transformers: Any, model: GPT, gelu: str) -> torch.nn.Module:
    """A GPT2LMHeadModel with the weights of ours; its Conv1D layers hold [inputs, outputs]."""
    shape = model.config
    settings = transformers.GPT2Config(
        vocab_size=shape.vocab_size,
        n_positions=shape.seq_len,
        n_embd=shape.hidden,
        n_layer=shape.layers,
        n_head=shape.heads,
        activation_function=INNER[gelu],
        layer_norm_epsilon=shape.layernorm_eps,
    )
    theirs = transformers.GPT2LMHeadModel(settings).eval()
    ours = {name: parameter.detach() for name, parameter in model.named_parameters()}
    state: Dict[str, torch.Tensor] = {
        "transformer.wte.weight": ours["token_embedding.weight"][: shape.vocab_size],
        "lm_head.weight": ours["token_embedding.weight"][: shape.vocab_size],
        "transformer.wpe.weight": ours["position_embedding.weight"],
        "transformer.ln_f.weight": ours["final_norm.weight"],
        "transformer.ln_f.bias": ours["final_norm.bias"],
    }
    for layer in range(shape.layers):
        our_prefix, their_prefix = f"blocks.{layer}", f"transformer.h.{layer}"
        for norm, name in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
            state[f"{their_prefix}.{name}.weight"] = ours[f"{our_prefix}.{norm}.weight"]
            state[f"{their_prefix}.{name}.bias"] = ours[f"{our_prefix}.{norm}.bias"]
        for linear, name in (
            ("attention.qkv", "attn.c_attn"),
            ("attention.out", "attn.c_proj"),
            ("mlp.up", "mlp.c_fc"),
            ("mlp.down", "mlp.c_proj"),
        ):
            weight = ours[f"{our_prefix}.{linear}.weight"]
            state[f"{their_prefix}.{name}.weight"] = weight.reshape(-1, weight.shape[-1]).t()
            state[f"{their_prefix}.{name}.bias"] = ours[f"{our_prefix}.{linear}.bias"].reshape(-1)
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not unexpected and all(name.endswith(("attn.bias", "attn.masked_bias")) for name in missing)
    return theirs


@pytest.mark.parametrize("seq_len", [64, 512])
@pytest.mark.parametrize("gelu", ["tanh", "erf"])
def test_logits_are_equal(transformers: Any, gelu: str, seq_len: int) -> None:
    settings = [
        "model.layers=3",
        "model.hidden=64",
        "model.heads=4",
        f"model.seq_len={seq_len}",
        "model.vocab_size=257",
    ]
    model = build_model(
        load_run_config(overrides=[*settings, f"model.gelu={gelu}", "model.init_std=0.2"]), Communicator.alone()
    )
    tokens = torch.from_numpy(ByteSamples(seq_len).batch(0, 2)[:, :-1])
    with torch.no_grad():
        ours = model.logits(tokens)[..., :257]
        theirs = with_our_weights(transformers, model, gelu)(tokens).logits
    assert float(ours.std()) > 0.5
    assert float((ours - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())
