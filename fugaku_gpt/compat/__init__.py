"""What this PyTorch can do, found by trying it. No other room asks, and none compares version strings.

What the rest of the package calls is named here. Each file is one question: which operations 16-bit types have
(``probes``), whether there is a fused AdamW (``adamw``), how a backward pass begins (``backward``), how operators are
seen running (``profiler``), what there is to report of this build (``build``). Where ranks could find different answers
they agree on one (``kernel_choices``).
"""

from __future__ import annotations

from fugaku_gpt.compat.adamw import divides_gradients, fused_adamw
from fugaku_gpt.compat.backward import backward
from fugaku_gpt.compat.build import build_facts, flush_denormals
from fugaku_gpt.compat.probes import can_train, compute_in_float32, has_kernel, in_float32, without_kernel
from fugaku_gpt.compat.profiler import Call, has_profiler, named, profiled

__all__ = [
    "Call",
    "backward",
    "build_facts",
    "can_train",
    "compute_in_float32",
    "divides_gradients",
    "flush_denormals",
    "fused_adamw",
    "has_kernel",
    "has_profiler",
    "in_float32",
    "named",
    "profiled",
    "without_kernel",
]
