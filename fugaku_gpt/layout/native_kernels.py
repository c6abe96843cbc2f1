"""Which runs may use the compiled kernels, by their configuration alone."""

from __future__ import annotations

from fugaku_gpt.config.schema import RunConfig

_NATIVE_DTYPES = ("float32", "bfloat16")


def may_use_native_kernels(config: RunConfig) -> bool:
    """Whether a run's type is one that compiled kernels compute in, and they may be used where they are there. (Of
    attention that :func:`fugaku_gpt.kernels.attention_tiling.enough_heads_for_threads` says whether they are.)"""
    return config.node.compiled_kernels and config.training.dtype in _NATIVE_DTYPES
