"""Probes this PyTorch by trying it. What one operator alone needs is probed beside it in ``ops``; nothing here or there
is chosen by a version string.

This file names what the rest of the package calls. Each module answers one question: which operations 16-bit types have
(``probes``), whether there is a fused AdamW (``adamw``), how a backward pass starts (``backward``), how operators are
profiled (``profiler``), what to report about this build (``build``). Where ranks could come to different answers, they
agree on one (``kernel_choices``).
"""

from __future__ import annotations

from fugaku_gpt.compat.adamw import fused_adamw, has_gradient_scale
from fugaku_gpt.compat.backward import backward
from fugaku_gpt.compat.build import build_facts, flush_denormals
from fugaku_gpt.compat.probes import (
    can_train,
    choose_float32_operations,
    float32_operations,
    has_kernel,
    operations_without_kernel,
)
from fugaku_gpt.compat.profiler import OperatorCall, has_profiler, profile_operators, profiled_range

__all__ = [
    "OperatorCall",
    "backward",
    "build_facts",
    "can_train",
    "choose_float32_operations",
    "has_gradient_scale",
    "flush_denormals",
    "fused_adamw",
    "has_kernel",
    "has_profiler",
    "float32_operations",
    "profiled_range",
    "profile_operators",
    "operations_without_kernel",
]
