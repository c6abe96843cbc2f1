"""What this PyTorch can do, found by trying it. No other module asks, and none compares version strings."""

from __future__ import annotations

import inspect
import math
from typing import Any, Callable, Dict, List, Optional

import torch
import torch.nn.functional as F

# (query, key, value [b, heads, s, d]) -> [b, heads, s, d], causal, fused; None before PyTorch 2.0
scaled_dot_product_attention: Optional[Callable[..., torch.Tensor]] = getattr(F, "scaled_dot_product_attention", None)

_GELU_HAS_APPROXIMATE = True
try:
    F.gelu(torch.zeros(1), approximate="tanh")
except TypeError:
    _GELU_HAS_APPROXIMATE = False


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by its tanh approximation, as in GPT-2's published weights (Hendrycks and Gimpel 2016, section 2)."""
    if _GELU_HAS_APPROXIMATE:
        return F.gelu(x, approximate="tanh")
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


def fused_adamw(parameter_groups: List[Dict[str, Any]], **options: Any) -> Optional[torch.optim.Optimizer]:
    """PyTorch's AdamW with its one-pass CPU kernel, or None where this build has none for these tensors."""
    if "fused" not in inspect.signature(torch.optim.AdamW).parameters:
        return None
    probe = torch.zeros(2, dtype=parameter_groups[0]["params"][0].dtype, requires_grad=True)
    probe.grad = torch.ones_like(probe)
    try:
        torch.optim.AdamW([probe], fused=True, **options).step()
    except RuntimeError:  # "fused" exists but not for the CPU, or not for this type
        return None
    return torch.optim.AdamW(parameter_groups, fused=True, **options)


def flush_denormals() -> bool:
    """Have denormal numbers treated as zero; False where this build cannot (Arm before PyTorch 2.3)."""
    return bool(torch.set_flush_denormal(True))


def build_facts() -> Dict[str, Any]:
    """What this build is: version, linear-algebra library, the instruction set that its kernels use, threads."""
    shown = torch.__config__.show()
    backends = getattr(torch, "backends", None)
    capability = getattr(getattr(backends, "cpu", None), "get_cpu_capability", None)
    libraries = [
        name
        for name, present in (
            ("MKL", torch.backends.mkl.is_available()),
            ("oneDNN", torch.backends.mkldnn.is_available()),
            ("OpenBLAS", "openblas" in shown.lower()),
            ("SSL2", "ssl2" in shown.lower()),
        )
        if present
    ]
    return {
        "torch": torch.__version__,
        "blas": " + ".join(libraries) or "none found",
        "instruction_set": capability() if capability is not None else _instruction_set(shown),
        "fused_attention": scaled_dot_product_attention is not None,
        "fused_adamw": fused_adamw([{"params": [torch.zeros(1, requires_grad=True)]}], lr=1e-3) is not None,
        "torch_threads": torch.get_num_threads(),
    }


def _instruction_set(shown: str) -> str:
    """The instruction set that the build's own report names (before PyTorch 2.0 it is a line of the report)."""
    for line in shown.splitlines():
        head, found, tail = line.partition("CPU capability usage:")
        if found:
            return tail.strip()
    return "unknown"
