"""What this PyTorch can do, found by trying it. No other room asks, and none compares version strings.

What the rest of the package calls is named here. Each file is one question: which operations 16-bit types have
(``trials``) and what is done about the others (``wide``); which kernels compute products, GELU, softmax, LayerNorm,
AdamW and sums of squares (``products``, ``activation``, ``softmax``, ``norm``, ``adamw``, ``squares``), and which of
our own do instead (``compiled``); whether large tensors can be in memory of ours (``blocks``); how a backward pass
begins (``gradients``) and operators are seen running (``profiler``); what there is to report (``build``). Where ranks
could find different answers they agree on one (``agreed``).
"""

from __future__ import annotations

from fugaku_gpt.compat.activation import compute_gelu_by_erf, gelu, gelu_by_erf, gelu_tanh
from fugaku_gpt.compat.adamw import divides_gradients, fused_adamw
from fugaku_gpt.compat.blocks import empty_block, use_blocks
from fugaku_gpt.compat.build import build_facts, flush_denormals
from fugaku_gpt.compat.compiled import (
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
from fugaku_gpt.compat.gradients import backward
from fugaku_gpt.compat.norm import layer_norm, sum_of_rows
from fugaku_gpt.compat.products import (
    add_product,
    compute_products_by_onednn,
    has_onednn,
    linear,
    linear_into,
    matmul,
    matmul_into,
    products_by_onednn,
)
from fugaku_gpt.compat.profiler import Call, has_profiler, named, profiled
from fugaku_gpt.compat.softmax import attention_dtype, softmax_, softmax_gradient_
from fugaku_gpt.compat.squares import sum_of_squares
from fugaku_gpt.compat.trials import can_train, compute_in_float32, has_kernel, in_float32, without_kernel

__all__ = [
    "Call",
    "add_product",
    "attends",
    "attention",
    "attention_dtype",
    "attention_gradient",
    "backward",
    "build_facts",
    "call_between",
    "can_train",
    "compiled_products",
    "compute_by_compiled",
    "compute_gelu_by_erf",
    "compute_in_float32",
    "compute_products_by_compiled",
    "compute_products_by_onednn",
    "counts_losses",
    "divides_gradients",
    "empty_block",
    "flush_denormals",
    "fused_adamw",
    "gelu",
    "gelu_by_erf",
    "gelu_tanh",
    "has_compiled",
    "has_gelu",
    "has_kernel",
    "has_onednn",
    "has_profiler",
    "in_float32",
    "layer_norm",
    "linear",
    "linear_into",
    "loss_gradient_",
    "loss_of_whole_rows_",
    "loss_sums",
    "matmul",
    "matmul_into",
    "named",
    "products_by_onednn",
    "profiled",
    "softmax_",
    "softmax_gradient_",
    "step_adamw",
    "sum_of_rows",
    "sum_of_squares",
    "use_blocks",
    "uses_compiled",
    "without_kernel",
]
