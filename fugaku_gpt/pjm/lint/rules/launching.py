"""Rules for what the commands start, and what waits for it (PJM035, PJM068, PJM069, PJM086)."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Iterator, Mapping, Optional, Tuple

from fugaku_gpt.pjm.lint.facts import Facts, printable
from fugaku_gpt.pjm.lint.inner_shells import PREFIX_COMMANDS
from fugaku_gpt.pjm.lint.launches import COUNT_OPTIONS, LAUNCHERS, Launch
from fugaku_gpt.pjm.lint.registry import INFO, WARNING, Hit, rule
from fugaku_gpt.pjm.lint.shell import Command, Word
from fugaku_gpt.pjm.lint.sites import FX1000
from fugaku_gpt.pjm.lint.waits import Waits, is_wait_for_one

# options of mpiexec that give a call nodes of its own
_PLACEMENT = re.compile(r"--?(v?coordfile|host|H|hostfile|machinefile)(=.*)?")
_WAITS = ("wait", "tail", "fg", "kill")  # commands that wait for what runs in the background, kill -0 in a loop
_KEEP_ALIVE = (*_WAITS, "sleep")  # with these a script may well outlive what it has started
# commands that print, set or look up something: what comes after them may still start processes
_QUIET = frozenset({
    "echo", "printf", "date", "cd", "pwd", "ls", "cat", "export", "set", "unset", "ulimit", "module", "mkdir", "cp",
    "mv", "rm", "ln", "touch", "hostname", "uname", "env", "id", "true", "false", "test", "[", "[[", "((", ":",
    "sleep", "wait", "exit", "return", "trap", "shopt", "umask", "pjstat", "llio_transfer", "dir_transfer",
    "sort_libp", "spack", "tar", "chmod", "grep", "sed", "awk", "head", "tail", "wc", "lscpu", "numactl", "nproc",
    "declare", "local", "readonly", "typeset", "readarray", "let", "shift", "alias", "type", "time", "seq",
    "basename", "dirname", "find", "du", "df", "free", "xargs", "tee", "sort", "uniq", "cut", "tr", "for", "case",
    "select", "disown", "jobs", "bg",
})  # fmt: skip
# a word that may start processes on all nodes in a way that is not seen here: a script, a shell, a launcher
_MAY_LAUNCH = re.compile(
    r"(?:^|/)(?:bash|sh|ksh|zsh|csh|tcsh|make|eval|exec|source|\.|pjrsh|mpi\w*|\w*mpi"
    r"|parallel|apptainer|singularity)[0-9.]*$|\.(?:sh|bash|csh|pjm)$|[$`]"
)
# an interpreter, or a program for it, which may, though few do
_INTERPRETED = re.compile(r"(?:^|/)(?:python|perl|ruby|julia)[0-9.]*$|\.(?:py|pl|rb|jl)$")
# launchers of other systems, which no site with PJM has, and whose they are
_FOREIGN_LAUNCHERS = {
    "srun": "Slurm",
    "ibrun": "the machines of TACC",
    "jsrun": "LSF",
    "aprun": "Cray's ALPS",
    "lrun": "LSF",
    "runjob": "Blue Gene",
    "flux": "Flux",
    "prun": "PRRTE",
}
_SETS_UP = re.compile(r"(?:env|setup|activate|profile|init|vars?|conda|spack|modules?|shrc)\w*(?:[.-]\w+)*$")
# a launcher in a line that is no comment, such as in a substitution or a here-document
_LAUNCH = re.compile(r"^(?!\s*#).*\bmpi(?:exec|run)\b", re.MULTILINE)
_LAUNCH_IN_TEXT = re.compile(r"(?:^|[\s/;&|({])mpi(?:exec|run)(?=$|\s)")  # a word, or in the text of `sh -c '...'`
# commands of the site, and of its scheduler, that scripts misspell; shorter ones resemble too many others
_SITE_COMMANDS = ("llio_transfer", "dir_transfer", "sort_libp", "mpiexec", "mpirun", "pjstat")
_SITE_FOLDERS = ("/home/system/tool/", "/usr/bin/", "/bin/")  # in which they are


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
    commands = [command for command in facts.commands if not _only_sets_up(command)]
    foreign = next((word for command in commands for word in _foreign_launcher(command, facts)), None)
    if foreign is not None and not _LAUNCH.search(facts.body_text):
        name = foreign.text.rpartition("/")[2]
        message = (
            f"{facts.nodes} nodes, and no mpiexec: {name} is of {_FOREIGN_LAUNCHERS[name]}, and starts nothing here"
        )
        yield Hit(foreign.line, message, foreign.column, f"write mpiexec in place of {name}")
        return
    programs = [command for command in commands if command.argv and command.name not in _QUIET]
    if programs and not any(_may_launch(command) for command in commands) and not _LAUNCH.search(facts.body_text):
        program = programs[-1]
        message = f"{facts.nodes} nodes, and no mpiexec: {printable(program.argv[0].text)} runs on the first alone"
        if any(_INTERPRETED.search(word.text) for command in programs for word in command.argv):
            yield Hit(program.line, f"{message}, unless it starts mpiexec itself", program.column, severity=INFO)
        else:
            yield Hit(program.line, message, program.column)


def _foreign_launcher(command: Command, facts: Facts) -> Iterator[Word]:
    """Yield the word with which a command calls the launcher of another system; none where the script may choose."""
    for word in command.argv:
        name = word.text.rpartition("/")[2]
        if name in _FOREIGN_LAUNCHERS:
            if not command.in_branch and not facts.functions & {name, command.function}:
                yield word
            return
        if name not in PREFIX_COMMANDS:
            return


def _may_launch(command: Command) -> bool:
    return any(_MAY_LAUNCH.search(word.text) or "mpiexec" in word.text for word in command.argv)


def _only_sets_up(command: Command) -> bool:
    """Whether a command reads a file whose name says that it sets variables, such as ``. ~/.bashrc``."""
    return command.name in ("source", ".") and len(command.argv) > 1 and bool(_SETS_UP.search(command.argv[1].text))


@rule(
    "PJM068",
    WARNING,
    "several mpiexec at once on the same nodes",
    why="Calls that run at the same time need nodes of their own, by a file of coordinates, up to 128 calls; without "
    "one the second is refused: [ERR.] PLE 0008 plexec must be started sequentially.",
    fix="give each call its own nodes with -vcoordfile FILE, or run one after the other",
    source="MPI User's Guide J2UL-2565, mpiexec, -vcoordfile; Fugaku user guide 1.49, MPI, background execution",
    site=FX1000,
)
def concurrent_launches(facts: Facts) -> Iterator[Hit]:
    launches = {(launch.command.line, launch.command.column): launch for launch in facts.launches}
    running: Optional[Tuple[Command, Word]] = None
    for index, step in enumerate(facts.flow):
        command = step.command
        word = _launcher_of_many(command)
        if word is not None:
            yield Hit(word.line, f"{command.name} starts several mpiexec at once, on the same nodes", word.column)
            return
        if running is not None and _may_wait(facts, command) and _ends_waiting(command, running[0]):
            # `(mpiexec a & wait) &`: what it waits for has ended, the list that waits has not
            running = (command, running[1]) if command.background else None
        launch = launches.get((command.line, command.column))
        if launch is None or _is_placed(launch):
            continue
        is_called = step.word is not None and step.word is not command.argv[0]
        started = step.word if is_called and step.word is not None else launch.word
        if running is not None and running[0].list_start == command.list_start:
            continue  # `(mpiexec a; mpiexec b) &`: one after the other
        if running is not None and not (running[0].in_branch and command.in_branch):  # both: perhaps if and else
            message = f"mpiexec starts while that of line {running[1].line} runs, on the same nodes"
            yield Hit(started.line, message, started.column)
            return
        if command.background and command.in_loop and not _loop_waits(facts, index):
            message = "a loop starts mpiexec again while the last call runs, on the same nodes"
            yield Hit(started.line, message, started.column)
            return
        running = (command, started) if command.background else running


def _launcher_of_many(command: Command) -> Optional[Word]:
    """The word with which ``xargs -P`` or GNU parallel start ``mpiexec`` several times at once; None if they do not."""
    if command.name not in ("xargs", "parallel"):
        return None
    texts = [word.text for word in command.argv]
    at = next((index for index, text in enumerate(texts) if _LAUNCH_IN_TEXT.search(text)), None)
    if at is None or any(_PLACEMENT.fullmatch(word) for text in texts for word in text.split()):
        return None
    options = " ".join(texts[1:at])
    is_serial = command.name == "xargs" and not re.search(r"(?:-P|--max-procs[= ]) ?(?!1\b)\S", options)
    if is_serial or re.search(r"-j ?1\b", options):
        return None
    return command.argv[at]


def _loop_waits(facts: Facts, index: int) -> bool:
    """Whether a loop waits after the step that it has put in the background."""
    launch = facts.flow[index].command
    commands = (facts.flow[later].command for later in range(index, len(facts.flow)))
    return any(command.in_loop and _may_wait(facts, command) and _ends_waiting(command, launch) for command in commands)


def _may_wait(facts: Facts, command: Command) -> bool:
    """Whether after a command what runs in the background has perhaps ended; ``fg`` fails without job control."""
    return command.name in _WAITS and (command.name != "fg" or facts.has_job_control)


def _ends_waiting(command: Command, running: Command) -> bool:
    """Whether a command after which one in the background has perhaps ended is run by the shell whose child that is."""
    return command.name != "wait" or command.executor == running.waiter


def _is_placed(launch: Launch) -> bool:
    """Whether a call of mpiexec names its nodes, or may do so through a variable."""
    program = launch.program
    for before, word in zip(("", *(word.text for word in launch.options)), launch.options):
        if _PLACEMENT.fullmatch(word.text) or ("$" in word.raw and before not in COUNT_OPTIONS):
            return True
    # a variable before the program may hold options: `mpiexec $PLACE ./a.out`
    return len(program) > 1 and "$" in program[0].raw and program[1].raw.startswith(("-", "$", "./", "/", '"$'))


@rule(
    "PJM069",
    WARNING,
    "a background program that nothing waits for",
    why="The job ends with its script, and what still runs in the background is killed.",
    fix="end the script with wait",
    source="End-user's Guide J2UL-2534, 2.1.1",
)
def no_wait(facts: Facts) -> Iterator[Hit]:
    steps = facts.flow
    launches = {(launch.command.line, launch.command.column): launch for launch in facts.launches}
    waits = Waits(steps, {index for index, step in enumerate(steps) if _is_launch(step.command, launches)})
    behind = [
        index
        for index, step in enumerate(steps)
        if step.command.background and _is_program(step.command) and not waits.is_awaited(index)
    ]
    if not behind:
        return
    last = steps[behind[-1]]
    for index, step in enumerate(steps[behind[-1] + 1 :], behind[-1] + 1):
        name = step.command.name
        if step.command.background or (name == "wait" and not waits.waits_for_all(index)):
            continue
        if name == "fg" and not facts.has_job_control:
            continue
        if name in _KEEP_ALIVE or _is_program(step.command):
            return
    launch = launches.get((last.command.line, last.command.column))
    word = launch.word if launch is not None else last.command.argv[0]
    name = "mpiexec" if launch is not None else printable(word.text)
    why = _why_not_awaited(facts, behind[-1])
    if last.word is not None and last.word is not last.command.argv[0]:
        name, word = f"{name}, which {printable(last.word.text)} starts", last.word
    yield Hit(word.line, f"{name} in the background, and {why}", word.column)


def _is_launch(command: Command, launches: Mapping[Tuple[int, int], Launch]) -> bool:
    return command.background and (command.line, command.column) in launches


def _why_not_awaited(facts: Facts, index: int) -> str:
    later = [step.command for step in facts.flow[index + 1 :]]
    if any(command.name == "wait" and is_wait_for_one(command) for command in later):
        return "wait -n waits for one of several alone"
    if any(command.name == "wait" and command.executor == 0 for command in later):
        return "the script's wait does not wait for it: it is a child of an inner shell"
    if any(command.name == "fg" for command in later):
        return "fg does not wait for it: a script has no job control"
    if any(step.command.name == "wait" for step in facts.flow[:index]):
        return "no wait after it, only before: the script ends at once"
    return "no wait after it: the script ends at once"


def _is_program(command: Command) -> bool:
    if not command.argv or command.name not in _QUIET:
        return bool(command.argv)
    # `env A=1 ./a.out`, `numactl -m 4 ./a.out`: a program behind a quiet command
    return command.name in PREFIX_COMMANDS and any(
        "=" not in word.text and not word.text.startswith("-") for word in command.argv[1:]
    )


@rule(
    "PJM086",
    WARNING,
    "a misspelt command of the site",
    why="The shell reports that it does not know the command, and goes through the rest of the script without it: the "
    "job runs, though slower than meant, or without its processes.",
    fix="write the command as the manual does",
    source="Fugaku user guide 1.52, LayeredStorageAndLLIO; Command Reference J2UL-2549",
    site=FX1000,
)
def misspelt_command(facts: Facts) -> Iterator[Hit]:
    for command in facts.commands:
        word = command.argv[0] if command.argv else None
        if word is None or "$" in word.text:
            continue
        folder = next((folder for folder in _SITE_FOLDERS if word.text.startswith(folder)), "")
        text = word.text[len(folder) :]
        if "/" in text or text in _VALID_COMMANDS:
            continue
        meant = _site_command_meant(text)
        if meant and text not in facts.functions:
            yield Hit(
                word.line,
                f"no site has a command {printable(word.text)}",
                word.column,
                f"did you mean {folder}{meant}?",
            )


_VALID_COMMANDS = frozenset((*_SITE_COMMANDS, *LAUNCHERS))


@lru_cache(maxsize=4096)
def _site_command_meant(text: str) -> Optional[str]:
    """The command of the site that a word is a misspelling of; scripts repeat few commands often."""
    return next((name for name in _SITE_COMMANDS if is_misspelling(text, name)), None)


def is_misspelling(text: str, name: str) -> bool:
    """Whether one letter of ``name`` is missing, added or another, or two neighbours have changed places; in long names
    also hyphens for underscores; or capitals are written."""
    if abs(len(text) - len(name)) > 1 and text.isascii():
        return False
    if text.replace("-", "_").casefold() == name and (len(name) > 8 or "-" not in text):
        return text != name
    start = 0
    while start < min(len(text), len(name)) and text[start] == name[start]:
        start += 1
    rest, meant = text[start:], name[start:]
    swapped = len(rest) > 1 and rest[1] + rest[0] + rest[2:] == meant
    return rest != meant and (rest[1:] == meant[1:] or rest[1:] == meant or rest == meant[1:] or swapped)
