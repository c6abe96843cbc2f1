"""Communications under way are looked after from within kernels, where nothing can be raised."""

from __future__ import annotations

import signal
import time
import weakref
from typing import Any, Iterator, List

import pytest
import torch

from fugaku_gpt import ops
from fugaku_gpt.comm import BACKGROUND, Communicator, pending
from fugaku_gpt.comm.pending import BackgroundProgress, Pending


class UnderWay:
    """Looked at some times until it is done, or raises."""

    def __init__(self, looks: int, error: Any = None) -> None:
        self.looks = looks
        self._error = error

    def done(self) -> bool:
        if self._error is not None:
            raise self._error
        self.looks -= 1
        if self.looks <= 0:
            pending.OUTSTANDING.discard(self)  # type: ignore[arg-type]
        return self.looks <= 0


@pytest.fixture
def under_way(monkeypatch: pytest.MonkeyPatch) -> Iterator[List[Any]]:
    """What is put into it is under way, in this order."""
    found = Ordered()
    monkeypatch.setattr(pending, "OUTSTANDING", found)
    yield found
    BACKGROUND._failed = None


class Ordered(List[Any]):
    """A set that keeps an order."""

    def discard(self, one: Any) -> None:
        self.remove(one)


def test_what_is_done_makes_way_and_one_that_is_not_moves_the_others(
    under_way: List[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    background, ones = BackgroundProgress(), [UnderWay(1), UnderWay(2), UnderWay(9)]
    monkeypatch.setattr(pending, "MULTI_STEP", {UnderWay(1, ValueError("would begin the next step"))})
    background.poll()
    assert background.pop_seconds() == 0.0  # nothing is under way
    under_way += ones
    background.poll()
    assert [one.looks for one in ones] == [0, 1, 9] and under_way == ones[1:]
    background.poll()
    assert [one.looks for one in ones] == [0, 0, 8] and under_way == ones[2:]
    assert background.pop_seconds() > 0.0 == background.pop_seconds()
    background.check()


def test_what_is_over_is_not_kept(under_way: List[Any]) -> None:
    background, one = BackgroundProgress(), UnderWay(9)
    under_way.append(one)
    background.poll()
    under_way.clear()
    kept = weakref.ref(one)
    del one
    assert kept() is None


@pytest.mark.parametrize("error", [ValueError("calls disagree"), KeyboardInterrupt()])
def test_what_goes_wrong_is_raised_by_the_next_call_and_only_once(under_way: List[Any], error: BaseException) -> None:
    under_way.append(UnderWay(1, error))
    BACKGROUND.poll()
    under_way[:] = [one] = [UnderWay(5)]
    BACKGROUND.poll()
    assert one.looks == 5  # nothing more is done until somebody knows
    with pytest.raises(type(error)):
        Communicator.alone()._enter("barrier", torch.zeros(1))
    Communicator.alone()._enter("barrier", torch.zeros(1))
    BACKGROUND.poll()
    assert one.looks == 4


@pytest.mark.skipif(not ops.has_native_kernels(), reason="no compiled kernels: fugaku-gpt env kernels")
def test_what_a_signal_raises_while_a_kernel_computes_is_not_lost() -> None:
    background, qkv = BackgroundProgress(), torch.zeros(1, 1, 2048, 3, 8, 64)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGALRM, interrupt)
    ops.set_progress_callback(background.poll, 0.0)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:  # it comes in the midst of a kernel, but for the very rare case
                ops.attention(qkv, None, 1.0)
                background.check()
    finally:
        ops.set_progress_callback(None, 0.0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, former)


def test_whoever_waits_is_told_what_went_wrong_meanwhile(under_way: List[Any]) -> None:
    under_way.append(UnderWay(1, ValueError("calls disagree")))
    one = Pending(Communicator.alone(), [], -1, None)
    BACKGROUND.poll()
    with pytest.raises(ValueError, match="calls disagree"):
        one.wait()
    one.wait()
