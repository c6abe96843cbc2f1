"""What the probes find in this PyTorch works as the rest of the package expects."""

from __future__ import annotations

import math
from typing import Any, Dict, Iterator, List

import pytest
import torch
import torch.nn.functional as F

from fugaku_gpt import compat

OPTIONS: Dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}


@pytest.fixture
def denormals_kept() -> Iterator[None]:
    yield
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("has_approximate", [True, False])
def test_gelu_tanh_is_its_formula_with_and_without_the_kernel(
    has_approximate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_approximate and not compat._GELU_HAS_APPROXIMATE:
        pytest.skip("this PyTorch has no tanh kernel of GELU")
    monkeypatch.setattr(compat, "_GELU_HAS_APPROXIMATE", has_approximate)
    x = torch.linspace(-6, 6, 101, dtype=torch.float64).requires_grad_()
    y = compat.gelu_tanh(x)
    y.sum().backward()
    for point, value, slope in zip(x.tolist(), y.tolist(), x.grad.tolist()):  # type: ignore[union-attr]
        scale = math.sqrt(2 / math.pi)
        t = math.tanh(scale * (point + 0.044715 * point**3))
        assert value == pytest.approx(0.5 * point * (1 + t), abs=1e-14)
        expected = 0.5 * (1 + t) + 0.5 * point * (1 - t * t) * scale * (1 + 3 * 0.044715 * point * point)
        assert slope == pytest.approx(expected, abs=1e-14)


def test_gelu_tanh_is_near_the_exact_gelu_and_not_equal_to_it() -> None:
    x = torch.linspace(-4, 4, 200)
    difference = float((compat.gelu_tanh(x) - F.gelu(x)).abs().max())
    assert 1e-5 < difference < 1e-3


def test_the_fused_attention_is_causal_where_it_is_found() -> None:
    if compat.scaled_dot_product_attention is None:
        assert not hasattr(F, "scaled_dot_product_attention")
        pytest.skip("this PyTorch has no fused attention")
    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    first = compat.scaled_dot_product_attention(q, k, v, is_causal=True)[:, :, 0]
    assert torch.allclose(first, v[:, :, 0])  # the first token sees itself only


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_probe_for_a_fused_optimiser_leaves_parameters_as_they_are(dtype: torch.dtype) -> None:
    weights = torch.ones(5, dtype=dtype).requires_grad_()
    weights.grad = torch.ones_like(weights)
    groups: List[Dict[str, Any]] = [{"params": [weights], "weight_decay": 0.0}]
    optimizer = compat.fused_adamw(groups, **OPTIONS)
    assert torch.equal(weights.detach(), torch.ones(5, dtype=dtype))
    if optimizer is not None:
        optimizer.step()  # the first step of Adam is the learning rate, by the gradient's sign
        assert weights.tolist() == pytest.approx([0.99] * 5, rel=1e-6)


def test_an_older_signature_of_adamw_means_no_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithoutFused(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr})

    monkeypatch.setattr(torch.optim, "AdamW", WithoutFused)
    assert compat.fused_adamw([{"params": [torch.zeros(1, requires_grad=True)]}], lr=0.1) is None


def test_denormals_become_zero_where_the_build_says_so(denormals_kept: None) -> None:
    tiny = torch.tensor([1e-30, 1.0])
    assert float((tiny * 1e-10)[0]) > 0
    if compat.flush_denormals():
        assert float((tiny * 1e-10)[0]) == 0.0


def test_the_build_is_described_by_plain_values() -> None:
    facts = compat.build_facts()
    assert facts["torch"] == torch.__version__ and facts["torch_threads"] == torch.get_num_threads()
    assert facts["fused_attention"] is (compat.scaled_dot_product_attention is not None)
    assert isinstance(facts["fused_adamw"], bool)
    for name in ("blas", "instruction_set"):
        assert isinstance(facts[name], str) and facts[name]


def test_the_instruction_set_is_read_from_an_older_build_s_report() -> None:
    report = "PyTorch built with:\n  - GCC 7.3\n  - CPU capability usage: AVX2\n  - Build settings: ..."
    assert compat._instruction_set(report) == "AVX2"
    assert compat._instruction_set("nothing of the kind") == "unknown"
