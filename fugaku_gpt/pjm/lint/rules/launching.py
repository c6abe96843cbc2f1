"""Rules for what the commands start, and what waits for it (PJM035, PJM068, PJM069, PJM086)."""

from __future__ import annotations

import re
from typing import Iterator, List

from fugaku_gpt.pjm.lint.facts import Facts, printable
from fugaku_gpt.pjm.lint.launches import LAUNCHERS, Launch
from fugaku_gpt.pjm.lint.registry import WARNING, Hit, rule
from fugaku_gpt.pjm.lint.shell import Command
from fugaku_gpt.pjm.lint.sites import FUGAKU, FX1000

# options of mpiexec that give a call nodes of its own
_PLACEMENT = re.compile(r"--?(v?coordfile|host|H|hostfile|machinefile)")
_WAITS = ("wait", "sleep", "tail", "fg", "kill")  # with these a script may well outlive what it has started
# commands that print, set or look up something: what comes after them may still start processes
_QUIET = frozenset({
    "echo", "printf", "date", "cd", "pwd", "ls", "cat", "export", "set", "unset", "ulimit", "module", "mkdir", "cp",
    "mv", "rm", "ln", "touch", "hostname", "uname", "env", "id", "true", "false", "test", "[", "[[", "((", ":",
    "sleep", "wait", "exit", "return", "trap", "shopt", "umask", "pjstat", "llio_transfer", "dir_transfer",
    "sort_libp", "spack", "tar", "chmod", "grep", "sed", "awk", "head", "tail", "wc", "lscpu", "numactl", "nproc",
    "declare", "local", "readonly", "typeset", "readarray", "let", "shift", "alias", "type", "time", "seq",
    "basename", "dirname", "find", "du", "df", "free", "xargs", "tee", "sort", "uniq", "cut", "tr", "for", "case",
    "select",
})  # fmt: skip
# a word that may start processes on all nodes in a way that is not seen here: a script, an interpreter, a launcher
_MAY_LAUNCH = re.compile(
    r"(?:^|/)(?:python|perl|ruby|julia|bash|sh|ksh|zsh|csh|tcsh|make|eval|exec|source|\.|pjrsh|srun|mpi\w*|\w*mpi"
    r"|parallel|apptainer|singularity)[0-9.]*$|\.(?:sh|bash|csh|py|pl|rb|jl|pjm)$|[$`]"
)
# commands of the site, and of this software, that scripts misspell
_SITE_COMMANDS = ("llio_transfer", "dir_transfer", "sort_libp", "mpiexec", "pjsub", "pjstat", "pjdel", "pjacl")


@rule(
    "PJM035",
    WARNING,
    "several nodes, and nothing is started on the others",
    why="A job script runs on the first of its nodes alone; the others do nothing, and are billed, unless mpiexec "
    "starts processes there.",
    fix="start the program with mpiexec, or ask for node=1",
    source="End-user's Guide J2UL-2534, 2.1.1 and 2.3.6",
    site=FX1000,
)
def idle_nodes(facts: Facts) -> Iterator[Hit]:
    if not facts.nodes or facts.nodes < 2 or facts.launches or "bulk" in facts.script.options:
        return
    programs = [command for command in facts.commands if command.argv and command.name not in _QUIET]
    if programs and not any(_may_launch(command) for command in facts.commands):
        program = programs[-1]
        message = f"{facts.nodes} nodes, and no mpiexec: {printable(program.argv[0].text)} runs on the first alone"
        yield Hit(program.line, message, program.column)


def _may_launch(command: Command) -> bool:
    return any(_MAY_LAUNCH.search(word.text) or "mpiexec" in word.text for word in command.argv)


@rule(
    "PJM068",
    WARNING,
    "several mpiexec at once on the same nodes",
    why="Each mpiexec takes the job's nodes from the first on. Calls that run at the same time need nodes of their "
    "own, by a file of coordinates; without one the second is refused or shares the cores of the first.",
    fix="give each call its own nodes with -vcoordfile FILE, or run one after the other",
    source="MPI User's Guide J2UL-2565, mpiexec, -vcoordfile; Fugaku user guide 1.52, JobExecution",
    site=FX1000,
)
def concurrent_launches(facts: Facts) -> Iterator[Hit]:
    behind = [launch for launch in facts.launches if launch.command.background and not _is_placed(launch)]
    repeated = [launch for launch in behind if launch.command.in_loop]
    if repeated:
        word = repeated[0].word
        yield Hit(word.line, "a loop starts mpiexec again while the last call runs, on the same nodes", word.column)
    elif behind:
        for launch in facts.launches:
            if launch.word.line > behind[0].word.line and not _is_placed(launch):
                if not _waits_between(facts, behind[0], launch):
                    message = f"mpiexec starts while that of line {behind[0].word.line} runs, on the same nodes"
                    yield Hit(launch.word.line, message, launch.word.column)
                return


def _is_placed(launch: Launch) -> bool:
    """Whether a call of mpiexec names its nodes, or may do so through a variable."""
    words = launch.command.argv
    options = words[: words.index(launch.program[0]) + 1] if launch.program and launch.program[0] in words else words
    return any(_PLACEMENT.fullmatch(word.text) or word.raw.startswith("$") for word in options)


def _waits_between(facts: Facts, first: Launch, second: Launch) -> bool:
    return any(
        command.name == "wait" and first.word.line <= command.line <= second.word.line for command in facts.commands
    )


@rule(
    "PJM069",
    WARNING,
    "a background mpiexec that nothing waits for",
    why="The job ends with its script, and what still runs in the background is killed.",
    fix="end the script with wait",
    source="End-user's Guide J2UL-2534, 2.1.1",
)
def no_wait(facts: Facts) -> Iterator[Hit]:
    behind: List[Launch] = []
    for launch in facts.launches:
        if not launch.command.background:
            behind = []  # a call in the foreground keeps the script alive
        else:
            behind.append(launch)
    if not behind:
        return
    last = behind[-1].command.line
    if not any(command.name in _WAITS and command.line >= last for command in facts.commands):
        word = behind[-1].word
        yield Hit(word.line, "mpiexec in the background, and no wait after it: the script ends at once", word.column)


@rule(
    "PJM086",
    WARNING,
    "a misspelt command of the site",
    why="The shell reports that it does not know the command, and goes through the rest of the script without it: the "
    "job runs, though slower than meant, or without its processes.",
    fix="write the command as the manual does",
    source="Fugaku user guide 1.52, LayeredStorageAndLLIO; Command Reference J2UL-2549",
    site=FUGAKU,
)
def misspelt_command(facts: Facts) -> Iterator[Hit]:
    for command in facts.commands:
        word = command.argv[0] if command.argv else None
        if word is None or "/" in word.text or "$" in word.text or word.text in (*_SITE_COMMANDS, *LAUNCHERS):
            continue
        meant = next((name for name in _SITE_COMMANDS if _is_misspelling(word.text, name)), None)
        if meant and not re.search(rf"^\s*(function\s+)?{re.escape(word.text)}\s*\(\)", facts.body_text, re.MULTILINE):
            yield Hit(word.line, f"no site has a command {printable(word.text)}", word.column, f"did you mean {meant}?")


def _is_misspelling(text: str, name: str) -> bool:
    """Whether one letter of ``name`` is missing, added or another, or two neighbours have changed places; in long names
    also hyphens for underscores."""
    if len(name) > 8 and text.replace("-", "_") == name:
        return text != name
    if abs(len(text) - len(name)) > 1 or len(name) < 6:
        return False
    start = 0
    while start < min(len(text), len(name)) and text[start] == name[start]:
        start += 1
    rest, meant = text[start:], name[start:]
    swapped = len(rest) > 1 and rest[1] + rest[0] + rest[2:] == meant
    return rest != meant and (rest[1:] == meant[1:] or rest[1:] == meant or rest == meant[1:] or swapped)
