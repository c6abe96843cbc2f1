"""The layers that tensor parallelism cuts (Shoeybi et al. 2019, "Megatron-LM", section 3); on one rank, plain layers.

A column-parallel layer holds some of the outputs, a row-parallel layer some of the inputs; one after the other they
need one all-reduce in the forward pass (of the row-parallel outputs) and one in the backward pass (of the gradient of
the column-parallel inputs). Each is done in place on the tensor that the matrix product has just made.

With ``sequence_parallel`` the activations outside of the two are cut too; ``sequence.py`` describes their order.

Gradients of weights are added up by the products that make them where a weight has a ``main_grad``
(``gradient_path.py``): no tensor of a weight's size is made, and none is read and written again to be added. A
schedule can defer these products.

A cheap operation right before a cut layer (LayerNorm, GELU) can be passed to it as ``prepare``. The layer then saves
only the input of the cheap operation, which the backward pass computes once more. In a transformer layer that leaves 10
of 16 tensors of b s h elements.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, List, Optional, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from torch import nn

from fugaku_gpt import compat, ops
from fugaku_gpt.comm import Communicator
from fugaku_gpt.comm.pending import Pending
from fugaku_gpt.parallel.gradient_path import add_weight_grad, main_grad
from fugaku_gpt.parallel.sequence import gather, scatter, start_gather, start_scatter

Prepare = Callable[[torch.Tensor], torch.Tensor]


class ColumnParallelLinear(nn.Module):
    """The layer y = x Wᵀ + b with the outputs cut over ``tp``: [..., inputs] → [..., sections * outputs / tp].

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
        has_bias: bool = True,
    ) -> None:
        """Create the layer. ``recompute_input``: the backward pass prepares the input again; False: the prepared input
        is saved."""
        super().__init__()
        rows: Tuple[int, ...] = (outputs // tp.size,) if sections == 1 else (sections, outputs // tp.size)
        self.weight = nn.Parameter(torch.empty(*rows, inputs, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(*rows, dtype=dtype)) if has_bias else None
        self._tp = tp
        self._sequence_parallel = sequence_parallel
        self._recompute_input = recompute_input

    def forward(self, x: torch.Tensor, prepare: Optional[Prepare] = None) -> torch.Tensor:
        """Apply the layer to ``prepare(x)``, or to ``x`` without ``prepare``."""
        (y,) = _apply(_ColumnParallel, [self], x, prepare)
        return y


def column_parallel_pair(
    first: ColumnParallelLinear, second: ColumnParallelLinear, x: torch.Tensor, prepare: Optional[Prepare] = None
) -> Tuple[torch.Tensor, ...]:
    """Apply two column-parallel layers to ``prepare(x)``, which is prepared, and communicated, once for both."""
    return _apply(_ColumnParallel, [first, second], x, prepare)


class RowParallelLinear(nn.Module):
    """The layer y = x Wᵀ + b with the inputs cut over ``tp``: [..., inputs / tp] → [..., outputs], equal on every rank
    of ``tp``.

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
        has_bias: bool = True,
    ) -> None:
        """Create the layer. ``recompute_input``: the backward pass prepares the input again; False: the prepared input
        is saved."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs // tp.size, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype)) if has_bias else None
        self._tp = tp
        self._sequence_parallel = sequence_parallel
        self._recompute_input = recompute_input

    def forward(self, x: torch.Tensor, prepare: Optional[Prepare] = None) -> torch.Tensor:
        """Apply the layer to ``prepare(x)``, or to ``x`` without ``prepare``."""
        (y,) = _apply(_RowParallel, [self], x, prepare)
        return y


class VocabParallelEmbedding(nn.Module):
    """A table of rows by token id, cut over ``tp`` by rows: [...] int64 → [..., width].

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
            x = look_up(tokens, self.weight)
        else:
            x = _VocabParallelLookup.apply(tokens, self.weight, self.first_row, self._tp, self._sequence_parallel)
        return x


def look_up(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the rows [...] int64 of a table that this rank has whole, [..., width]. Gradients of a row that is looked
    up often are added up in one order, in float32 at least."""
    if not torch.is_grad_enabled():
        return F.embedding(rows, weight)
    x: torch.Tensor = _Lookup.apply(rows, weight)
    return x


def _apply(
    function: Any,
    layers: Sequence[Union[ColumnParallelLinear, RowParallelLinear]],
    x: torch.Tensor,
    prepare: Optional[Prepare],
) -> Tuple[torch.Tensor, ...]:
    first = layers[0]
    # the backward pass, which prepares again, is reached through x
    if prepare is not None and not (first._recompute_input and x.requires_grad):
        x, prepare = prepare(x), None
    if not (first.training or torch.is_grad_enabled()):  # without what autograd asks for
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        is_column = function is _ColumnParallel
        return _outputs(x, first._tp, first._sequence_parallel, is_column, weights, biases, ops.linear_of_few_rows)
    parameters = [parameter for layer in layers for parameter in (layer.weight, layer.bias)]
    y: Tuple[torch.Tensor, ...] = function.apply(
        x, first._tp, prepare, first._sequence_parallel, function is _ColumnParallel, *parameters
    )
    return y


def _outputs(
    x: torch.Tensor,
    tp: Communicator,
    sequence_parallel: bool,
    is_column: bool,
    weights: Sequence[torch.Tensor],
    biases: Sequence[Optional[torch.Tensor]],
    linear: Callable[[torch.Tensor, torch.Tensor, Optional[torch.Tensor]], torch.Tensor],
) -> Tuple[torch.Tensor, ...]:
    """The outputs of layers of the same input; ``linear`` computes x weightᵀ + bias."""
    if is_column:
        inputs = gather(x, tp) if sequence_parallel else x
        return tuple(
            linear(inputs, _rows(weight), bias.view(-1) if bias is not None else None)
            for weight, bias in zip(weights, biases)
        )
    (weight,), (bias,) = weights, biases
    if sequence_parallel:  # a tensor of its own, so that the full one is freed
        y = scatter(linear(x, weight, None), tp)
        return (y + bias if bias is not None else y.clone(),)
    # PyTorch's result may be a view, to which the residual could not be added in place
    y = linear(x, weight, bias if tp.size == 1 else None).data
    if tp.size > 1:
        tp.all_reduce(y)
        if bias is not None:
            y.add_(bias)
    return (y,)


class _CutLinear(torch.autograd.Function):
    """A linear layer that is cut over ``tp``, and its communication: weight [..., inputs], bias [...] or None; or
    several column-parallel layers of the same input.

    Column-parallel: the backward pass sums the gradient of x over ``tp``. Row-parallel: the forward pass sums y. With
    ``sequence_parallel`` these sums are reduce-scatters, and what the other pass starts from (x, and the gradient of y)
    is gathered.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        tp: Communicator,
        prepare: Optional[Prepare],
        sequence_parallel: bool,
        is_column: bool,
        *parameters: Any,  # of each layer its weight, and its bias or None
    ) -> Tuple[torch.Tensor, ...]:
        weights: Sequence[torch.Tensor] = parameters[::2]
        biases: Sequence[Optional[torch.Tensor]] = parameters[1::2]
        # only this rank's shard of a gathered x is saved: the backward pass gathers again
        ctx.save_for_backward(x, *weights)
        # the parameters themselves: what is saved comes back without their main_grad in old versions of PyTorch
        ctx.weights, ctx.biases = weights, biases
        ctx.tp, ctx.prepare, ctx.sequence_parallel, ctx.is_column = tp, prepare, sequence_parallel, is_column
        if prepare is not None:
            x = prepare(x)
        return _outputs(x, tp, sequence_parallel, is_column, weights, biases, ops.linear)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        saved, *weights = ctx.saved_tensors
        x = saved
        if ctx.prepare is not None:
            saved = saved.detach().requires_grad_()
            with torch.enable_grad():
                x = ctx.prepare(saved)
        inputs, output_grads = x.detach(), grads  # both end up with all tokens that the product needs
        gathering: Optional[Pending] = None
        scattering: Optional[Pending] = None
        if ctx.sequence_parallel and ctx.is_column:
            inputs, gathering = start_gather(inputs, ctx.tp)
        elif ctx.sequence_parallel:
            output_grads = (gather(grads[0], ctx.tp),)
        grad_x = ops.matmul(output_grads[0], _rows(weights[0]))  # if column-parallel, from this rank's outputs only
        for grad, weight in zip(output_grads[1:], weights[1:]):
            grad_x.add_(ops.matmul(grad, _rows(weight)))
        if gathering is not None:
            gathering.wait()
            grad_x, scattering = start_scatter(grad_x, ctx.tp)
        elif ctx.is_column:
            ctx.tp.all_reduce(grad_x)
        parameter_grads: List[Optional[torch.Tensor]] = []
        for weight, bias, output_grad, grad in zip(ctx.weights, ctx.biases, output_grads, grads):
            parameter_grads.append(_weight_gradient(weight, output_grad, inputs))
            parameter_grads.append(_bias_gradient(bias, grad) if bias is not None else None)
        if scattering is not None:
            scattering.wait()
        if ctx.prepare is not None:  # gradients of the preparation's own parameters go to their main_grad
            compat.backward(x, grad_x)
            grad_x = saved.grad
        return (grad_x, None, None, None, None, *parameter_grads)


class _ColumnParallel(_CutLinear):
    """A column-parallel layer, under the name that profilers show."""


class _RowParallel(_CutLinear):
    """A row-parallel layer, under the name that profilers show, and by which ``training/operators.py`` knows that GELU
    prepares its input."""


def _weight_gradient(weight: torch.Tensor, grad: torch.Tensor, x: torch.Tensor) -> Optional[torch.Tensor]:
    """Return gradᵀ x; None if it is added to the weight's ``main_grad``, at once or deferred."""
    grad, x, sums = _rows(grad), _rows(x), main_grad(weight)
    if sums is None:
        return ops.matmul(grad.t(), x).view(weight.shape)
    add_weight_grad(weight, partial(ops.add_product, _rows(sums), grad.t(), x))
    return None


def _bias_gradient(bias: torch.Tensor, grad: torch.Tensor) -> Optional[torch.Tensor]:
    """Return the sum of grad over tokens; None if it is added to the bias's ``main_grad``."""
    bias_grad, sums = ops.sum_of_rows(_rows(grad)).view(bias.shape), main_grad(bias)
    if sums is None:
        return bias_grad.to(grad.dtype)
    sums.add_(bias_grad)
    return None


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
        rows = F.embedding(local, weight).masked_fill_(elsewhere.unsqueeze(-1), 0.0)
        # one rank has each row, the others zeros: the sum is exact
        if sequence_parallel:
            return scatter(rows, tp).clone()  # a tensor of its own, so that the full one is freed
        tp.all_reduce(rows)
        return rows

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Tuple[None, Optional[torch.Tensor], None, None, None]:
        local, elsewhere = ctx.saved_tensors
        if ctx.tp is not None:
            grad = gather(grad, ctx.tp)
        is_local = ~elsewhere.view(-1)
        return None, _table_gradient(ctx, local.view(-1)[is_local], _rows(grad)[is_local]), None, None, None


def _table_gradient(ctx: Any, rows: torch.Tensor, values: torch.Tensor) -> Optional[torch.Tensor]:
    """Add each of the [n, width] values to its row of a table's gradient; None if its ``main_grad`` takes them.

    A frequent token has thousands of terms, which are added up in float32 at least.
    """
    if ctx.main_grad is not None:
        ctx.main_grad.index_add_(0, rows, values.to(ctx.main_grad.dtype))
        return None
    wide = values.dtype if values.dtype in (torch.float32, torch.float64) else torch.float32
    return torch.zeros(ctx.shape, dtype=wide).index_add_(0, rows, values.to(wide)).to(values.dtype)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
