"""Tests of nested ranges in the profiler."""

from __future__ import annotations

import torch

from fugaku_gpt import compat


def test_the_profiler_sees_operators_inside_named_ranges() -> None:
    assert compat.has_profiler()  # in every build that is tested

    def run() -> None:
        with compat.profiled_range("outer"):
            torch.ones(300, 300).mm(torch.ones(300, 300))
        torch.ones(3).exp_()

    calls = {call.name: call for call in compat.profile_operators(run)}
    outer, product, after = calls["outer"], calls["aten::mm"], calls["aten::exp_"]
    assert outer.start < product.start < product.end < outer.end < after.start
    assert outer.thread == product.thread and 1e-6 < product.end - product.start < 10.0
