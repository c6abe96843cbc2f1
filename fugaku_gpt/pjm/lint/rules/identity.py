"""Rules for job name, group, resource group and volumes (PJM013, PJM020 to PJM023, PJM098, PJM099)."""

from __future__ import annotations

import re
from typing import Iterator, Optional

from fugaku_gpt.pjm.lint.facts import Facts, printable
from fugaku_gpt.pjm.lint.registry import COMMAND_LINE, DATED, ERROR, INFO, UNSURE, WARNING, Hit, rule
from fugaku_gpt.pjm.lint.rules.launching import is_misspelling
from fugaku_gpt.pjm.lint.sites import FUGAKU, FX1000
from fugaku_gpt.pjm.values import NAME_BYTES, has_placeholder, parse_volumes

_VOLUMES = "PJM_LLIO_GFSCACHE"
_SPACK_VOLUME = "/vol0004"
_SPACK = re.compile(r"/vol0004/apps/oss/spack|/home/apps/oss/spack|share/spack/setup-env|\bspack\s+load\b")
_CHARSET = re.compile(r"[A-Za-z0-9._-]+")
_PLACEHOLDERS = re.compile(
    r"\$\{[^{}]*\}?|\$\([^()]*\)?|\$\w+|`[^`]*`|\{\{.*?\}\}|\{%.*?%\}|\{[A-Za-z_]\w*\}|%\(\w+\)[sd]?|@\w+@|__\w+__"
    r"|%[A-Z_]{3,}%|##\w+##|\bHH:MM(?::SS)?\b|<[-A-Za-z_][^<>]*>|\[[A-Za-z_][^\[\]]*\]|/vol000[A-Z]\b|\bgroup_?name\b|\byour[_-]?\w+|\bX{3,}\b|\b(?:hp|ra)[xX*]{3,}",
    re.IGNORECASE,
)
_VARIABLE = re.compile(r"\$\{(\w+)\}")


@rule(
    "PJM013",
    ERROR,
    "bad job name",
    why="A job name begins with an ASCII letter, has 63 bytes at most and no slash, else pjsub refuses it; Fugaku "
    "supports only letters, digits, '.', '_' and '-', also in the script's file name.",
    fix="rename: a letter, then letters, digits, '.', '_' and '-'",
    source="Command Reference J2UL-2549, pjsub; Fugaku user guide 1.52, pjsubCommandOptions",
)
def job_name(facts: Facts) -> Iterator[Hit]:
    name = facts.script.options.get("name")
    if not isinstance(name, str):
        file = facts.file.rpartition("/")[2]
        if facts.is_fugaku and file and not _CHARSET.fullmatch(file):
            yield Hit(facts.top, f"the script's file name {printable(file)} becomes the job's name", downgrade=UNSURE)
        return
    if has_placeholder(name) or _PLACEHOLDERS.search(name):
        return
    line, column = facts.position("name", name)
    length = len(name.encode("utf-8", "surrogateescape"))
    if length > NAME_BYTES:
        yield Hit(line, f"the job name has {length} bytes, more than {NAME_BYTES}", column)
    elif "/" in name:
        yield Hit(line, f"the job name {printable(name)} holds a slash", column)
    elif not re.match(r"[A-Za-z]", name):
        yield Hit(line, f"the job name {printable(name)} begins with no letter", column, downgrade=UNSURE)
    elif facts.is_fugaku and not _CHARSET.fullmatch(name):
        yield Hit(
            line,
            f"the job name {printable(name)} holds characters that Fugaku does not support",
            column,
            downgrade=UNSURE,
        )


@rule(
    "PJM020",
    ERROR,
    "no group",
    why="Without -g the job is charged to a group that may not run jobs: [ERR.] PJM 0071 pjsub Group not authorized "
    "to submit a job. The group may also be given on the command line.",
    fix="add #PJM -g GROUP, with the group of your project (`id` lists yours)",
    source="Fugaku user guide 1.52, JobExecution/NormalJob and UsageRules",
    site=FUGAKU,
)
def no_group(facts: Facts) -> Iterator[Hit]:
    if "group" not in facts.script.options and "gid" not in facts.script.options:
        message = "no -g: pjsub refuses the job unless the command line names a group"
        yield Hit(facts.top, message, downgrade=COMMAND_LINE, is_absence=True)


@rule(
    "PJM021",
    ERROR,
    "a group that may not run this job",
    why="The group `fugaku`, which all users are in, may not submit jobs; the group `trial` may use the spot- "
    "resource groups alone.",
    fix="name the group of your project, or, with trial, a spot- resource group",
    source="Fugaku user guide 1.52, UsageRules and JobExecution/NormalJob",
    site=FUGAKU,
)
def wrong_group(facts: Facts) -> Iterator[Hit]:
    owner = facts.script.options.get("group")
    line, column = facts.position("group", owner if isinstance(owner, str) else "")
    if owner == "fugaku":
        yield Hit(line, "-g fugaku: this group may not submit jobs", column, downgrade=DATED)
    elif owner == "trial" and facts.group and not facts.group.startswith("spot-"):
        message = f"-g trial with the resource group {printable(facts.group)}: trial may use spot- groups alone"
        yield Hit(line, message, column, downgrade=DATED)


@rule(
    "PJM022",
    WARNING,
    "the job's volumes are not named",
    why="PJM_LLIO_GFSCACHE names the second-layer volumes that the nodes see besides the one of your home. pjsub "
    "refuses jobs that start on a volume which it does not name, and jobs that use Spack without /vol0004.",
    fix="add #PJM -x PJM_LLIO_GFSCACHE=/vol0004 with the volumes that the job touches, joined by colons",
    source="Fugaku user guide 1.52, LayeredStorageAndLLIO/SelectAvailableVolumes",
    site=FUGAKU,
)
def volumes(facts: Facts) -> Iterator[Hit]:
    spack = next(facts.find_uses(_SPACK), None)
    value = facts.directive_environment.get(_VOLUMES)
    if value is None:
        if "export_all" not in facts.script.options:
            yield Hit(facts.top, f"no -x {_VOLUMES}: only the volume of your home is there", is_absence=True)
        return
    line, column = facts.position(f"environment.{_VOLUMES}", value)
    if has_placeholder(value) or _PLACEHOLDERS.search(value):
        return
    try:
        named = parse_volumes(value)
    except ValueError as error:
        yield Hit(line, f"{_VOLUMES}: {printable(error)}", column, "write /vol0004; several are joined by colons")
        return
    unknown = [volume for volume in named if facts.limits.volumes and volume not in facts.limits.volumes]
    if unknown:
        site_volumes = " ".join(facts.limits.volumes)
        message = f"{_VOLUMES} names {printable(unknown[0])}; the volumes of {facts.limits.date} are {site_volumes}"
        yield Hit(line, message, column)
    if spack and _SPACK_VOLUME not in named:
        message = f"line {spack[0].line} uses Spack, which is on {_SPACK_VOLUME}, and {_VOLUMES} is {printable(value)}"
        yield Hit(line, message, column, f"add :{_SPACK_VOLUME}")


@rule(
    "PJM023",
    INFO,
    "all volumes are named",
    why="A job fails when one of its volumes has a fault. The fewer it names, the fewer faults are its own.",
    fix="name only the volumes that the job touches",
    source="Fugaku user guide 1.52, LayeredStorageAndLLIO/SelectAvailableVolumes",
    site=FUGAKU,
)
def all_volumes(facts: Facts) -> Iterator[Hit]:
    value = facts.directive_environment.get(_VOLUMES)
    site_volumes = set(facts.limits.volumes)
    if value and site_volumes and site_volumes <= set(value.split(":")):
        line, column = facts.position(f"environment.{_VOLUMES}", value)
        yield Hit(line, f"{_VOLUMES} names all {len(site_volumes)} volumes", column)


@rule(
    "PJM098",
    WARNING,
    "a placeholder is left in a directive",
    why="pjsub puts in no variables (but those of --vset): what stands there is what it gets. Fill templates in "
    "before they are submitted. No other rule speaks about such a value.",
    fix="write the value",
    source="Command Reference J2UL-2549, pjsub, --vset",
)
def placeholder(facts: Facts) -> Iterator[Hit]:
    script = facts.script
    defined = set(script.options.get("vset", {}))
    severity = INFO if facts.is_template else ""  # it is there to be filled in
    lines = sorted({directive.line for directive in script.directives} | {problem.line for problem in script.problems})
    for line in lines:
        text = script.lines[line - 1]
        end = re.search(r"\s#", text)
        match = _first_placeholder(_PLACEHOLDERS, text[: end.start()] if end else text, defined)
        if match:
            yield Hit(line, f"{printable(match[0])} is not replaced by pjsub", match.start() + 1, severity=severity)


def _first_placeholder(pattern: "re.Pattern[str]", text: str, defined: "set[str]") -> "Optional[re.Match[str]]":
    for match in pattern.finditer(text, 4):
        variable = _VARIABLE.fullmatch(match[0])
        if not (variable and variable[1] in defined):
            return match
    return None


@rule(
    "PJM099",
    WARNING,
    "a resource group of earlier years",
    why="The group is in no public list of today; pjsub refuses groups that do not exist (PJM 0058).",
    fix="choose a group of today: `pjacl` and the site's table list them",
    source="Fugaku user guide 1.52; user briefings of 2025",
    site=FUGAKU,
)
def retired_group(facts: Facts) -> Iterator[Hit]:
    group, limits = facts.group, facts.limits
    successor, reporter = (limits.successor(group), limits.report_of(group)) if group else (None, None)
    if not group or not (successor or reporter):
        return
    line, column = facts.position("resources.rscgrp", group)
    message = f"the resource group {printable(group)} is in no list of today (as of {limits.date})"
    if reporter:
        fix = f"`pjacl --rg {group}` tells whether you may use it"
        yield Hit(line, f"{message}, though {reporter} name it", column, fix, severity=INFO)
    else:
        fitting = limits.groups_for(facts.nodes)
        if facts.nodes and not fitting:
            fix = f"no group of the list takes {facts.nodes} nodes: `pjacl` lists yours"
        else:
            names = [name for name in str(successor).split(" or ") if not facts.nodes or name in fitting]
            fix = f"use {' or '.join(names or fitting)}"
        yield Hit(line, message, column, fix, date=limits.date)


@rule(
    "PJM025",
    WARNING,
    "a resource group that the site does not list, and that resembles one",
    why="pjsub refuses groups that do not exist (PJM 0058), and distinguishes capitals. The list is data with a date, "
    "and projects may have groups that are in no list.",
    fix="`pjacl` lists the groups that you may use",
    source="Command Reference J2UL-2549, pjsub, message 0058; the tables of the sites",
)
def misspelt_group(facts: Facts) -> Iterator[Hit]:
    group, limits = facts.group, facts.limits
    if not group or not limits.groups or group in limits.groups or limits.report_of(group) or limits.successor(group):
        return
    names = {name.casefold(): name for name in limits.groups}
    same = names.get(group.casefold())
    meant = [same] if same else [name for name in limits.groups if is_misspelling(group, name)]
    meant = [
        name for name in meant if same or _without_digits(group) != _without_digits(name)
    ]  # `f-pt2` may be another group of a series
    if meant:
        line, column = facts.position("resources.rscgrp", group)
        message = f"the resource group {printable(group)} is in no list of {limits.title or limits.site}"
        fix = f"did you mean {' or '.join(meant)}? `pjacl` lists yours"
        yield Hit(line, f"{message} (as of {limits.date})", column, fix, date=limits.date)


def _without_digits(name: str) -> str:
    return name.rstrip("0123456789")


@rule(
    "PJM024",
    ERROR,
    "a group for interactive jobs in a batch script",
    why="Groups such as int take jobs of pjsub --interact alone: pjsub refuses the script unless the option is on its "
    "command line.",
    fix="name a group for batch jobs, such as small, or submit with pjsub --interact",
    source="Fugaku user guide 1.52, JobExecution/InteractiveJob; FAQ of the supercomputer Flow, --interact",
)
def interactive_group(facts: Facts) -> Iterator[Hit]:
    group = facts.group
    if not group or "interact" in facts.script.options:
        return
    limits = facts.group_limits
    is_interactive = limits.interactive if limits else facts.site == FX1000 and "interactive" in group
    if is_interactive:
        line, column = facts.position("resources.rscgrp", group)
        message = f"the resource group {printable(group)} takes interactive jobs alone"
        yield Hit(line, message, column, downgrade=COMMAND_LINE)
