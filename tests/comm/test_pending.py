"""Tests of polling outstanding communications from within kernels, where nothing can be raised."""

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


class OutstandingRequest:
    """A request that is done after some polls, or raises an error."""

    def __init__(self, polls: int, error: Any = None) -> None:
        self.polls_left = polls
        self._error = error

    def done(self) -> bool:
        if self._error is not None:
            raise self._error
        self.polls_left -= 1
        if self.polls_left <= 0:
            pending.OUTSTANDING.discard(self)  # type: ignore[arg-type]
        return self.polls_left <= 0


@pytest.fixture
def outstanding(monkeypatch: pytest.MonkeyPatch) -> Iterator[List[Any]]:
    """The outstanding requests that a poll tests, in the order of this list."""
    requests = OrderedSet()
    monkeypatch.setattr(pending, "OUTSTANDING", requests)
    yield requests
    BACKGROUND._failed = None


class OrderedSet(List[Any]):
    """Stand-in for a set, which keeps the order of its elements."""

    def discard(self, request: Any) -> None:
        self.remove(request)


def test_a_poll_removes_finished_requests_and_ends_at_the_first_unfinished_request(
    outstanding: List[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    background, requests = BackgroundProgress(), [OutstandingRequest(1), OutstandingRequest(2), OutstandingRequest(9)]
    monkeypatch.setattr(pending, "MULTI_STEP", {OutstandingRequest(1, ValueError("would begin the next step"))})
    background.poll()
    assert background.pop_seconds() == 0.0  # nothing is outstanding
    outstanding += requests
    background.poll()
    assert [request.polls_left for request in requests] == [0, 1, 9] and outstanding == requests[1:]
    background.poll()
    assert [request.polls_left for request in requests] == [0, 0, 8] and outstanding == requests[2:]
    assert background.pop_seconds() > 0.0 == background.pop_seconds()
    background.check()


def test_a_finished_request_is_released(outstanding: List[Any]) -> None:
    background, request = BackgroundProgress(), OutstandingRequest(9)
    outstanding.append(request)
    background.poll()
    outstanding.clear()
    reference = weakref.ref(request)
    del request
    assert reference() is None


@pytest.mark.parametrize("error", [ValueError("calls disagree"), KeyboardInterrupt()])
def test_an_error_of_a_poll_is_raised_by_the_next_call_and_only_once(
    outstanding: List[Any], error: BaseException
) -> None:
    outstanding.append(OutstandingRequest(1, error))
    BACKGROUND.poll()
    outstanding[:] = [request] = [OutstandingRequest(5)]
    BACKGROUND.poll()
    assert request.polls_left == 5  # no request is polled until the error has been raised
    with pytest.raises(type(error)):
        Communicator.alone()._enter("barrier", torch.zeros(1))
    Communicator.alone()._enter("barrier", torch.zeros(1))
    BACKGROUND.poll()
    assert request.polls_left == 4


@pytest.mark.skipif(not ops.has_native_kernels(), reason="no compiled kernels: fugaku-gpt env kernels")
def test_an_exception_that_a_signal_raises_inside_a_kernel_is_not_lost() -> None:
    background, qkv = BackgroundProgress(), torch.zeros(1, 1, 2048, 24, 64)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGALRM, interrupt)
    ops.set_progress_callback(background.poll, 0.0)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:  # the signal nearly always arrives inside a kernel
                ops.attention(qkv, 8, ops.KeyRanges.causal(2048), None, 1.0)
                background.check()
    finally:
        ops.set_progress_callback(None, 0.0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, former)


def test_waiting_raises_the_error_of_an_earlier_poll(outstanding: List[Any]) -> None:
    outstanding.append(OutstandingRequest(1, ValueError("calls disagree")))
    communication = Pending(Communicator.alone(), [], -1, None)
    BACKGROUND.poll()
    with pytest.raises(ValueError, match="calls disagree"):
        communication.wait()
    communication.wait()
