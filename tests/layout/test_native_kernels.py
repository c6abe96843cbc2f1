"""Tests of which runs may use the native kernels."""

from __future__ import annotations

import pytest

from fugaku_gpt.config import load_run_config
from fugaku_gpt.layout.native_kernels import may_use_native_kernels


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("allowed", [True, False])
def test_they_are_allowed_and_of_the_number_type(dtype: str, allowed: bool) -> None:
    config = load_run_config(overrides=[f"training.dtype={dtype}", f"node.compiled_kernels={str(allowed).lower()}"])
    assert may_use_native_kernels(config) == (allowed and dtype in ("float32", "bfloat16"))
