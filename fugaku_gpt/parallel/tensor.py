"""The layers that tensor parallelism cuts (Shoeybi et al. 2019, "Megatron-LM", section 3). On one rank: plain layers.

A column-parallel layer holds some of the outputs, a row-parallel layer some of the inputs; one after the other they
need one all-reduce in the forward pass (of the row-parallel outputs) and one in the backward pass (of the gradient of
the column-parallel inputs). Each is done in place on the tensor that the matrix product has just made.

With ``sequence_parallel`` the activations outside of the two are cut too: ``sequence.py`` says how they lie.

Gradients of weights are added up by the products that make them where a weight has a ``main_grad``
(``gradient_path.py``): no tensor of a weight's size is made, and none is read and written again to be added. A
schedule can defer these products.

What comes right before a cut layer and is cheap (LayerNorm, GELU) can be handed to it as ``prepare``. Of such a layer's
input only that is kept which the cheap operation starts from: the backward pass does it once more. In a transformer
layer that leaves 10 of 16 tensors of b s h elements.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from fugaku_gpt import compat, ops
from fugaku_gpt.comm import Communicator
from fugaku_gpt.parallel.gradient_path import add_weight_grad, main_grad
from fugaku_gpt.parallel.sequence import gather, scatter, start_gather, start_scatter

Prepare = Callable[[torch.Tensor], torch.Tensor]


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
        recompute_input: bool = True,
    ) -> None:
        """``recompute_input``: the backward pass prepares the input again; False: the prepared input is kept."""
        super().__init__()
        rows: Tuple[int, ...] = (outputs // tp.size,) if sections == 1 else (sections, outputs // tp.size)
        self.weight = nn.Parameter(torch.empty(*rows, inputs, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(*rows, dtype=dtype))
        self._tp = tp
        self._function = _GatherColumnParallel if sequence_parallel else _ColumnParallel
        self._recompute_input = recompute_input

    def forward(self, x: torch.Tensor, prepare: Optional[Prepare] = None) -> torch.Tensor:
        """``prepare``: what is done to ``x`` first."""
        return _apply(self._function, x, self.weight, self.bias, self._tp, prepare, self._recompute_input)


class RowParallelLinear(nn.Module):
    """y = x Wᵀ + b with the inputs cut over ``tp``: [..., inputs / tp] → [..., outputs], equal on every rank of ``tp``.

    With ``sequence_parallel`` [tp * b, s / tp, inputs / tp] → [b, s / tp, outputs].
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        tp: Communicator,
        dtype: torch.dtype,
        sequence_parallel: bool = False,
        recompute_input: bool = True,
    ) -> None:
        """``recompute_input``: the backward pass prepares the input again; False: the prepared input is kept."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs // tp.size, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype))
        self._tp = tp
        self._function = _RowParallelScatter if sequence_parallel else _RowParallel
        self._recompute_input = recompute_input

    def forward(self, x: torch.Tensor, prepare: Optional[Prepare] = None) -> torch.Tensor:
        """``prepare``: what is done to ``x`` first."""
        return _apply(self._function, x, self.weight, self.bias, self._tp, prepare, self._recompute_input)


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
        x: torch.Tensor
        if self._tp.size == 1:
            x = _Lookup.apply(tokens, self.weight)
        else:
            x = _VocabParallelLookup.apply(tokens, self.weight, self.first_row, self._tp, self._sequence_parallel)
        return x


def _apply(
    function: Any,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    tp: Communicator,
    prepare: Optional[Prepare],
    recompute_input: bool,
) -> torch.Tensor:
    if prepare is not None and not (recompute_input and x.requires_grad):  # the backward pass is reached through x
        x, prepare = prepare(x), None
    y: torch.Tensor = function.apply(x, weight, bias, tp, prepare)
    return y


# of x, weight, bias; tp, prepare
_Gradients = Tuple[torch.Tensor, Optional[torch.Tensor], Optional[torch.Tensor], None, None]


class _CutLinear(torch.autograd.Function):
    """What the four have in common: what they keep, and the gradients of weight [..., inputs] and bias [...]."""

    @staticmethod
    def keep(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        tp: Communicator,
        prepare: Optional[Prepare],
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """Keep what the backward pass needs; returns the product's input, and the weight as a matrix."""
        ctx.save_for_backward(x, weight)
        ctx.tp, ctx.prepare = tp, prepare
        # the parameters themselves: what is saved comes back without their main_grad in old versions of PyTorch
        ctx.weight, ctx.bias = weight, bias
        return x if prepare is None else prepare(x), _rows(weight)

    @staticmethod
    def prepared(ctx: Any) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What was kept, as a leaf where it is to be prepared; the product's input, prepared again; and the weight."""
        x, weight = ctx.saved_tensors
        if ctx.prepare is None:
            return x, x, weight
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            return leaf, ctx.prepare(leaf), weight

    @staticmethod
    def gradient_before(ctx: Any, leaf: torch.Tensor, x: torch.Tensor, grad_x: torch.Tensor) -> torch.Tensor:
        """From the gradient of the product's input ``x`` that of what was kept; gradients of the preparation's own
        parameters go to their sums."""
        if ctx.prepare is None:
            return grad_x
        compat.backward(x, grad_x)
        assert leaf.grad is not None
        return leaf.grad

    @staticmethod
    def weight_gradient(ctx: Any, grad: torch.Tensor, x: torch.Tensor) -> Optional[torch.Tensor]:
        """gradᵀ x; None where it is added to the weight's ``main_grad``, at once or deferred."""
        grad, x, sums = _rows(grad), _rows(x.detach()), main_grad(ctx.weight)
        if sums is None:
            return ops.matmul(grad.t(), x).view(ctx.weight.shape)
        add_weight_grad(ctx.weight, partial(ops.add_product, _rows(sums), grad.t(), x))
        return None

    @staticmethod
    def bias_gradient(ctx: Any, grad: torch.Tensor) -> Optional[torch.Tensor]:
        """The sum of grad over tokens; None where it is added to the bias's ``main_grad``."""
        bias_grad, sums = ops.sum_of_rows(_rows(grad)).view(ctx.bias.shape), main_grad(ctx.bias)
        if sums is None:
            return bias_grad.to(grad.dtype)
        sums.add_(bias_grad)
        return None


class _ColumnParallel(_CutLinear):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        tp: Communicator,
        prepare: Optional[Prepare],
    ) -> torch.Tensor:
        return ops.linear(*_CutLinear.keep(ctx, x, weight, bias, tp, prepare), bias.view(-1))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> _Gradients:
        leaf, x, weight = _CutLinear.prepared(ctx)
        grad_x = ops.matmul(grad, _rows(weight))  # this rank's outputs only: the sum over tp is the gradient of x
        ctx.tp.all_reduce(grad_x)
        grad_weight, grad_bias = _CutLinear.weight_gradient(ctx, grad, x), _CutLinear.bias_gradient(ctx, grad)
        return _CutLinear.gradient_before(ctx, leaf, x, grad_x), grad_weight, grad_bias, None, None


class _RowParallel(_CutLinear):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        tp: Communicator,
        prepare: Optional[Prepare],
    ) -> torch.Tensor:
        x, weight = _CutLinear.keep(ctx, x, weight, bias, tp, prepare)
        # PyTorch's result may be a view, to which the residual could not be added in place
        y = ops.linear(x, weight, bias if tp.size == 1 else None).data
        if tp.size > 1:
            tp.all_reduce(y)
            y.add_(bias)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> _Gradients:
        leaf, x, weight = _CutLinear.prepared(ctx)
        grad_x = ops.matmul(grad, weight)
        grad_weight, grad_bias = _CutLinear.weight_gradient(ctx, grad, x), _CutLinear.bias_gradient(ctx, grad)
        return _CutLinear.gradient_before(ctx, leaf, x, grad_x), grad_weight, grad_bias, None, None


class _GatherColumnParallel(_CutLinear):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        tp: Communicator,
        prepare: Optional[Prepare],
    ) -> torch.Tensor:
        # of x this rank's part is kept: the backward pass gathers again
        x, weight = _CutLinear.keep(ctx, x, weight, bias, tp, prepare)
        return ops.linear(gather(x, tp), weight, bias.view(-1))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> _Gradients:
        leaf, x, weight = _CutLinear.prepared(ctx)
        whole, gathering = start_gather(x.detach(), ctx.tp)
        grad_x = ops.matmul(grad, _rows(weight))
        gathering.wait()
        grad_x, scattering = start_scatter(grad_x, ctx.tp)
        grad_weight, grad_bias = _CutLinear.weight_gradient(ctx, grad, whole), _CutLinear.bias_gradient(ctx, grad)
        scattering.wait()
        return _CutLinear.gradient_before(ctx, leaf, x, grad_x), grad_weight, grad_bias, None, None


class _RowParallelScatter(_CutLinear):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        tp: Communicator,
        prepare: Optional[Prepare],
    ) -> torch.Tensor:
        x, weight = _CutLinear.keep(ctx, x, weight, bias, tp, prepare)
        return scatter(ops.linear(x, weight), tp) + bias  # a tensor of its own, so that the whole one is freed

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> _Gradients:
        leaf, x, weight = _CutLinear.prepared(ctx)
        whole = gather(grad, ctx.tp)
        grad_weight, grad_bias = _CutLinear.weight_gradient(ctx, whole, x), _CutLinear.bias_gradient(ctx, grad)
        grad_x = ops.matmul(whole, weight)
        return _CutLinear.gradient_before(ctx, leaf, x, grad_x), grad_weight, grad_bias, None, None


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        ctx.shape, ctx.main_grad = weight.shape, main_grad(weight)
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Tuple[None, Optional[torch.Tensor]]:
        (tokens,) = ctx.saved_tensors
        return None, _table_gradient(ctx, tokens.reshape(-1), _rows(grad))


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
        ctx.shape, ctx.main_grad = weight.shape, main_grad(weight)
        ctx.tp = tp if sequence_parallel else None
        found = F.embedding(local, weight).masked_fill_(elsewhere.unsqueeze(-1), 0.0)
        # one rank has each row, the others zeros: the sum is exact
        if sequence_parallel:
            return scatter(found, tp).clone()  # a tensor of its own, so that the whole one is freed
        tp.all_reduce(found)
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Tuple[None, Optional[torch.Tensor], None, None, None]:
        local, elsewhere = ctx.saved_tensors
        if ctx.tp is not None:
            grad = gather(grad, ctx.tp)
        here = ~elsewhere.view(-1)
        return None, _table_gradient(ctx, local.view(-1)[here], _rows(grad)[here]), None, None, None


def _table_gradient(ctx: Any, rows: torch.Tensor, values: torch.Tensor) -> Optional[torch.Tensor]:
    """Each of the [n, width] values added to its row of a table; None where they are added to its ``main_grad``.

    A frequent token has thousands of terms, which are added up in float32 at least.
    """
    if ctx.main_grad is not None:
        ctx.main_grad.index_add_(0, rows, values.to(ctx.main_grad.dtype))
        return None
    wide = values.dtype if values.dtype in (torch.float32, torch.float64) else torch.float32
    return torch.zeros(ctx.shape, dtype=wide).index_add_(0, rows, values.to(wide)).to(values.dtype)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
