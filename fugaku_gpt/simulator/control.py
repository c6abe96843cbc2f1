"""``pjdel``, ``pjhold``, ``pjrls`` and ``pjwait``.

The numbers of pjdel's messages are those of the Command Reference; those of pjhold (03xx) and pjrls (04xx) follow its
pattern and are not known.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional, Tuple, Union

from fugaku_gpt.simulator.call import Call, Pending, Reply, message
from fugaku_gpt.simulator.client import BANNER
from fugaku_gpt.simulator.core import Core
from fugaku_gpt.simulator.job import (
    BULK,
    ENDING,
    EPILOGUE,
    ERROR,
    HELD,
    PROLOGUE,
    RUNNING,
    WAITING,
    Job,
)

_BLOCK = {"pjdel": 100, "pjhold": 300, "pjrls": 400, "pjwait": 600}
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
_WAITS = ("waitall", "waitany", "waitnone")


@dataclass
class Options:
    """What was typed after the command."""

    given: Dict[str, str] = field(default_factory=dict)
    ids: List[str] = field(default_factory=list)


# whether it was done, number of the message within the command's block, and its words
Outcome = Tuple[bool, int, str]
Action = Callable[[Core, Job, Options], Outcome]


def read_options(call: Call) -> Union[Options, Reply]:
    """The options and ids, or the refusal to print."""
    block, known = _BLOCK[call.command], _OPTIONS[call.command]
    options = Options()
    words = list(call.words)
    while words:
        word = words.pop(0)
        spelling, equals, argument = word.partition("=")
        if word in known and not known[word]:
            options.given[word] = ""
        elif spelling in known and known[spelling] and (equals or words):
            options.given[spelling] = argument if equals else words.pop(0)
        elif word.startswith("-"):
            return Reply(err=message(call.command, block + 1, f"Invalid option {word}."), code=1)
        else:
            options.ids.append(word)
    if "--help" in options.given:
        return Reply(out=f"{call.command} ({BANNER})\nUsage: {call.command} [{' | '.join(known)}] job-id...\n")
    if not options.ids:
        return Reply(err=message(call.command, block + 3, "Job ID is not specified."), code=1)
    return options


def pjdel(call: Call, core: Core) -> Reply:
    """Delete jobs."""
    options = read_options(call)
    if isinstance(options, Reply):
        return options
    return _each(call, core, options, _delete)


def pjhold(call: Call, core: Core) -> Reply:
    """Hold jobs."""
    options = read_options(call)
    if isinstance(options, Reply):
        return options
    return _each(call, core, options, _hold)


def pjrls(call: Call, core: Core) -> Reply:
    """Release held jobs."""
    options = read_options(call)
    if isinstance(options, Reply):
        return options
    return _each(call, core, options, _release)


def _each(call: Call, core: Core, options: Options, act: Action) -> Reply:
    """Do something to every job that is named; what fails does not stop the rest."""
    reply = Reply()
    quiet = "-z" in options.given
    block = _BLOCK[call.command]
    for text in options.ids:
        jobs, ids = core.table.named(text)
        if ids is None:
            reply.err += message(call.command, block + 11, f"Invalid job ID {text}.")
            reply.code = 1
            continue
        if not jobs:
            reply.err += message(call.command, block + 12, f"Job {text} does not exist.")
            reply.code = 1
            continue
        whole_range = len(ids) > 1 and ids[0].bulk is not None
        told = set()
        for job, shown in _units(core, jobs):
            good, code, words = act(core, job, options)
            line = message(
                call.command, block + code, words.format(text if whole_range else shown), "INFO" if good else "ERR."
            )
            if line in told:
                continue
            told.add(line)
            if good:
                reply.out += "" if quiet else line
            else:
                reply.err += line
                reply.code = 1
    return reply


def _units(core: Core, jobs: List[Job]) -> List[Tuple[Job, str]]:
    """(what is acted on, the id that the answer names): a step job by its sub-jobs, a bulk job as one."""
    found: List[Tuple[Job, str]] = []
    for job in jobs:
        if job.parent and job.request.model != BULK:
            found.extend((sub, sub.id) for sub in core.table.subs(job) if not sub.over or job.over)
        else:
            found.append((job, job.id))
    return found


def _delete(core: Core, job: Job, options: Options) -> Outcome:
    if job.over:
        return False, 12, "Job {} does not exist."
    if job.delete_asked is not None:
        return True, 19, "Already accepted job {}."
    enforce = "--enforce" in options.given
    now = time.time()
    open_units = [unit for unit in core.table.running_units(job) if not unit.over]
    if not enforce and any(unit.state in (PROLOGUE, EPILOGUE, ENDING) for unit in open_units):
        return False, 13, "Job {} is in a state in which it cannot be deleted."
    job.delete_asked = now
    for unit in open_units:
        core.delete(unit, now, enforce)
    return True, 0, "Accepted job {}."


def _hold(core: Core, job: Job, options: Options) -> Outcome:
    if job.over:
        return False, 12, "Job {} does not exist."
    units = [unit for unit in core.table.running_units(job) if not unit.over]
    if all(unit.state == HELD for unit in units):
        return True, 19, "Already accepted job {}."
    possible = [
        unit
        for unit in units
        if (unit.state in WAITING and unit.state not in (HELD, ERROR))
        or (unit.state == RUNNING and unit.request.restart and unit.stopping is None)
    ]
    if not possible:
        return False, 13, "Job {} is in a state in which it cannot be held."
    now = time.time()
    for unit in possible:
        core.hold(unit, now)
    return True, 0, "Accepted job {}."


def _release(core: Core, job: Job, options: Options) -> Outcome:
    if job.over:
        return False, 12, "Job {} does not exist."
    held = [unit for unit in core.table.running_units(job) if unit.state == HELD]
    if not held:
        return False, 13, "Job {} is not held."
    now = time.time()
    for unit in held:
        core.release(unit, now)
    return True, 0, "Accepted job {}."


# --- pjwait -------------------------------------------------------------------------------------------------------


def pjwait(call: Call, core: Core) -> Union[Reply, Pending]:
    """Wait for jobs: the answer comes when all (``waitany``: one) are over, with ``waitnone`` at once.

    One line each, ``jobid PJMcode exitcode signal``: ``X`` while it is active, ``E`` for an error, ``H`` for held,
    ``-`` for the parent of sub-jobs.
    """
    options = read_options(call)
    if isinstance(options, Reply):
        return options
    mode = options.given.get("-w", "waitall")
    if mode not in _WAITS:
        return Reply(err=message("pjwait", 603, f"Invalid argument {mode}."), code=1)
    wanted: List[Tuple[str, List[Job]]] = []
    errors = ""
    for text in options.ids:
        jobs, ids = core.table.named(text)
        if ids is None:
            errors += message("pjwait", 611, f"Invalid job ID {text}.")
        elif not jobs:
            errors += message("pjwait", 612, f"Job {text} does not exist.")
        wanted.append((text, jobs))
    jobs = [job for _, found in wanted for job in found]

    def answer() -> Optional[Reply]:
        known = [job for job in jobs if core.table.get(job.number, job.sub) is job]  # lost ones are waited for no more
        settled = [job for job in known if job.over or job.state in (HELD, ERROR)]
        if mode == "waitall" and len(settled) < len(known):
            return None
        if mode == "waitany" and known and not any(job.over for job in known):
            return None
        lines = "".join(_wait_line(job) for job in jobs)
        quiet = "-z" in options.given
        lost = len(known) < len(jobs)
        return Reply(out="" if quiet else lines, err=errors, code=1 if errors or lost else 0)

    return answer() or answer


def _wait_line(job: Job) -> str:
    if job.parent:
        return f"{job.id} - - -\n" if job.over else f"{job.id} X X X\n"
    if job.over:
        return f"{job.id} {job.code} {job.exit_code} {job.signal}\n"
    letter = {HELD: "H", ERROR: "E"}.get(job.state, "X")
    return f"{job.id} {letter} {letter} {letter}\n"
