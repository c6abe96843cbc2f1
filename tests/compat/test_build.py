"""Tests of the facts about this PyTorch build, and of denormal numbers."""

from __future__ import annotations

from typing import Iterator

import pytest
import torch

from fugaku_gpt import compat
from fugaku_gpt.compat import build


@pytest.fixture
def denormals_restored() -> Iterator[None]:
    yield
    torch.set_flush_denormal(False)


def test_denormals_become_zero_if_the_build_supports_it(denormals_restored: None) -> None:
    tiny = torch.tensor([1e-30, 1.0])
    assert float((tiny * 1e-10)[0]) > 0
    if compat.flush_denormals():
        assert float((tiny * 1e-10)[0]) == 0.0


def test_the_build_is_described_by_plain_values() -> None:
    facts = compat.build_facts()
    assert facts["torch"] == torch.__version__ and facts["torch_threads"] == torch.get_num_threads()
    assert isinstance(facts["fused_adamw"], bool)
    for name in ("blas", "instruction_set"):
        assert isinstance(facts[name], str) and facts[name]


@pytest.mark.parametrize("settings", ["BLAS_INFO=open, BUILD_TYPE=Release", "BLAS=OpenBLAS"])
def test_openblas_is_named_where_the_build_s_report_has_it(monkeypatch: pytest.MonkeyPatch, settings: str) -> None:
    monkeypatch.setattr(torch.__config__, "show", lambda: f"PyTorch built with:\n  - Build settings: {settings}, ")
    assert compat.build_facts()["blas"].endswith("OpenBLAS")


def test_the_instruction_set_is_read_from_an_older_build_s_report() -> None:
    report = "PyTorch built with:\n  - GCC 7.3\n  - CPU capability usage: AVX2\n  - Build settings: ..."
    assert build._instruction_set(report) == "AVX2"
    assert build._instruction_set("nothing of the kind") == "unknown"
