"""What of the replicas' communication computation hides: what it takes of a rank's time, beside what it takes alone.

In most steps it goes on while ranks compute, and takes their time all the same: waiting for its end, and, in MPI
libraries without a thread of their own, the calls that start it and let it get on. In a few steps, the same on all
ranks, replicas first wait for each other and then do nothing else: that is how long it takes alone.
"""

from __future__ import annotations

from typing import Optional

import torch

from fugaku_gpt.comm import BACKGROUND, Communicator


class Timed:
    """One kind of communication.

    Attributes:
        alone_seconds: of one step's, without computation: as timed last; None before.
        exposed_seconds: of this rank's time that it has taken in steps that compute meanwhile.
        polled_seconds: what of these were calls between computations (counted for sums only) and within kernels.
        steps: how many these were.
    """

    def __init__(self) -> None:
        self.alone_seconds: Optional[float] = None
        self.start_anew()

    def start_anew(self) -> None:
        """Nothing has been exposed yet."""
        self.exposed_seconds = 0.0
        self.polled_seconds = 0.0
        self.steps = 0

    def took_alone(self, seconds: float) -> None:
        """One step's was timed by itself. What was exposed before the first time was that of cold steps."""
        if self.alone_seconds is None:
            self.start_anew()
        self.alone_seconds = seconds

    def begin_background(self) -> None:
        """From here on it is this kind that kernels let MPI get on with, and what else is under way then."""
        BACKGROUND.pop_seconds()

    def count_background(self) -> None:
        """What that has taken until here is exposed."""
        seconds = BACKGROUND.pop_seconds()
        self.exposed_seconds += seconds
        self.polled_seconds += seconds

    @property
    def per_step(self) -> Optional[float]:
        """Seconds exposed in a step; None where none was."""
        return self.exposed_seconds / self.steps if self.steps else None


class Overlap:
    """The sums of gradients over replicas and, where these share out the optimiser's work, the gathering of parameters.

    Attributes:
        gather_is_due: the next gathering is to be timed alone.
    """

    def __init__(self, dp: Communicator, gathers: bool) -> None:
        self._dp = dp
        self.sums = Timed()
        self.gathers = Timed() if gathers else None
        self.gather_is_due = False

    def meet(self) -> None:
        """Wait for all replicas, so that none is waited for in what is timed next."""
        self._dp.barrier()

    def read(self) -> Optional[float]:
        """The share hidden since the last reading, from 0 to 1, on the replica that hides most: the others have waited
        for it to come, and not for messages. None where nothing is known. Collective over the replicas."""
        kinds = [kind for kind in (self.sums, self.gathers) if kind is not None]
        figures = [(kind.alone_seconds, kind.per_step) for kind in kinds]
        if self._dp.size == 1 or any(None in pair for pair in figures):
            return None
        alone, exposed = (sum(seconds for seconds in column if seconds is not None) for column in zip(*figures))
        hidden = torch.tensor([1.0 - exposed / max(alone, 1e-9)], dtype=torch.float64)
        self._dp.all_reduce(hidden, "max")
        for kind in kinds:
            kind.start_anew()
        return max(0.0, float(hidden))
