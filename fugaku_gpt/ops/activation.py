"""GELU, exact and by its tanh approximation, and SwiGLU."""

from __future__ import annotations

import functools
import math
import time
from typing import Any, Callable, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from fugaku_gpt.compat import probes
from fugaku_gpt.compat.kernel_choices import RANK_CONSENSUS
from fugaku_gpt.compat.probes import WIDE_DTYPES, has_kernel, probe_input
from fugaku_gpt.ops import native
from fugaku_gpt.ops.in_float32 import InFloat32


def gelu(x: torch.Tensor) -> torch.Tensor:
    """The exact GELU."""
    if native.has_native_gelu(x):
        return _native_gelu(x, False)
    y: torch.Tensor = _gelu(x) if has_kernel("gelu", x.dtype) else InFloat32.apply(_gelu, x)
    return y


def _gelu(x: torch.Tensor) -> torch.Tensor:
    if x.dtype not in WIDE_DTYPES or not uses_gelu_by_erf():  # in 16 bits 1 + erf(x) would have lost all of x below -3
        return F.gelu(x)
    y: torch.Tensor = GeluByErf.apply(x)
    return y


class _NativeGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by_tanh: bool) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.by_tanh = by_tanh
        return native.gelu(x, by_tanh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, y_grad: torch.Tensor) -> Tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return native.gelu_gradient(y_grad, x, ctx.by_tanh), None


def _native_gelu(x: torch.Tensor, by_tanh: bool) -> torch.Tensor:
    if not torch.is_grad_enabled():  # without what autograd asks for
        return native.gelu(x.contiguous(), by_tanh)
    y: torch.Tensor = _NativeGelu.apply(x.contiguous(), by_tanh)
    return y


class GeluByErf(torch.autograd.Function):
    """The exact GELU for builds that compute PyTorch's element by element: the error function is vectorised there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return _normal_share(x).mul_(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        slope = torch.mul(x, x).mul_(-0.5).exp_().mul_(x).mul_(1.0 / math.sqrt(2.0 * math.pi))
        return slope.add_(_normal_share(x)).mul_(grad)


def _normal_share(x: torch.Tensor) -> torch.Tensor:
    """The normal distribution function of x."""
    return torch.mul(x, math.sqrt(0.5)).erf_().add_(1.0).mul_(0.5)


def uses_gelu_by_erf() -> bool:
    """Whether the exact GELU is computed from the error function: as the ranks agreed, or before that, whether
    PyTorch's own is slow."""
    return _gelu_is_slow() if RANK_CONSENSUS.gelu_by_erf is None else RANK_CONSENSUS.gelu_by_erf


def choose_gelu_by_erf(by_erf: bool) -> None:
    """Choose whether the exact GELU is computed from the error function; see :class:`KernelChoices`."""
    RANK_CONSENSUS.gelu_by_erf = by_erf


@functools.lru_cache(maxsize=None)
def _gelu_is_slow() -> bool:
    """Whether PyTorch's GELU takes much longer than its error function (seen: half of its time, or seven times it)."""
    functions: Sequence[Callable[[torch.Tensor], torch.Tensor]] = (F.gelu, torch.erf)
    x, best = probe_input(2**16), [math.inf, math.inf]
    with torch.no_grad():
        for _ in range(7):
            for index, function in enumerate(functions):
                before = time.perf_counter()
                function(x)
                best[index] = min(best[index], time.perf_counter() - before)
    return best[0] > 2.5 * best[1]


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by its tanh approximation, as in GPT-2's published weights (Hendrycks and Gimpel 2016, section 2)."""
    if native.has_native_gelu(x):
        return _native_gelu(x, True)
    builtin = probes.builtin_gelu_tanh  # looked up here: the profiler may have replaced it
    y: torch.Tensor = builtin(x) if has_kernel("gelu_tanh", x.dtype) else InFloat32.apply(builtin, x)
    return y


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """SwiGLU (Shazeer 2020, "GLU Variants Improve Transformer"): silu(a) * b of [..., 2 f], which is a beside b, as
    [..., f], computed in float32 at least."""
    if native.has_native_swiglu(x) and not torch.is_grad_enabled():  # without what autograd asks for
        return native.swiglu(x.contiguous())
    y: torch.Tensor = _NativeSwiGlu.apply(x.contiguous()) if native.has_native_swiglu(x) else _SwiGlu.apply(x)
    return y


class _NativeSwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return native.swiglu(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, y_grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return native.swiglu_gradient(y_grad, x)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        gate, gated = _halves(x)
        return torch.sigmoid(gate).mul_(gate).mul_(gated).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, y_grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        gate, gated = _halves(x)
        wide_grad = y_grad if y_grad.dtype in WIDE_DTYPES else y_grad.float()
        share = torch.sigmoid(gate)
        x_grad = torch.empty_like(x, memory_format=torch.contiguous_format)
        gate_grad, gated_grad = x_grad.chunk(2, -1)
        gated_grad.copy_((share * gate).mul_(wide_grad))
        # of silu: σ(a) (1 + a (1 - σ(a)))
        slope = (1.0 - share).mul_(gate).add_(1.0).mul_(share)
        gate_grad.copy_(slope.mul_(gated).mul_(wide_grad))
        return x_grad


def _halves(x: torch.Tensor) -> Sequence[torch.Tensor]:
    """The two halves of the last dimension, in float32 at least."""
    return (x if x.dtype in WIDE_DTYPES else x.float()).chunk(2, -1)
