"""What a user may ask for: ``pjstat --limit`` and ``pjacl``."""

from __future__ import annotations

import getpass
from typing import Dict, List, Optional

from fugaku_gpt.pjm.options import KNOB_VALUES
from fugaku_gpt.simulator.call import Call, Reply, message
from fugaku_gpt.simulator.client import BANNER
from fugaku_gpt.simulator.job import RUNNING
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
from fugaku_gpt.simulator.table import Table

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


def format_limits(table: Table, settings: Settings) -> str:
    """``pjstat --limit``."""
    jobs = [job for job in table.top() if not job.over]
    running = [job for job in table.open() if job.state == RUNNING and not job.parent]
    subs = [sub for job in jobs for sub in table.subs(job) if not sub.over]
    allocated: Dict[str, int] = {
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
            text += f" {name:<24}{limits.get(name, UNLIMITED):>11}{allocated.get(name, 0):>7}\n"
    return text


def pjacl(call: Call, settings: Settings) -> Reply:
    """``pjacl --rg NAME``: what may be asked for in a resource group."""
    words = list(call.words)
    given: Dict[str, str] = {}
    names = {"-u": "user", "--user": "user", "-g": "group", "--group": "group", "--rg": "rg", "--ru": "ru"}
    if "--help" in words:
        return Reply(out=HELP)
    while words:
        word = words.pop(0)
        spelling, equals, argument = word.partition("=")
        if spelling not in names or not (equals or words):
            return Reply(err=message("pjacl", 1, f"Invalid option {word}."), code=1)
        given[names[spelling]] = argument if equals else words.pop(0)
    try:
        group = find_group(given.get("rg"), given.get("ru"))
    except Refusal as refusal:
        return Reply(err=message("pjacl", refusal.code, refusal.text), code=1)
    return Reply(out=format_acl(group, settings, given.get("user"), given.get("group")))


def clock(seconds: int) -> str:
    """``72:00:00``."""
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def format_acl(group: ResourceGroup, settings: Settings, user: Optional[str], project: Optional[str]) -> str:
    """The table ``pjsub option parameters`` with lower, upper and default value of each option."""
    short = int(settings.min_elapse)
    usual = max(DEFAULT_ELAPSE, short)
    rows: List[List[str]] = [
        ["(node=)", str(group.low), str(min(group.high, settings.nodes)), str(group.usual)],
        ["(elapse=)", clock(short), clock(group.elapse), clock(usual)],
        ["(adaptive elapsed time min)", clock(short), clock(group.elapse), clock(usual)],
        ["(adaptive elapsed time max)", clock(short + 1), clock(group.elapse_range), clock(group.elapse_range)],
        *(
            [f"({name}=)", str(min(values)), str(max(values)), str(knob_defaults(group.usual)[name])]
            for name, values in KNOB_VALUES.items()
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
