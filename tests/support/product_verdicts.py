"""Verdicts on products with ratios of a test's choice, in a file of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from fugaku_gpt.kernels.product_verdicts import MIN_TURNS, ProductTimes, ProductVerdict, add_verdicts
from fugaku_gpt.ops import product_choice, product_timing


def product_verdict(
    dtype: str = "float32", threads: int = 1, turns: int = MIN_TURNS, **speedups: float
) -> ProductVerdict:
    """A verdict of two products, whose ways (``compiled``, ``onednn``) are faster than PyTorch's by these factors."""
    times = [ProductTimes(kind, 512, 768, 3072, 0.01, speedups) for kind in ("forward", "gradient of inputs")]
    return ProductVerdict(dtype, threads, turns, tuple(times) if turns else ())


def use_verdict_file(monkeypatch: pytest.MonkeyPatch, file: Path, *verdicts: ProductVerdict) -> None:
    """Has this process read and write a file that contains these verdicts, measured with the stamp in force; without
    any it does not exist."""
    monkeypatch.setattr(product_choice, "verdict_file", lambda stamp: file)
    monkeypatch.setattr(product_timing, "verdict_file", lambda stamp: file)
    if file.exists():
        file.unlink()
    if verdicts:
        assert add_verdicts(file, product_choice.current_stamp(), verdicts, True)[1] == ""
    product_choice.forget_recorded()
