"""Decides from its configuration alone whether a run may use the native kernels."""

from __future__ import annotations

from fugaku_gpt.config.schema import RunConfig

_NATIVE_DTYPES = ("float32", "bfloat16")


def may_use_native_kernels(config: RunConfig) -> bool:
    """Whether native kernels support a run's number type and the run allows them. (For attention,
    :func:`fugaku_gpt.kernels.attention_tiling.enough_heads_for_threads` decides whether they are used.)"""
    return config.node.compiled_kernels and config.training.dtype in _NATIVE_DTYPES
