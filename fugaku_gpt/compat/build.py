"""Describes this build of PyTorch."""

from __future__ import annotations

import hashlib
from typing import Any, Dict

import torch

from fugaku_gpt.compat.adamw import fused_adamw


def flush_denormals() -> bool:
    """Have denormal numbers treated as zero; False where this build cannot (Arm before PyTorch 2.3)."""
    return bool(torch.set_flush_denormal(True))


def build_facts() -> Dict[str, Any]:
    """Facts about this build: version, linear-algebra library, instruction set of its kernels, threads."""
    shown = torch.__config__.show()
    backends = getattr(torch, "backends", None)
    capability = getattr(getattr(backends, "cpu", None), "get_cpu_capability", None)
    libraries = [
        name
        for name, present in (
            ("MKL", torch.backends.mkl.is_available()),
            ("oneDNN", torch.backends.mkldnn.is_available()),
            ("OpenBLAS", "openblas" in shown.lower() or "BLAS_INFO=open" in shown),
            ("SSL2", "ssl2" in shown.lower()),
        )
        if present
    ]
    return {
        "torch": torch.__version__,
        "blas": " + ".join(libraries) or "none found",
        "instruction_set": capability() if capability is not None else _instruction_set(shown),
        "fused_adamw": fused_adamw(torch.float32) is not None,
        "torch_threads": torch.get_num_threads(),
    }


def build_fingerprint() -> str:
    """The version and a hash of the build's own report: commit, libraries, compiler's options, instruction set."""
    return f"{torch.__version__} {hashlib.sha256(torch.__config__.show().encode()).hexdigest()[:16]}"


def _instruction_set(shown: str) -> str:
    """The instruction set that the build's own report names (before PyTorch 2.0 it is a line of the report)."""
    for line in shown.splitlines():
        head, separator, tail = line.partition("CPU capability usage:")
        if separator:
            return tail.strip()
    return "unknown"
