"""Limits of a user and of a resource group: ``pjstat --limit`` and ``pjacl``."""

from __future__ import annotations

import getpass
from typing import Dict, List, Optional

from fugaku_gpt.pjm.options import KNOB_VALUES
from fugaku_gpt.simulator.client import BANNER
from fugaku_gpt.simulator.job import RUNNING
from fugaku_gpt.simulator.protocol import Invocation, Reply, pjm_message
from fugaku_gpt.simulator.settings import Settings
from fugaku_gpt.simulator.site import (
    DEFAULT_ELAPSE,
    DEFAULT_PRIORITY,
    RESOURCE_UNIT,
    Refusal,
    ResourceGroup,
    find_group,
    knob_defaults,
)
from fugaku_gpt.simulator.table import JobTable

_LIMIT_NAMES = (
    "ru-accept",
    "ru-accept-allsubjob",
    "ru-accept-bulksubjob",
    "ru-accept-stepsubjob",
    "ru-run-job",
    "ru-run-bulksubjob",
    "ru-use-node",
    "ru-interact-accept",
    "ru-interact-run-job",
    "ru-interact-use-node",
    "ru-use-core",
    "ru-interact-use-core",
)
UNLIMITED = "unlimited"
HELP = f"pjacl ({BANNER})\nUsage: pjacl [-u user] [-g group] [--rg name]\n"


def format_limits(table: JobTable, settings: Settings) -> str:
    """The output of ``pjstat --limit``."""
    jobs = [job for job in table.top_level_jobs() if not job.is_finished]
    running = [job for job in table.unfinished_jobs() if job.state == RUNNING and not job.parent]
    subs = [sub for job in jobs for sub in table.sub_jobs(job) if not sub.is_finished]
    uses: Dict[str, int] = {
        "ru-accept": len(jobs),
        "ru-accept-allsubjob": len(subs),
        "ru-accept-bulksubjob": sum(sub.request.model == "BU" for sub in subs),
        "ru-accept-stepsubjob": sum(sub.request.model == "ST" for sub in subs),
        "ru-run-job": len(running),
        "ru-run-bulksubjob": sum(job.request.model == "BU" for job in running),
        "ru-use-node": sum(job.request.nodes for job in running),
    }
    user = getpass.getuser()
    group = jobs[0].group if jobs else user
    text = f"System Resource Information:\nRSCUNIT: {RESOURCE_UNIT}\n"
    for title, limits in (
        (f"USER: {user}", {"ru-accept": str(settings.accept_limit), "ru-run-job": str(settings.slots)}),
        (f"GROUP: {group}", {}),
        ("ALL:", {"ru-use-node": str(settings.nodes)}),
    ):
        text += f"{title}\n LIMIT-NAME                    LIMIT  ALLOC\n"
        for name in _LIMIT_NAMES:
            text += f" {name:<24}{limits.get(name, UNLIMITED):>11}{uses.get(name, 0):>7}\n"
    return text


def pjacl(invocation: Invocation, settings: Settings) -> Reply:
    """Report the limits of a resource group (``pjacl --rg NAME``)."""
    arguments = list(invocation.arguments)
    values: Dict[str, str] = {}
    names = {"-u": "user", "--user": "user", "-g": "group", "--group": "group", "--rg": "rg", "--ru": "ru"}
    if "--help" in arguments:
        return Reply(out=HELP)
    while arguments:
        argument = arguments.pop(0)
        spelling, equals, value = argument.partition("=")
        if spelling not in names or not (equals or arguments):
            return Reply(err=pjm_message("pjacl", 1, f"Invalid option {argument}."), code=1)
        values[names[spelling]] = value if equals else arguments.pop(0)
    try:
        group = find_group(values.get("rg"), values.get("ru"))
    except Refusal as refusal:
        return Reply(err=pjm_message("pjacl", refusal.code, refusal.text), code=1)
    return Reply(out=format_acl(group, settings, values.get("user"), values.get("group")))


def format_duration(seconds: int) -> str:
    """A number of seconds as ``72:00:00``."""
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def format_acl(group: ResourceGroup, settings: Settings, user: Optional[str], project: Optional[str]) -> str:
    """The table ``pjsub option parameters``: lower, upper and default value of each option."""
    min_elapse = int(settings.min_elapse)
    default_elapse = max(DEFAULT_ELAPSE, min_elapse)
    rows: List[List[str]] = [
        ["(node=)", str(group.min_nodes), str(min(group.max_nodes, settings.nodes)), str(group.default_nodes)],
        ["(elapse=)", format_duration(min_elapse), format_duration(group.max_elapse), format_duration(default_elapse)],
        [
            "(adaptive elapsed time min)",
            format_duration(min_elapse),
            format_duration(group.max_elapse),
            format_duration(default_elapse),
        ],
        [
            "(adaptive elapsed time max)",
            format_duration(min_elapse + 1),
            format_duration(group.range_max),
            format_duration(group.range_max),
        ],
        *(
            [f"({name}=)", str(min(knob_values)), str(max(knob_values)), str(knob_defaults(group.default_nodes)[name])]
            for name, knob_values in KNOB_VALUES.items()
        ),
    ]
    text = f"[USER: {user or getpass.getuser()}]\n" + (f"[GROUP: {project}]\n" if project else "")
    text += f"[RSCUNIT: {RESOURCE_UNIT}]\n[RSCGRP: {group.name}]\n"
    text += "pjsub option parameters\n"
    text += f"    {'(-L/--rsc-list)':<40}{'lower':<17}{'upper':<17}default\n"
    for title, low, high, default in rows:
        text += f"        {title:<36}{low:<17}{high:<17}{default}\n"
    text += f"    {'(-p)':<40}{'0':<17}{'255':<17}{DEFAULT_PRIORITY}\n"
    return text
