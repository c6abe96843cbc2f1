"""Tests that kernels for 16-bit types are probed by running them, once."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterator

import pytest
import torch

from fugaku_gpt import compat
from fugaku_gpt.compat import probes as kernels
from fugaku_gpt.compat.kernel_choices import RANK_CONSENSUS


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dict[str, Any]]:
    """The trials, which a test may add to; ranks have agreed on nothing yet."""
    before, cached_probes = dict(kernels.TRIALS), (kernels._is_precise, kernels._is_fast)
    monkeypatch.setattr(RANK_CONSENSUS, "in_float32", {})
    for cached_probe in cached_probes:
        cached_probe.cache_clear()
    yield kernels.TRIALS
    kernels.TRIALS.clear()
    kernels.TRIALS.update(before)
    for cached_probe in cached_probes:
        cached_probe.cache_clear()


def test_kernels_are_probed_also_where_gradients_are_off(trials: Dict[str, Any]) -> None:
    with torch.no_grad():
        inside = compat.operations_without_kernel(torch.bfloat16)
    kernels._is_precise.cache_clear()
    assert inside == compat.operations_without_kernel(torch.bfloat16)


def test_a_kernel_that_is_missing_or_adds_up_in_16_bits_is_detected(trials: Dict[str, Any]) -> None:
    def missing(x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.bfloat16:
            raise RuntimeError("\"sum_cpu\" not implemented for 'BFloat16'")
        return x.sum(0)

    def sequential_sum(x: torch.Tensor) -> torch.Tensor:
        total = x[0]
        for row in x[1:]:
            total = total + row
        return total

    ones: Callable[[], Any] = lambda: (torch.ones(400, 2),)  # noqa: E731
    trials.update({"missing": (missing, ones), "one by one": (sequential_sum, ones), "good": (lambda x: x * 2.0, ones)})
    assert not compat.has_kernel("missing", torch.bfloat16) and compat.has_kernel("missing", torch.float16)
    assert not compat.has_kernel("one by one", torch.bfloat16)  # 256 + 1 is 256 there
    assert compat.has_kernel("good", torch.bfloat16)
    assert compat.has_kernel("one by one", torch.float32)
    assert {"missing", "one by one"} <= set(compat.float32_operations(torch.bfloat16))
    assert compat.float32_operations(torch.float32) == []


def test_a_gelu_that_rounds_intermediate_results_is_detected_by_small_values(trials: Dict[str, Any]) -> None:
    def rounds(x: torch.Tensor) -> torch.Tensor:
        return x * 0.5 * (1.0 + torch.erf(x.float() / 2.0**0.5).to(x.dtype))

    def rounds_at_the_end(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x.float()).to(x.dtype)

    inputs = trials["gelu"][1]
    trials.update({"gelu": (rounds, inputs), "not small": (rounds, inputs), "gelu_tanh": (rounds_at_the_end, inputs)})
    assert not compat.has_kernel("gelu", torch.bfloat16)
    assert compat.has_kernel("not small", torch.bfloat16)  # beside the largest result that is no error
    assert compat.has_kernel("gelu_tanh", torch.bfloat16)


def test_a_product_that_is_much_slower_than_in_float32_is_not_used(
    trials: Dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {torch.float32: 1.0, torch.bfloat16: 2.0, torch.float16: 4.0}
    monkeypatch.setattr(kernels, "_seconds", lambda operation, dtype: seconds[dtype])
    trials["linear"] = (lambda x: x * 1.0, lambda: (torch.ones(4),))
    assert compat.has_kernel("linear", torch.bfloat16) and not compat.has_kernel("linear", torch.float16)


def test_the_agreed_operations_are_used_without_timing_kernels_again(
    trials: Dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_is_precise", lambda operation, dtype: operation != "softmax")
    compat.choose_float32_operations(["gelu", "softmax"], torch.bfloat16)
    seconds = {torch.float32: 1.0, torch.bfloat16: 100.0, torch.float16: 100.0}
    monkeypatch.setattr(kernels, "_seconds", lambda operation, dtype: seconds[dtype])
    assert compat.float32_operations(torch.bfloat16) == ["gelu", "softmax"]
    assert not compat.has_kernel("gelu", torch.bfloat16) and compat.has_kernel("linear", torch.bfloat16)
    assert compat.float32_operations(torch.float16) == ["linear", "matmul", "bmm", "baddbmm", "softmax"]
    assert (
        compat.operations_without_kernel(torch.bfloat16) == ["softmax"]
        and compat.operations_without_kernel(torch.float64) == []
    )


def test_a_type_that_cannot_be_added_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compat.can_train(torch.float32) and compat.can_train(torch.float64)

    def refuse(*_: Any) -> torch.Tensor:
        raise RuntimeError("\"mul_cpu\" not implemented for 'Half'")

    monkeypatch.setattr(torch.Tensor, "masked_fill_", refuse)
    assert not compat.can_train(torch.float16)
