"""``pjsub``: a command line and a script become a job, or a refusal in PJM's words."""

from __future__ import annotations

import getpass
import os
import socket
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from fugaku_gpt.pjm.jobids import PjmJobId
from fugaku_gpt.pjm.lexer import read_script
from fugaku_gpt.simulator.call import Call, Reply, message
from fugaku_gpt.simulator.client import BANNER
from fugaku_gpt.simulator.faults import Faults
from fugaku_gpt.simulator.job import BULK, NORMAL, STEP, Job, Request
from fugaku_gpt.simulator.request import build_request, step_parameters
from fugaku_gpt.simulator.settings import Settings
from fugaku_gpt.simulator.site import Refusal
from fugaku_gpt.simulator.table import Table
from fugaku_gpt.simulator.words import CommandLine, check, check_script_only, merge, read_words, with_prefix

STDIN_NAME = "STDIN"
HELP = f"""pjsub ({BANNER})
Usage: pjsub [option] [script-file...]
  -L|--rsc-list k=v[,...]  --mpi k=v[,...]  --llio k=v[,...]  -g|--gname group  -N|--name name
  -o|--out file  -e|--err file  -j  -s|-S  --spath file  -x var=value[,...]  -X  -p priority  --at date
  --restart|--norestart  --bulk --sparam start-end  --step --sparam "jid=id,sn=number,sd=form[:del[:step]]"
  -z [jid]  -C prefix  --comment text  --appname name  --fs name
"""


def pjsub(call: Call, table: Table, settings: Settings, faults: Faults) -> Reply:
    """Submit one or several scripts."""
    try:
        line = read_words(call.words)
    except Refusal as refusal:
        return Reply(err=_refused(refusal), code=1)
    if "help" in line.options:
        return Reply(out=HELP)
    if not line.scripts and call.stdin is None:
        return Reply(want_stdin=True)
    reply = Reply()
    joined: Optional[int] = None
    for name in _script_names(line, call.directory):
        refused = faults.refusal()
        try:
            if refused is not None:
                raise refused
            job, remarks = _submit_one(call, line, name, table, settings, joined)
        except Refusal as refusal:
            reply.err += _refused(refusal)
            reply.code = 1
            continue
        joined = job.number if job.request.model == STEP else None
        reply.err += "".join(remark + "\n" for remark in remarks)
        if faults.unanswered():
            reply.err += message("pjsub", 91, "Internal error occurred.")
            reply.code = 1
            continue
        quiet = line.options.get("quiet")
        shown = str(job.number) if job.request.model == BULK else job.id
        if quiet == "jid":
            reply.out += shown + "\n"
        elif quiet is None:
            reply.out += message("pjsub", 0, f"Job {shown} submitted.", "INFO")
        if faults.loses_next():
            table.drop(job.number)
    return reply


def _refused(refusal: Refusal) -> str:
    return message("pjsub", refusal.code, refusal.text)


def _script_names(line: CommandLine, directory: str) -> List[str]:
    """The scripts, those that are written as one word with delimiters taken apart."""
    delimiter = str(line.options.get("script_delimiter", ","))
    names: List[str] = []
    for word in line.scripts or ("",):
        if delimiter in word and not os.path.exists(os.path.join(directory, word)):
            names.extend(part for part in word.split(delimiter) if part)
        else:
            names.append(word)
    return names


def _submit_one(
    call: Call, line: CommandLine, name: str, table: Table, settings: Settings, joined: Optional[int]
) -> Tuple[Job, List[str]]:
    """One script as a job; for a bulk job its parent, for a step job the sub-job."""
    if len(call.directory) > 4096 or not os.path.isdir(call.directory):
        raise Refusal(26, "The current directory cannot be reached.")
    text = _read(call, name)
    prefix = line.options.get("dir_prefix")
    script = read_script(with_prefix(text, prefix) if isinstance(prefix, str) else text)
    remarks = [message("pjsub", 24, warning, "WARN").rstrip("\n") for warning in check(script)]
    check_script_only(script)
    options = merge(script.options, line.options)
    if table.unfinished() >= settings.accept_limit:
        raise Refusal(72, f"The number of jobs exceeds the accept limit ({settings.accept_limit}).")
    now = time.time()
    model = BULK if "bulk" in options else STEP if "step" in options else NORMAL
    parent: Optional[Job] = None
    sub: Optional[int] = None
    if model == STEP:
        parent, sub = _step_place(options, table, joined)
    number = parent.number if parent is not None else 0
    request, said = build_request(
        options,
        settings,
        name=os.path.basename(name) or STDIN_NAME,
        directory=call.directory,
        text=text,
        environment=call.environment,
        umask=call.umask,
        now=now,
    )
    if parent is not None and number and step_parameters(options).job_name not in (None, parent.request.name):
        raise Refusal(18, f"The job name differs from that of job {number}.")
    if not number:
        number = table.spool.next_number(settings.first_job)
    return _enter(number, sub, request, text, parent, table, now), remarks + said


def _read(call: Call, name: str) -> str:
    if not name:
        return call.stdin or ""
    try:
        return Path(call.directory, name).read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise Refusal(20, f"File open failed: {name} ({error.strerror}).") from None


def _step_place(options: Dict[str, Any], table: Table, joined: Optional[int]) -> Tuple[Optional[Job], int]:
    """(the step job that is joined or None for a new one, the step number)."""
    steps = step_parameters(options)
    parent: Optional[Job] = None
    wanted = steps.job_id if steps.job_id is not None else joined
    if wanted is not None:
        parent = table.get(wanted)
        if parent is None or parent.over or parent.request.model != STEP:
            raise Refusal(12, f"Job {wanted} does not exist.")
    elif steps.job_name is not None:
        named = [
            job
            for job in table.top()
            if job.request.model == STEP and not job.over and job.request.name == steps.job_name
        ]
        parent = named[-1] if named else None
    last = max((job.sub or 0 for job in table.subs(parent)), default=-1) if parent is not None else -1
    if steps.number is not None and steps.number <= last:
        raise Refusal(60, f"Step number {steps.number} is not above the last one ({last}).")
    return parent, steps.number if steps.number is not None else last + 1


def _enter(
    number: int, sub: Optional[int], request: Request, text: str, parent: Optional[Job], table: Table, now: float
) -> Job:
    """Write the script down and take the job, with its parent and sub-jobs, into the table."""
    user, host = _user(), socket.gethostname()
    script = table.spool.folder(str(PjmJobId(number, step=sub if request.model == STEP else None))) / "script"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_bytes(text.encode("utf-8", "surrogateescape"))
    final = replace(request, script=str(script))

    def make(place: Optional[int], is_parent: bool = False) -> Job:
        job = Job(number, final, user, final.group, host, place, is_parent, mark=uuid.uuid4().hex)
        job.dates["accept"] = job.dates[job.state] = now
        table.add(job)
        return job

    if request.model == STEP:
        if parent is None:
            make(None, is_parent=True)
        return make(sub)
    if request.model == BULK:
        for bulk in range(request.bulk[0], request.bulk[1] + 1):
            make(bulk)
    return make(None, is_parent=request.model == BULK)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
