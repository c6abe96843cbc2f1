"""Products of two matrices: by native kernels (``native``) or by oneDNN where these were measured to be faster,
otherwise by PyTorch."""

from __future__ import annotations

import functools
from typing import Callable, Iterator, Optional, Tuple

import torch
import torch.nn.functional as F

from fugaku_gpt.compat.kernel_choices import RANK_CONSENSUS
from fugaku_gpt.compat.probes import has_kernel, probe_input
from fugaku_gpt.kernels.matmul_tiling import cast_rows
from fugaku_gpt.ops import native
from fugaku_gpt.ops.in_float32 import or_in_float32
from fugaku_gpt.ops.product_choice import recorded_verdict
from fugaku_gpt.ops.tensor_pool import pooled_empty

_MIN_ONEDNN_ROWS = 128
_ONEDNN_SPLIT = 2048  # rows or columns of a part that oneDNN gets: 4 MiB of 512 rows

# x weightᵀ + bias: [..., inputs], [outputs, inputs], [outputs] → [..., outputs]
_Operator = Callable[[torch.Tensor, torch.Tensor, Optional[torch.Tensor]], torch.Tensor]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor] = None) -> torch.Tensor:
    """Computes x weightᵀ + bias: [..., inputs], [outputs, inputs], [outputs] → [..., outputs]."""
    return _linear(x, weight, bias)


def linear_of_few_rows(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor] = None) -> torch.Tensor:
    """Computes x weightᵀ + bias without gradients, for models that are used: where x has few rows, such as the newest
    token of each text, by a kernel that reads the weight at the speed of memory. Its sums have another order than those
    of :func:`linear`, which training uses for any number of rows."""
    if native.has_native_gemv(x, weight):
        return native.gemv(x, weight, bias)
    return _linear(x, weight, bias)


def matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Computes x y: [..., inner], [inner, columns] → [..., columns]."""
    return _matmul(x, y)


def linear_into(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Writes x weightᵀ into ``out`` [rows, outputs] and returns it: [rows, inputs], [outputs, inputs].

    oneDNN allocates its results itself, and repeated large allocations leave holes (seen: 100 MiB for 124M's logits),
    so it computes a block of the outputs at a time.
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
    """Writes x y into ``out`` [rows, columns] and returns it: [rows, inner], [inner, columns].

    oneDNN gets a block of the inner dimension at a time, because it copies its inputs.
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
    """Add x y to ``sums``: [rows, inner], [inner, columns], [rows, columns]; in one pass where the product has the type
    of the sums and PyTorch's is as fast as any."""
    if native.has_native_matmul(x, y, sums, accumulate=True):
        native.matmul_(sums, x, y, accumulate=True)
        return
    if sums.dtype != x.dtype:
        if has_kernel("matmul", x.dtype):  # a block at a time: the product is in memory of its own
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
    """Splits two matrices with equally many rows into the same blocks of rows."""
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
    """Whether the native kernel might multiply [..., inner] and a matrix, which saves the reshape for a closer look."""
    return y.dim() == 2 and x.numel() > 0 and not torch.is_grad_enabled() and native.uses_native_matmul(x.dtype)


def _native_matmul(
    x: torch.Tensor, rows: torch.Tensor, y: torch.Tensor, bias: Optional[torch.Tensor] = None
) -> torch.Tensor:
    """Multiplies by the native kernel; ``rows`` is x as a matrix."""
    out = pooled_empty((*x.shape[:-1], y.shape[1]), x.dtype)
    native.matmul_(out.view(-1, y.shape[1]), rows, y, bias)
    return out


def _may_write_into_pool(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether the product of [..., inner] and a matrix is written into a tensor from the pool. That does not depend on
    whether the pool is in use, so that results are rounded alike with either allocator. (Layers of older builds round a
    three-dimensional product before they add the bias; this does not.)"""
    return y.dim() == 2 and x.numel() > 0 and not torch.is_grad_enabled()


def _matmul_into_pool(x: torch.Tensor, y: torch.Tensor, bias: Optional[torch.Tensor] = None) -> torch.Tensor:
    """Multiplies by the functions that PyTorch's layers call, into a tensor from the pool where it is used."""
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
    """Whether oneDNN should compute a product with ``x``. Autograd must not see its operators, and they rearrange the
    weight at each call, which pays from about a hundred rows on."""
    return (
        x.dtype == torch.float32
        and not torch.is_grad_enabled()
        and x.numel() >= _MIN_ONEDNN_ROWS * x.shape[-1] > 0
        and x.is_contiguous()
        and uses_onednn_matmul()
    )


def _sums_suit_onednn(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether oneDNN should compute a product x y [rows, inner], [inner, columns] that is added to something. oneDNN
    cannot accumulate, so this pays only where MKL is slow on this processor: in the builds whose oneDNN takes opaque
    tensors (seen: 1.5 to 2.5 times slower; in newer builds MKL's accumulating product is as fast)."""
    return (
        x.dtype == torch.float32
        and not torch.is_grad_enabled()
        and min(*x.shape, y.shape[1]) >= _MIN_ONEDNN_ROWS
        and uses_onednn_matmul()
        and _onednn() is _onednn_with_opaque_tensors
    )


def _onednn_matmul(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor] = None) -> torch.Tensor:
    operator = _onednn()
    assert operator is not None  # otherwise oneDNN would not have been chosen
    return operator(x, weight, bias)


def uses_onednn_matmul() -> bool:
    """Whether oneDNN computes float32 products of layers: as the ranks agreed, or before that, whether this build can
    call it and the verdict in the file beside the kernels' library says that it is faster (``product_choice``)."""
    return (
        _onednn_is_recorded_as_faster()
        if RANK_CONSENSUS.products_by_onednn is None
        else RANK_CONSENSUS.products_by_onednn
    )


def choose_onednn_matmul(by_onednn: bool) -> None:
    """Choose whether oneDNN computes float32 products of layers; see :class:`KernelChoices`."""
    RANK_CONSENSUS.products_by_onednn = by_onednn


def _onednn_is_recorded_as_faster() -> bool:
    verdict, _ = recorded_verdict("float32", torch.get_num_threads())
    return verdict is not None and verdict.uses_onednn and has_onednn()


def has_onednn() -> bool:
    """Whether this build can call oneDNN directly for a float32 layer, with precise results."""
    return _onednn() is not None


@functools.lru_cache(maxsize=None)
def _onednn() -> Optional[_Operator]:
    """The function by which this build has oneDNN compute a float32 layer."""
    return next(
        (operator for operator in (_onednn_with_plain_tensors, _onednn_with_opaque_tensors) if _is_correct(operator)),
        None,
    )


def _onednn_with_plain_tensors(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]) -> torch.Tensor:
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


def _onednn_with_opaque_tensors(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]) -> torch.Tensor:
    """Computes a layer by the operator of older builds. It copies inputs and results, so large layers are split into
    blocks."""
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
    """Converts a matrix to oneDNN's opaque layout; oneDNN transposes faster than PyTorch."""
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
