"""The run that both sides of a comparison, or all runs of a design, change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional, Tuple

from fugaku_gpt.compare.sides import LiveSide, config_of
from fugaku_gpt.config import RunConfig
from fugaku_gpt.config.source import RunSource
from fugaku_gpt.errors import UsageError

LIVE_WARM_UP, RECORDED_WARM_UP = 5, 2
TOLERANCE = 0.02  # default of the relative difference within which the sides count as the same
_PROFILED = "training.profile_operators=3"  # iterations after the timed ones, for the table of operators
_ITERATIONS = "training.iterations"
# whatever takes time beside iterations is switched off unless the user sets it; each iteration is logged
_TIMED = (
    *("training.log_interval=1", "training.eval_interval=null", "training.eval_files=[]"),
    *("checkpoint.interval=null", "checkpoint.keep_best=null"),
)


@dataclass(frozen=True)
class SharedRun:
    """The run without the settings of a side.

    Attributes:
        source: the run file, preset and overrides of the user, with those of ``--data`` and the scheduler.
        ranks: number of ranks on each side; None for that of the run.
        iterations: number of timed iterations in each job.
        warm_up: number of iterations before these; None for the default.
    """

    source: RunSource
    ranks: Optional[int]
    iterations: int
    warm_up: Optional[int]

    @property
    def warm_up_of_live(self) -> int:
        """Number of warm-up iterations of a job that is run now."""
        return self.warm_up if self.warm_up is not None else LIVE_WARM_UP

    @property
    def warm_up_of_recorded(self) -> int:
        """Number of warm-up iterations of a run that was made before."""
        return self.warm_up if self.warm_up is not None else RECORDED_WARM_UP

    @property
    def overrides_of_timing(self) -> Tuple[str, ...]:
        """The user's overrides of what a comparison sets itself; they are repeated where the run is given as a file."""
        keys = {text.partition("=")[0] for text in (*_TIMED, _PROFILED, _ITERATIONS)}
        return tuple(text for text in self.source.settings if text.partition("=")[0].strip() in keys)

    def config_of(self, side: LiveSide, profiled: bool = True) -> RunConfig:
        """Load the run of a side.

        Args:
            profiled: whether some iterations after the timed ones are profiled, for the table of operators.

        Raises:
            UsageError: no run is named, or it is not valid.
        """
        source = self.source
        if source.run_file is None and source.preset is None:
            raise UsageError("no run is named: give --preset, such as tiny, or --run RUN.yaml")
        overrides: List[str] = [*_TIMED, f"{_ITERATIONS}={self.warm_up_of_live + self.iterations}"]
        overrides += [_PROFILED] if profiled else []
        return config_of(side, source.file, source.preset, [*overrides, *source.settings], self.ranks)

    def base(self, profiled: bool = True) -> RunConfig:
        """Load the run without the settings of any side.

        Raises:
            UsageError: as :meth:`config_of`.
        """
        return self.config_of(LiveSide("base"), profiled)
