"""Wraps every call in which this process may wait for other ranks, while a profile is taken."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, ContextManager, Iterator

from fugaku_gpt.comm.communicator import Communicator
from fugaku_gpt.comm.hierarchical import ChainedRequest
from fugaku_gpt.comm.pending import Pending

CALLS = (
    (
        Communicator,
        (
            "all_reduce",
            "start_all_reduce",
            "start_reduce_scatter",
            "start_all_gather",
            "start_send",
            "start_receive",
            "all_gather",
            "broadcast",
            "barrier",
        ),
    ),
    (Pending, ("done", "wait")),
    (ChainedRequest, ("done", "wait")),
)


@contextlib.contextmanager
def calls_in_scope(scope: Callable[..., ContextManager[Any]]) -> Iterator[None]:
    """Make every such call inside a ``scope`` of its own. Before and afterwards the calls are unchanged, at no
    cost."""
    with contextlib.ExitStack() as replaced:
        for owner, names in CALLS:
            for name in names:
                replaced.enter_context(scoped_call(owner, name, scope))
        yield


@contextlib.contextmanager
def scoped_call(owner: Any, name: str, scope: Callable[..., ContextManager[Any]]) -> Iterator[None]:
    """Make calls of a function of a class or module inside a ``scope``, which receives their arguments. (This is in
    this package because the line that made a call is searched for outside of it.)"""
    inherited = name not in vars(owner)
    function = getattr(owner, name)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with scope(*args, **kwargs):
            return function(*args, **kwargs)

    setattr(owner, name, called)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, function)
