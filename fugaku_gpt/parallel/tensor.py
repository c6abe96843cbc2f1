"""The layers that tensor parallelism cuts (Shoeybi et al. 2019, "Megatron-LM", section 3). On one rank: plain layers.

A column-parallel layer holds some of the outputs, a row-parallel layer some of the inputs; one after the other they
need one all-reduce in the forward pass (of the row-parallel outputs) and one in the backward pass (of the gradient of
the column-parallel inputs). Each is done in place on the tensor that the matrix product has just made.

With ``sequence_parallel`` the activations outside of the two are cut too: ``sequence.py`` says how they lie.
"""

from __future__ import annotations

from typing import Any, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from fugaku_gpt import compat
from fugaku_gpt.comm import Communicator
from fugaku_gpt.parallel.sequence import gather, scatter, start_gather, start_scatter


class ColumnParallelLinear(nn.Module):
    """y = x Wᵀ + b with the outputs cut over ``tp``: [..., inputs] → [..., sections * outputs / tp].

    ``sections`` equal parts (query, key and value) are each cut on their own, so that a rank gets its heads of all
    three: weight [sections, outputs / tp, inputs], or [outputs / tp, inputs] for one section.

    With ``sequence_parallel`` [b, s / tp, inputs] → [tp * b, s / tp, ...].
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        tp: Communicator,
        dtype: torch.dtype,
        sections: int = 1,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        rows: Tuple[int, ...] = (outputs // tp.size,) if sections == 1 else (sections, outputs // tp.size)
        self.weight = nn.Parameter(torch.empty(*rows, inputs, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(*rows, dtype=dtype))
        self._tp = tp
        self._function = _GatherColumnParallel if sequence_parallel else _ColumnParallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight.view(-1, self.weight.shape[-1]), self.bias.view(-1)
        if self._tp.size == 1 and compat.has_kernel("linear", x.dtype):
            return F.linear(x, weight, bias)
        return self._function.apply(x, weight, bias, self._tp)


class RowParallelLinear(nn.Module):
    """y = x Wᵀ + b with the inputs cut over ``tp``: [..., inputs / tp] → [..., outputs], equal on every rank of ``tp``.

    With ``sequence_parallel`` [tp * b, s / tp, inputs / tp] → [b, s / tp, outputs].
    """

    def __init__(
        self, inputs: int, outputs: int, tp: Communicator, dtype: torch.dtype, sequence_parallel: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs // tp.size, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype))
        self._tp = tp
        self._function = _RowParallelScatter if sequence_parallel else _RowParallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._tp.size == 1 and compat.has_kernel("linear", x.dtype):
            return F.linear(x, self.weight, self.bias)
        return self._function.apply(x, self.weight, self.bias, self._tp)


class VocabParallelEmbedding(nn.Module):
    """Rows of a table by token id, the table cut over ``tp`` by rows: [...] int64 → [..., width].

    With ``sequence_parallel`` [tp * b, s / tp] → [b, s / tp, width].
    """

    def __init__(
        self, rows: int, width: int, tp: Communicator, dtype: torch.dtype, sequence_parallel: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows // tp.size, width, dtype=dtype))
        self.first_row = tp.rank * (rows // tp.size)
        self._tp = tp
        self._sequence_parallel = sequence_parallel

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self._tp.size == 1 and compat.has_kernel("embedding", self.weight.dtype):
            return F.embedding(tokens, self.weight)
        return _VocabParallelLookup.apply(tokens, self.weight, self.first_row, self._tp, self._sequence_parallel)


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, tp: Communicator) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tp = tp
        return compat.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        grad_x = compat.matmul(grad, weight)  # this rank's outputs only: the sum over tp is the gradient of x
        ctx.tp.all_reduce(grad_x)
        rows = _rows(grad)
        return grad_x, compat.matmul(rows.t(), _rows(x)), compat.sum_of_rows(rows), None


class _RowParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, tp: Communicator) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        y = compat.linear(x, weight)
        tp.all_reduce(y)
        return y.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        rows = _rows(grad)
        return compat.matmul(grad, weight), compat.matmul(rows.t(), _rows(x)), compat.sum_of_rows(rows), None


class _GatherColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, tp: Communicator) -> torch.Tensor:
        ctx.save_for_backward(x, weight)  # this rank's part alone: the backward pass gathers again
        ctx.tp = tp
        return compat.linear(gather(x, tp), weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        x, gathering = start_gather(x, ctx.tp)
        grad_x = compat.matmul(grad, weight)
        gathering.wait()
        grad_x, scattering = start_scatter(grad_x, ctx.tp)
        rows = _rows(grad)
        grad_weight, grad_bias = compat.matmul(rows.t(), _rows(x)), compat.sum_of_rows(rows)
        scattering.wait()
        return grad_x, grad_weight, grad_bias, None


class _RowParallelScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, tp: Communicator) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tp = tp
        return scatter(compat.linear(x, weight), tp) + bias  # a tensor of its own, so that the whole one is freed

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        whole = gather(grad, ctx.tp)
        grad_weight = compat.matmul(_rows(whole).t(), _rows(x))
        return compat.matmul(whole, weight), grad_weight, compat.sum_of_rows(_rows(grad)), None


class _VocabParallelLookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: torch.Tensor,
        weight: torch.Tensor,
        first_row: int,
        tp: Communicator,
        sequence_parallel: bool,
    ) -> torch.Tensor:
        local = tokens - first_row
        elsewhere = (local < 0) | (local >= weight.shape[0])
        local = local.masked_fill(elsewhere, 0)
        ctx.save_for_backward(local, elsewhere)
        ctx.shape = weight.shape
        ctx.tp = tp if sequence_parallel else None
        found = F.embedding(local, weight).masked_fill_(elsewhere.unsqueeze(-1), 0.0)
        # one rank has each row, the others zeros: the sum is exact
        if sequence_parallel:
            return scatter(found, tp).clone()  # a tensor of its own, so that the whole one is freed
        tp.all_reduce(found)
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Tuple[None, torch.Tensor, None, None, None]:
        local, elsewhere = ctx.saved_tensors
        if ctx.tp is not None:
            grad = gather(grad, ctx.tp)
        here = ~elsewhere.view(-1)
        rows, values = local.view(-1)[here], _rows(grad)[here]
        grad_weight = grad.new_zeros(ctx.shape)
        if grad.dtype in (torch.float32, torch.float64):
            grad_weight.index_add_(0, rows, values)
        else:  # a frequent token has thousands of terms: they are added up in float32
            used, where = torch.unique(rows, return_inverse=True)
            sums = torch.zeros(used.numel(), values.shape[1]).index_add_(0, where, values.float())
            grad_weight[used] = sums.to(grad.dtype)
        return None, grad_weight, None, None, None


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])
