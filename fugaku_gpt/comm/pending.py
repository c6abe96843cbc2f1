"""Communications in progress, and how they are driven forward."""

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
    """Communications that were started together and have not been seen to end.

    The tensors that they read and write must not be touched before :meth:`wait`. MPI libraries without a progress
    thread only make progress inside calls: code that computes meanwhile calls :meth:`done` now and then."""

    def __init__(
        self,
        group: Communicator,
        requests: List[MPI.Request],
        slot: int,
        buffer: Any,
        message: Optional[MessageCheck] = None,
    ) -> None:
        """``message``: a check that must succeed before the requests are tested."""
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
        """Whether a message has been compared with its description, or need not be."""
        message, self._message = self._message, None
        if message is None:
            return True
        try:
            compared = message.compare(blocking)
        except CallsDisagree:  # this message is no longer wanted, but MPI still writes it into its buffer
            OUTSTANDING.discard(self)
            _REFUSED.append(self._buffer)
            raise
        if not compared:
            self._message = message
        return compared


class MultiStepRequest(Protocol):
    """Communications that are each started when the previous one has ended."""

    def done(self) -> bool:
        """Whether all have ended; starts the next one when it is due."""


OUTSTANDING: Set[Pending] = set()
_REFUSED: List[Any] = []
# every wait polls these: another rank may be waiting for the next step of one
MULTI_STEP: Set[MultiStepRequest] = set()


class BackgroundProgress:
    """Lets MPI make progress while this rank computes: long native kernels call :attr:`poll` now and then, in the
    thread that calls MPI. Without it, MPI makes progress between operators only, which may be tens of milliseconds
    apart. Nothing is started there, not even the next step of a sum: reports of hangs compare the lines at which ranks
    start their calls.

    Attributes:
        poll: tests the communications in progress. It raises nothing, since a kernel could not pass it on: see
        :meth:`check`.
    """

    def __init__(self) -> None:
        # Python may raise a signal's exception as soon as a function is entered, before its first statement. A
        # generator that resumes is inside its `try` from the start.
        self._poller = self._poll_forever()
        next(self._poller)
        self.poll: Callable[[], None] = functools.partial(next, self._poller, None)
        self._seconds = 0.0
        self._failed: Optional[BaseException] = None

    def check(self) -> None:
        """Raise the exception that :attr:`poll` has caught, once."""
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed

    def pop_seconds(self) -> float:
        """Seconds of this process's time that polling has taken since the last call of this method."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _poll_forever(self) -> Generator[None, None, None]:
        while True:
            try:
                while True:
                    yield
                    if OUTSTANDING and self._failed is None:
                        self._test_outstanding()  # a function: the generator's variables would keep a message alive
            except GeneratorExit:
                raise
            except BaseException as error:  # a second signal's KeyboardInterrupt too
                self._failed = error

    def _test_outstanding(self) -> None:
        before = time.perf_counter()
        for pending in tuple(OUTSTANDING):
            if not pending.done():  # testing one that is not done makes progress on the others too
                break
        self._seconds += time.perf_counter() - before


BACKGROUND = BackgroundProgress()  # one for the process, as the kernels are


def finish_outstanding(limit: float = 5.0) -> None:
    """Wait at most ``limit`` seconds until MPI has finished what was started and never waited for: it must not write
    into freed memory, nor be finalised meanwhile. Runs at the end of the process."""
    deadline = time.monotonic() + limit
    while [pending for pending in (*MULTI_STEP, *OUTSTANDING) if not pending.done()] and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)


atexit.register(finish_outstanding)  # before mpi4py's own end, which was registered when it was imported
