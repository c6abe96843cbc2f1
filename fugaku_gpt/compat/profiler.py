"""Profiles operators."""

from __future__ import annotations

import functools
import importlib
from typing import Any, Callable, ContextManager, List, NamedTuple

import torch


class OperatorCall(NamedTuple):
    """A call of an operator, of an autograd function or of a :func:`profiled_range`, as the profiler recorded it;
    seconds by its clock."""

    name: str
    thread: int
    start: float
    end: float


def profiled_range(name: str) -> ContextManager[Any]:
    """A range of code that :func:`profile_operators` records under this name."""
    scope: ContextManager[Any] = torch.autograd.profiler.record_function(name)
    return scope


def profile_operators(run: Callable[[], None]) -> List[OperatorCall]:
    """The calls that are made while ``run`` runs. If :func:`has_profiler` is False there may be none.

    The profiler is the one that all builds since 1.7 have, under one name or another, where this one still has it: what
    is compared between builds is measured alike, in nanoseconds. (What took its place counts microseconds in 1.10.)
    """
    try:
        profiler: Any = importlib.import_module("torch.autograd.profiler_legacy")
    except ImportError:
        profiler = torch.autograd.profiler
    with profiler.profile() as profile:
        run()
    calls = []
    for event in profile.function_events or []:
        times = event.time_range if hasattr(event, "time_range") else event.cpu_interval  # microseconds
        calls.append(OperatorCall(event.name, event.thread, times.start * 1e-6, times.end * 1e-6))
    return calls


class _ErfProbe(torch.autograd.Function):
    """A function of autograd with one operator inside, to see whether the profiler sees both."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone().erf_()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


@functools.lru_cache(maxsize=None)
def has_profiler() -> bool:
    """Whether this build's profiler sees operators, named parts and functions of autograd inside each other."""

    def run() -> None:
        x = torch.ones(8, 8).requires_grad_()
        with profiled_range("part"):
            _ErfProbe.apply(x).sum().backward()

    try:
        calls = {call.name: call for call in profile_operators(run)}
        outer, function, operator = calls["part"], calls["_ErfProbe"], calls["aten::erf_"]
    except (KeyError, RuntimeError):
        return False
    return "_ErfProbeBackward" in calls and outer.start <= function.start and operator.end <= outer.end
