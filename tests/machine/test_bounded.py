"""Tests that a function on untrusted input ends at its bounds."""

from __future__ import annotations

import os
import signal

import pytest

from fugaku_gpt.machine.bounded import BoundExceeded, call_in_child

MIB = 2**20


def spin() -> str:
    while True:
        pass


def test_the_text_of_the_function_is_returned() -> None:
    parent = os.getpid()
    text = call_in_child(lambda: f"ä\udc80 {os.getpid() != parent}", seconds=5, memory=64 * MIB, length=100)
    assert text == "ä\udc80 True"


def test_memory_is_bounded() -> None:
    """A process that has freed memory may use that again, beyond the limit."""
    with pytest.raises(BoundExceeded, match="needs more than 64 MiB of memory"):
        call_in_child(lambda: str(len(bytes(16384 * MIB))), seconds=5, memory=64 * MIB, length=100)


def test_the_length_is_bounded_and_a_writer_that_does_not_end_is_ended() -> None:
    with pytest.raises(BoundExceeded, match="makes more than 1,000 characters"):
        call_in_child(lambda: "x" * 1001, seconds=5, memory=64 * MIB, length=1000)
    with pytest.raises(BoundExceeded, match="makes more than 1,000 characters"):
        call_in_child(lambda: "x" * MIB, seconds=5, memory=64 * MIB, length=1000)


@pytest.mark.slow
def test_time_is_bounded() -> None:
    with pytest.raises(BoundExceeded, match="takes more than 1 s of processor time"):
        call_in_child(spin, seconds=1, memory=64 * MIB, length=100)


def test_a_function_that_fails_gives_the_error_as_text() -> None:
    with pytest.raises(BoundExceeded, match="fails: ZeroDivisionError: integer division or modulo by zero"):
        call_in_child(lambda: str(1 // 0), seconds=5, memory=64 * MIB, length=100)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (signal.SIGKILL, "is ended by signal 9, Killed: by the kernel for want of memory, or by another process$"),
        (signal.SIGTERM, "is ended by signal 15, Terminated$"),
    ],
)
def test_a_signal_that_is_not_the_limit_of_time_is_named(number: int, message: str) -> None:
    with pytest.raises(BoundExceeded, match=message):
        call_in_child(lambda: str(os.kill(os.getpid(), number)), seconds=5, memory=64 * MIB, length=100)


def test_a_function_that_ends_the_process_is_refused() -> None:
    with pytest.raises(BoundExceeded, match=r"has ended the process that ran it \(exit code 7\)"):
        call_in_child(lambda: str(os._exit(7)), seconds=5, memory=64 * MIB, length=100)
