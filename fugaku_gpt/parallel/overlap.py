"""Measures how much of the replicas' communication overlaps with computation, by comparing the time that it costs a
rank in most steps with the time that it takes alone.

In most steps it runs while ranks compute, but still costs them time: waiting for its end and, in MPI libraries without
a thread of their own, the calls that start it and poll it. In a few calibration steps, the same on all ranks, replicas
first wait for each other and then only communicate, which gives the time that it takes alone.
"""

from __future__ import annotations

from typing import Optional

import torch

from fugaku_gpt.comm import BACKGROUND, Communicator


class CommunicationTiming:
    """One kind of communication.

    Attributes:
        alone_seconds: seconds of one step's communication without computation, as timed last; None before the first
            timing.
        exposed_seconds: seconds of this rank's time that it has cost in steps that compute meanwhile.
        polled_seconds: those of them that were calls between computations (counted for sums only) and within kernels.
        steps: number of these steps.
    """

    def __init__(self) -> None:
        self.alone_seconds: Optional[float] = None
        self.reset()

    def reset(self) -> None:
        """Reset the exposed time."""
        self.exposed_seconds = 0.0
        self.polled_seconds = 0.0
        self.steps = 0

    def record_alone(self, seconds: float) -> None:
        """Record the time of one step's communication by itself. Steps before the first timing were cold: their exposed
        time is dropped."""
        if self.alone_seconds is None:
            self.reset()
        self.alone_seconds = seconds

    def begin_background(self) -> None:
        """Start to count the time that kernels spend on polling MPI, for this and all other pending communication."""
        BACKGROUND.pop_seconds()

    def count_background(self) -> None:
        """Count the polling time since :meth:`begin_background` as exposed."""
        seconds = BACKGROUND.pop_seconds()
        self.exposed_seconds += seconds
        self.polled_seconds += seconds

    @property
    def per_step(self) -> Optional[float]:
        """Seconds exposed in a step; None before the first one."""
        return self.exposed_seconds / self.steps if self.steps else None


class Overlap:
    """The overlap of both kinds: the sums of gradients over replicas and, with ZeRO, the all-gather of parameters.

    Attributes:
        gather_is_due: the next all-gather is to be timed alone.
    """

    def __init__(self, dp: Communicator, gathers: bool) -> None:
        self._dp = dp
        self.sums = CommunicationTiming()
        self.gathers = CommunicationTiming() if gathers else None
        self.gather_is_due = False

    def wait_for_replicas(self) -> None:
        """Wait for all replicas, so that the next timing includes no waiting for a slow one."""
        self._dp.barrier()

    def read(self) -> Optional[float]:
        """Return the share hidden since the last reading, from 0 to 1, on the replica that hides most; the other
        replicas have waited for that replica, not for messages. None before it was measured. Collective over the
        replicas."""
        kinds = [kind for kind in (self.sums, self.gathers) if kind is not None]
        figures = [(kind.alone_seconds, kind.per_step) for kind in kinds]
        if self._dp.size == 1 or any(None in pair for pair in figures):
            return None
        alone, exposed = (sum(seconds for seconds in column if seconds is not None) for column in zip(*figures))
        hidden = torch.tensor([1.0 - exposed / max(alone, 1e-9)], dtype=torch.float64)
        self._dp.all_reduce(hidden, "max")
        for kind in kinds:
            kind.reset()
        return max(0.0, float(hidden))
