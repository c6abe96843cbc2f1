"""Tests of each AdamW that a build may have, against the algorithm written out in NumPy."""

from __future__ import annotations

from typing import Any, List

import numpy as np
import pytest
import torch

from fugaku_gpt import compat, ops
from fugaku_gpt.comm import Communicator
from fugaku_gpt.compat.kernel_choices import RANK_CONSENSUS
from fugaku_gpt.layout.tensors import model_tensors
from fugaku_gpt.model import build_model
from fugaku_gpt.parallel.buffers import FlatBuffers, MasterWeights, ParamRange
from fugaku_gpt.training import optimizer as optimizers
from fugaku_gpt.training.health import StateCopy, squares_of
from fugaku_gpt.training.optimizer import BlockedAdamW, CompiledAdamW, FusedAdamW, build_optimizer
from tests.support.tiny import tiny_config

CONFIG = tiny_config("training.dtype=float64", "training.weight_decay=0.1", "training.eps=1e-6")
STEPS = 4


def trained(build: Any, divisor: float = 1.0) -> "tuple[FlatBuffers, np.ndarray[Any, Any]]":
    """The flat buffers after some steps with gradients times ``divisor``, and the parameters before."""
    model = build_model(CONFIG, Communicator.alone())
    buffers = FlatBuffers(dict(model.named_parameters()), model_tensors(CONFIG.model, 1))
    before = buffers.parameters.numpy().copy()
    adamw = build(runs_of(buffers), CONFIG.training)
    for step in range(STEPS):
        buffers.gradients.copy_(torch.from_numpy(gradient(step, len(before))) * divisor)
        adamw.step(0.01 / (step + 1), divisor)
    return buffers, before


def runs_of(buffers: FlatBuffers) -> List[ParamRange]:
    return list(buffers.param_ranges(buffers.layout.owned(0, 1), lambda spec: True))


def gradient(step: int, size: int) -> "np.ndarray[Any, Any]":
    return np.random.RandomState(step).randn(size)


@pytest.mark.parametrize("divisor", [1.0, 3.3e9])
@pytest.mark.parametrize("block", [64, 65536])
@pytest.mark.parametrize("build", [BlockedAdamW, build_optimizer], ids=["blocked", "this build's own"])
def test_each_implementation_equals_the_algorithm(
    build: Any, block: int, divisor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizers, "BLOCK", block)
    buffers, p = trained(build, divisor)
    t = CONFIG.training
    decay = np.zeros_like(p)
    for placement in buffers.placements:
        if not placement.spec.name.endswith("bias") and "norm" not in placement.spec.name:
            decay[placement.start : placement.start + placement.size] = t.weight_decay
    m, v = np.zeros_like(p), np.zeros_like(p)
    for step in range(STEPS):
        lr, g = 0.01 / (step + 1), gradient(step, len(p))
        m, v = t.beta1 * m + (1 - t.beta1) * g, t.beta2 * v + (1 - t.beta2) * g * g
        p = p - lr * decay * p
        p = p - lr * (m / (1 - t.beta1 ** (step + 1))) / (np.sqrt(v / (1 - t.beta2 ** (step + 1))) + t.eps)
    ours = buffers.parameters.numpy()
    for placement in buffers.placements:
        part = slice(placement.start, placement.start + placement.size)
        assert np.abs(ours[part] - p[part]).max() <= 1e-12, placement.spec.name


@pytest.mark.parametrize("compiled", [False, True], ids=["by operators", "compiled"])
@pytest.mark.parametrize("divisor", [1.0, 0.3, 3.3e9])
def test_each_implementation_divides_the_gradients_in_float32_too(
    divisor: float, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiled and not ops.has_native_kernels():
        pytest.skip("no compiled kernels")
    monkeypatch.setattr(RANK_CONSENSUS, "compiled", compiled)

    def stepped(build: Any) -> List[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        values, gradients = (torch.randn(1000, generator=generator) for _ in range(2))
        run = ParamRange(True, True, 0, values, torch.zeros_like(gradients))
        adamw = build([run], CONFIG.training)
        run.gradients.copy_(gradients * divisor)
        if isinstance(adamw, FusedAdamW):
            assert compat.has_gradient_scale(torch.float32)
        assert build is BlockedAdamW or isinstance(adamw, CompiledAdamW) == compiled
        adamw.step(0.01, divisor)
        return [values, *adamw.moments[0]]

    for ours, judge in zip(stepped(build_optimizer), stepped(BlockedAdamW)):
        assert torch.allclose(ours, judge, rtol=2e-6, atol=1e-7)


def test_the_fused_kernel_is_used_if_the_build_has_it() -> None:
    model = build_model(CONFIG, Communicator.alone())
    buffers = FlatBuffers(dict(model.named_parameters()), model_tensors(CONFIG.model, 1))
    has_fused_adamw = compat.build_facts()["fused_adamw"]
    assert isinstance(
        build_optimizer(runs_of(buffers), CONFIG.training), FusedAdamW if has_fused_adamw else BlockedAdamW
    )


@pytest.mark.skipif(not ops.has_native_kernels(), reason="no compiled kernels")
@pytest.mark.parametrize("shards", [1, 3])
def test_the_compiled_kernel_rounds_the_masters_that_a_rank_owns(shards: int) -> None:
    config = tiny_config("training.dtype=bfloat16")
    final_parameters = []
    for build in (build_optimizer, BlockedAdamW):
        model = build_model(config, Communicator.alone())
        buffers = FlatBuffers(dict(model.named_parameters()), model_tensors(config.model, 1), shards)
        owned = buffers.layout.owned(shards - 1, shards)
        masters = MasterWeights(buffers, owned)
        adamw: Any = build(list(buffers.param_ranges(owned, lambda spec: True, masters)), config.training)
        assert adamw.rounds_parameters == (build is build_optimizer)
        buffers.gradients.copy_(torch.from_numpy(gradient(0, buffers.gradients.numel())))
        adamw.step(0.01)
        if adamw.rounds_parameters:
            stepped = buffers.parameters.clone()
            masters.round()
            assert torch.equal(buffers.parameters, stepped)
        else:
            masters.round()
        final_parameters.append(buffers.parameters.float())
    assert float((final_parameters[0] - final_parameters[1]).abs().max()) <= 2.0**-8 * float(
        final_parameters[1].abs().max()
    )


@pytest.mark.parametrize("build", [BlockedAdamW, build_optimizer], ids=["blocked", "this build's own"])
def test_moments_and_the_number_of_steps_are_the_full_state_of_the_optimizer(build: Any) -> None:
    model = build_model(CONFIG, Communicator.alone())
    buffers = FlatBuffers(dict(model.named_parameters()), model_tensors(CONFIG.model, 1))
    adamw = build(runs_of(buffers), CONFIG.training)

    def after(step: int) -> torch.Tensor:
        buffers.gradients.copy_(torch.from_numpy(gradient(step, buffers.gradients.numel())))
        adamw.step(0.01)
        return buffers.parameters.clone()

    parameters, steps, moments = after(0), adamw.steps, [tensor.clone() for both in adamw.moments for tensor in both]
    expected = [after(1), after(2)]
    buffers.parameters.copy_(parameters)
    for tensor, before in zip((tensor for both in adamw.moments for tensor in both), moments):
        tensor.copy_(before)
    adamw.steps = steps
    assert steps == 1 and all(torch.equal(after(step), judge) for step, judge in zip((1, 2), expected))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_shard_of_padding_alone_is_stepped_saved_and_restored(dtype: str) -> None:
    config, shards = tiny_config(f"training.dtype={dtype}"), 300
    model = build_model(config, Communicator.alone())
    buffers = FlatBuffers(dict(model.named_parameters()), model_tensors(config.model, 1), shards)
    before = buffers.parameters.clone()
    owned = buffers.layout.owned(shards - 1, shards)
    masters = MasterWeights(buffers, owned) if dtype == "bfloat16" else None
    runs = list(buffers.param_ranges(owned, lambda spec: True, masters))
    assert runs == [] and squares_of(runs) == (0.0, True)
    adamw = build_optimizer(runs, config.training)
    copy = StateCopy(runs, adamw)
    for step in range(2):
        adamw.step(0.01)
        copy.save(step, step)
    copy.restore()
    if masters is not None:
        masters.round()
    assert torch.equal(buffers.parameters, before)


@pytest.mark.parametrize("build", [BlockedAdamW, build_optimizer], ids=["blocked", "this build's own"])
def test_moments_exist_before_the_first_step_and_correspond_to_the_runs(build: Any) -> None:
    model = build_model(CONFIG, Communicator.alone())
    buffers = FlatBuffers(dict(model.named_parameters()), model_tensors(CONFIG.model, 1))
    before = buffers.parameters.clone()
    runs = runs_of(buffers)
    adamw = build(runs, CONFIG.training)
    assert adamw.steps == 0 and torch.equal(buffers.parameters, before)
    assert all(float(moment.abs().max()) == 0.0 for both in adamw.moments for moment in both)
    buffers.gradients.copy_(torch.from_numpy(gradient(0, buffers.gradients.numel())))
    adamw.step(0.01)
    for run, (first, second) in zip(runs, adamw.moments):
        assert torch.allclose(first, 0.1 * run.gradients) and torch.allclose(second, 0.05 * run.gradients**2)
