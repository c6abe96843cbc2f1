"""Trains one run on ranks that are started on this machine, from its directory to its result."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Optional

from fugaku_gpt.config import RunConfig, dump_run_config
from fugaku_gpt.errors import EXIT_OK, EXIT_RESUME, EXIT_RUN_FAILED, RunFailed, UsageError
from fugaku_gpt.launch.launch_result import result_of_launch
from fugaku_gpt.launch.launcher import exit_code_of, launch, require_rank_packages
from fugaku_gpt.launch.processes import Outcome
from fugaku_gpt.machine.clock import steady_time
from fugaku_gpt.records.run import NONE, OK, REFUSED, Result, RunDirectory, resumes_in_same_folder


@dataclass(frozen=True)
class LocalRun:
    """A run on this machine that has ended.

    Attributes:
        directory: the run's directory.
        result: how it ended.
        outcome: how its launcher ended.
        code: the exit code of a command that does nothing but this run.
        time_limit: seconds after which its launcher would have ended it, or None.
        problem: why its result could not be recorded; empty if it was.
    """

    directory: RunDirectory
    result: Result
    outcome: Outcome
    code: int
    time_limit: Optional[float] = None
    problem: str = ""

    @property
    def warning(self) -> str:
        """The reason that the ranks have not printed themselves; empty if they have."""
        result, outcome = self.result, self.outcome
        # a process was killed after the run was complete, or the ranks have stopped as their launcher was lost
        is_unreported = (result.status == OK and result.reason) or (outcome.lost_reason and self.code == EXIT_RESUME)
        if result.reason and (outcome.stopped_by is not None or outcome.signal is not None or is_unreported):
            return result.reason
        return ""

    def raise_if_ended(self) -> None:
        """Report a run that did not end by itself.

        Raises:
            RunFailed: its ranks or their launcher were lost, or it was ended at its time limit.
        """
        if self.code in (EXIT_OK, EXIT_RESUME):
            return
        if self.outcome.lost_reason:
            raise RunFailed(f"{self.directory.path}: {self.outcome.lost_reason}")
        if self.outcome.timed_out:
            limit = self.time_limit or 0.0
            raise RunFailed(f"{self.directory.path}: stopped at its time limit of {limit:g} s; raise job.elapse")


def is_complete(out: Path, config: RunConfig, resume: str) -> bool:
    """Whether a run that resumes in its own folder has nothing left to do.

    Raises:
        UsageError: it resumes from a checkpoint there that is not the newest.
    """
    directory = RunDirectory(out)
    return resumes_in_same_folder(directory, resume) and directory.has_finished(config.training.iterations)


def train_on_this_machine(
    config: RunConfig,
    out: Path,
    check: Callable[[], None],
    resume: str = NONE,
    force_data: bool = False,
    on_line: Optional[Callable[[str], None]] = None,
) -> LocalRun:
    """Start the ranks of a run by ``mpirun``, and wait for their end.

    Args:
        out: the run directory.
        check: refuses the run, by a UsageError, before anything is written; called once ranks can be started at all.
        resume: ``none``, ``auto``, or the path of a checkpoint or run.
        force_data: whether to resume even if the corpus is not that of the checkpoint.
        on_line: called with each line that the ranks print.

    Raises:
        UsageError: the run was refused; nothing of it is left in the folder.
        ModuleNotFoundError: this Python lacks a package that ranks need.
    """
    directory, mark = RunDirectory(out), uuid.uuid4().hex
    in_same_folder = resumes_in_same_folder(directory, resume)
    require_rank_packages()
    check()
    arguments = ([] if resume == NONE else ["--resume", resume]) + (["--force-data"] if force_data else [])
    directory.create(dump_run_config(config), mark, resume=in_same_folder)
    started, log = steady_time(), directory.log_file
    try:
        outcome = launch(config, directory, arguments, timeout=config.job.elapse, on_line=on_line, mark=mark)
    except UsageError:
        directory.discard()
        raise
    result = result_of_launch(directory, config, outcome, log, started)
    code, problem = exit_code_of(outcome, result), ""
    if result.status == REFUSED:
        directory.discard()
    else:
        try:
            directory.write_result(result)  # changes nothing where the ranks have recorded just this
        except OSError as error:  # such as a disk that is full, which may be why the run has failed
            code = code or EXIT_RUN_FAILED
            problem = f"{error.filename}: cannot be read or written: {error.strerror}; the run's end: {result.status}"
            problem += f", {result.reason}" if result.reason else ""
    return LocalRun(directory, result, outcome, code, config.job.elapse, problem)
