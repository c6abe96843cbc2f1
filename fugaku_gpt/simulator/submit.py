"""``pjsub``: makes jobs of command lines and scripts, or refuses them with PJM's messages."""

from __future__ import annotations

import getpass
import os
import re
import socket
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from fugaku_gpt.pjm.groups import fugaku_limits
from fugaku_gpt.pjm.jobids import PjmJobId
from fugaku_gpt.pjm.lexer import read_script
from fugaku_gpt.pjm.lint.facts import Facts
from fugaku_gpt.pjm.lint.sites import FUGAKU
from fugaku_gpt.pjm.script import PjmScript
from fugaku_gpt.simulator.client import BANNER
from fugaku_gpt.simulator.command_line import (
    CommandLine,
    check_directives,
    check_script_only,
    merge_options,
    parse_command_line,
    with_pjm_prefix,
)
from fugaku_gpt.simulator.faults import Faults
from fugaku_gpt.simulator.job import BULK, NORMAL, STEP, Job, JobRequest
from fugaku_gpt.simulator.protocol import Invocation, Reply, pjm_message
from fugaku_gpt.simulator.request import build_request, step_parameters
from fugaku_gpt.simulator.settings import Settings
from fugaku_gpt.simulator.site import Refusal
from fugaku_gpt.simulator.table import JobTable

STDIN_NAME = "STDIN"
_MENTIONS_LAUNCHER = re.compile(r"^(?!\s*#).*\bmpi(?:exec|run)\b", re.MULTILINE)
HELP = f"""pjsub ({BANNER})
Usage: pjsub [option] [script-file...]
  -L|--rsc-list k=v[,...]  --mpi k=v[,...]  --llio k=v[,...]  -g|--gname group  -N|--name name
  -o|--out file  -e|--err file  -j  -s|-S  --spath file  -x var=value[,...]  -X  -p priority  --at date
  --restart|--norestart  --bulk --sparam start-end  --step --sparam "jid=id,sn=number,sd=form[:del[:step]]"
  -z [jid]  -C prefix  --comment text  --appname name  --fs name
"""


def pjsub(invocation: Invocation, table: JobTable, settings: Settings, faults: Faults) -> Reply:
    """Submit one or several scripts, subject to the faults that are pending."""
    try:
        command_line = parse_command_line(invocation.arguments)
    except Refusal as refusal:
        return Reply(err=_refusal_message(refusal), code=1)
    if "help" in command_line.options:
        return Reply(out=HELP)
    if not command_line.scripts and invocation.stdin is None:
        return Reply(want_stdin=True)
    reply = Reply()
    step_job: Optional[int] = None
    for name in _script_names(command_line, invocation.directory):
        injected_refusal = faults.take_refusal()
        try:
            if injected_refusal is not None:
                raise injected_refusal
            job, remarks = _submit_script(invocation, command_line, name, table, settings, step_job)
        except Refusal as refusal:
            reply.err += _refusal_message(refusal)
            reply.code = 1
            continue
        step_job = job.number if job.request.model == STEP else None
        reply.err += "".join(remark + "\n" for remark in remarks)
        if faults.take_lost_answer():
            reply.err += pjm_message("pjsub", 91, "Internal error occurred.")
            reply.code = 1
            continue
        quiet_mode = command_line.options.get("quiet")
        reported_id = str(job.number) if job.request.model == BULK else job.id
        if quiet_mode == "jid":
            reply.out += reported_id + "\n"
        elif quiet_mode is None:
            reply.out += pjm_message("pjsub", 0, f"Job {reported_id} submitted.", "INFO")
        if faults.take_job_loss():
            table.remove(job.number)
    return reply


def _refusal_message(refusal: Refusal) -> str:
    message = pjm_message("pjsub", refusal.code, refusal.text)
    if refusal.is_dated:
        message += (
            f"pjsub: by what was published of the site up to {fugaku_limits().date}; pjacl on Fugaku has the truth\n"
        )
    return message


def _script_names(command_line: CommandLine, directory: str) -> List[str]:
    """The script names; arguments that join several names with delimiters are split."""
    delimiter = str(command_line.options.get("script_delimiter", ","))
    names: List[str] = []
    for script_argument in command_line.scripts or ("",):
        if delimiter in script_argument and not os.path.exists(os.path.join(directory, script_argument)):
            names.extend(part for part in script_argument.split(delimiter) if part)
        else:
            names.append(script_argument)
    return names


def _submit_script(
    invocation: Invocation,
    command_line: CommandLine,
    name: str,
    table: JobTable,
    settings: Settings,
    step_job: Optional[int],
) -> Tuple[Job, List[str]]:
    """Submit one script; return its job (parent of a bulk job, sub-job of a step job) and the remarks."""
    if len(invocation.directory) > 4096 or not os.path.isdir(invocation.directory):
        raise Refusal(26, "The current directory cannot be reached.")
    script_text = _read_script(invocation, name)
    prefix = command_line.options.get("dir_prefix")
    script = read_script(with_pjm_prefix(script_text, prefix) if isinstance(prefix, str) else script_text)
    remarks = [pjm_message("pjsub", 24, warning, "WARN").rstrip("\n") for warning in check_directives(script)]
    check_script_only(script)
    options = merge_options(script.options, command_line.options)
    if table.count_unfinished() >= settings.accept_limit:
        raise Refusal(72, f"The number of jobs exceeds the accept limit ({settings.accept_limit}).")
    timestamp = time.time()
    model = BULK if "bulk" in options else STEP if "step" in options else NORMAL
    parent: Optional[Job] = None
    sub: Optional[int] = None
    if model == STEP:
        parent, sub = _step_parent(options, table, step_job)
    number = parent.number if parent is not None else 0
    request, site_remarks = build_request(
        options,
        settings,
        name=os.path.basename(name) or STDIN_NAME,
        directory=invocation.directory,
        text=script_text,
        environment=invocation.environment,
        umask=invocation.umask,
        timestamp=timestamp,
    )
    _refuse_too_many_ranks(script, request, settings)
    if parent is not None and number and step_parameters(options).job_name not in (None, parent.request.name):
        raise Refusal(18, f"The job name differs from that of job {number}.")
    if not number:
        number = table.spool.next_number(settings.first_job)
    return _add_to_table(number, sub, request, script_text, parent, table, timestamp), remarks + site_remarks


def _refuse_too_many_ranks(script: PjmScript, request: JobRequest, settings: Settings) -> None:
    """Refuse a script whose ``mpiexec`` would start more processes than this simulator can: it would wait in the queue,
    and fail at that line. A script without ``mpiexec`` may simulate any number of nodes.

    Raises:
        Refusal: it would.
    """
    facts = Facts(script, fugaku_limits(), FUGAKU)
    calls = [
        (launch.word.line, launch.processes if launch.count_word is not None else request.processes)
        for launch in facts.launches
        if not launch.has_several_programs or launch.processes is not None
    ]
    if not facts.launches and _MENTIONS_LAUNCHER.search(facts.body_text):  # in a variable or an array
        calls = [(script.body_line, request.processes)]
    for line, count in calls:
        if count is not None and count > settings.max_ranks:
            raise Refusal(
                57,
                f"proc={count} is greater than the upper limit ({settings.max_ranks}) of this simulator, which starts "
                f"real processes: mpiexec from line {line} on.",
            )


def _read_script(invocation: Invocation, name: str) -> str:
    if not name:
        return invocation.stdin or ""
    try:
        return Path(invocation.directory, name).read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise Refusal(20, f"File open failed: {name} ({error.strerror}).") from None


def _step_parent(options: Dict[str, Any], table: JobTable, step_job: Optional[int]) -> Tuple[Optional[Job], int]:
    """The step job that a script joins, or None for a new one, and the number of its step."""
    steps = step_parameters(options)
    parent: Optional[Job] = None
    parent_number = steps.job_id if steps.job_id is not None else step_job
    if parent_number is not None:
        parent = table.get(parent_number)
        if parent is None or parent.is_finished or parent.request.model != STEP:
            raise Refusal(12, f"Job {parent_number} does not exist.")
    elif steps.job_name is not None:
        same_name = [
            job
            for job in table.top_level_jobs()
            if job.request.model == STEP and not job.is_finished and job.request.name == steps.job_name
        ]
        parent = same_name[-1] if same_name else None
    last_step = max((job.sub or 0 for job in table.sub_jobs(parent)), default=-1) if parent is not None else -1
    if steps.number is not None and steps.number <= last_step:
        raise Refusal(60, f"Step number {steps.number} is not above the last one ({last_step}).")
    return parent, steps.number if steps.number is not None else last_step + 1


def _add_to_table(
    number: int,
    sub: Optional[int],
    request: JobRequest,
    script_text: str,
    parent: Optional[Job],
    table: JobTable,
    timestamp: float,
) -> Job:
    """Store the script and add the job, with its parent and sub-jobs, to the table."""
    user, host = _user_name(), socket.gethostname()
    script = table.spool.job_folder(str(PjmJobId(number, step=sub if request.model == STEP else None))) / "script"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_bytes(script_text.encode("utf-8", "surrogateescape"))
    stored_request = replace(request, script=str(script))

    def add_job(sub_number: Optional[int], is_parent: bool = False) -> Job:
        job = Job(
            number, stored_request, user, stored_request.group, host, sub_number, is_parent, mark=uuid.uuid4().hex
        )
        job.dates["accept"] = job.dates[job.state] = timestamp
        table.add(job)
        return job

    if request.model == STEP:
        if parent is None:
            add_job(None, is_parent=True)
        return add_job(sub)
    if request.model == BULK:
        for bulk in range(request.bulk[0], request.bulk[1] + 1):
            add_job(bulk)
    return add_job(None, is_parent=request.model == BULK)


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
