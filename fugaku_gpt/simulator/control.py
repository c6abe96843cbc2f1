"""``pjdel``, ``pjhold``, ``pjrls`` and ``pjwait``.

The numbers of pjdel's messages are those of the Command Reference. Those of pjhold (03xx) and pjrls (04xx) are not
published; they follow the same pattern.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional, Tuple, Union

from fugaku_gpt.simulator.client import BANNER
from fugaku_gpt.simulator.job import (
    BULK,
    ENDING,
    EPILOGUE,
    ERROR,
    HOLD,
    PROLOGUE,
    RUNNING,
    WAITING_STATES,
    Job,
)
from fugaku_gpt.simulator.job_manager import JobManager
from fugaku_gpt.simulator.protocol import DeferredReply, Invocation, Reply, pjm_message

_FIRST_MESSAGE = {"pjdel": 100, "pjhold": 300, "pjrls": 400, "pjwait": 600}
_OPTIONS: Dict[str, Dict[str, bool]] = {  # option → whether it takes an argument
    "pjdel": {
        "--reason": True,
        "--enforce": False,
        "--llio-flush": False,
        "--no-stats": False,
        "--no-history": False,
        "-z": False,
        "--help": False,
    },
    "pjhold": {"--reason": True, "-R": True, "--llio-flush": False, "-z": False, "--help": False},
    "pjrls": {"-z": False, "--help": False},
    "pjwait": {"-w": True, "-z": False, "--help": False},
}
_WAIT_MODES = ("waitall", "waitany", "waitnone")


@dataclass
class CommandOptions:
    """The options of a command, by their spelling, and the job ids."""

    values: Dict[str, str] = field(default_factory=dict)
    ids: List[str] = field(default_factory=list)


# (True if accepted, number of the message counted from the command's first one, its text with {} for the job id)
Outcome = Tuple[bool, int, str]
Action = Callable[[JobManager, Job, CommandOptions], Outcome]


def parse_options(invocation: Invocation) -> Union[CommandOptions, Reply]:
    """Parse the options and ids; return the reply instead where there is nothing more to do."""
    first_message, takes_argument = _FIRST_MESSAGE[invocation.command], _OPTIONS[invocation.command]
    options = CommandOptions()
    arguments = list(invocation.arguments)
    while arguments:
        argument = arguments.pop(0)
        spelling, equals, value = argument.partition("=")
        if argument in takes_argument and not takes_argument[argument]:
            options.values[argument] = ""
        elif spelling in takes_argument and takes_argument[spelling] and (equals or arguments):
            options.values[spelling] = value if equals else arguments.pop(0)
        elif argument.startswith("-"):
            return Reply(err=pjm_message(invocation.command, first_message + 1, f"Invalid option {argument}."), code=1)
        else:
            options.ids.append(argument)
    if "--help" in options.values:
        return Reply(
            out=f"{invocation.command} ({BANNER})\n"
            f"Usage: {invocation.command} [{' | '.join(takes_argument)}] job-id...\n"
        )
    if not options.ids:
        return Reply(err=pjm_message(invocation.command, first_message + 3, "Job ID is not specified."), code=1)
    return options


def pjdel(invocation: Invocation, job_manager: JobManager) -> Reply:
    """Delete jobs and return the messages about them."""
    options = parse_options(invocation)
    if isinstance(options, Reply):
        return options
    return _apply_to_each(invocation, job_manager, options, _delete)


def pjhold(invocation: Invocation, job_manager: JobManager) -> Reply:
    """Hold jobs and return the messages about them."""
    options = parse_options(invocation)
    if isinstance(options, Reply):
        return options
    return _apply_to_each(invocation, job_manager, options, _hold)


def pjrls(invocation: Invocation, job_manager: JobManager) -> Reply:
    """Release held jobs and return the messages about them."""
    options = parse_options(invocation)
    if isinstance(options, Reply):
        return options
    return _apply_to_each(invocation, job_manager, options, _release)


def _apply_to_each(invocation: Invocation, job_manager: JobManager, options: CommandOptions, act: Action) -> Reply:
    """Apply an action to every job that is named; a failure does not stop the others."""
    reply = Reply()
    quiet = "-z" in options.values
    first_message = _FIRST_MESSAGE[invocation.command]
    for job_id in options.ids:
        jobs, ids = job_manager.table.resolve_ids(job_id)
        if ids is None:
            reply.err += pjm_message(invocation.command, first_message + 11, f"Invalid job ID {job_id}.")
            reply.code = 1
            continue
        if not jobs:
            reply.err += pjm_message(invocation.command, first_message + 12, f"Job {job_id} does not exist.")
            reply.code = 1
            continue
        is_bulk_range = len(ids) > 1 and ids[0].bulk is not None
        printed_lines = set()
        for job, shown in _units_of(job_manager, jobs):
            is_accepted, code, text_form = act(job_manager, job, options)
            line = pjm_message(
                invocation.command,
                first_message + code,
                text_form.format(job_id if is_bulk_range else shown),
                "INFO" if is_accepted else "ERR.",
            )
            if line in printed_lines:
                continue
            printed_lines.add(line)
            if is_accepted:
                reply.out += "" if quiet else line
            else:
                reply.err += line
                reply.code = 1
    return reply


def _units_of(job_manager: JobManager, jobs: List[Job]) -> List[Tuple[Job, str]]:
    """(job to act on, id that the reply names): a step job by its sub-jobs, a bulk job as one."""
    units: List[Tuple[Job, str]] = []
    for job in jobs:
        if job.parent and job.request.model != BULK:
            units.extend(
                (sub, sub.id) for sub in job_manager.table.sub_jobs(job) if not sub.is_finished or job.is_finished
            )
        else:
            units.append((job, job.id))
    return units


def _delete(job_manager: JobManager, job: Job, options: CommandOptions) -> Outcome:
    if job.is_finished:
        return False, 12, "Job {} does not exist."
    if job.delete_asked is not None:
        return True, 19, "Already accepted job {}."
    enforce = "--enforce" in options.values
    timestamp = time.time()
    unfinished_units = [unit for unit in job_manager.table.execution_units(job) if not unit.is_finished]
    if not enforce and any(unit.state in (PROLOGUE, EPILOGUE, ENDING) for unit in unfinished_units):
        return False, 13, "Job {} is in a state in which it cannot be deleted."
    job.delete_asked = timestamp
    for unit in unfinished_units:
        job_manager.delete_job(unit, timestamp, enforce)
    return True, 0, "Accepted job {}."


def _hold(job_manager: JobManager, job: Job, options: CommandOptions) -> Outcome:
    if job.is_finished:
        return False, 12, "Job {} does not exist."
    unfinished_units = [unit for unit in job_manager.table.execution_units(job) if not unit.is_finished]
    if all(unit.state == HOLD for unit in unfinished_units):
        return True, 19, "Already accepted job {}."
    holdable = [
        unit
        for unit in unfinished_units
        if (unit.state in WAITING_STATES and unit.state not in (HOLD, ERROR))
        or (unit.state == RUNNING and unit.request.restart and unit.stopping is None)
    ]
    if not holdable:
        return False, 13, "Job {} is in a state in which it cannot be held."
    timestamp = time.time()
    for unit in holdable:
        job_manager.hold_job(unit, timestamp)
    return True, 0, "Accepted job {}."


def _release(job_manager: JobManager, job: Job, options: CommandOptions) -> Outcome:
    if job.is_finished:
        return False, 12, "Job {} does not exist."
    units_on_hold = [unit for unit in job_manager.table.execution_units(job) if unit.state == HOLD]
    if not units_on_hold:
        return False, 13, "Job {} is not held."
    timestamp = time.time()
    for unit in units_on_hold:
        job_manager.release_job(unit, timestamp)
    return True, 0, "Accepted job {}."


# --- pjwait -------------------------------------------------------------------------------------------------------


def pjwait(invocation: Invocation, job_manager: JobManager) -> Union[Reply, DeferredReply]:
    """Wait for jobs: the reply comes when all (``waitany``: any) have finished, with ``waitnone`` at once.

    It has one line for each job, ``jobid PJMcode exitcode signal``, with ``X`` for an active job, ``E`` for an error,
    ``H`` for a held job and ``-`` for the parent of sub-jobs.
    """
    options = parse_options(invocation)
    if isinstance(options, Reply):
        return options
    mode = options.values.get("-w", "waitall")
    if mode not in _WAIT_MODES:
        return Reply(err=pjm_message("pjwait", 603, f"Invalid argument {mode}."), code=1)
    waited_for: List[Tuple[str, List[Job]]] = []
    errors = ""
    for job_id in options.ids:
        jobs, ids = job_manager.table.resolve_ids(job_id)
        if ids is None:
            errors += pjm_message("pjwait", 611, f"Invalid job ID {job_id}.")
        elif not jobs:
            errors += pjm_message("pjwait", 612, f"Job {job_id} does not exist.")
        waited_for.append((job_id, jobs))
    jobs = [job for _, named_jobs in waited_for for job in named_jobs]

    def poll_reply() -> Optional[Reply]:
        remaining_jobs = [
            job for job in jobs if job_manager.table.get(job.number, job.sub) is job
        ]  # lost jobs are not waited for
        settled_jobs = [job for job in remaining_jobs if job.is_finished or job.state in (HOLD, ERROR)]
        if mode == "waitall" and len(settled_jobs) < len(remaining_jobs):
            return None
        if mode == "waitany" and remaining_jobs and not any(job.is_finished for job in remaining_jobs):
            return None
        lines = "".join(_wait_line(job) for job in jobs)
        quiet = "-z" in options.values
        has_lost_jobs = len(remaining_jobs) < len(jobs)
        return Reply(out="" if quiet else lines, err=errors, code=1 if errors or has_lost_jobs else 0)

    return poll_reply() or poll_reply


def _wait_line(job: Job) -> str:
    if job.parent:
        return f"{job.id} - - -\n" if job.is_finished else f"{job.id} X X X\n"
    if job.is_finished:
        return f"{job.id} {job.code} {job.exit_code} {job.signal}\n"
    letter = {HOLD: "H", ERROR: "E"}.get(job.state, "X")
    return f"{job.id} {letter} {letter} {letter}\n"
