"""What happens to jobs: each look at the clock moves them on."""

from __future__ import annotations

import shutil
import time
from typing import Dict, List, Tuple

from fugaku_gpt.pjm.values import parse_condition
from fugaku_gpt.simulator import execution
from fugaku_gpt.simulator.execution import CannotStart, End
from fugaku_gpt.simulator.faults import Faults
from fugaku_gpt.simulator.job import (
    ACCEPTED,
    ALLOCATING,
    CANCELLED,
    CODE_DELETED,
    CODE_DEPENDENCY,
    CODE_DIRECTORY,
    CODE_ELAPSE,
    CODE_HELD,
    CODE_NODE_DOWN,
    CODE_PREEMPTED,
    CODE_SHELL,
    ELAPSE_SIGNAL,
    ENDED,
    ENDING,
    EPILOGUE,
    HELD,
    PROLOGUE,
    QUEUED,
    RUNNING,
    STEP,
    Job,
)
from fugaku_gpt.simulator.settings import Settings
from fugaku_gpt.simulator.stats import write_stats
from fugaku_gpt.simulator.table import Table

REASONS = {
    CODE_ELAPSE: "ELAPSE LIMIT EXCEEDED",
    CODE_PREEMPTED: "ANOTHER JOB STARTED",
    CODE_NODE_DOWN: "NODE DOWN",
    CODE_DEPENDENCY: "STEP DEPENDENCY",
    CODE_DIRECTORY: "FILE IO ERROR",
    CODE_SHELL: "SHELL EXEC FAILURE",
}
_LOOK_SECONDS = 0.1  # between two searches for a job's processes
_OPERATORS = {
    "==": lambda value, other: value == other,
    "!=": lambda value, other: value != other,
    "<": lambda value, other: value < other,
    ">": lambda value, other: value > other,
    "<=": lambda value, other: value <= other,
    ">=": lambda value, other: value >= other,
}


class Core:
    """The scheduler and the jobs' keeper."""

    def __init__(self, table: Table, settings: Settings, faults: Faults) -> None:
        self.table = table
        self.settings = settings
        self.faults = faults
        self._ends: Dict[str, End] = {}  # of scripts whose job still has processes
        self._looks: Dict[str, Tuple[float, bool]] = {}  # when these were looked for, and whether there were any

    # --- one look -----------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Move every job on; returns whether anything is left that time alone will move."""
        now = time.time()
        live = [job for job in self.table.open() if not job.over and not job.parent]
        for job in live:
            if job.active:
                self._advance(job, now)
            elif job.state == ACCEPTED:
                self._enter(job, QUEUED, now)
        self._schedule(now)
        return any(not job.over and job.state != HELD for job in live)

    def _advance(self, job: Job, now: float) -> None:
        """One active job: through the short states, and at RUN a look at its script."""
        while job.active:
            if job.state == RUNNING:
                self._watch(job, now)
                if job.state == RUNNING:
                    return
            if now - job.dates[job.state] < self.settings.transition:
                return
            if job.state == ALLOCATING:
                self._enter(job, PROLOGUE, now)
            elif job.state == PROLOGUE:
                self._start(job, now)
            elif job.state == EPILOGUE:
                self._enter(job, ENDING, now)
            elif job.state == ENDING:
                self._finish(job, now)

    def _enter(self, job: Job, state: str, now: float) -> None:
        job.enter(state, now)
        self.table.save(job)
        parent = self.table.refresh_parent(job, now)
        if parent is not None:
            write_stats(parent, self.settings)

    # --- scheduling ---------------------------------------------------------------------------------------------

    def _schedule(self, now: float) -> None:
        """Start what fits, in order; the first that does not fit holds up all behind it."""
        active = [job for job in self.table.open() if job.active and not job.parent]
        nodes = sum(job.request.nodes for job in active)
        slots = len(active)
        for job in self._queue(now):
            if slots >= self.settings.slots or nodes + job.request.nodes > self.settings.nodes:
                self._preempt(active, now)
                return
            self._enter(job, ALLOCATING, now)
            slots += 1
            nodes += job.request.nodes
            self._advance(job, now)

    def _queue(self, now: float) -> List[Job]:
        """The jobs that may start, the first one first."""
        ready = []
        for job in self.table.open():
            if job.state != QUEUED or job.parent or (job.request.at is not None and now < job.request.at):
                continue
            if job.request.model == STEP and not self._step_ready(job, now):
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

    def _preempt(self, active: List[Job], now: float) -> None:
        """A job past the minimum of its range makes room for one that waits."""
        for job in active:
            minimum = job.request.elapse_min
            if job.state != RUNNING or not job.request.ranged or minimum is None or job.stopping is not None:
                continue
            if job.elapsed(now) > minimum:
                self.stop(job, CODE_PREEMPTED, now)
                return

    def _step_ready(self, job: Job, now: float) -> bool:
        """Whether a step's turn has come; cancels it where its condition says so."""
        parent = self.table.parent(job)
        assert parent is not None and job.sub is not None
        earlier = [other for other in self.table.subs(parent) if (other.sub or 0) < job.sub]
        if job.request.condition.upper() == "NONE":
            return True
        looked_at = [other for other in earlier if not job.request.steps or other.sub in job.request.steps]
        if not job.request.steps:
            looked_at = looked_at[-1:]
        if not all(other.over for other in earlier):
            return False
        condition = parse_condition(job.request.condition) if job.request.condition else None
        if condition is None:
            return True
        item, operator, values = condition
        meets = all if operator == "!=" else any  # of several values: none of them, or one of them
        for other in looked_at:
            found = {"ec": other.exit_code, "pc": other.code, "sn": other.signal}[item]
            if meets(_OPERATORS[operator](found, value) for value in values):
                self._cancel_steps(parent, job, now)
                return False
        return True

    def _cancel_steps(self, parent: Job, job: Job, now: float) -> None:
        """Cancel a step, and with ``after`` those that depend on it, with ``all`` every later one."""
        gone = [job]
        for other in self.table.subs(parent):
            if (other.sub or 0) <= (job.sub or 0) or other.over:
                continue
            if job.request.deletion == "all":
                gone.append(other)
            elif job.request.deletion == "after":
                before = [step.sub for step in self.table.subs(parent) if (step.sub or 0) < (other.sub or 0)]
                on = [*other.request.steps] or before[-1:]
                if other.request.condition.upper() != "NONE" and any(step.sub in on for step in gone):
                    gone.append(other)
        for each in gone:
            each.code = CODE_DEPENDENCY
            each.reason = REASONS[CODE_DEPENDENCY]
            self._over(each, CANCELLED, now)

    # --- running ------------------------------------------------------------------------------------------------

    def _start(self, job: Job, now: float) -> None:
        job.pid = 0
        try:
            job.pid = execution.start(self.table.spool, job, self.settings.max_ranks)
        except CannotStart as error:
            job.code = CODE_DIRECTORY if error.directory else CODE_SHELL
            job.reason = REASONS[job.code]
            self._enter(job, RUNNING, now)
            self._enter(job, EPILOGUE, now)
            return
        job.started = True
        for name in (EPILOGUE, ENDING):
            job.dates.pop(name, None)
        self._enter(job, RUNNING, now)
        if self.faults.node_goes_down():
            self.node_down(job)

    def _watch(self, job: Job, now: float) -> None:
        """A running job: has it ended, is its time up, does it not stop?"""
        end = self._ends.pop(job.id, None) or execution.ended(job.pid)
        if end is not None:
            if self._leaves_time(job, end, now):
                return
            self._script_over(job, end, now)
            return
        limit = job.request.elapse_max
        if job.stopping is None and limit is not None and job.elapsed(now) >= limit:
            self.stop(job, CODE_ELAPSE, now)
        if job.stop_asked is not None and not job.killed and now - job.stop_asked >= self.settings.grace:
            job.killed = True
            execution.kill(job)

    def _leaves_time(self, job: Job, end: End, now: float) -> bool:
        """Whether ranks of a job that is being stopped still have their grace: a shell is often gone before them."""
        if job.stop_asked is None or job.killed or now - job.stop_asked >= self.settings.grace:
            return False
        looked, alive = self._looks.get(job.id, (0.0, True))
        if now - looked >= _LOOK_SECONDS:
            alive = bool(execution.processes(job))
            self._looks[job.id] = (now, alive)
        if alive:
            self._ends[job.id] = end
        return alive

    def stop(self, job: Job, code: int, now: float) -> None:
        """Ask a running job to stop; it is killed after the grace."""
        job.stopping = code
        job.stop_asked = now
        self.table.save(job)
        execution.ask_to_stop(job)

    def _script_over(self, job: Job, end: End, now: float) -> None:
        self._looks.pop(job.id, None)
        execution.kill(job)  # what the script has left in the background ends with it
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
        self._enter(job, EPILOGUE, now)

    def _finish(self, job: Job, now: float) -> None:
        """After the last of the short states."""
        for folder in execution.temporary_space(self.table.spool, job):
            shutil.rmtree(folder, ignore_errors=True)
        if job.stopping == CODE_HELD or (job.stopping == CODE_NODE_DOWN and job.request.restart):
            held = job.stopping == CODE_HELD
            self._requeue(job, HELD if held else QUEUED, now)
            return
        self._over(job, CANCELLED if job.stopping in (CODE_DELETED, CODE_PREEMPTED) else ENDED, now)

    def _requeue(self, job: Job, state: str, now: float) -> None:
        """Back to the queue, to start from the beginning."""
        job.retries += 1
        job.stopping = job.stop_asked = None
        job.killed = job.started = False
        job.pid = job.exit_code = job.signal = 0
        job.code = CODE_HELD if state == HELD else 0
        job.reason = "-"
        for name in (RUNNING, EPILOGUE, ENDING, PROLOGUE, ALLOCATING):
            job.dates.pop(name, None)
        self._enter(job, state, now)

    def _over(self, job: Job, state: str, now: float) -> None:
        """The end; the statistics come before the state, so that who sees the state finds the file."""
        job.dates["exit"] = now
        write_stats(job, self.settings, state)
        self._enter(job, state, now)

    # --- what commands do ---------------------------------------------------------------------------------------

    def delete(self, job: Job, now: float, enforce: bool = False) -> None:
        """``pjdel`` of a job that is not over."""
        job.delete_asked = now
        if job.state == RUNNING:
            self.stop(job, CODE_DELETED, now)
            if enforce:
                job.killed = True
                execution.kill(job)
            return
        job.code = CODE_DELETED
        job.stopping = CODE_DELETED
        if job.state not in (EPILOGUE, ENDING):  # those two end by themselves, as cancelled
            self._over(job, CANCELLED, now)

    def hold(self, job: Job, now: float) -> None:
        """``pjhold`` of a job that waits, or of one that runs and may be run again."""
        job.holds += 1
        if job.active:
            self.stop(job, CODE_HELD, now)
            return
        job.code = CODE_HELD
        self._enter(job, HELD, now)

    def release(self, job: Job, now: float) -> None:
        """``pjrls``."""
        job.code = 0
        self._enter(job, QUEUED, now)

    def node_down(self, job: Job) -> None:
        """A node of a running job fails: everything of it is gone at once."""
        job.stopping = CODE_NODE_DOWN
        job.stop_asked = time.time()
        job.killed = True
        execution.kill(job)

    def lose(self, job: Job) -> None:
        """The site forgets a job: no state, no history, no files."""
        for unit in self.table.running_units(job):
            if unit.active:
                execution.kill(unit)
                if unit.pid:
                    execution.ended(unit.pid)
        self.table.drop(job.number)

    # --- start and stop of the daemon ---------------------------------------------------------------------------

    def recover(self) -> int:
        """After a daemon that was killed: what ran is ended, and counts as lost to a failed node. Returns how many."""
        now = time.time()
        count = 0
        for number in sorted({job.number for job in self.table}):
            parent = self.table.get(number)
            if parent is None or (parent.parent and not self.table.subs(parent)):
                self.table.drop(number)  # a submission that was cut short: nobody was told its number
        for job in list(self.table):
            if not job.active or job.parent:
                continue
            count += 1
            if not execution.is_script(job):
                job.pid = 0  # the number may be another process's by now
            execution.kill(job)
            job.stopping, job.code, job.reason = CODE_NODE_DOWN, CODE_NODE_DOWN, REASONS[CODE_NODE_DOWN]
            job.exit_code = job.signal = 0
            if EPILOGUE not in job.dates:
                job.dates[EPILOGUE] = now
            self._finish(job, now)
        for parent in list(self.table.top()):
            if parent.parent and not parent.over:
                subs = self.table.subs(parent)
                self.table.refresh_parent(subs[0], now)
        return count

    def abandon(self) -> None:
        """The folder is gone: nothing can be written down any more, but no process stays."""
        for job in list(self.table.open()):
            if job.state == RUNNING and not job.parent:
                execution.kill(job)
                execution.ended(job.pid)

    def end_all(self) -> None:
        """At ``sim stop``: every job that is not over is cancelled, and no process stays."""
        now = time.time()
        for job in list(self.table.open()):
            if job.parent or job.over:
                continue
            if job.state in (EPILOGUE, ENDING):
                self._finish(job, now)
            else:
                self.delete(job, now)
        running = [job for job in self.table.open() if job.state == RUNNING and not job.parent]
        deadline = time.monotonic() + self.settings.grace
        while running:
            for job in list(running):
                late = time.monotonic() >= deadline
                if late:
                    execution.kill(job)
                end = self._ends.pop(job.id, None) or execution.ended(job.pid)
                if end is not None and (late or not self._leaves_time(job, end, time.time())):
                    self._script_over(job, end, time.time())
                    self._finish(job, time.time())
                    running.remove(job)
            time.sleep(self.settings.tick)
