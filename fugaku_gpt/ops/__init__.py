"""The operators that layers, losses and the optimiser are built from: our kernels where better, else PyTorch's.

What the rest of the package calls is named here. Each file is one operator: products of matrices (``gemm``), GELU
(``activation``), LayerNorm (``normalization``), attention's softmax (``softmax``), sums of squares (``reductions``).
``native`` calls our own kernels (``fugaku_gpt/kernels``), ``tensor_pool`` gives large tensors their memory, and
``in_float32`` computes what a 16-bit type has no good kernel for.
"""

from __future__ import annotations

from fugaku_gpt.ops.activation import compute_gelu_by_erf, gelu, gelu_by_erf, gelu_tanh
from fugaku_gpt.ops.gemm import (
    add_product,
    compute_products_by_onednn,
    has_onednn,
    linear,
    linear_into,
    matmul,
    matmul_into,
    products_by_onednn,
)
from fugaku_gpt.ops.native import (
    AdamWStep,
    attends,
    attention,
    attention_gradient,
    call_between,
    compiled_products,
    compute_by_compiled,
    compute_products_by_compiled,
    counts_losses,
    has_compiled,
    has_gelu,
    loss_gradient_,
    loss_of_whole_rows_,
    loss_sums,
    step_adamw,
    uses_compiled,
)
from fugaku_gpt.ops.normalization import layer_norm, sum_of_rows
from fugaku_gpt.ops.reductions import sum_of_squares
from fugaku_gpt.ops.softmax import attention_dtype, softmax_, softmax_gradient_
from fugaku_gpt.ops.tensor_pool import empty_block, use_blocks

__all__ = [
    "AdamWStep",
    "add_product",
    "attends",
    "attention",
    "attention_dtype",
    "attention_gradient",
    "call_between",
    "compiled_products",
    "compute_by_compiled",
    "compute_gelu_by_erf",
    "compute_products_by_compiled",
    "compute_products_by_onednn",
    "counts_losses",
    "empty_block",
    "gelu",
    "gelu_by_erf",
    "gelu_tanh",
    "has_compiled",
    "has_gelu",
    "has_onednn",
    "layer_norm",
    "linear",
    "linear_into",
    "loss_gradient_",
    "loss_of_whole_rows_",
    "loss_sums",
    "matmul",
    "matmul_into",
    "products_by_onednn",
    "softmax_",
    "softmax_gradient_",
    "step_adamw",
    "sum_of_rows",
    "sum_of_squares",
    "use_blocks",
    "uses_compiled",
]
