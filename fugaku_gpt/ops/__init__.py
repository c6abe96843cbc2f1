"""The operators of layers, losses and the optimiser: native kernels where they are better, otherwise PyTorch's.

This file names what the rest of the package calls. Each module is one operator: matrix products (``gemm``), GELU and
SwiGLU (``activation``), LayerNorm and RMSNorm (``normalization``), rotary positions (``rotary``), the keys that each
query of attention sees (``key_ranges``), attention's softmax (``softmax``), sums of squares (``reductions``).
``native`` calls the native kernels (``fugaku_gpt/kernels``), ``tensor_pool`` provides memory for large tensors, and
``in_float32`` computes what a 16-bit type has no good kernel for.
"""

from __future__ import annotations

from fugaku_gpt.ops.activation import choose_gelu_by_erf, gelu, gelu_tanh, swiglu, uses_gelu_by_erf
from fugaku_gpt.ops.gemm import (
    add_product,
    choose_onednn_matmul,
    has_onednn,
    linear,
    linear_into,
    linear_of_few_rows,
    matmul,
    matmul_into,
    uses_onednn_matmul,
)
from fugaku_gpt.ops.key_ranges import KeyRanges
from fugaku_gpt.ops.native import (
    AdamWStep,
    attention,
    attention_gradient,
    choose_native_kernels,
    choose_native_matmul,
    decode_attention,
    has_native_attention,
    has_native_decode_attention,
    has_native_kernels,
    has_native_loss,
    loss_full_rows_,
    loss_gradient_,
    loss_sums,
    native_kernels_problem,
    set_progress_callback,
    step_adamw,
    supports_gelu,
    supports_native_matmul,
    uses_native_kernels,
    uses_native_matmul,
)
from fugaku_gpt.ops.normalization import layer_norm, rms_norm, sum_of_rows
from fugaku_gpt.ops.reductions import sum_of_squares
from fugaku_gpt.ops.rotary import Rotation, pack_heads, rotation, rotation_at, rotation_in_grid
from fugaku_gpt.ops.softmax import attention_dtype, softmax_, softmax_gradient_
from fugaku_gpt.ops.tensor_pool import pooled_empty, pooled_sizes, release_tensor_pool, use_tensor_pool

__all__ = [
    "AdamWStep",
    "KeyRanges",
    "Rotation",
    "pack_heads",
    "rms_norm",
    "rotation",
    "rotation_at",
    "rotation_in_grid",
    "swiglu",
    "add_product",
    "has_native_attention",
    "has_native_decode_attention",
    "decode_attention",
    "attention",
    "attention_dtype",
    "attention_gradient",
    "set_progress_callback",
    "supports_native_matmul",
    "uses_native_matmul",
    "choose_native_kernels",
    "choose_gelu_by_erf",
    "choose_native_matmul",
    "choose_onednn_matmul",
    "has_native_loss",
    "pooled_empty",
    "pooled_sizes",
    "release_tensor_pool",
    "gelu",
    "uses_gelu_by_erf",
    "gelu_tanh",
    "has_native_kernels",
    "supports_gelu",
    "has_onednn",
    "layer_norm",
    "linear",
    "linear_into",
    "linear_of_few_rows",
    "loss_gradient_",
    "loss_full_rows_",
    "loss_sums",
    "matmul",
    "matmul_into",
    "native_kernels_problem",
    "uses_onednn_matmul",
    "softmax_",
    "softmax_gradient_",
    "step_adamw",
    "sum_of_rows",
    "sum_of_squares",
    "use_tensor_pool",
    "uses_native_kernels",
]
