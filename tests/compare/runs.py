"""Makes run directories such as runs leave, with times that a test chooses."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence

from fugaku_gpt.config import RunConfig, dump_run_config, load_run_config
from fugaku_gpt.launch.processes import Outcome
from fugaku_gpt.records.run import OK, Result, RunDirectory
from tests.support.runs import write_run

ENVIRONMENT: Dict[str, Any] = {
    "fugaku_gpt": "0.1.0",
    "git_commit": "abc",
    "python": "3.8.18",
    "numpy": "1.24.4",
    "build": {"torch": "1.7.1", "blas": "MKL", "instruction_set": "AVX2", "fused_adamw": False},
    "precision": {"dtype": "float32", "in_float32": [], "gelu_by_erf": True},
    "mpi": {"library": "MPICH 5", "standard": "5.0", "thread_level": "funneled", "mpi4py": "4"},
    "processor": "a processor",
    "vector_extensions": ["avx2"],
    "system": "Linux",
    "memory_limit_bytes": 2**30,
    "toggles": [],
    "ranks": [{"rank": 0, "host": "h", "threads": 1, "allocator": "libc", "affinity": [0, 1], "flush_denormals": True}],
}


def tiny(*overrides: str) -> RunConfig:
    return load_run_config(preset="tiny", overrides=["training.iterations=6", *overrides])


def leave_run(
    path: Path,
    seconds: Sequence[float],
    config: Optional[RunConfig] = None,
    *,
    status: str = OK,
    reason: str = "",
    environment: Optional[Mapping[str, Any]] = None,
    losses: Sequence[float] = (),
    memory: int = 2**20,
) -> Path:
    """Writes the directory of a run with these seconds for each iteration."""
    directory = RunDirectory(path)
    directory.path.mkdir(parents=True, exist_ok=True)
    directory.config_file.write_text(dump_run_config(config or tiny()))
    result = Result(status, reason, 0.0, 1.0, len(seconds))
    write_run(
        directory, environment if environment is not None else ENVIRONMENT, lines(seconds, losses, memory), result
    )
    return path


def lines(seconds: Sequence[float], losses: Sequence[float] = (), memory: int = 2**20) -> List[Dict[str, Any]]:
    """The lines of ``metrics.jsonl`` of iterations that take these seconds."""
    return [
        {
            "iteration": number,
            "seconds": value,
            "loss": losses[number - 1] if losses else 8.0 - 0.1 * number,
            "global_batch": 16,
            "rss_max_bytes": memory,
            "node_used_bytes": 4 * memory,
        }
        for number, value in enumerate(seconds, start=1)
    ]


class TimedLaunch:
    """Stands in for :func:`fugaku_gpt.launch.launcher.launch`: leaves a run directory as ranks would.

    Args:
        seconds: side → seconds per iteration of its first job, of its second one, and so on; the last one stays.
    """

    def __init__(self, seconds: Mapping[str, Sequence[float]]) -> None:
        self.seconds = seconds
        self.started: "list[str]" = []
        self.toggles: Dict[str, Any] = {}
        self.ends: Dict[int, Outcome] = {}  # number of a start → its outcome, where that is not a good one

    def __call__(self, config: RunConfig, directory: RunDirectory, **options: Any) -> Outcome:
        side = directory.path.name
        paces = self.seconds[side]
        seconds = paces[min(self.started.count(side), len(paces) - 1)]
        self.started.append(side)
        directory.log_file.write_text("fugaku-gpt: what a rank said\n")
        end = self.ends.get(len(self.started))
        if end is not None:
            return end
        toggles = [self.toggles[side]] if side in self.toggles else []
        # the first iterations are slow, as those of real runs are
        times = [3 * seconds, 2 * seconds, seconds, seconds, 1.01 * seconds, 0.99 * seconds]
        write_run(directory, {**ENVIRONMENT, "toggles": toggles}, lines(times), Result(OK, "", 0.0, 1.0, len(times)))
        return Outcome(0, None, False, 1.0, 0)
