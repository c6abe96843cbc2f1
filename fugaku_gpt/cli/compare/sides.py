"""What ``fugaku-gpt compare`` is asked to run: the run that both sides, or all runs of a design, change."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, List, Optional, Tuple

from fugaku_gpt.config import RunConfig
from fugaku_gpt.errors import UsageError

if TYPE_CHECKING:
    from fugaku_gpt.compare.sides import LiveSide

LIVE_WARM_UP, RECORDED_WARM_UP = 5, 2
TOLERANCE = 0.02  # by default: within which the sides are the same
_PROFILED = "training.profile_operators=3"  # iterations after the timed ones, for the table of operators
_ITERATIONS = "training.iterations"
# what takes time beside iterations is left out, unless it is asked for; each iteration is told by itself
_TIMED = ("training.log_interval=1", "training.eval_interval=null", "checkpoint.interval=null")


@dataclass(frozen=True)
class Shared:
    """The run without any side; see the options of the command.

    Attributes:
        overrides: the user's own.
        warm_up: None: by default.
    """

    run_file: Optional[Path]
    preset: Optional[str]
    overrides: Tuple[str, ...]
    ranks: Optional[int]
    iterations: int
    warm_up: Optional[int]

    @property
    def warm_up_of_live(self) -> int:
        """Iterations of a job that is run now."""
        return self.warm_up if self.warm_up is not None else LIVE_WARM_UP

    @property
    def warm_up_of_recorded(self) -> int:
        """Iterations of a run that was made before."""
        return self.warm_up if self.warm_up is not None else RECORDED_WARM_UP

    @property
    def overrides_of_timing(self) -> Tuple[str, ...]:
        """The user's own of what is set here over the run, to be given again where the run is given as a file."""
        here = {text.partition("=")[0] for text in (*_TIMED, _PROFILED, _ITERATIONS)}
        return tuple(text for text in self.overrides if text.partition("=")[0].strip() in here)

    def config_of(self, side: "LiveSide", profiled: bool = True) -> RunConfig:
        """The run of a side.

        Args:
            profiled: what takes the time is seen, too, after the timed iterations.

        Raises:
            UsageError: no run is named, or it is not valid.
        """
        from fugaku_gpt.compare.sides import config_of

        if self.run_file is None and self.preset is None:
            raise UsageError("which run is to be timed? give --preset, such as tiny, or --run RUN.yaml")
        words: List[str] = [*_TIMED, f"{_ITERATIONS}={self.warm_up_of_live + self.iterations}"]
        words += [_PROFILED] if profiled else []
        return config_of(side, self.run_file, self.preset, [*words, *self.overrides], self.ranks)

    def base(self, profiled: bool = True) -> RunConfig:
        """The run as it is.

        Raises:
            UsageError: as :meth:`config_of`.
        """
        from fugaku_gpt.compare.sides import LiveSide

        return self.config_of(LiveSide("base"), profiled)
