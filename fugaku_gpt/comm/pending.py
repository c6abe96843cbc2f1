"""Communications that are under way, and who looks after them."""

from __future__ import annotations

import atexit
import functools
import time
from typing import TYPE_CHECKING, Any, Callable, Generator, List, Optional, Protocol, Set

from fugaku_gpt.comm.checks import MessageCheck
from fugaku_gpt.comm.mpi import MPI
from fugaku_gpt.errors import CallsDisagree

if TYPE_CHECKING:
    from fugaku_gpt.comm.communicator import Communicator

_PAUSE_SECONDS = 1e-3


class Pending:
    """Communications that were started together and are not known to have ended.

    The tensors that they read and write must not be touched before :meth:`wait`. MPI libraries without a thread of
    their own only make progress inside calls: whoever computes meanwhile looks now and then with :meth:`done`.
    """

    def __init__(
        self,
        group: Communicator,
        requests: List[MPI.Request],
        slot: int,
        buffer: Any,
        message: Optional[MessageCheck] = None,
    ) -> None:
        """``message``: what is to be compared before the requests are looked at."""
        self._group = group
        self._message = message
        self._requests = requests
        self._slot = slot
        self._buffer = buffer  # the memory must live until MPI is done with it, also where nobody waits any more
        if buffer is not None:
            OUTSTANDING.add(self)
            group._posted(slot)

    def done(self) -> bool:
        """Whether all of them have ended; does not wait."""
        if not self._is_compared(blocking=False):
            return False
        while self._requests and self._requests[-1].Test():
            self._requests.pop()
        if not self._requests and self._buffer is not None:
            self._buffer = None
            OUTSTANDING.discard(self)
            self._group._leave(self._slot)
        return not self._requests

    def wait(self) -> None:
        """Wait until all of them have ended."""
        BACKGROUND.check()
        if not self.done():
            self._group._waits(self._slot)
        self._is_compared(blocking=True)
        while not self.done():
            self._group._wait(self._requests[-1])

    def _is_compared(self, blocking: bool) -> bool:
        """Whether what a message is said to be is what it should be, or need not be compared."""
        message, self._message = self._message, None
        if message is None:
            return True
        try:
            compared = message.compare(blocking)
        except CallsDisagree:  # nobody takes this message any more, but MPI still puts it where it was told to
            OUTSTANDING.discard(self)
            _REFUSED.append(self._buffer)
            raise
        if not compared:
            self._message = message
        return compared


class MultiStepRequest(Protocol):
    """Communications of which each is started when the one before it has ended."""

    def done(self) -> bool:
        """Whether all have ended; starts the next one where its turn has come."""


OUTSTANDING: Set[Pending] = set()
_REFUSED: List[Any] = []
# whoever waits for anything looks after these: another rank may be waiting for the next step of one
MULTI_STEP: Set[MultiStepRequest] = set()


class BackgroundProgress:
    """Lets MPI get on while this rank computes: long kernels of ours call :attr:`poll` now and then, in the thread
    that calls MPI. Without, it gets on between operators only, which may be tens of milliseconds apart. Nothing is
    begun there, the next step of a sum neither: reports of hangs compare the lines at which ranks begin their calls.

    Attributes:
        poll: looks after what is under way. Raises nothing, since a kernel could not pass it on: see :meth:`check`.
    """

    def __init__(self) -> None:
        # Python may raise what a signal asks for as soon as a function is entered, before its first statement. A
        # generator that goes on is inside its `try` from the beginning.
        self._poller = self._poll_forever()
        next(self._poller)
        self.poll: Callable[[], None] = functools.partial(next, self._poller, None)
        self._seconds = 0.0
        self._failed: Optional[BaseException] = None

    def check(self) -> None:
        """Raise what :attr:`poll` has met, once."""
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed

    def pop_seconds(self) -> float:
        """Of this process's time that it has taken since this was asked last."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _poll_forever(self) -> Generator[None, None, None]:
        while True:
            try:
                while True:
                    yield
                    if OUTSTANDING and self._failed is None:
                        self._test_outstanding()  # whose variables end with it: a generator would keep a message alive
            except GeneratorExit:
                raise
            except BaseException as error:  # a second signal's KeyboardInterrupt too
                self._failed = error

    def _test_outstanding(self) -> None:
        before = time.perf_counter()
        for pending in tuple(OUTSTANDING):
            if not pending.done():  # looking after one that is not done moves the others too
                break
        self._seconds += time.perf_counter() - before


BACKGROUND = BackgroundProgress()  # one for the process, as the kernels are


def finish_outstanding(limit: float = 5.0) -> None:
    """Wait, for so many seconds at most, until MPI has done what was started and never waited for: it must not write
    into memory that is gone, nor be finalised in the midst of it. Runs at the end of the process."""
    deadline = time.monotonic() + limit
    while [pending for pending in (*MULTI_STEP, *OUTSTANDING) if not pending.done()] and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)


atexit.register(finish_outstanding)  # before mpi4py's own end, which was registered when it was imported
