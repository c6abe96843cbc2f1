"""Products of two matrices, and whether float32 ones are oneDNN's."""

from __future__ import annotations

import functools
from typing import Optional

import torch
import torch.nn.functional as F

from fugaku_gpt.compat.agreed import AGREED
from fugaku_gpt.compat.trials import waves
from fugaku_gpt.compat.wide import or_in_float32
from fugaku_gpt.machine.local import processor_name, vector_flags

_ROWS_FOR_ONEDNN = 128
_OUTPUTS_AT_ONCE = 2048  # of a result that is copied: 4 MiB of 512 rows

# autograd keeps the float32 copies
_linear = or_in_float32("linear", F.linear)
_matmul = or_in_float32("matmul", torch.matmul)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor] = None) -> torch.Tensor:
    """x weightᵀ + bias: [..., inputs], [outputs, inputs], [outputs] → [..., outputs]."""
    if _suits_onednn(x):
        return _by_onednn(x, weight, bias)
    return _linear(x, weight, bias)


def matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x y: [..., inner], [inner, columns] → [..., columns]."""
    if _suits_onednn(x):
        return _by_onednn(x, y.t())
    return _matmul(x, y)


def linear_into(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``out`` [rows, outputs], which becomes x weightᵀ: [rows, inputs], [outputs, inputs], float32 or float64.

    oneDNN writes into memory of its own choosing, and what it takes for a large result again and again leaves holes
    (seen: 100 MiB of 124M's logits): it gets a part of the outputs at a time.
    """
    if not _suits_onednn(x):
        return torch.mm(x, weight.t(), out=out)
    for part, rows in zip(out.split(_OUTPUTS_AT_ONCE, dim=1), weight.split(_OUTPUTS_AT_ONCE)):
        part.copy_(_by_onednn(x, rows))
    return out


def _suits_onednn(x: torch.Tensor) -> bool:
    """Whether a product with ``x`` is one for oneDNN, whose operator is unknown to autograd and arranges the weight
    anew for each call, which pays from some hundred rows on."""
    return (
        x.dtype == torch.float32
        and not torch.is_grad_enabled()
        and x.numel() >= _ROWS_FOR_ONEDNN * x.shape[-1] > 0
        and x.is_contiguous()
        and products_by_onednn()
    )


def _by_onednn(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor] = None) -> torch.Tensor:
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


def products_by_onednn() -> bool:
    """Whether float32 products of layers are oneDNN's: what was agreed on; before that, whether this build can hand
    them to it and would else use MKL's kernels on a processor that is not Intel's (seen: 5 to 25 % slower there)."""
    return _onednn_is_better() if AGREED.products_by_onednn is None else AGREED.products_by_onednn


def compute_products_by_onednn(by_onednn: bool) -> None:
    """From now on they are, or are not; see :class:`Agreed`."""
    AGREED.products_by_onednn = by_onednn


@functools.lru_cache(maxsize=None)
def _onednn_is_better() -> bool:
    return (
        torch.backends.mkl.is_available()
        and "avx512f" in vector_flags()
        and "intel" not in processor_name().lower()
        and has_onednn()
    )


@functools.lru_cache(maxsize=None)
def has_onednn() -> bool:
    """Whether oneDNN computes a layer in float32 when it is asked by itself, and precisely."""
    x, weight, bias = waves(8, 24), waves(16, 24), waves(16)
    with torch.no_grad():
        try:
            y = _by_onednn(x, weight, bias)
            z = _by_onednn(x, weight.t().contiguous().t())
        except (AttributeError, RuntimeError):  # no such operator, or none for processors
            return False
        judge = F.linear(x.double(), weight.double(), bias.double())
        off = max(float((y - judge).abs().max()), float((z + bias - judge).abs().max()))
    return off <= 64.0 * torch.finfo(torch.float32).eps
