"""Tests here run on every rank of an ``mpirun``; outside one there is nothing to collect."""

from __future__ import annotations

import os
import threading
from typing import Any, Callable, Iterator, List

import pytest

from fugaku_gpt.comm import Communicator
from fugaku_gpt.comm.pending import Pending

RANKS_VARIABLE = "FUGAKU_GPT_TEST_RANKS"

if RANKS_VARIABLE not in os.environ:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def assert_only_the_main_thread_calls_mpi(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Asserts in every test that other threads, such as writers of checkpoints and watchdogs, never call MPI."""
    callers: List[str] = []
    main_thread = threading.main_thread().ident

    def recording(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if threading.get_ident() != main_thread:
                callers.append(f"{function.__qualname__} in thread {threading.current_thread().name}")
            return function(*arguments, **options)

        return call

    # the entry of a call is not wrapped: its recorded line would be one of this file
    for owner, name in (
        (Communicator, "_wait"),
        (Communicator, "_posted"),
        (Communicator, "_leave"),
        (Pending, "done"),
    ):
        monkeypatch.setattr(owner, name, recording(getattr(owner, name)))
    yield
    assert not callers
