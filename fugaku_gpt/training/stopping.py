"""Stops a run before its end, on a signal or shortly before the job's time limit.

Each rank decides for itself; the sum at the end of each step turns this into one decision (``Trainer``). A rank that
waits inside MPI runs no Python signal handlers, so a thread ends the process when a second signal comes.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from types import FrameType
from typing import Any, Callable, Deque, Dict, List, Optional, Tuple

from fugaku_gpt.comm import Communicator
from fugaku_gpt.config.schema import JobConfig
from fugaku_gpt.config.values import format_duration
from fugaku_gpt.machine.job_limit import JobLimit, read_job_limit
from fugaku_gpt.machine.signals import signal_name

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_IMMEDIATE_SIGNALS = (signal.SIGTERM, signal.SIGINT)  # these end the process if a stop is already under way
# one stop request may arrive several times: from the batch system, from the job's script, and from launchers
_DUPLICATE_SECONDS = 3.0
_PATIENCE_SECONDS = 5.0
_STEP_HISTORY = 16


def _is_signal(reason: str) -> bool:
    return any(reason.startswith(signal_name(number)) for number in _SIGNALS)


class StopRequest:
    """Decides whether this rank wants the run to stop, and why.

    As a context manager it catches SIGTERM, SIGUSR1 and SIGINT, in the main thread only. Until the first step has
    ended, SIGINT ends the run at once, since nothing would be lost.

    Attributes:
        reason: why this rank wants to stop; empty while it does not.
        requested_at: when it began to want that, in seconds since the epoch.
        time_before_next_step: called at the end of each step; the seconds that something else than a step will take
            before the next one, such as an evaluation.

    Args:
        limit: the job's time limit; None if it has none.
        margin: seconds before the limit that the last checkpoint needs.
    """

    def __init__(self, limit: Optional[JobLimit] = None, margin: float = 0.0) -> None:
        self.reason = ""
        self.requested_at = 0.0
        self.time_before_next_step: Callable[[], float] = lambda: 0.0
        self._limit = limit
        self._margin = margin
        self._deadline = float("inf")  # by time.monotonic(), which setting the system clock does not change
        if limit is not None:
            self._deadline = time.monotonic() + limit.end - margin - time.time()
        self._last_step_end: Optional[float] = None
        self._steps: Deque[float] = deque([0.0], maxlen=_STEP_HISTORY)
        self._first_signal: Optional[float] = None
        self._former_handlers: Dict[int, Any] = {}
        self._pipe: Optional[Tuple[int, int]] = None
        self._former_descriptor = -1
        self._thread: Optional[threading.Thread] = None
        self._over = threading.Event()

    @classmethod
    def for_job(cls, job: JobConfig) -> StopRequest:
        """Return a request with the time limit of the job that this process runs in."""
        limit = read_job_limit(job)
        return cls(limit, limit.margin(job.stop_margin) if limit is not None else 0.0)

    def should_stop(self) -> bool:
        """Return True if the run should stop after this step. Call it once at the end of each step: the time between
        calls, without that of :meth:`leave_out`, is the estimate for the next step."""
        current_time = time.monotonic()
        if self._last_step_end is not None:
            self._steps.append(current_time - self._last_step_end)
        self._last_step_end = current_time
        needed = max(self._steps) + self.time_before_next_step()
        if not self.reason and self._limit is not None and current_time + needed > self._deadline:
            self._request(f"{format_duration(self._margin)} before the time limit of {self._limit}")
        return bool(self.reason)

    def leave_out(self, seconds: float) -> None:
        """Leave some of the time since the last call of :meth:`should_stop` out of that of the step."""
        if self._last_step_end is not None:
            self._last_step_end += seconds

    def agreed_reason(self, world: Communicator) -> str:
        """Return the reason of the rank that was first to want the stop, on rank 0; empty on other ranks. Collective,
        to be called after all ranks have agreed to stop."""
        reasons: Optional[List[Tuple[float, str]]] = world.gather_json((self.requested_at, self.reason))
        if reasons is None:
            return ""
        _, rank, reason = min((at, rank, reason) for rank, (at, reason) in enumerate(reasons) if reason)
        return f"{reason} (rank {rank})" if _is_signal(reason) and world.size > 1 else reason

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)
            self._former_descriptor = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._former_handlers[number] = signal.signal(number, self._handle)
            self._thread = threading.Thread(target=self._watch, args=(self._pipe[0],), name="signals", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former_handlers.items():
            signal.signal(number, handler)
        if self._pipe is not None and self._thread is not None:
            self._over.set()
            signal.set_wakeup_fd(self._former_descriptor)
            os.close(self._pipe[1])  # the thread reads end-of-file
            self._thread.join()
            os.close(self._pipe[0])
            self._pipe = None

    def _request(self, reason: str) -> None:
        self.reason, self.requested_at = reason, time.time()

    def _handle(self, number: int, _frame: Optional[FrameType]) -> None:
        current_time = time.monotonic()
        if number == signal.SIGINT and self._last_step_end is None:
            raise KeyboardInterrupt
        if self._first_signal is None:
            self._first_signal = current_time
        elif number in _IMMEDIATE_SIGNALS and current_time - self._first_signal > _DUPLICATE_SECONDS:
            raise KeyboardInterrupt
        if not self.reason:
            self._request(f"{signal_name(number)} on {socket.gethostname()}")

    def _watch(self, descriptor: int) -> None:
        """End the process if its main thread does not get to handle a second signal."""
        first_signal: Optional[float] = None
        while True:
            numbers = os.read(descriptor, 1)
            if not numbers:
                return
            current_time = time.monotonic()
            if first_signal is None and numbers[0] in _SIGNALS:
                first_signal = current_time
            elif (
                first_signal is not None
                and numbers[0] in _IMMEDIATE_SIGNALS
                and current_time - first_signal > _DUPLICATE_SECONDS
            ):
                if self._over.wait(_PATIENCE_SECONDS):
                    return
                print(f"fugaku-gpt: ended at once by a second {signal_name(numbers[0])}", file=sys.stderr, flush=True)
                os._exit(128 + numbers[0])
