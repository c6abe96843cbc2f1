"""Reads a run directory as a sample: one start of a run gives one number, the median of its timed iterations.

The iterations of one start are not independent of each other: they share the location of memory and the load of the
machine. So they are never pooled over starts, and intervals are computed from the spread between starts.
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
        name: name of its directory, for messages.
        status: status of its result; ``failed`` without a result, ``not run`` where there is no such run.
        reason: reason for the status, in one line.
        seconds: median of seconds per iteration after the warm-up; None where nothing was timed.
        timed_count: number of iterations in this median, or of lines of the log where a line covers several.
        settling_ratio: median of the first half of these over that of the second; None for fewer than four.
        rss_max_bytes: peak memory of the largest rank.
        node_used_bytes: peak memory of the fullest node.
        losses: iteration → loss, including the warm-up; losses that were not finite are left out.
        environment: record of what was really running.
        config: the run's configuration; None where it is not valid any more.
        operators: time of an iteration by operator; None where it was not profiled.
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
        """True if it ended well and was timed."""
        return self.status == OK and self.seconds is not None


def read_job(directory: Path, warm_up: int) -> JobSample:
    """Reads a run directory as a sample.

    Args:
        warm_up: number of iterations at the beginning whose times do not count.

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
    """Seconds per iteration of a log's lines after the warm-up; of the last size where batch or samples grow."""
    timed = [line for line in lines if int(line["iteration"]) > warm_up]
    # a line gives the mean since the previous line, which may lie within the warm-up
    warm_up_iterations = [int(line["iteration"]) for line in lines if int(line["iteration"]) <= warm_up]
    if timed and warm_up and (not warm_up_iterations or warm_up_iterations[-1] < warm_up):
        timed = timed[1:]
    timed = [line for line in timed if (line.get("seconds") or 0) > 0]
    return [float(line["seconds"]) for line in lines_of_last_size(timed)]


def unapplied_settings(job: JobSample) -> Dict[str, str]:
    """Settings that were not applied, by the run's own record: key → the requested and the observed value.

    They include tcmalloc that was not requested: an ``LD_PRELOAD`` of the shell also reaches the side without it.
    """
    remarks = {}
    for toggle in job.environment.get("toggles") or []:
        if not toggle.get("applied"):
            requested, seen = toggle.get("requested"), toggle.get("seen")
            remarks[f"node.{toggle.get('name')}"] = f"={requested} was not applied (seen: {seen})"
    ranks = job.environment.get("ranks") or []
    allocators = {str(rank.get("allocator", "")) for rank in ranks}
    preloaded = sorted(allocator for allocator in allocators if "tcmalloc" in allocator)
    if job.config is not None and not job.config.node.tcmalloc and preloaded:
        remarks["node.tcmalloc"] = f"=False was not applied (seen: {', '.join(preloaded)})"
    threads = job.config.node.threads_per_rank if job.config is not None else None
    seen_threads = {rank["threads"] for rank in ranks if rank.get("threads") is not None}
    if threads is not None and seen_threads and seen_threads != {threads}:
        counts = ", ".join(map(str, sorted(seen_threads)))
        remarks["node.threads_per_rank"] = f"={threads} was not applied (seen: {counts})"
    return remarks


def builds_of(jobs: Sequence[JobSample]) -> List[str]:
    """The different builds that a side's jobs ran with; more than one invalidates the side."""
    builds = (job.environment.get("build") or {} for job in jobs if job.environment)
    return list(dict.fromkeys(f"torch {build.get('torch')}, BLAS {build.get('blas')}" for build in builds))


def require_run_directories(path: Path) -> List[Path]:
    """Returns the run directories of a side: the folder itself, or those directly in it.

    Raises:
        UsageError: there is no run directory.
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
