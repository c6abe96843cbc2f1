"""Tests that tensor-parallel layers are plain layers on one rank, and that their hand-written gradients are right.

``tests/mpi`` compares several ranks with one rank.
"""

from __future__ import annotations

import math
from typing import Any, List, Tuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fugaku_gpt.comm import Communicator
from fugaku_gpt.parallel.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    _ColumnParallel,
    _RowParallel,
    _VocabParallelLookup,
    column_parallel_pair,
)

ALONE = Communicator.alone("tp")
INPUTS, OUTPUTS, ROWS = 6, 8, 11


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def fill(layer: nn.Module) -> None:
    for seed, parameter in enumerate(layer.parameters()):
        with torch.no_grad():
            parameter.copy_(random(*parameter.shape, seed=seed + 1))


def output_and_gradients(layer: nn.Module, x: torch.Tensor) -> List[torch.Tensor]:
    """Return y, dy/dx and the gradients of all parameters, the latter as [rows, inputs] and [rows]."""
    y = layer(x)
    y.backward(random(*y.shape, seed=9).detach())
    gradients = [parameter.grad for parameter in layer.parameters()]
    assert all(gradient is not None for gradient in gradients)
    return [y.detach(), *([x.grad] if x.grad is not None else []), *gradients]  # type: ignore[list-item]


def linear_layers() -> List[Tuple[str, nn.Module]]:
    return [
        ("column-parallel", ColumnParallelLinear(INPUTS, OUTPUTS, ALONE, torch.float64)),
        ("column-parallel in three sections", ColumnParallelLinear(INPUTS, OUTPUTS, ALONE, torch.float64, sections=3)),
        ("row-parallel", RowParallelLinear(INPUTS, OUTPUTS, ALONE, torch.float64)),
    ]


@pytest.mark.parametrize(("name", "layer"), linear_layers(), ids=[name for name, _ in linear_layers()])
@pytest.mark.parametrize("leading", [(5,), (2, 3)])
def test_a_linear_layer_on_a_single_rank_is_nn_linear(name: str, layer: nn.Module, leading: Tuple[int, ...]) -> None:
    layer.zero_grad()
    fill(layer)
    weight, bias = (parameter.detach() for parameter in layer.parameters())
    judge = nn.Linear(INPUTS, bias.numel()).double()
    with torch.no_grad():
        judge.weight.copy_(weight.reshape(-1, INPUTS))
        judge.bias.copy_(bias.reshape(-1))
    # its rows: of three dimensions older builds round the product before they add the bias, which ours never does
    theirs = output_and_gradients(judge, random(math.prod(leading), INPUTS))
    for parameter in layer.parameters():
        parameter.grad = None
    ours = output_and_gradients(layer, random(*leading, INPUTS))
    assert len(ours) == len(theirs) == 4
    assert ours[0].shape == (*leading, bias.numel()) and ours[1].shape == (*leading, INPUTS)
    for actual, expected in zip(ours, theirs):
        assert torch.equal(actual.reshape(expected.shape), expected)


def test_a_layer_that_trains_multiplies_few_rows_in_the_same_way_with_and_without_gradients() -> None:
    for cut in (ColumnParallelLinear, RowParallelLinear):
        layer = cut(70, 40, ALONE, torch.float32)
        fill(layer)
        x = random(3, 70).detach().float()
        with torch.no_grad():  # as recomputed layers run for the first time
            without = layer.train()(x)
            in_use = layer.eval()(x)
        assert torch.equal(without, layer.train()(x.requires_grad_()))
        assert torch.allclose(without, in_use, rtol=1e-5, atol=1e-5)


def test_sections_are_query_key_and_value_in_this_order() -> None:
    layer = ColumnParallelLinear(INPUTS, OUTPUTS, ALONE, torch.float64, sections=3)
    fill(layer)
    assert tuple(layer.weight.shape) == (3, OUTPUTS, INPUTS) and tuple(layer.bias.shape) == (3, OUTPUTS)
    x = random(2, INPUTS)
    outputs = layer(x).view(2, 3, OUTPUTS)
    for section in range(3):
        expected = x.matmul(layer.weight[section].t()) + layer.bias[section]
        assert torch.allclose(outputs[:, section], expected, rtol=0, atol=1e-13)


def test_an_embedding_on_a_single_rank_is_nn_embedding() -> None:
    layer = VocabParallelEmbedding(ROWS, INPUTS, ALONE, torch.float64)
    fill(layer)
    judge = nn.Embedding(ROWS, INPUTS).double()
    with torch.no_grad():
        judge.weight.copy_(layer.weight)
    tokens = torch.tensor([[0, 3, 3], [10, 0, 7]])  # repeated ids add up
    for actual, expected in zip(output_and_gradients(layer, tokens), output_and_gradients(judge, tokens)):
        assert torch.equal(actual, expected)
    assert layer.first_row == 0


@pytest.mark.parametrize("function", [_ColumnParallel, _RowParallel])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_hand_written_gradients_of_a_cut_layer_equal_finite_differences(
    function: torch.autograd.Function, sequence_parallel: bool
) -> None:
    more = ALONE, None, sequence_parallel, function is _ColumnParallel
    x, weight, bias = random(2, 3, INPUTS), random(OUTPUTS, INPUTS, seed=1), random(OUTPUTS, seed=2)
    assert torch.autograd.gradcheck(lambda x, *parameters: function.apply(x, *more, *parameters), (x, weight, bias))
    assert torch.autograd.gradcheck(lambda x, weight: function.apply(x, *more, weight, None), (x, weight))


def test_a_pair_of_layers_equals_both_one_after_the_other() -> None:
    """But that their input is prepared once in each pass."""
    first = ColumnParallelLinear(INPUTS, OUTPUTS, ALONE, torch.float64)
    second = ColumnParallelLinear(INPUTS, 3, ALONE, torch.float64, 2, has_bias=False)
    fill(first)
    fill(second)
    prepared: List[int] = []

    def prepare(x: torch.Tensor) -> torch.Tensor:
        prepared.append(1)
        return torch.tanh(x)

    results: List[List[torch.Tensor]] = []
    for apply in (
        lambda x: column_parallel_pair(first, second, x, prepare),
        lambda x: (first(x, torch.tanh), second(x, torch.tanh)),
    ):
        x = random(ROWS, INPUTS)
        for parameter in (*first.parameters(), *second.parameters()):
            parameter.grad = None
        outputs = apply(x)
        sum((y * random(*y.shape, seed=y.shape[1]).detach()).sum() for y in outputs).backward()  # type: ignore[union-attr]
        gradients = [parameter.grad for parameter in (*first.parameters(), *second.parameters())]
        results.append([*(y.detach() for y in outputs), x.grad, *gradients])  # type: ignore[list-item]
    assert len(prepared) == 2 and second.bias is None
    for ours, expected in zip(*results):
        assert float((ours - expected).abs().max()) <= 1e-14


@pytest.mark.parametrize("first_row", [0, 4])
def test_a_slice_of_an_embedding_gives_zeros_for_the_rows_of_other_ranks(first_row: int) -> None:
    table, tokens = random(5, INPUTS), torch.tensor([[0, 4, 4], [8, 9, 3]])
    embedded = _VocabParallelLookup.apply(tokens, table, first_row, ALONE, False)
    embedded.sum().backward()
    times = torch.zeros(5, dtype=torch.float64)
    for i in range(2):
        for j in range(3):
            row = int(tokens[i, j]) - first_row
            if 0 <= row < 5:
                assert torch.equal(embedded[i, j], table[row])
                times[row] += 1
            else:
                assert float(embedded[i, j].detach().abs().sum()) == 0.0
    assert table.grad is not None and torch.equal(table.grad, times.unsqueeze(1).expand(5, INPUTS))


@pytest.mark.parametrize("cut", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_preparation_of_a_layer_s_input_is_recomputed_and_not_saved(cut: Any, sequence_parallel: bool) -> None:
    norm = nn.LayerNorm(INPUTS).double()
    fill(norm)
    results, calls = [], []

    def prepare(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.detach().clone())
        prepared: torch.Tensor = F.gelu(norm(x))
        return prepared

    for again in (False, True):
        layer = cut(INPUTS, OUTPUTS, ALONE, torch.float64, sequence_parallel=sequence_parallel, recompute_input=again)
        fill(layer)
        calls.clear()
        x = random(2, 3, INPUTS)
        for parameter in (*layer.parameters(), *norm.parameters()):
            parameter.grad = None
        y = layer(x, prepare)
        y.backward(random(*y.shape, seed=9).detach())
        assert len(calls) == (2 if again else 1) and torch.equal(calls[0], calls[-1])
        results.append([y.detach(), x.grad, *(p.grad for p in (*layer.parameters(), *norm.parameters()))])
    for without_recompute, with_recompute in zip(*results):
        assert without_recompute is not None and torch.equal(without_recompute, with_recompute)
    with torch.no_grad():
        calls.clear()
        layer(random(2, 3, INPUTS), prepare)
    assert len(calls) == 1
    calls.clear()
    layer(random(2, 3, INPUTS).detach(), prepare).sum().backward()  # only the layers' parameters need gradients
    assert len(calls) == 1 and norm.weight.grad is not None
