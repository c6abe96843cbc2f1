"""What ``fugaku-gpt sim`` tells a running simulator: faults, and what it looks like inside."""

from __future__ import annotations

import json
from typing import List

from fugaku_gpt.simulator.call import Call, Reply
from fugaku_gpt.simulator.core import Core
from fugaku_gpt.simulator.faults import Faults
from fugaku_gpt.simulator.job import RUNNING, Job

FAULTS = (
    "refuse [CODE [TIMES]]",
    "lose JOB|next [TIMES]",
    "unanswered [TIMES]",
    "node-down [JOB|next]",
    "slow-pjstat SECONDS",
    "pjstat-fails TIMES",
    "garbage [TIMES]",
    "clear",
)


def order(call: Call, core: Core) -> Reply:
    """``status``, ``ping`` or ``fault NAME ARGUMENT...``; answers in JSON, or with an error and code 2."""
    words = call.words
    if words[:1] == ["status"]:
        return Reply(out=json.dumps(_status(core)) + "\n")
    if words[:1] == ["ping"]:
        return Reply()
    try:
        return _fault(words[1:], core)
    except (ValueError, IndexError):
        return Reply(err=f"{' '.join(words[1:])}: not a fault; valid are: {'; '.join(FAULTS)}\n", code=2)


def _status(core: Core) -> "dict[str, object]":
    counts: "dict[str, int]" = {}
    for job in core.table.top():
        counts[job.state] = counts.get(job.state, 0) + 1
    return {"jobs": counts, "faults": core.faults.summary()}


def _fault(words: List[str], core: Core) -> Reply:
    name, arguments, faults = words[0], words[1:], core.faults
    if name == "clear":
        core.faults = Faults()
    elif name == "refuse":
        code = int(arguments[0]) if arguments else 71
        faults.refuse_code, faults.refuse_times = code, _times(arguments[1:])
    elif name == "lose":
        if arguments[0] == "next":
            faults.lose_times = _times(arguments[1:])
        else:
            for job in _jobs(arguments[0], core):
                core.lose(job)
    elif name == "unanswered":
        faults.unanswered_times = _times(arguments)
    elif name == "node-down":
        if arguments[:1] == ["next"]:
            faults.node_down_times = 1
        else:
            named = _jobs(arguments[0], core) if arguments else list(core.table.open())
            running = [unit for job in named for unit in core.table.running_units(job) if unit.state == RUNNING]
            if not running:
                return Reply(err="no running job is meant\n", code=2)
            for job in running[:1] if not arguments else running:
                core.node_down(job)
    elif name == "slow-pjstat":
        faults.slow_seconds = float(arguments[0])
    elif name == "pjstat-fails":
        faults.fail_times = int(arguments[0])
    elif name == "garbage":
        faults.garbage_times = _times(arguments)
    else:
        raise ValueError(name)
    return Reply()


def _times(arguments: List[str]) -> int:
    return int(arguments[0]) if arguments else 1


def _jobs(text: str, core: Core) -> List[Job]:
    """The jobs of an id.

    Raises:
        ValueError: there are none.
    """
    jobs, _ = core.table.named(text)
    if not jobs:
        raise ValueError(text)
    return jobs
