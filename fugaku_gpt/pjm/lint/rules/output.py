"""Rules for output files (PJM070 to PJM072)."""

from __future__ import annotations

import re
from typing import Iterator

from fugaku_gpt.pjm.lint.facts import Facts, printable
from fugaku_gpt.pjm.lint.registry import ERROR, INFO, RUNS, WARNING, Hit, rule
from fugaku_gpt.pjm.lint.sites import FX1000

_MAX_FILES = 1000  # processes that may make files in one folder
_DEVICES = ("/dev/stdout", "/dev/stderr")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+))")


@rule(
    "PJM070",
    WARNING,
    "mpiexec ignores the single-file output options",
    why="On Fugaku -std, -stdout, -stderr and -of are passed over with [WARN] PLE 0605; output goes to "
    "./output.JOBID/0/1/stdout.1.RANK. Only the -proc forms, one file for each process, work.",
    fix="use -std-proc, -stdout-proc or -stderr-proc, with a path such as ./output.%j/%/1000r/stdout",
    source="Fugaku user guide 1.52, MPI/InputOutputRedirection",
    site=FX1000,
)
def single_file(facts: Facts) -> Iterator[Hit]:
    for launch in facts.launches:
        for option, path in launch.outputs:
            if not option.text.endswith("-proc"):
                where = f" {printable(path.text)}" if path else ""
                proc = f"{option.text}-proc"
                severity = "" if facts.is_fugaku else INFO  # other sites may have left the option on
                message = f"{option.text}{where} is ignored"
                yield Hit(option.line, message, option.column, f"use {proc}{where}", severity=severity)


@rule(
    "PJM071",
    WARNING,
    "a thousand processes make files in one folder",
    why="The files of 1000 processes and more in one folder burden its metadata server and slow the whole job. "
    "%/1000r puts each thousand into a folder of its own.",
    fix="write a path such as ./output.%j/%/1000r/stdout",
    source="Fugaku user guide 1.52, MPI/InputOutputRedirection; MPI User's Guide J2UL-2565, mpiexec",
    site=FX1000,
)
def crowded_folder(facts: Facts) -> Iterator[Hit]:
    for launch in facts.launches:
        ranks = launch.processes if launch.count_word is not None else facts.ranks
        for option, path in launch.outputs:
            if not ranks or ranks < _MAX_FILES or path is None or not option.text.endswith("-proc"):
                continue
            if not _is_spread(facts, path.text):
                message = f"{ranks} processes make files in the folder of {option.text} {printable(path.text)}"
                yield Hit(path.line, message, path.column)


def _is_spread(facts: Facts, path: str) -> bool:
    """Whether a path may contain ``%/``: directly, through a variable, or through a variable that is set elsewhere."""
    waiting, seen = [path], set()
    while waiting:
        text = waiting.pop()
        if "%/" in text:
            return True
        for match in _VARIABLE.finditer(text):
            name = match[1] or match[2]
            if name in seen:
                continue
            seen.add(name)
            values = facts.assignments_to(name)
            if not values and not name.startswith("PJM_"):
                return True
            waiting.extend(assignment.value for assignment in values)
    return False


@rule(
    "PJM072",
    ERROR,
    "redirection to /dev/stdout or /dev/stderr",
    why="In a job these are files that are opened anew: what was written to .out or .err before is overwritten from "
    "the start.",
    fix="write >&2 or >&1, or leave the redirection away",
    source="End-user's Guide J2UL-2534, 2.1.1",
)
def device(facts: Facts) -> Iterator[Hit]:
    for command in facts.commands:
        for operator, target in command.redirections:
            if target.text in _DEVICES and operator in (">", ">>", ">|", "&>", "&>>"):
                descriptor = "&1" if target.text == "/dev/stdout" else "&2"
                message = f"{operator} {target.text} overwrites the job's output"
                yield Hit(target.line, message, target.column, f"write >{descriptor}", RUNS)
