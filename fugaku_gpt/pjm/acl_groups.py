"""Limits of resource groups from saved outputs of ``pjacl``."""

from __future__ import annotations

import re
from typing import List, Tuple

from fugaku_gpt.errors import UsageError
from fugaku_gpt.pjm.groups import GroupLimits
from fugaku_gpt.pjm.limits import BATCH, INTERACTIVE, AclLimits, parse_acl

# lines of a saved output that name its group
_COMMAND = re.compile(r"\bpjacl\b[^\n#]*?--(?:rg|rscgrp)[ =]+([A-Za-z][\w.-]*)")
_GROUP_LINE = re.compile(r"^[ \t]*(?:rscgrp|resource group|rg)[ \t]*[:=][ \t]*([A-Za-z][\w.-]*)[ \t]*\r?$", re.M | re.I)


def read_acl_groups(text: str, date: str, where: str, name: str = "") -> List[GroupLimits]:
    """Read the groups and limits in saved output of ``pjacl --rg GROUP``.

    Args:
        name: name of the group; empty if the text names it: in a line with the command, as a terminal shows it (one
            text may then hold several groups), or in a line such as ``rscgrp: small``.

    Raises:
        UsageError: the text names no group, or holds no limit.
    """
    outputs: List[Tuple[str, str]] = []
    commands = [] if name else list(_COMMAND.finditer(text))
    if name:
        outputs = [(name, text)]
    elif commands:
        ends = [command.start() for command in commands[1:]] + [len(text)]
        outputs = [(command[1], text[command.end() : end]) for command, end in zip(commands, ends)]
    else:
        named = _GROUP_LINE.search(text)
        if named is None:
            raise UsageError(f"{where}: no line names the group; write GROUP=FILE, such as small={where}")
        outputs = [(named[1], text)]
    groups = [_group_from_acl(group, parse_acl(output), date) for group, output in outputs]
    for group in groups:
        if group.max_elapse is None and group.max_nodes is None:
            raise UsageError(f"{where}: no limits of {group.name}: expected what `pjacl --rg {group.name}` prints")
    return groups


def _group_from_acl(name: str, acl: AclLimits, date: str) -> GroupLimits:
    option = BATCH if acl.row("elapse", BATCH) or acl.row("node", BATCH) else INTERACTIVE
    elapse = acl.seconds("elapse", option) or (None, None, None)
    longest = acl.seconds("adaptive elapsed time max", option) or (None, None, None)
    nodes = acl.nodes("node", option) or (None, None, None)
    return GroupLimits(
        name=name,
        date=date,
        min_nodes=nodes[0],
        max_nodes=nodes[1],
        default_nodes=nodes[2],
        min_elapse=elapse[0],
        max_elapse=elapse[1],
        range_max=longest[1],
        interactive=option == INTERACTIVE,
    )
