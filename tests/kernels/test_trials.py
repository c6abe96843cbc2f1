"""Tests of the trials of a library: a right one passes, and a kernel that computes anything else is named."""

from __future__ import annotations

import ctypes
from typing import Any, Dict, List, Set

import numpy as np
import pytest
import torch  # noqa: F401  # its OpenMP runtime is the kernels'
from hypothesis import given
from hypothesis import strategies as st

from fugaku_gpt.kernels.library import FLOAT32, AttentionShape, Library
from fugaku_gpt.kernels.trials import Trial, failures, from_bfloat16, to_bfloat16, trials
from tests.kernels.loaded import loaded_library

# kernel → the arguments, of those that are addresses, that it writes to
OUTPUTS: Dict[str, List[int]] = {
    "attention_forward": [8],
    "attention_backward": [11, 12, 13],
    "loss_sums": [5, 6],
    "loss_full_rows": [0, 5],
    "loss_gradient": [0],
    "layer_norm": [3],
    "layer_norm_gradient": [5, 6, 7],
    "rms_norm": [5],
    "rms_norm_gradient": [7, 8],
    "gelu": [1],
    "gelu_gradient": [2],
    "swiglu": [1],
    "swiglu_gradient": [2],
    "rotate": [3],
    "gemm": [8],
    "gemv": [3],
    "decode_attention": [5],
    "accumulate": [0],
    "sum_of_rows": [3],
    "adamw": [0, 2, 3, 4],
}


class OneWrong:
    """A library whose kernels are right, but for a bit of the exponent of one number that one of them writes: the first
    float32 number, or the second bfloat16 number."""

    def __init__(self, library: Library, kernel: str, argument: int) -> None:
        self._library, self._kernel, self._argument = library, kernel, argument
        self.changed = 0

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)
        if name != self._kernel:
            return function

        def wrong(*arguments: Any) -> None:
            function(*arguments)
            (ctypes.c_uint16 * 2).from_address(arguments[self._argument])[1] ^= 0x4000
            self.changed += 1

        return wrong


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_kernels_of_this_environment_pass(threads: int) -> None:
    library = loaded_library()
    assert failures(library, threads) == []
    kernels = {trial.kernel.rpartition(" of ")[0] for trial in trials(library, threads)}
    assert {"attention", "loss", "largest logit", "LayerNorm", "RMSNorm", "GELU", "GELU by tanh", "SwiGLU"} <= kernels
    assert {"rotation", "rotation back", "AdamW", "accumulate"} <= kernels


@pytest.mark.parametrize(
    ("kernel", "argument"), [(kernel, argument) for kernel, arguments in OUTPUTS.items() for argument in arguments]
)
def test_a_single_wrong_number_of_a_kernel_is_detected(kernel: str, argument: int) -> None:
    library = OneWrong(loaded_library(), kernel, argument)
    wrong = failures(library, 2)  # type: ignore[arg-type]
    if kernel == "gemm" and not library.changed:
        pytest.skip("the library has no products")
    assert library.changed and wrong and " instead of " in wrong[0]


@pytest.mark.parametrize("query", [96, 169])
def test_a_wrong_number_in_the_second_block_of_queries_is_detected(query: int) -> None:
    library = loaded_library()

    class LaterQueryWrong:
        def __getattr__(self, name: str) -> Any:
            return wrong if name == "attention_forward" else getattr(library, name)

    def wrong(shape: AttentionShape, *arguments: Any) -> None:
        library.attention_forward(shape, *arguments)
        assert shape.queries > query
        address = arguments[OUTPUTS["attention_forward"][0] - 1]
        first = query * shape.heads * shape.width * (4 if shape.type == FLOAT32 else 2)
        (ctypes.c_uint16 * 2).from_address(address + first)[1] ^= 0x4000

    assert failures(LaterQueryWrong(), 2)  # type: ignore[arg-type]


def test_every_function_of_the_library_that_computes_is_tried() -> None:
    library = loaded_library()
    used: Set[str] = set()

    class Recording:
        def __getattr__(self, name: str) -> Any:
            used.add(name)
            return getattr(library, name)

    assert failures(Recording(), 1) == []  # type: ignore[arg-type]
    computing = {*OUTPUTS, "sum_of_squares"} - (set() if library.supports_gemm(FLOAT32) else {"gemm"})
    assert computing <= used
    others = {"set_progress_callback", "supports_gemm", "gemm_workspace_floats", "attention_workspace_floats", "lanes"}
    others |= {"decode_attention_workspace_floats"}
    others |= {"triad", "chained_additions", "multiply_adds"}  # they measure the node; tests/kernels/test_rates.py
    assert {name for name in (*vars(library), *vars(Library)) if not name.startswith("_")} <= {*OUTPUTS, *used, *others}


@pytest.mark.parametrize("value", [np.nan, np.inf, 1.0 + 2.0**-18])
def test_a_failure_names_the_kernel_the_number_and_what_it_should_be(value: float) -> None:
    expected = np.array([1.0, 1.0, 1.0])
    assert Trial("gelu of float32", np.array([1.0, 1.0, 1.0 + 2.0**-20]), expected, 2.0**-23).failure() == ""
    text = Trial("gelu of float32", np.array([1.0, value, 1.0]), expected, 2.0**-23).failure()
    assert text == f"gelu of float32: {value:.6g} instead of 1 (1 of 3 numbers are wrong)"


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=8))
def test_bfloat16_is_rounded_as_pytorch_rounds(numbers: List[float]) -> None:
    x = np.array(numbers, np.float32)
    expected = torch.from_numpy(x).bfloat16().float().numpy()
    assert np.array_equal(from_bfloat16(to_bfloat16(x)), expected)
