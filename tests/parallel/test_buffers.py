"""Flat parameters and gradients, and the norm that is taken over them."""

from __future__ import annotations

import pytest
import torch

from fugaku_gpt.comm import Communicator, ProcessGrid
from fugaku_gpt.config import RunConfig
from fugaku_gpt.layout.tensors import model_tensors
from fugaku_gpt.model import GPT, build_model
from fugaku_gpt.parallel.buffers import ALIGNMENT_BYTES, FlatBuffers
from fugaku_gpt.parallel.gradients import gradient_norm, sum_over_replicas
from tests.support.text import ByteSamples
from tests.support.tiny import tiny_config


@pytest.fixture
def config() -> RunConfig:
    return tiny_config("training.dtype=float32")


@pytest.fixture
def model(config: RunConfig) -> GPT:
    return build_model(config, Communicator.alone())


def test_parameters_and_gradients_become_views_and_keep_their_values(config: RunConfig, model: GPT) -> None:
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    buffers = FlatBuffers(dict(model.named_parameters()), model_tensors(config.model, 1))
    tokens = torch.from_numpy(ByteSamples(24).batch(0, 2))
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    named = dict(model.named_parameters())
    for placement in buffers.placements:
        parameter, part = named[placement.spec.name], slice(placement.start, placement.start + placement.size)
        assert torch.equal(parameter.detach(), before[placement.spec.name])
        assert parameter.data_ptr() == buffers.parameters[part].data_ptr()
        assert parameter.data_ptr() % ALIGNMENT_BYTES == buffers.parameters.data_ptr() % ALIGNMENT_BYTES
        assert parameter.grad is not None and parameter.grad.data_ptr() == buffers.gradients[part].data_ptr()
        assert float(buffers.gradients[part].abs().max()) > 0, placement.spec.name
    buffers.parameters.zero_()
    assert all(float(parameter.detach().abs().sum()) == 0 for parameter in named.values())


def test_a_second_micro_batch_adds_to_the_first_in_place(config: RunConfig, model: GPT) -> None:
    buffers = FlatBuffers(dict(model.named_parameters()), model_tensors(config.model, 1))
    tokens = torch.from_numpy(ByteSamples(24).batch(0, 2))
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    once, address = buffers.gradients.clone(), buffers.gradients.data_ptr()
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    assert buffers.gradients.data_ptr() == address
    assert torch.allclose(buffers.gradients, 2 * once, rtol=1e-5, atol=1e-7)


def test_tensors_lie_in_the_order_in_which_their_gradients_are_finished(config: RunConfig, model: GPT) -> None:
    specs = model_tensors(config.model, 1)
    buffers = FlatBuffers(dict(model.named_parameters()), specs)
    assert [placement.spec.name for placement in buffers.placements] == [spec.name for spec in reversed(specs)]


def test_ranges_cover_every_element_once_and_agree_on_weight_decay(config: RunConfig, model: GPT) -> None:
    buffers = FlatBuffers(dict(model.named_parameters()), model_tensors(config.model, 1))
    ranges = list(buffers.ranges())
    assert ranges[0][1].start == 0 and ranges[-1][1].stop == buffers.parameters.numel()
    for (decays, part), (next_decays, next_part) in zip(ranges, ranges[1:]):
        assert part.stop == next_part.start and decays != next_decays
    for placement in buffers.placements:
        (inside,) = [decays for decays, part in ranges if part.start <= placement.start < part.stop]
        assert (
            inside
            == placement.spec.decays
            == (not placement.spec.name.endswith("bias") and "norm" not in placement.spec.name)
        )


def test_the_norm_is_that_of_all_gradients(config: RunConfig, model: GPT) -> None:
    buffers = FlatBuffers(dict(model.named_parameters()), model_tensors(config.model, 1))
    for placement in buffers.placements:
        part = buffers.gradients[placement.start : placement.start + placement.size]
        part.copy_(torch.randn(placement.size, generator=torch.Generator().manual_seed(placement.start)))
    judge = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in model.parameters() if p.grad is not None))  # type: ignore
    assert gradient_norm(buffers, ProcessGrid.alone()) == pytest.approx(float(judge), rel=1e-6)
    buffers.gradients[3] = float("inf")
    assert gradient_norm(buffers, ProcessGrid.alone()) == float("inf")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_tensor_starts_on_a_cache_line_and_gaps_hold_zeros(dtype: str) -> None:
    config = tiny_config(f"training.dtype={dtype}", "model.hidden=20", "model.ffn_hidden=7")  # odd sizes: many gaps
    model = build_model(config, Communicator.alone())
    buffers = FlatBuffers(dict(model.named_parameters()), model_tensors(config.model, 1))
    step = ALIGNMENT_BYTES // buffers.parameters.element_size()
    used = torch.zeros_like(buffers.parameters, dtype=torch.bool)
    for placement in buffers.placements:
        part = slice(placement.start, placement.start + placement.size)
        assert placement.start % step == 0 and not bool(used[part].any())
        used[part] = True
    assert int(used.sum()) == sum(parameter.numel() for parameter in model.parameters())
    assert not bool(used.all())
    assert float(buffers.parameters[~used].abs().sum()) == float(buffers.gradients[~used].abs().sum()) == 0.0


def test_changing_the_flat_parameters_changes_the_model_s_loss(config: RunConfig, model: GPT) -> None:
    buffers = FlatBuffers(dict(model.named_parameters()), model_tensors(config.model, 1))
    tokens = torch.from_numpy(ByteSamples(24).batch(0, 1))
    model.eval()
    before = float(model(tokens[:, :-1], tokens[:, 1:]).detach())
    buffers.parameters.mul_(1.5)
    assert float(model(tokens[:, :-1], tokens[:, 1:]).detach()) != before


def test_one_replica_sums_nothing(config: RunConfig, model: GPT) -> None:
    gradients = torch.arange(10.0)
    sum_over_replicas(gradients, Communicator.alone(), bucket_bytes=8)
    assert torch.equal(gradients, torch.arange(10.0))


def test_the_norm_of_over_a_million_equal_gradients_stays_within_the_tolerance_of_parity() -> None:
    # equal terms are the worst case of a float32 sum: every addition rounds the same way (3e-6 was seen)
    wide = tiny_config("training.dtype=float32", "model.hidden=128", "model.vocab_size=8192")
    wide_model = build_model(wide, Communicator.alone())
    buffers = FlatBuffers(dict(wide_model.named_parameters()), model_tensors(wide.model, 1))
    for placement in buffers.placements:
        buffers.gradients[placement.start : placement.start + placement.size] = 1e-3
    count = sum(placement.size for placement in buffers.placements)
    assert count > 10**6
    assert gradient_norm(buffers, ProcessGrid.alone()) == pytest.approx(1e-3 * count**0.5, rel=1e-5)
