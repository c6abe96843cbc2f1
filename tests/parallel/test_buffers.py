"""Tests of flat parameters, gradients and master weights, and of the sum of squares over them."""

from __future__ import annotations

import math
from functools import partial
from typing import Dict, List, Tuple

import pytest
import torch

from fugaku_gpt import compat
from fugaku_gpt.comm import Communicator, ProcessGrid
from fugaku_gpt.config import RunConfig
from fugaku_gpt.layout.flat import ALIGNMENT_BYTES
from fugaku_gpt.layout.tensors import TOKEN_EMBEDDING, TensorSpec, model_tensors
from fugaku_gpt.model import GPT, build_model
from fugaku_gpt.parallel.buffers import FlatBuffers, MasterWeights, ParamRange, counted_in_norm
from fugaku_gpt.parallel.cross_entropy import LossOptions, vocab_parallel_cross_entropy
from fugaku_gpt.parallel.gradient_path import GradientReducer, accumulate_grad_node, main_grad
from fugaku_gpt.training.health import squares_of
from tests.support.text import ByteSamples
from tests.support.tiny import tiny_config

DTYPES = ["float32", "float64", "bfloat16", "float16"]


@pytest.fixture
def config() -> RunConfig:
    return tiny_config("training.dtype=float32")


@pytest.fixture
def model(config: RunConfig) -> GPT:
    return build_model(config, Communicator.alone())


def buffers_of(config: RunConfig, model: GPT, shards: int = 1, bucket_bytes: int = 2**25) -> FlatBuffers:
    return FlatBuffers(dict(model.named_parameters()), model_tensors(config.model, 1), shards, bucket_bytes)


def with_reducer(
    config: RunConfig, model: GPT, accumulate_in_layers: bool = True
) -> Tuple[FlatBuffers, GradientReducer]:
    """Buffers and their reducer, which the caller keeps alive: it owns autograd's hooks."""
    buffers = buffers_of(config, model)
    reducer = GradientReducer(
        buffers, {0: model}, ProcessGrid.alone(), sharded=False, accumulate_in_layers=accumulate_in_layers
    )
    return buffers, reducer


def backward(model: GPT, samples: int = 2) -> None:
    tokens = torch.from_numpy(ByteSamples(24).batch(0, samples))
    model(tokens[:, :-1], tokens[:, 1:]).backward()


def runs_of(buffers: FlatBuffers) -> List[ParamRange]:
    return list(buffers.param_ranges(buffers.layout.owned(0, 1), lambda spec: True))


def test_parameters_and_gradients_become_views_and_keep_their_values(config: RunConfig, model: GPT) -> None:
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    buffers, _reducer = with_reducer(config, model)
    backward(model)
    named = dict(model.named_parameters())
    for placement in buffers.placements:
        parameter = named[placement.spec.name]
        assert torch.equal(parameter.detach(), before[placement.spec.name])
        assert parameter.data_ptr() == buffers.parameters[placement.span].data_ptr()
        assert parameter.grad is not None
        assert parameter.grad.data_ptr() == buffers.gradients[placement.span].data_ptr()
        assert float(buffers.gradients[placement.span].abs().max()) > 0, placement.spec.name
    buffers.parameters.zero_()
    assert all(float(parameter.detach().abs().sum()) == 0 for parameter in named.values())


def test_a_second_micro_batch_adds_to_the_first_in_place(config: RunConfig, model: GPT) -> None:
    buffers, _reducer = with_reducer(config, model)
    backward(model)
    once, address = buffers.gradients.clone(), buffers.gradients.data_ptr()
    backward(model)
    assert buffers.gradients.data_ptr() == address
    assert torch.allclose(buffers.gradients, 2 * once, rtol=1e-5, atol=1e-7)


def test_tensors_lie_in_the_order_in_which_they_are_summed_over_other_groups(config: RunConfig, model: GPT) -> None:
    specs = model_tensors(config.model, 1)
    buffers = buffers_of(config, model)
    split, replicated = (
        [
            spec.name
            for spec in reversed(specs)
            if spec.name != TOKEN_EMBEDDING and (spec.tp_dim is None) == is_replicated
        ]
        for is_replicated in (False, True)
    )
    assert [placement.spec.name for placement in buffers.placements] == [*split, *replicated, TOKEN_EMBEDDING]
    inside = buffers.parameters[buffers.layout.tp_replicated]
    assert inside.numel() >= sum(p.numel() for n, p in model.named_parameters() if n in replicated)
    assert buffers.layout.embedding == buffers.placements[-1].span


def test_runs_cover_every_element_once_and_agree_on_weight_decay(config: RunConfig, model: GPT) -> None:
    buffers = buffers_of(config, model)
    runs = runs_of(buffers)
    assert sum(run.parameters.numel() for run in runs) == buffers.parameters.numel()
    *earlier, last = runs
    assert all(run.decays != following.decays for run, following in zip(earlier, earlier[1:]))
    assert last.parameters.data_ptr() == model.token_embedding.weight.data_ptr()  # whatever comes before it
    for run in runs:
        run.parameters.fill_(2.0 if run.decays else 1.0)
    for name, parameter in model.named_parameters():
        decays = not name.endswith("bias") and "norm" not in name
        assert bool((parameter == (2.0 if decays else 1.0)).all()), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shards", [2, 3])
def test_shards_of_all_replicas_cover_every_element_once(shards: int, dtype: str) -> None:
    config = tiny_config(f"training.dtype={dtype}")
    model = build_model(config, Communicator.alone())
    buffers = buffers_of(config, model, shards, 10_000)
    assert len(buffers.buckets) > 2
    seen = torch.zeros(buffers.parameters.numel(), dtype=torch.int64)
    for shard in range(shards):
        owned = buffers.layout.owned(shard, shards)
        masters = MasterWeights(buffers, owned) if dtype == "bfloat16" else None
        for owned_range in owned:
            seen[owned_range.parameters] += 1
        if masters is not None:
            owned_parameters = torch.cat([buffers.parameters[owned_range.parameters] for owned_range in owned])
            assert torch.equal(masters.values, owned_parameters.float())
        offset = 0
        for run in buffers.param_ranges(owned, lambda spec: True, masters):
            assert run.parameters.numel() == run.gradients.numel()
            if masters is not None:
                assert run.parameters.data_ptr() == masters.values[offset:].data_ptr()
            offset += run.parameters.numel()
        assert offset == sum(owned_range.parameters.stop - owned_range.parameters.start for owned_range in owned)
    assert bool((seen == 1).all())


@pytest.mark.parametrize("shards", [1, 3])
def test_ranks_step_copies_of_heads_of_keys_in_equal_ranges_and_one_of_them_counts_each(shards: int) -> None:
    tp, specs = 4, model_tensors(tiny_config("model.kv_heads=2").model, 4)
    ranges_of_ranks: List[List[Tuple[int, int]]] = []
    counted = torch.zeros(tp)
    for rank in range(tp):
        named = {spec.name: torch.nn.Parameter(torch.ones(spec.local_shape(tp))) for spec in specs}
        buffers = FlatBuffers(named, specs, shards, 2048, tp)
        copied = buffers.layout.copied
        owned = buffers.layout.owned(0, shards)
        ranges = list(buffers.param_ranges(owned, partial(TensorSpec.is_first_copy, tp_rank=rank)))
        inside = [run for run in ranges if copied.start <= run.first < copied.stop]
        ranges_of_ranks.append([(run.first, run.parameters.numel()) for run in inside])
        assert len({run.counts for run in inside}) == 1
        counted[rank] = float(inside[0].counts)
    assert all(ranges == ranges_of_ranks[0] for ranges in ranges_of_ranks)
    assert counted.tolist() == [1, 0, 1, 0]


def test_the_norm_is_that_of_all_gradients(config: RunConfig, model: GPT) -> None:
    buffers, _reducer = with_reducer(config, model)
    for placement in buffers.placements:
        values = torch.randn(placement.size, generator=torch.Generator().manual_seed(placement.start))
        buffers.gradients[placement.span].copy_(values)
    judge = sum(float((p.grad.double() ** 2).sum()) for p in model.parameters() if p.grad is not None)
    runs = list(buffers.param_ranges(buffers.layout.owned(0, 1), counted_in_norm(ProcessGrid.alone(), False)))
    squares, finite = squares_of(runs)
    assert finite and squares == pytest.approx(judge, rel=1e-6)
    buffers.gradients[3] = float("inf")
    assert not squares_of(runs)[1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tensor_starts_on_a_cache_line_and_gaps_hold_zeros(dtype: str) -> None:
    config = tiny_config(f"training.dtype={dtype}", "model.hidden=20", "model.ffn_hidden=7")  # odd sizes: many gaps
    model = build_model(config, Communicator.alone())
    buffers = buffers_of(config, model)
    used = torch.zeros_like(buffers.parameters, dtype=torch.bool)
    for placement in buffers.placements:
        for flat in (buffers.parameters, buffers.gradients):
            assert placement.start * flat.element_size() % ALIGNMENT_BYTES == 0
        assert not bool(used[placement.span].any())
        used[placement.span] = True
    assert int(used.sum()) == sum(parameter.numel() for parameter in model.parameters())
    assert not bool(used.all())
    assert float(buffers.parameters[~used].float().abs().sum()) == float(buffers.gradients[~used].abs().sum()) == 0.0


def test_changing_the_flat_parameters_changes_the_model_s_loss(config: RunConfig, model: GPT) -> None:
    buffers = buffers_of(config, model)
    tokens = torch.from_numpy(ByteSamples(24).batch(0, 1))
    model.eval()
    before = float(model(tokens[:, :-1], tokens[:, 1:]).detach())
    buffers.parameters.mul_(1.5)
    assert float(model(tokens[:, :-1], tokens[:, 1:]).detach()) != before


def test_the_norm_of_over_a_million_equal_gradients_stays_within_the_tolerance_of_parity() -> None:
    # equal terms are the worst case of a float32 sum: every addition rounds the same way (3e-6 was measured)
    wide = tiny_config("training.dtype=float32", "model.hidden=128", "model.vocab_size=8192")
    wide_model = build_model(wide, Communicator.alone())
    buffers = buffers_of(wide, wide_model)
    for placement in buffers.placements:
        buffers.gradients[placement.span] = 1e-3
    count = sum(placement.size for placement in buffers.placements)
    assert count > 10**6
    assert squares_of(runs_of(buffers))[0] ** 0.5 == pytest.approx(1e-3 * count**0.5, rel=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_of_16_bits_are_added_up_in_float32_and_freed(dtype: str) -> None:
    config = tiny_config(f"training.dtype={dtype}", "model.dropout=0", "model.attention_dropout=0")
    model = build_model(config, Communicator.alone())
    buffers, _reducer = with_reducer(config, model)
    assert buffers.parameters.dtype == getattr(torch, dtype) and buffers.gradients.dtype == torch.float32
    backward(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    once = buffers.gradients.clone()
    # gradients of all other tensors are sums over tokens in float32
    products = [p.span for p in buffers.placements if p.spec.decays and p.spec.name != TOKEN_EMBEDDING]
    product_elements = torch.cat([torch.arange(part.start, part.stop) for part in products])
    rounded = once.to(getattr(torch, dtype)).float()
    assert not torch.equal(once, rounded) and float(once[product_elements].abs().max()) > 0
    for _ in range(2):
        backward(model)
    if compat.has_kernel("matmul", getattr(torch, dtype)):  # else products are added to the sums as they are
        assert torch.equal(once[product_elements], rounded[product_elements])
        assert torch.equal(buffers.gradients[product_elements], (once + once + once)[product_elements])
    assert torch.allclose(buffers.gradients, 3.0 * once, rtol=1e-5, atol=1e-7)
    assert not torch.equal(buffers.gradients, buffers.gradients.to(getattr(torch, dtype)).float())


def test_both_gradients_of_the_token_embedding_are_added_up_in_float32() -> None:
    """Each gradient fits into 16 bits and their sum does not: a rank that computes both must not overflow if two ranks
    that compute one each do not."""
    config = tiny_config("training.dtype=float16")
    model = build_model(config, Communicator.alone())
    buffers, _reducer = with_reducer(config, model)
    table, vocabulary = model.token_embedding, config.model.vocab_size
    table.weight.detach().zero_()  # all probabilities are 1 / vocabulary
    embedded, each_gradient = table(torch.tensor([3])), 40000.0
    hidden = torch.full((1, config.model.hidden), -1.0, dtype=torch.float16)
    scale = each_gradient * vocabulary / (vocabulary - 1)
    loss = vocab_parallel_cross_entropy(
        hidden,
        table.weight,
        torch.tensor([3]),
        Communicator.alone(),
        vocabulary,
        options=LossOptions(gradient_scale=scale),
    )
    (loss + (embedded * each_gradient).float().sum()).backward()
    row = buffers.gradients[buffers.layout.embedding].view(-1, config.model.hidden)[3]
    assert row.tolist() == pytest.approx([2.0 * each_gradient] * config.model.hidden, rel=1e-3)


def test_sums_over_tokens_do_not_depend_on_how_many_of_them_a_rank_has() -> None:
    """Gradients of biases and LayerNorms over all tokens do not fit into float16, and those over two halves do. One
    rank must not overflow if ranks that share the tokens do not."""
    config = tiny_config("training.dtype=float16")
    model = build_model(config, Communicator.alone())
    buffers, _reducer = with_reducer(config, model)
    norm, down = model.blocks["0"].attention_norm, model.blocks["0"].mlp.down
    x = torch.randn(1, 64, config.model.ffn_size, generator=torch.Generator().manual_seed(1)).half()
    ones = torch.ones(1, 64, config.model.hidden).half()
    signs = x[..., : config.model.hidden].sign()
    for layer, parameter, gradient in (
        (norm, norm.weight, signs * 2000.0),
        (norm, norm.bias, ones * 1500.0),
        (down, down.bias, ones * 1500.0),
    ):
        layer_input = x[..., : config.model.hidden] if layer is norm else x
        sums = main_grad(parameter)
        totals = []
        for chunk_count in (1, 2):
            buffers.gradients.zero_()
            for part, grad in zip(layer_input.chunk(chunk_count, dim=1), gradient.chunk(chunk_count, dim=1)):
                layer(part.detach().requires_grad_()).backward(grad)
            assert sums is not None
            totals.append(sums.clone())
        assert 65504.0 < float(totals[0].abs().max()) < math.inf
        assert torch.allclose(*totals, rtol=1e-5)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float64", 1e-14), ("float32", 1e-6), ("bfloat16", 2e-2), ("float16", 2e-3)]
)
def test_gradients_added_by_layers_equal_those_of_autograd_and_every_hook_runs_once(
    dtype: str, tolerance: float, recompute: str
) -> None:
    config = tiny_config(f"training.dtype={dtype}", f"training.recompute={recompute}")
    sums, finished = [], []
    for accumulate_in_layers in (True, False):
        model = build_model(config, Communicator.alone())
        buffers, _reducer = with_reducer(config, model, accumulate_in_layers)
        assert all((main_grad(parameter) is not None) == accumulate_in_layers for parameter in model.parameters())
        counts: Dict[str, int] = {}
        nodes = []
        for name, parameter in model.named_parameters():
            nodes.append(accumulate_grad_node(parameter))
            nodes[-1].register_hook(lambda *_, name=name, counts=counts: counts.update({name: counts.get(name, 0) + 1}))
        for _ in range(2):
            backward(model)
        sums.append(buffers)
        finished.append(counts)
    assert finished[0] == finished[1] == dict.fromkeys(dict(model.named_parameters()), 2)
    for placement in sums[0].placements:
        ours, judge = (buffers.gradients[placement.span] for buffers in sums)
        assert float((ours - judge).abs().max()) <= tolerance * float(judge.abs().max()), placement.spec.name


def test_a_gradient_sum_is_complete_before_the_hook_runs(config: RunConfig, model: GPT) -> None:
    buffers, _reducer = with_reducer(config, model)
    seen = {}
    nodes = []
    named = dict(model.named_parameters())
    for placement in buffers.placements:
        nodes.append(accumulate_grad_node(named[placement.spec.name]))
        nodes[-1].register_hook(lambda *_, p=placement: seen.update({p.spec.name: buffers.gradients[p.span].clone()}))
    backward(model)
    for placement in buffers.placements:
        assert torch.equal(seen[placement.spec.name], buffers.gradients[placement.span]), placement.spec.name


def test_masters_keep_steps_that_16_bits_would_lose() -> None:
    config = tiny_config("training.dtype=bfloat16")
    model = build_model(config, Communicator.alone())
    buffers = buffers_of(config, model)
    masters = MasterWeights(buffers, buffers.layout.owned(0, 1))
    weight = model.final_norm.weight
    assert bool((weight == 1.0).all())
    small, steps = 1e-4, 60  # a bfloat16 below 1 is 0.0039 away from it
    alone = weight.detach().clone()
    for _ in range(steps):
        masters.values.sub_(small)
        masters.round()
        alone.sub_(small)
    assert bool((alone == 1.0).all())
    assert (
        torch.equal(weight.detach(), torch.full_like(weight, 1.0 - steps * small)) and float(weight[0].detach()) < 1.0
    )
