"""When a run stops before its end: told by a signal, or because the job's time limit is near.

Each rank decides for itself; the sum at the end of each step makes one decision of it (``Trainer``). A rank that waits
inside MPI runs no Python handlers, so a thread sees to it that a second signal ends the process all the same.
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
from typing import Any, Deque, Dict, List, Optional, Tuple

from fugaku_gpt.comm import Communicator
from fugaku_gpt.config.schema import JobConfig
from fugaku_gpt.config.values import format_duration
from fugaku_gpt.machine.job_limit import JobLimit, read_job_limit

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_AT_ONCE = (signal.SIGTERM, signal.SIGINT)  # these, once a stop is under way
# one order may come several times: by the batch system to every process, by the job's script, and by launchers
_SAME_SECONDS = 3.0
_PATIENCE_SECONDS = 5.0
_STEPS_KEPT = 16


class Stop:
    """Whether this rank wants the run to stop, and why.

    As a context manager it catches SIGTERM, SIGUSR1 and SIGINT; only the main thread can. Until the first step has
    ended, SIGINT ends the run at once, since nothing would be lost.

    Attributes:
        reason: why this rank wants to stop; empty while it does not.
        wanted_at: since when, seconds since the epoch.

    Args:
        limit: the end that the job must not reach; None where there is none.
        margin: seconds before that end which are needed for the last checkpoint.
    """

    def __init__(self, limit: Optional[JobLimit] = None, margin: float = 0.0) -> None:
        self.reason = ""
        self.wanted_at = 0.0
        self._limit = limit
        self._margin = margin
        self._latest = float("inf")  # by time.monotonic(): a clock that is set back changes nothing
        if limit is not None:
            self._latest = time.monotonic() + limit.end - margin - time.time()
        self._asked: Optional[float] = None
        self._steps: Deque[float] = deque([0.0], maxlen=_STEPS_KEPT)
        self._told: Optional[float] = None
        self._former: Dict[int, Any] = {}
        self._pipe: Optional[Tuple[int, int]] = None
        self._former_descriptor = -1
        self._thread: Optional[threading.Thread] = None
        self._over = threading.Event()

    @classmethod
    def of_job(cls, job: JobConfig) -> Stop:
        """By the limit of the job that this process is in."""
        limit = read_job_limit(job)
        return cls(limit, limit.margin(job.stop_margin) if limit is not None else 0.0)

    def wanted(self) -> bool:
        """Whether the run should stop after this step. To be asked once at the end of each step: the time between is
        how long the next one is taken to last."""
        now = time.monotonic()
        if self._asked is not None:
            self._steps.append(now - self._asked)
        self._asked = now
        if not self.reason and self._limit is not None and now + max(self._steps) > self._latest:
            self._want(f"{format_duration(self._margin)} before the time limit of {self._limit}")
        return bool(self.reason)

    def agreed_reason(self, world: Communicator) -> str:
        """The reason of the rank that was the first to want it, on rank 0; empty elsewhere. Collective, to be called
        when all ranks have agreed on stopping."""
        reasons: Optional[List[Tuple[float, str]]] = world.gather_json((self.wanted_at, self.reason))
        if reasons is None:
            return ""
        _, rank, reason = min((at, rank, reason) for rank, (at, reason) in enumerate(reasons) if reason)
        return f"{reason} (rank {rank})" if reason.startswith("SIG") and world.size > 1 else reason

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)
            self._former_descriptor = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._former[number] = signal.signal(number, self._handle)
            self._thread = threading.Thread(target=self._watch, args=(self._pipe[0],), name="signals", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        if self._pipe is not None and self._thread is not None:
            self._over.set()
            signal.set_wakeup_fd(self._former_descriptor)
            os.close(self._pipe[1])  # the thread reads the end
            self._thread.join()
            os.close(self._pipe[0])
            self._pipe = None

    def _want(self, reason: str) -> None:
        self.reason, self.wanted_at = reason, time.time()

    def _handle(self, number: int, _frame: Optional[FrameType]) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and self._asked is None:
            raise KeyboardInterrupt
        if self._told is None:
            self._told = now
        elif number in _AT_ONCE and now - self._told > _SAME_SECONDS:
            raise KeyboardInterrupt
        if not self.reason:
            self._want(f"{signal.Signals(number).name} on {socket.gethostname()}")

    def _watch(self, descriptor: int) -> None:
        """End a process whose main thread does not come to handle a second signal."""
        first: Optional[float] = None
        while True:
            numbers = os.read(descriptor, 1)
            if not numbers:
                return
            now = time.monotonic()
            if first is None and numbers[0] in _SIGNALS:
                first = now
            elif first is not None and numbers[0] in _AT_ONCE and now - first > _SAME_SECONDS:
                if self._over.wait(_PATIENCE_SECONDS):
                    return
                name = signal.Signals(numbers[0]).name
                print(f"fugaku-gpt: ended at once by a second {name}", file=sys.stderr, flush=True)
                os._exit(128 + numbers[0])
