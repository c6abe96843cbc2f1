"""Products of two matrices: by our own kernels where these are the better ones (``compiled``), and whether other
float32 ones are oneDNN's."""

from __future__ import annotations

import functools
from typing import Callable, Iterator, Optional, Tuple

import torch
import torch.nn.functional as F

from fugaku_gpt.compat.kernel_choices import RANK_CONSENSUS
from fugaku_gpt.compat.probes import has_kernel, probe_input
from fugaku_gpt.kernels.matmul_tiling import cast_rows
from fugaku_gpt.machine.local import processor_name, vector_flags
from fugaku_gpt.ops import native
from fugaku_gpt.ops.in_float32 import or_in_float32
from fugaku_gpt.ops.tensor_pool import pooled_empty

_MIN_ONEDNN_ROWS = 128
_ONEDNN_SPLIT = 2048  # rows or columns of a part that oneDNN gets: 4 MiB of 512 rows

# x weightᵀ + bias: [..., inputs], [outputs, inputs], [outputs] → [..., outputs]
_Operator = Callable[[torch.Tensor, torch.Tensor, Optional[torch.Tensor]], torch.Tensor]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor] = None) -> torch.Tensor:
    """x weightᵀ + bias: [..., inputs], [outputs, inputs], [outputs] → [..., outputs]."""
    return _linear(x, weight, bias)


def matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x y: [..., inner], [inner, columns] → [..., columns]."""
    return _matmul(x, y)


def linear_into(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``out`` [rows, outputs], which becomes x weightᵀ: [rows, inputs], [outputs, inputs].

    oneDNN writes into memory of its own choosing, and what it takes for a large result again and again leaves holes
    (seen: 100 MiB of 124M's logits): it gets a part of the outputs at a time.
    """
    if native.has_native_matmul(x, weight.t(), out):
        return native.matmul_(out, x, weight.t())
    if not has_kernel("matmul", x.dtype):
        return out.copy_(_matmul_in_dtype(x.float(), weight.t().float()))
    if not _suits_onednn(x):
        return torch.mm(x, weight.t(), out=out)
    for block, rows in _row_blocks(out.t(), weight, _ONEDNN_SPLIT):
        block.t().copy_(_onednn_matmul(x, rows))
    return out


def matmul_into(out: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``out`` [rows, columns], which becomes x y: [rows, inner], [inner, columns].

    oneDNN gets a part of the inner dimension at a time: of all that it takes there is a copy.
    """
    if native.has_native_matmul(x, y, out):
        return native.matmul_(out, x, y)
    if not has_kernel("matmul", x.dtype):
        return out.copy_(_matmul_in_dtype(x.float(), y.float()))
    if not _sums_suit_onednn(x, y):
        return torch.mm(x, y, out=out)
    out.zero_()
    for block, rows in _row_blocks(x.t(), y, _ONEDNN_SPLIT):
        out.add_(_onednn_matmul(block.t(), rows.t()))
    return out


def add_product(sums: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
    """Add x y to ``sums``: [rows, inner], [inner, columns], [rows, columns]; in the same pass where it is computed in
    the type of the sums and PyTorch's product is as fast as any."""
    if native.has_native_matmul(x, y, sums, accumulate=True):
        native.matmul_(sums, x, y, accumulate=True)
        return
    if sums.dtype != x.dtype:
        if has_kernel("matmul", x.dtype):  # a part at a time: what is added is in memory of its own
            for block, rows in _row_blocks(sums, x, cast_rows(sums.shape[1])):
                product = torch.matmul(rows, y)
                if native.has_native_accumulate(product, block):
                    native.accumulate_(block, product)
                else:
                    block.add_(product)
            return
        # the product is one of float32 anyway, and is not rounded on its way
        add_product(sums, x.to(sums.dtype), y.to(sums.dtype))
        return
    if not _sums_suit_onednn(x, y):
        sums.addmm_(x, y)
        return
    for block, rows in _row_blocks(sums, x, 2 * _ONEDNN_SPLIT):
        block.add_(_onednn_matmul(rows, y.t()))


def _row_blocks(first: torch.Tensor, second: torch.Tensor, rows: int) -> Iterator[Tuple[torch.Tensor, torch.Tensor]]:
    """Parts of two matrices of equally many rows."""
    if first.shape[0] != second.shape[0]:
        raise RuntimeError(f"matrices of {first.shape[0]} and {second.shape[0]} rows do not belong together")
    return zip(first.split(rows), second.split(rows))


def _linear_in_dtype(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]) -> torch.Tensor:
    if _may_use_native_matmul(x, weight) and (bias is None or bias.shape == weight.shape[:1]):
        rows = x.reshape(-1, x.shape[-1])
        if native.has_native_matmul(rows, weight.t()):
            return _native_matmul(x, rows, weight.t(), bias)
    if _suits_onednn(x):
        return _onednn_matmul(x, weight, bias)
    return _matmul_into_pool(x, weight.t(), bias) if _may_write_into_pool(x, weight) else F.linear(x, weight, bias)


def _matmul_in_dtype(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if _may_use_native_matmul(x, y):
        rows = x.reshape(-1, x.shape[-1])
        if native.has_native_matmul(rows, y):
            return _native_matmul(x, rows, y)
    if _suits_onednn(x):
        return _onednn_matmul(x, y.t())
    return _matmul_into_pool(x, y) if _may_write_into_pool(x, y) else torch.matmul(x, y)


def _may_use_native_matmul(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether it is worth a look if [..., inner] and a matrix are multiplied by our kernel."""
    return y.dim() == 2 and x.numel() > 0 and not torch.is_grad_enabled() and native.uses_native_matmul()


def _native_matmul(
    x: torch.Tensor, rows: torch.Tensor, y: torch.Tensor, bias: Optional[torch.Tensor] = None
) -> torch.Tensor:
    """By our kernel; ``rows`` are those of x."""
    out = pooled_empty((*x.shape[:-1], y.shape[1]), x.dtype)
    native.matmul_(out.view(-1, y.shape[1]), rows, y, bias)
    return out


def _may_write_into_pool(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether PyTorch is told where to put the product of [..., inner] and a matrix. It is in blocks or not, which is
    the process's allocator's: a sum is to be rounded alike beside each. (Layers of older builds round a product of
    three dimensions before they add the bias; this does not.)"""
    return y.dim() == 2 and x.numel() > 0 and not torch.is_grad_enabled()


def _matmul_into_pool(x: torch.Tensor, y: torch.Tensor, bias: Optional[torch.Tensor] = None) -> torch.Tensor:
    """By the functions that PyTorch's layers call themselves, into a block where these are used."""
    out = pooled_empty((*x.shape[:-1], y.shape[1]), x.dtype)
    rows, result = x.reshape(-1, x.shape[-1]), out.view(-1, y.shape[1])
    if bias is None:
        torch.mm(rows, y, out=result)
    else:
        torch.addmm(bias, rows, y, out=result)
    return out


# where autograd differentiates them, it keeps the float32 copies
_linear = or_in_float32("linear", _linear_in_dtype)
_matmul = or_in_float32("matmul", _matmul_in_dtype)


def _suits_onednn(x: torch.Tensor) -> bool:
    """Whether a product with ``x`` is one for oneDNN, whose operators autograd is not to see, and which arrange the
    weight anew for each call: that pays from some hundred rows on."""
    return (
        x.dtype == torch.float32
        and not torch.is_grad_enabled()
        and x.numel() >= _MIN_ONEDNN_ROWS * x.shape[-1] > 0
        and x.is_contiguous()
        and uses_onednn_matmul()
    )


def _sums_suit_onednn(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether oneDNN makes a product x y [rows, inner], [inner, columns] that is added to something. It does not add,
    so that this pays only beside an MKL that is slow on this processor: those of the builds whose oneDNN takes tensors
    of its own (seen: 1.5 to 2.5 times slower; in newer builds MKL's product that adds is as fast)."""
    return (
        x.dtype == torch.float32
        and not torch.is_grad_enabled()
        and min(*x.shape, y.shape[1]) >= _MIN_ONEDNN_ROWS
        and uses_onednn_matmul()
        and _onednn() is _onednn_with_opaque_tensors
    )


def _onednn_matmul(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor] = None) -> torch.Tensor:
    operator = _onednn()
    assert operator is not None  # or products would not be oneDNN's
    return operator(x, weight, bias)


def uses_onednn_matmul() -> bool:
    """Whether float32 products of layers are oneDNN's: what was agreed on; before that, whether this build can hand
    them to it and would else use MKL's kernels on a processor that is not Intel's (seen: 5 to 25 % slower there with
    AVX-512, on the whole faster without; in older builds less than half as fast, with it or without)."""
    return _onednn_is_better() if RANK_CONSENSUS.products_by_onednn is None else RANK_CONSENSUS.products_by_onednn


def choose_onednn_matmul(by_onednn: bool) -> None:
    """From now on they are, or are not; see :class:`KernelChoices`."""
    RANK_CONSENSUS.products_by_onednn = by_onednn


@functools.lru_cache(maxsize=None)
def _onednn_is_better() -> bool:
    if not torch.backends.mkl.is_available() or "intel" in processor_name().lower() or not has_onednn():
        return False
    # MKL of the builds whose oneDNN takes tensors of its own has good kernels for Intel's processors alone
    return ("avx2" if _onednn() is _onednn_with_opaque_tensors else "avx512f") in vector_flags()


def has_onednn() -> bool:
    """Whether oneDNN computes a layer in float32 when it is asked by itself, and precisely."""
    return _onednn() is not None


@functools.lru_cache(maxsize=None)
def _onednn() -> Optional[_Operator]:
    """How this build has oneDNN compute a layer in float32."""
    return next(
        (operator for operator in (_onednn_with_plain_tensors, _onednn_with_opaque_tensors) if _is_correct(operator)),
        None,
    )


def _onednn_with_plain_tensors(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]) -> torch.Tensor:
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


def _onednn_with_opaque_tensors(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]) -> torch.Tensor:
    """By the operator of older builds. What it takes and gives are copies: of many outputs a part at a time."""
    rows, outputs = x.reshape(-1, x.shape[-1]), weight.shape[0]
    arranged = _to_onednn_layout(rows)
    if outputs <= 2 * _ONEDNN_SPLIT:
        y = _linear_of_opaque(arranged, weight, bias)
    else:
        y = x.new_empty(len(rows), outputs)
        for first in range(0, outputs, _ONEDNN_SPLIT):
            columns = slice(first, first + _ONEDNN_SPLIT)
            y[:, columns] = _linear_of_opaque(arranged, weight[columns], None if bias is None else bias[columns])
    return y.view(*x.shape[:-1], outputs)


def _linear_of_opaque(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]) -> torch.Tensor:
    function = torch._C._nn.mkldnn_linear
    y: torch.Tensor = function(x, _to_onednn_layout(weight), None if bias is None else bias.to_mkldnn())
    return y.to_dense()


def _to_onednn_layout(x: torch.Tensor) -> torch.Tensor:
    """A matrix in a tensor of oneDNN's, which transposes faster than PyTorch does."""
    if x.is_contiguous() or x.stride(0) != 1:
        return x.contiguous().to_mkldnn()
    return torch._mkldnn_transpose(x.t().contiguous().to_mkldnn(), 0, 1)


def _is_correct(operator: _Operator) -> bool:
    x, weight, bias = probe_input(8, 24), probe_input(16, 24), probe_input(16)
    with torch.no_grad():
        try:
            y = operator(x, weight, bias)
            z = operator(x, weight.t().contiguous().t(), None)
        except (AttributeError, RuntimeError, TypeError):  # no such operator, none for processors, other arguments
            return False
        expected = F.linear(x.double(), weight.double(), bias.double())
        error = max(float((y - expected).abs().max()), float((z + bias - expected).abs().max()))
    return error <= 64.0 * torch.finfo(torch.float32).eps
