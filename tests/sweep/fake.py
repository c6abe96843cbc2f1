"""A launcher that trains nothing and writes the files that a real run would leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

from fugaku_gpt.config import RunConfig, dump_run_config
from fugaku_gpt.launch.processes import Outcome
from fugaku_gpt.records.run import FAILED, OK, Result, RunDirectory
from fugaku_gpt.records.summary import summarise
from fugaku_gpt.sweep.run import EndedRun
from tests.support.runs import write_run

ITERATIONS = 4


def iteration(number: int, seconds: float = 0.5) -> Dict[str, Any]:
    """One line of ``metrics.jsonl``."""
    return {
        "iteration": number,
        "seconds": seconds,
        "loss": 8.0 - number,
        "rss_max_bytes": 2**28,
        "node_used_bytes": 2**30 + number * 2**20,
    }


def outcome(exit_code: int = 0, **values: Any) -> Outcome:
    """How a launcher ended."""
    signal = -exit_code if exit_code < 0 else None
    return Outcome(
        **{"exit_code": exit_code, "signal": signal, "timed_out": False, "seconds": 2.0, "oom_kills": 0, **values}
    )


def leave_run(
    directory: Path, config: RunConfig, status: Optional[str] = OK, reason: str = "", pace: float = 0.5
) -> None:
    """Write the files of a trainer's run; without a status there is no result, as after a kill."""
    record = RunDirectory(directory)
    record.create(dump_run_config(config))
    toggles = [
        {"name": "freq_mhz", "requested": config.node.freq_mhz, "applied": False, "seen": "clock not fixed"},
        {"name": "tcmalloc", "requested": True, "applied": True, "seen": "libtcmalloc.so.4"},
    ]
    environment = {"build": {"torch": "2.13.0+cpu"}, "git_commit": "0123abc", "toggles": toggles}
    iterations = [iteration(number, pace) for number in range(1, ITERATIONS + 1)]
    validations = [{"iteration": 0, "loss": 8.0, "tokens": 10}, {"iteration": ITERATIONS, "loss": 4.5, "tokens": 10}]
    result = None
    if status is not None:
        summary = summarise(config, iterations, validations)
        result = Result(status, reason, 1.7e9, 1.7e9 + 2, ITERATIONS, summary)
    write_run(record, environment, iterations, result, validations)


class FakeLaunch:
    """Ends each run by the function of (directory, config) → outcome given for its name; all other runs succeed."""

    def __init__(self, **ends: Callable[[Path, RunConfig], Outcome]) -> None:
        self.ends = ends
        self.started: List[str] = []
        self.timeouts: List[Optional[float]] = []

    def __call__(self, config: RunConfig, directory: RunDirectory, **options: Any) -> Outcome:
        self.started.append(directory.path.name)
        self.timeouts.append(options["timeout"])
        assert directory.config_file.read_text(encoding="utf-8") == dump_run_config(config)
        directory.log_file.write_text("log of " + directory.path.name + "\n", encoding="utf-8")
        end = self.ends.get(directory.path.name.rpartition("-")[0].replace("-", "_"), succeeding)
        return end(directory.path, config)


def succeeding(directory: Path, config: RunConfig) -> Outcome:
    """A run that succeeds."""
    leave_run(directory, config)
    return outcome()


def failing(directory: Path, config: RunConfig) -> Outcome:
    """A run that fails and reports the reason."""
    leave_run(directory, config, FAILED, "rank 1: ValueError: no such thing")
    return outcome(1)


class QuietProgress:
    """Prints nothing, and records the names of runs with an earlier result."""

    def __init__(self) -> None:
        self.earlier_runs: List[str] = []

    def run_started(self, run: Any, number: int, total: int, directory: RunDirectory) -> None:
        """A run begins."""

    def run_ended(self, run: Any, number: int, total: int, result: Result, is_earlier_result: bool) -> None:
        """A run is over."""
        if is_earlier_result:
            self.earlier_runs.append(run.name)


def statuses(ended: List[EndedRun]) -> Dict[str, str]:
    """The status of each run, by its name."""
    return {ended_run.run.name: ended_run.result.status for ended_run in ended}
