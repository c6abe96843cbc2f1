"""One start of a run gives one number: the median of its timed iterations. What else a comparison reads of a run.

Iterations of one start are not independent of each other: where its memory lies, and what else the machine did, is
common to all. So they are never pooled over starts, and the spread between starts is what an interval is made from.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from fugaku_gpt.config import RunConfig, load_run_config
from fugaku_gpt.errors import ConfigError, UsageError
from fugaku_gpt.records.operators import Operators, read_operators
from fugaku_gpt.records.run import FAILED, OK, RunDirectory
from fugaku_gpt.records.summary import lines_of_last_size

NOT_RUN = "not run"
MAX_SETTLING = 1.05  # the first half of the timed iterations over the second: above it, the warm-up was too short


@dataclass(frozen=True)
class JobSample:
    """One start of a run.

    Attributes:
        name: of its directory, for messages.
        status: as of its result; ``failed`` where it has none, ``not run`` where there is no such run.
        reason: of that, in one line.
        seconds: per iteration: the median after the warm-up; None where nothing was timed.
        timed: iterations that this is the median of, or lines of the log where it does not tell each iteration.
        settling: median of the first half of these over that of the second; None below four of them.
        rss_max_bytes: of the largest rank, at most.
        node_used_bytes: of the fullest node, at most.
        losses: iteration → loss, warm-up included; those that were not finite are left out.
        environment: what was really running.
        config: None where it makes no valid run any more.
        operators: what an iteration's time goes to; None where that was not profiled.
    """

    name: str
    status: str
    reason: str
    seconds: Optional[float] = None
    timed_count: int = 0
    settling_ratio: Optional[float] = None
    rss_max_bytes: Optional[int] = None
    node_used_bytes: Optional[int] = None
    losses: Mapping[int, float] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    config: Optional[RunConfig] = None
    operators: Optional[Operators] = None

    @property
    def is_usable(self) -> bool:
        """It has ended well, and something was timed."""
        return self.status == OK and self.seconds is not None


def read_job(directory: Path, warm_up: int) -> JobSample:
    """What a comparison wants to know of a run directory.

    Args:
        warm_up: iterations at the beginning of which no time counts.

    Raises:
        UsageError: a file in it is damaged.
    """
    if not directory.exists():
        return JobSample(directory.name, NOT_RUN, "it was not started")
    run = RunDirectory(directory)
    result = run.result()
    lines = run.metrics("iteration")
    seconds = timed_seconds(lines, warm_up)
    config: Optional[RunConfig] = None
    if run.config_file.exists():
        try:
            config = load_run_config(run.config_file)
        except ConfigError:  # a refused row of a sweep
            config = None
    return JobSample(
        name=directory.name,
        status=result.status if result is not None else FAILED,
        reason=result.reason if result is not None else "it has left no result: it still runs, or was killed",
        seconds=statistics.median(seconds) if seconds else None,
        timed_count=len(seconds),
        settling_ratio=_settling_ratio_of(seconds),
        rss_max_bytes=_largest(lines, "rss_max_bytes"),
        node_used_bytes=_largest(lines, "node_used_bytes"),
        losses={int(line["iteration"]): float(line["loss"]) for line in lines if line.get("loss") is not None},
        environment=run.environment() or {},
        config=config,
        operators=read_operators(directory),
    )


def timed_seconds(lines: Sequence[Dict[str, Any]], warm_up: int) -> List[float]:
    """Seconds per iteration of the lines of a log after the warm-up. Where batch or samples grow, of the last size."""
    timed = [line for line in lines if int(line["iteration"]) > warm_up]
    # a line tells the mean since the line before, which may have begun within the warm-up
    warm_up_iterations = [int(line["iteration"]) for line in lines if int(line["iteration"]) <= warm_up]
    if timed and warm_up and (not warm_up_iterations or warm_up_iterations[-1] < warm_up):
        timed = timed[1:]
    return [float(line["seconds"]) for line in lines_of_last_size(timed)]


def unapplied_settings(job: JobSample) -> Dict[str, str]:
    """The settings that a run has not really run with, by its own record: key → what was asked for and what was
    seen. Also tcmalloc that nobody asked for: an ``LD_PRELOAD`` of the shell's reaches the side without it, too."""
    remarks = {}
    for toggle in job.environment.get("toggles", []):
        if not toggle["applied"]:
            remarks[f"node.{toggle['name']}"] = (
                f"={toggle['requested']} was not applied (seen: {toggle['seen_threads']})"
            )
    allocators = {str(rank.get("allocator", "")) for rank in job.environment.get("ranks", [])}
    preloaded = sorted(allocator for allocator in allocators if "tcmalloc" in allocator)
    if job.config is not None and not job.config.node.tcmalloc and preloaded:
        remarks["node.tcmalloc"] = f"=False was not applied (seen: {', '.join(preloaded)})"
    threads = job.config.node.threads_per_rank if job.config is not None else None
    seen_threads = {rank["threads"] for rank in job.environment.get("ranks", [])}
    if threads is not None and seen_threads and seen_threads != {threads}:
        counts = ", ".join(map(str, sorted(seen_threads)))
        remarks["node.threads_per_rank"] = f"={threads} was not applied (seen: {counts})"
    return remarks


def builds_of(jobs: Sequence[JobSample]) -> List[str]:
    """The different builds that a side's jobs have run with; more than one makes it no side at all."""
    builds = (job.environment.get("build", {}) for job in jobs if job.environment)
    return list(dict.fromkeys(f"torch {build.get('torch')}, BLAS {build.get('blas')}" for build in builds))


def require_run_directories(path: Path) -> List[Path]:
    """The run directories of a side: the folder itself, or those directly in it and in the folders of its pairs.

    Raises:
        UsageError: there is none.
    """
    if _is_run(path):
        return [path]
    directories = sorted(child for child in path.iterdir() if child.is_dir() and _is_run(child))
    if not directories:
        raise UsageError(f"{path}: holds no run directory (a folder with config.yaml and metrics.jsonl)")
    return directories


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").exists() and ((path / "metrics.jsonl").exists() or (path / "result.json").exists())


def _settling_ratio_of(times: Sequence[float]) -> Optional[float]:
    half = len(times) // 2
    if half < 2:
        return None
    return statistics.median(times[:half]) / statistics.median(times[-half:])


def _largest(lines: Sequence[Mapping[str, Any]], key: str) -> Optional[int]:
    values: Tuple[int, ...] = tuple(int(line[key]) for line in lines if line.get(key) is not None)
    return max(values) if values else None
