"""Kernels reach the committed shares of what A64FX can do, by the count of its model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.aarch64.machine import compiler, folder

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from a64fx import CASES, committed_shares, count_kernels  # noqa: E402
from a64fx_trace import Machine  # noqa: E402

ALLOWED_LOSS = 0.03
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", committed_shares())
def test_a_kernel_keeps_its_share(name: str) -> None:
    compiler("gcc-12")
    counted = count_kernels(Machine(folder()), [name])[name]
    assert counted.share > committed_shares()[name] - ALLOWED_LOSS, (
        f"{name}: {counted.share:.3f} of its bound; committed {committed_shares()[name]:.3f}: "
        f"if that is meant, benchmarks/a64fx.py --write {name}"
    )


def test_the_table_has_kernels_that_can_be_counted() -> None:
    assert committed_shares() and set(committed_shares()) <= set(CASES)
