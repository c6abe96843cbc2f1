"""Tests that recomputed layers are equal to the last bit, save no activations, and finish each gradient once."""

from __future__ import annotations

from typing import Dict, List, Sequence, Tuple

import pytest
import torch

from fugaku_gpt import compat
from fugaku_gpt.comm import Communicator, ProcessGrid
from fugaku_gpt.model import GPT, attention, build_model
from fugaku_gpt.model.kv_cache import KeyValueCache
from fugaku_gpt.model.recompute import recomputed
from fugaku_gpt.training.trainer import Trainer
from tests.support.kept import HAS_HOOKS, counting
from tests.support.text import ByteSamples
from tests.support.tiny import tiny_config

KINDS = ["selective", "full"]
SETTINGS = ("model.layers=3", "training.micro_batch=2")


def model_of(*settings: str) -> GPT:
    return build_model(tiny_config(*SETTINGS, *settings), Communicator.alone()).train()


def tokens_of(model: GPT, samples: int = 2) -> Tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.from_numpy(ByteSamples(model.config.seq_len).batch(5, samples))
    return tokens[:, :-1], tokens[:, 1:]


def loss_and_gradients(model: GPT) -> Dict[str, torch.Tensor]:
    for parameter in model.parameters():
        parameter.grad = None
    loss = model(*tokens_of(model), 5)
    loss.backward()
    tensors_by_name = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        tensors_by_name[name] = parameter.grad
    return tensors_by_name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "settings",
    [(), ("training.dtype=float64",), ("training.dtype=bfloat16",), ("training.recompute_layers=1",)],
    ids=str,
)
def test_loss_and_every_gradient_are_equal_to_the_last_bit_with_dropout_on(kind: str, settings: Sequence[str]) -> None:
    if "training.dtype=bfloat16" in settings and not compat.can_train(torch.bfloat16):
        pytest.skip("this PyTorch cannot train in bfloat16")
    plain = [setting for setting in settings if "recompute" not in setting]
    judge = loss_and_gradients(model_of(*plain))
    ours = loss_and_gradients(model_of(*settings, f"training.recompute={kind}"))
    assert set(ours) == set(judge)
    for name, tensor in judge.items():
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("kind", KINDS)
def test_attention_without_dropout_is_recomputed_to_the_last_bit_too(kind: str) -> None:
    judge = loss_and_gradients(model_of("model.attention_dropout=0"))
    ours = loss_and_gradients(model_of("model.attention_dropout=0", f"training.recompute={kind}"))
    assert all(torch.equal(ours[name], tensor) for name, tensor in judge.items())


@pytest.mark.parametrize("chunks", [1, 3])
def test_training_has_the_same_curve_to_the_last_bit(chunks: int) -> None:
    def curve(kind: str) -> List[Tuple[float, float]]:
        schedule = "interleaved" if chunks > 1 else "1f1b"
        config = tiny_config(
            *SETTINGS, f"training.recompute={kind}", f"layout.chunks={chunks}", f"layout.schedule={schedule}"
        )
        samples = ByteSamples(config.model.seq_len)
        trainer = Trainer(config, ProcessGrid.alone(), samples, samples)
        steps = [trainer.step() for _ in range(3)]
        return [(step.loss, step.grad_norm) for step in steps] + [(trainer.validate(), 0.0)]

    judge = curve("none")
    assert all(curve(kind) == judge for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_recomputed_without_gradients(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    keep_mask = attention.keep_mask
    monkeypatch.setattr(attention, "keep_mask", lambda *inputs: calls.append(1) or keep_mask(*inputs))
    model = model_of(f"training.recompute={kind}")
    with torch.no_grad():
        loss = model(*tokens_of(model), 5)
    assert not loss.requires_grad and len(calls) == 3 * 2  # layers, samples
    model(*tokens_of(model), 5).backward()
    assert len(calls) == 3 * 2 + 2 * 3 * 2


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_added_up_in_place_and_each_is_finished_once(kind: str) -> None:
    judge, model = model_of(), model_of(f"training.recompute={kind}")
    finished: Dict[str, int] = {}
    nodes = []
    for name, parameter in model.named_parameters():
        parameter.grad = torch.zeros_like(parameter)
        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_, name=name: finished.__setitem__(name, finished.get(name, 0) + 1))
        nodes.append(node)
    addresses = {name: parameter.grad.data_ptr() for name, parameter in model.named_parameters()}
    for _ in range(2):
        model(*tokens_of(model), 5).backward()
        judge(*tokens_of(judge), 5).backward()
    assert addresses == {name: parameter.grad.data_ptr() for name, parameter in model.named_parameters()}
    for (name, ours), theirs in zip(model.named_parameters(), judge.parameters()):
        assert torch.equal(ours.grad, theirs.grad), name
    assert finished == dict.fromkeys(addresses, 2)  # the tied embedding too: autograd adds its two uses first


@pytest.mark.skipif(not HAS_HOOKS, reason="this PyTorch does not show what it saves")
def test_a_recomputed_layer_saves_only_the_input_and_the_backward_pass_frees_everything() -> None:
    most = {}
    for kind in ("none", *KINDS):
        model = model_of(f"training.recompute={kind}", "model.layers=6")
        with counting([model]) as saved_bytes:
            loss = model(*tokens_of(model), 5)
            after_forward = saved_bytes.current_bytes
            loss.backward()
        assert saved_bytes.current_bytes == 0
        most[kind] = (after_forward, saved_bytes.peak_bytes)
    for stage in (0, 1):  # after the forward pass, and at most, recomputing included
        assert most["full"][stage] < most["selective"][stage] < most["none"][stage]
    assert most["full"][0] < most["none"][0] / 8


def test_inputs_that_require_no_gradient_get_none() -> None:
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    y = torch.randn(3, dtype=torch.float64)
    recomputed(lambda x, y: (x * y).tanh(), x, y).sum().backward()
    assert x.grad is not None and y.grad is None
    assert torch.equal(x.grad, torch.autograd.grad((x * y).tanh().sum(), x)[0])


def test_a_separate_layer_has_gradients_even_if_the_input_requires_none() -> None:
    model = model_of("training.recompute=full")
    block = model.blocks["0"]
    block(torch.randn(2, 24, 32), 0).sum().backward()
    assert all(parameter.grad is not None for parameter in block.parameters())


def test_gradients_of_a_recomputed_function_equal_finite_differences() -> None:
    x, y = (torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda x, y: recomputed(lambda x, y: (x * y).exp() * x, x, y), (x, y))


@pytest.mark.parametrize("kind", ["none", "full"])
def test_a_layer_that_is_recomputed_in_training_reads_the_cache_of_keys_and_values(kind: str) -> None:
    model = model_of(f"training.recompute={kind}", "training.dtype=float64", "model.kv_heads=2").eval()
    tokens, _ = tokens_of(model)
    cache = KeyValueCache(range(3), model.config, 1, len(tokens), model.config.seq_len, torch.float64)
    with torch.no_grad():
        expected = model.hidden_states(tokens)
        first, later = (
            model.hidden_states(part, cache=cache, new=cache.extend(0, len(tokens), part.shape[1]))
            for part in tokens.split([5, tokens.shape[1] - 5], 1)
        )
    assert torch.allclose(torch.cat([first, later], 1), expected, rtol=1e-5, atol=1e-6)
