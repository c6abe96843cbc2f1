"""LayerNorm and RMSNorm, and sums over tokens, for which 16 bits are too few."""

from __future__ import annotations

from typing import Any, Tuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from fugaku_gpt.compat.probes import WIDE_DTYPES
from fugaku_gpt.ops import native
from fugaku_gpt.ops.in_float32 import InFloat32


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """LayerNorm over the last dimension, computed in float32 at least. ``weight`` and ``bias`` may be float32 beside a
    16-bit ``x``: their gradients, sums over tokens, are then not rounded. (PyTorch 2.13's kernel accepts this too, but
    sums their gradients with errors of 20 to 50 roundings.)"""

    def normalize(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)

    y: torch.Tensor
    if native.has_native_layer_norm(x, weight, bias):
        x = x.contiguous()
        if not torch.is_grad_enabled():  # without what autograd asks for
            return native.layer_norm(x, weight, bias, eps)[0]
        y = _NativeLayerNorm.apply(x, weight, bias, eps)
        return y
    if x.dtype in WIDE_DTYPES:
        return normalize(x, weight, bias)
    y = InFloat32.apply(normalize, x, weight, bias)
    return y


class _NativeLayerNorm(torch.autograd.Function):
    """LayerNorm by the native kernel."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        y, statistics = native.layer_norm(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, statistics)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, y_grad: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        return (*native.layer_norm_gradient(y_grad, *ctx.saved_tensors), None)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm (Zhang and Sennrich 2019) over the last dimension, x / √(mean of x² + eps) * weight, computed in float32
    at least. ``weight`` may be float32 beside a 16-bit ``x``: its gradient, a sum over tokens, is then not rounded."""
    y: torch.Tensor
    if native.has_native_rms_norm(x, weight):
        x = x if native.has_even_steps(x) else x.contiguous()
        if not torch.is_grad_enabled():  # without what autograd asks for
            return native.rms_norm(x, weight, eps)[0]
        y = _NativeRmsNorm.apply(x, weight, eps)
    else:
        y = _RmsNorm.apply(x, weight, eps)
    return y


class _NativeRmsNorm(torch.autograd.Function):
    """RMSNorm by the native kernel."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        y, scales = native.rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, scales)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, y_grad: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, None]:
        return (*native.rms_norm_gradient(y_grad, *ctx.saved_tensors), None)


class _RmsNorm(torch.autograd.Function):
    """RMSNorm that saves its input and a number for each token."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = _widened(x)
        scale = (wide * wide).mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(_widened(weight)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, y_grad: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normalized, grad = _widened(x) * scale, _widened(y_grad)
        weight_grad = (grad * normalized).view(-1, x.shape[-1]).sum(0).to(weight.dtype)
        grad = grad * _widened(weight)
        along = (grad * normalized).mean(-1, keepdim=True)  # the part that only changes the length
        return grad.sub_(normalized.mul_(along)).mul_(scale).to(x.dtype), weight_grad, None


def _widened(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype in WIDE_DTYPES else x.float()


def sum_of_rows(x: torch.Tensor) -> torch.Tensor:
    """Sums rows, [n, width] → [width], in float32 at least; the result keeps that type."""
    if native.has_native_accumulate(x):
        return native.sum_of_rows(x)
    return x.sum(0) if x.dtype in WIDE_DTYPES else x.sum(0, dtype=torch.float32)
