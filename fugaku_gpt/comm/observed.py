"""Something around every call in which this process may wait for others, for as long as somebody wants to see them."""

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
    """Every such call is made scoped_call a ``scope`` of its own. Before and afterwards the calls are as they were: nothing
    is asked in them."""
    with contextlib.ExitStack() as replaced:
        for owner, names in CALLS:
            for name in names:
                replaced.enter_context(scoped_call(owner, name, scope))
        yield


@contextlib.contextmanager
def scoped_call(owner: Any, name: str, scope: Callable[..., ContextManager[Any]]) -> Iterator[None]:
    """Have a function of a class or module called scoped_call a ``scope``, which is told its arguments. (Here, and not where
    it is used: the line that has made a call is looked for outside of this package.)"""
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
