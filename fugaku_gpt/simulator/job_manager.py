"""The job manager: schedules jobs, runs their scripts and moves them from state to state as time passes."""

from __future__ import annotations

import shutil
import time
from typing import Dict, List, Tuple

from fugaku_gpt.pjm.values import parse_condition
from fugaku_gpt.simulator import execution
from fugaku_gpt.simulator.execution import CannotStart, ScriptEnd
from fugaku_gpt.simulator.faults import Faults
from fugaku_gpt.simulator.job import (
    ACCEPTED,
    ALLOCATING,
    CANCELLED,
    CODE_DELETED,
    CODE_DEPENDENCY,
    CODE_DIRECTORY,
    CODE_ELAPSE,
    CODE_HOLD,
    CODE_NODE_DOWN,
    CODE_PREEMPTED,
    CODE_SHELL,
    ELAPSE_SIGNAL,
    ENDED,
    ENDING,
    EPILOGUE,
    HOLD,
    PROLOGUE,
    QUEUED,
    RUNNING,
    STEP,
    Job,
)
from fugaku_gpt.simulator.settings import Settings
from fugaku_gpt.simulator.stats import write_stats
from fugaku_gpt.simulator.table import JobTable

REASONS = {
    CODE_ELAPSE: "ELAPSE LIMIT EXCEEDED",
    CODE_PREEMPTED: "ANOTHER JOB STARTED",
    CODE_NODE_DOWN: "NODE DOWN",
    CODE_DEPENDENCY: "STEP DEPENDENCY",
    CODE_DIRECTORY: "FILE IO ERROR",
    CODE_SHELL: "SHELL EXEC FAILURE",
}
_PROCESS_CHECK_SECONDS = 0.1  # between two searches for the processes of one job
_OPERATORS = {
    "==": lambda value, other: value == other,
    "!=": lambda value, other: value != other,
    "<": lambda value, other: value < other,
    ">": lambda value, other: value > other,
    "<=": lambda value, other: value <= other,
    ">=": lambda value, other: value >= other,
}


class JobManager:
    """Scheduler of the jobs and owner of their processes.

    Methods take the current time as ``timestamp``, in seconds since the epoch.
    """

    def __init__(self, table: JobTable, settings: Settings, faults: Faults) -> None:
        self.table = table
        self.settings = settings
        self.faults = faults
        self._script_ends: Dict[str, ScriptEnd] = {}  # ends of scripts whose jobs still have processes
        self._process_checks: Dict[
            str, Tuple[float, bool]
        ] = {}  # time of the last search for processes, and whether there were any

    # --- one tick -----------------------------------------------------------------------------------------------

    def advance_jobs(self) -> bool:
        """Advance every job; return whether jobs remain that will advance by time alone."""
        timestamp = time.time()
        unfinished = [job for job in self.table.unfinished_jobs() if not job.is_finished and not job.parent]
        for job in unfinished:
            if job.is_active:
                self._advance_job(job, timestamp)
            elif job.state == ACCEPTED:
                self._enter(job, QUEUED, timestamp)
        self._schedule(timestamp)
        return any(not job.is_finished and job.state != HOLD for job in unfinished)

    def _advance_job(self, job: Job, timestamp: float) -> None:
        """Advance one active job through the short states, and check its script in RUN."""
        while job.is_active:
            if job.state == RUNNING:
                self._check_running(job, timestamp)
                if job.state == RUNNING:
                    return
            if timestamp - job.dates[job.state] < self.settings.transition:
                return
            if job.state == ALLOCATING:
                self._enter(job, PROLOGUE, timestamp)
            elif job.state == PROLOGUE:
                self._start_job(job, timestamp)
            elif job.state == EPILOGUE:
                self._enter(job, ENDING, timestamp)
            elif job.state == ENDING:
                self._leave_ending(job, timestamp)

    def _enter(self, job: Job, state: str, timestamp: float) -> None:
        job.enter(state, timestamp)
        self.table.save(job)
        parent = self.table.refresh_parent(job, timestamp)
        if parent is not None:
            write_stats(parent, self.settings)

    # --- scheduling ---------------------------------------------------------------------------------------------

    def _schedule(self, timestamp: float) -> None:
        """Start the jobs that fit, in order; the first that does not fit blocks those behind it."""
        active = [job for job in self.table.unfinished_jobs() if job.is_active and not job.parent]
        nodes = sum(job.request.nodes for job in active)
        slots = len(active)
        for job in self._startable_jobs(timestamp):
            if slots >= self.settings.slots or nodes + job.request.nodes > self.settings.nodes:
                self._preempt_ranged_job(active, timestamp)
                return
            self._enter(job, ALLOCATING, timestamp)
            slots += 1
            nodes += job.request.nodes
            self._advance_job(job, timestamp)

    def _startable_jobs(self, timestamp: float) -> List[Job]:
        """Jobs that may start, in the order in which they will."""
        ready = []
        for job in self.table.unfinished_jobs():
            if job.state != QUEUED or job.parent or (job.request.at is not None and timestamp < job.request.at):
                continue
            if job.request.model == STEP and not self._is_step_ready(job, timestamp):
                continue
            ready.append(job)
        return sorted(
            ready,
            key=lambda job: (
                job.request.rscgrp.startswith("spot-"),
                -job.request.priority,
                job.dates["accept"],
                job.number,
                job.sub or 0,
            ),
        )

    def _preempt_ranged_job(self, active: List[Job], timestamp: float) -> None:
        """Stop one job that has run longer than the minimum of its range, so that a waiting job can start."""
        for job in active:
            minimum = job.request.elapse_min
            if job.state != RUNNING or not job.request.ranged or minimum is None or job.stopping is not None:
                continue
            if job.elapsed_seconds(timestamp) > minimum:
                self.stop_job(job, CODE_PREEMPTED, timestamp)
                return

    def _is_step_ready(self, job: Job, timestamp: float) -> bool:
        """Whether a step may start; a step whose condition says so is cancelled instead."""
        parent = self.table.parent(job)
        assert parent is not None and job.sub is not None
        earlier = [earlier_step for earlier_step in self.table.sub_jobs(parent) if (earlier_step.sub or 0) < job.sub]
        if job.request.condition.upper() == "NONE":
            return True
        dependencies = [step for step in earlier if not job.request.steps or step.sub in job.request.steps]
        if not job.request.steps:
            dependencies = dependencies[-1:]
        if not all(step.is_finished for step in earlier):
            return False
        condition = parse_condition(job.request.condition) if job.request.condition else None
        if condition is None:
            return True
        item, operator, values = condition
        quantifier = all if operator == "!=" else any  # several values mean none of them, or any of them
        for step in dependencies:
            actual = {"ec": step.exit_code, "pc": step.code, "sn": step.signal}[item]
            if quantifier(_OPERATORS[operator](actual, value) for value in values):
                self._cancel_steps(parent, job, timestamp)
                return False
        return True

    def _cancel_steps(self, parent: Job, job: Job, timestamp: float) -> None:
        """Cancel a step; with ``after`` also the steps that depend on it, with ``all`` every later one."""
        cancelled_steps = [job]
        for later_step in self.table.sub_jobs(parent):
            if (later_step.sub or 0) <= (job.sub or 0) or later_step.is_finished:
                continue
            if job.request.deletion == "all":
                cancelled_steps.append(later_step)
            elif job.request.deletion == "after":
                earlier_numbers = [
                    step.sub for step in self.table.sub_jobs(parent) if (step.sub or 0) < (later_step.sub or 0)
                ]
                dependency_numbers = [*later_step.request.steps] or earlier_numbers[-1:]
                if later_step.request.condition.upper() != "NONE" and any(
                    step.sub in dependency_numbers for step in cancelled_steps
                ):
                    cancelled_steps.append(later_step)
        for step in cancelled_steps:
            step.code = CODE_DEPENDENCY
            step.reason = REASONS[CODE_DEPENDENCY]
            self._complete(step, CANCELLED, timestamp)

    # --- running ------------------------------------------------------------------------------------------------

    def _start_job(self, job: Job, timestamp: float) -> None:
        job.pid = 0
        try:
            job.pid = execution.start_script(self.table.spool, job, self.settings.max_ranks)
        except CannotStart as error:
            job.code = CODE_DIRECTORY if error.directory else CODE_SHELL
            job.reason = REASONS[job.code]
            self._enter(job, RUNNING, timestamp)
            self._enter(job, EPILOGUE, timestamp)
            return
        job.started = True
        for name in (EPILOGUE, ENDING):
            job.dates.pop(name, None)
        self._enter(job, RUNNING, timestamp)
        if self.faults.take_node_failure():
            self.fail_node(job)

    def _check_running(self, job: Job, timestamp: float) -> None:
        """Check a running job: has its script ended, is its time up, must it be killed?"""
        end = self._script_ends.pop(job.id, None) or execution.poll_end(job.pid)
        if end is not None:
            if self._is_in_grace(job, end, timestamp):
                return
            self._record_script_end(job, end, timestamp)
            return
        limit = job.request.elapse_max
        if job.stopping is None and limit is not None and job.elapsed_seconds(timestamp) >= limit:
            self.stop_job(job, CODE_ELAPSE, timestamp)
        if job.stop_asked is not None and not job.killed and timestamp - job.stop_asked >= self.settings.grace:
            job.killed = True
            execution.kill_processes(job)

    def _is_in_grace(self, job: Job, end: ScriptEnd, timestamp: float) -> bool:
        """Whether ranks of a job that is being stopped still have grace time: the shell often exits before them."""
        if job.stop_asked is None or job.killed or timestamp - job.stop_asked >= self.settings.grace:
            return False
        checked, has_processes = self._process_checks.get(job.id, (0.0, True))
        if timestamp - checked >= _PROCESS_CHECK_SECONDS:
            has_processes = bool(execution.find_processes(job))
            self._process_checks[job.id] = (timestamp, has_processes)
        if has_processes:
            self._script_ends[job.id] = end
        return has_processes

    def stop_job(self, job: Job, code: int, timestamp: float) -> None:
        """Send SIGTERM to a running job; it is killed when the grace time has passed."""
        job.stopping = code
        job.stop_asked = timestamp
        self.table.save(job)
        execution.terminate_processes(job)

    def _record_script_end(self, job: Job, end: ScriptEnd, timestamp: float) -> None:
        self._process_checks.pop(job.id, None)
        execution.kill_processes(job)  # background processes of the script end with it
        job.memory = max(job.memory, end.memory)
        job.cpu_user += end.user
        job.cpu_system += end.system
        job.exit_code, job.signal = end.exit_code, end.signal
        if job.stopping is not None:
            job.code = job.stopping
            job.reason = REASONS.get(job.code, "-")
        if job.code in (CODE_ELAPSE, CODE_NODE_DOWN):
            job.exit_code = 0
            job.signal = ELAPSE_SIGNAL if job.code == CODE_ELAPSE else 0
        self._enter(job, EPILOGUE, timestamp)

    def _leave_ending(self, job: Job, timestamp: float) -> None:
        """Leave the last of the short states: the job returns to the queue or is complete."""
        for folder in execution.temporary_folders(self.table.spool, job):
            shutil.rmtree(folder, ignore_errors=True)
        if job.stopping == CODE_HOLD or (job.stopping == CODE_NODE_DOWN and job.request.restart):
            is_hold = job.stopping == CODE_HOLD
            self._requeue(job, HOLD if is_hold else QUEUED, timestamp)
            return
        self._complete(job, CANCELLED if job.stopping in (CODE_DELETED, CODE_PREEMPTED) else ENDED, timestamp)

    def _requeue(self, job: Job, state: str, timestamp: float) -> None:
        """Return a job to the queue, to start from the beginning."""
        job.retries += 1
        job.stopping = job.stop_asked = None
        job.killed = job.started = False
        job.pid = job.exit_code = job.signal = 0
        job.code = CODE_HOLD if state == HOLD else 0
        job.reason = "-"
        for name in (RUNNING, EPILOGUE, ENDING, PROLOGUE, ALLOCATING):
            job.dates.pop(name, None)
        self._enter(job, state, timestamp)

    def _complete(self, job: Job, state: str, timestamp: float) -> None:
        """Enter a final state; the statistics are written first, so that a reader who sees the state finds the file."""
        job.dates["exit"] = timestamp
        write_stats(job, self.settings, state)
        self._enter(job, state, timestamp)

    # --- actions of commands and faults -------------------------------------------------------------------------

    def delete_job(self, job: Job, timestamp: float, enforce: bool = False) -> None:
        """Delete a job that has not finished (``pjdel``)."""
        job.delete_asked = timestamp
        if job.state == RUNNING:
            self.stop_job(job, CODE_DELETED, timestamp)
            if enforce:
                job.killed = True
                execution.kill_processes(job)
            return
        job.code = CODE_DELETED
        job.stopping = CODE_DELETED
        if job.state not in (EPILOGUE, ENDING):  # in these two states the job ends by itself, as cancelled
            self._complete(job, CANCELLED, timestamp)

    def hold_job(self, job: Job, timestamp: float) -> None:
        """Hold a waiting job, or a running job that may be run again (``pjhold``)."""
        job.holds += 1
        if job.is_active:
            self.stop_job(job, CODE_HOLD, timestamp)
            return
        job.code = CODE_HOLD
        self._enter(job, HOLD, timestamp)

    def release_job(self, job: Job, timestamp: float) -> None:
        """Release a held job (``pjrls``)."""
        job.code = 0
        self._enter(job, QUEUED, timestamp)

    def fail_node(self, job: Job, node: int = 0, seconds: float = 0.0) -> None:
        """Fail a node of a running job: its processes are killed at once, and PJM ends the job with code 20.

        Args:
            node: number of the node in the job, from 0, on which the script runs.
            seconds: time after which PJM notices, and kills the processes of the other nodes. Meanwhile these continue,
                and may end by themselves.
        """
        job.stopping = CODE_NODE_DOWN
        job.stop_asked = time.time() - self.settings.grace + seconds  # when its grace ends, it is killed
        self.table.save(job)
        if seconds == 0:
            job.killed = True
            execution.kill_processes(job)
        else:
            execution.kill_node(job, node)

    def lose_job(self, job: Job) -> None:
        """Remove a job without a trace: no state, no history, no files."""
        for unit in self.table.execution_units(job):
            if unit.is_active:
                execution.kill_processes(unit)
                if unit.pid:
                    execution.poll_end(unit.pid)
        self.table.remove(job.number)

    # --- start and stop of the daemon ---------------------------------------------------------------------------

    def recover(self) -> int:
        """End the jobs that a killed daemon left running, as if their nodes had failed; return their number."""
        timestamp = time.time()
        count = 0
        for number in sorted({job.number for job in self.table}):
            parent = self.table.get(number)
            if parent is None or (parent.parent and not self.table.sub_jobs(parent)):
                self.table.remove(number)  # an interrupted submission, whose number was never reported
        for job in list(self.table):
            if not job.is_active or job.parent:
                continue
            count += 1
            if not execution.is_script_running(job):
                job.pid = 0  # another process may have this pid by now
            execution.kill_processes(job)
            job.stopping, job.code, job.reason = CODE_NODE_DOWN, CODE_NODE_DOWN, REASONS[CODE_NODE_DOWN]
            job.exit_code = job.signal = 0
            if EPILOGUE not in job.dates:
                job.dates[EPILOGUE] = timestamp
            self._leave_ending(job, timestamp)
        for parent in list(self.table.top_level_jobs()):
            if parent.parent and not parent.is_finished:
                subs = self.table.sub_jobs(parent)
                self.table.refresh_parent(subs[0], timestamp)
        return count

    def abandon_jobs(self) -> None:
        """Kill all jobs after the folder has been removed, when nothing can be recorded."""
        for job in list(self.table.unfinished_jobs()):
            if job.state == RUNNING and not job.parent:
                execution.kill_processes(job)
                execution.poll_end(job.pid)

    def end_all_jobs(self) -> None:
        """Cancel every job that has not finished and end all processes (``sim stop``)."""
        timestamp = time.time()
        for job in list(self.table.unfinished_jobs()):
            if job.parent or job.is_finished:
                continue
            if job.state in (EPILOGUE, ENDING):
                self._leave_ending(job, timestamp)
            else:
                self.delete_job(job, timestamp)
        running = [job for job in self.table.unfinished_jobs() if job.state == RUNNING and not job.parent]
        deadline = time.monotonic() + self.settings.grace
        while running:
            for job in list(running):
                is_past_deadline = time.monotonic() >= deadline
                if is_past_deadline:
                    execution.kill_processes(job)
                end = self._script_ends.pop(job.id, None) or execution.poll_end(job.pid)
                if end is not None and (is_past_deadline or not self._is_in_grace(job, end, time.time())):
                    self._record_script_end(job, end, time.time())
                    self._leave_ending(job, time.time())
                    running.remove(job)
            time.sleep(self.settings.tick)
