"""Kernels reach the committed shares of what A64FX can do, by the count of its model: one of each source, and in
`make soak-arm` all."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List

import pytest

from fugaku_gpt.kernels import build
from fugaku_gpt.machine.fugaku import COMPILER_OPTIONS
from tests.aarch64.machine import compiler, folder
from tests.benchmarks import programs  # noqa: F401  # puts benchmarks/ on the path

from a64fx import CASES, committed_shares, count_kernel, difference_from_table  # isort: skip
from a64fx_trace import Machine, compile_program  # isort: skip

KERNEL_OF_EACH_SOURCE = (
    "gemm_nn",
    "attention_forward",
    "gemv",
    "decode_attention",
    "layer_norm",
    "rms_norm",
    "gelu_erf",
    "swiglu",
    "rotate",
    "loss_full_rows",
    "adamw",
    "sum_of_squares",
)
pytestmark = pytest.mark.slow


def _kernels() -> List[Any]:
    soak = [pytest.param(name, marks=pytest.mark.soak) for name in CASES if name not in KERNEL_OF_EACH_SOURCE]
    return [*KERNEL_OF_EACH_SOURCE, *soak]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels, compiled with their driver."""
    compiler("gcc-12")
    return compile_program(
        Machine(folder()), "gcc-12", COMPILER_OPTIONS, tmp_path_factory.mktemp("a64fx"), build.SOURCE
    )


@pytest.mark.parametrize("name", _kernels())
def test_a_kernel_has_its_committed_share(program: Path, name: str) -> None:
    assert difference_from_table(name, count_kernel(Machine(folder()), program, name).share) == ""


def test_the_table_has_all_kernels_that_can_be_counted() -> None:
    assert list(committed_shares()) == list(CASES)
