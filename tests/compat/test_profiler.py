"""Tests of nested ranges in the profiler."""

from __future__ import annotations

import time

import torch

from fugaku_gpt import compat


def test_the_profiler_sees_operators_inside_named_ranges() -> None:
    assert compat.has_profiler()  # in every build that is tested

    def run() -> None:
        with compat.profiled_range("outer"):
            torch.ones(300, 300).mm(torch.ones(300, 300))
            time.sleep(0.01)
        torch.ones(3).exp_()

    before = time.perf_counter()
    calls = {call.name: call for call in compat.profile_operators(run)}
    elapsed = time.perf_counter() - before
    outer, product, after = calls["outer"], calls["aten::mm"], calls["aten::exp_"]
    assert outer.start < product.start < product.end < outer.end < after.start
    assert outer.thread == product.thread
    # in seconds: no less than the sleep in it, no more than all of it, which two clocks round to a microsecond or so
    assert 0.01 - 1e-5 <= outer.end - outer.start <= elapsed + 1e-5
