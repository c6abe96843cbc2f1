"""Finds the variables that a script's commands set, and their calls of ``mpiexec``."""

from __future__ import annotations

import re
from typing import Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from fugaku_gpt.pjm.lint.inner_shells import PREFIX_COMMANDS
from fugaku_gpt.pjm.lint.shell import Command, Word

LAUNCHERS = ("mpiexec", "mpirun")
# options of mpiexec that take a value; options that are not listed count as flags
_OPTIONS_WITH_VALUE = (
    "n", "np", "c", "stdin", "x", "H", "host", "hostfile", "machinefile", "vcoordfile", "wdir", "wd", "app", "npernode",
    "ppn", "map-by", "bind-to", "env", "f", "configfile",
)  # fmt: skip
_VALUE_COUNTS = {**dict.fromkeys(_OPTIONS_WITH_VALUE, 1), "mca": 2, "gmca": 2}
COUNT_OPTIONS = ("-n", "-np", "--np", "--n", "-c")
OUTPUT_OPTION = re.compile(r"--?(std|stdout|stderr|of|ofout|oferr)(-proc)?")
_EXPANSION = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


class Assignment(NamedTuple):
    """An assignment to a variable.

    ``exported``: processes started later see it. ``scoped``: it holds for one command only. ``nested``: see
    :class:`Command`. ``directive``: it comes from ``-x`` of the directives.
    """

    name: str
    value: str
    line: int
    column: int
    exported: bool
    scoped: bool
    nested: bool
    append: bool = False
    directive: bool = False


class Launch(NamedTuple):
    """A call of ``mpiexec``.

    ``processes``: number of processes; None if not given or unknown. ``count_word``: the word with the number, None if
    not given. ``outputs``: options that redirect output, with their paths. ``program``: command line of each process.
    ``has_several_programs``: it starts several programs, separated by ``:``. ``options``: what stands before the
    program; the words of a variable that holds the call are its value.
    """

    command: Command
    word: Word
    processes: Optional[int]
    count_word: Optional[Word]
    outputs: Tuple[Tuple[Word, Optional[Word]], ...]
    program: Tuple[Word, ...]
    has_several_programs: bool
    options: Tuple[Word, ...] = ()


def assignments_of(commands: Sequence[Command]) -> List[Assignment]:
    """Return all assignments of the commands, in order."""
    assignments: List[Assignment] = []
    exported: Set[str] = set()
    for command in commands:
        scoped = bool(command.argv)
        for setting in command.settings:
            value = setting.value
            assignments.append(
                Assignment(
                    setting.name, value.text, value.line, value.column, scoped or setting.name in exported, scoped,
                    command.nested, setting.append,
                )
            )  # fmt: skip
        name = command.name
        if name in ("export", "declare", "typeset", "readonly", "local"):
            options = [word.text for word in command.argv[1:] if word.text.startswith("-")]
            exports = name == "export" or any("x" in option for option in options)
            for word in command.argv[1:]:
                match = _ASSIGNMENT.fullmatch(word.text)
                if match:
                    position = (word.line, word.column)
                    assignments.append(Assignment(match[1], match[2], *position, exports, False, command.nested))
                if exports:
                    exported.add(match[1] if match else word.text)
        elif name == "setenv" and len(command.argv) >= 2:
            word = command.argv[1]
            value_text = command.argv[2].text if len(command.argv) > 2 else ""
            assignments.append(Assignment(word.text, value_text, word.line, word.column, True, False, command.nested))
        elif name == "env" or name in LAUNCHERS:
            assignments.extend(_scoped_assignments(command))
    return [
        assignment._replace(exported=True) if assignment.name in exported else assignment for assignment in assignments
    ]


def _scoped_assignments(command: Command) -> Iterator[Assignment]:
    """Yield the assignments of ``env A=b ...`` and ``mpiexec -x A=b``."""
    argv = command.argv
    for before, word in zip(argv, argv[1:]):
        if command.name == "env" or before.text in ("-x", "-env", "-export"):
            match = _ASSIGNMENT.fullmatch(word.text)
            if match:
                yield Assignment(match[1], match[2], word.line, word.column, True, True, command.nested)
            elif command.name == "env" and not word.text.startswith("-"):
                return


def constants_of(assignments: Sequence[Assignment]) -> Dict[str, str]:
    """Return the variables that are set exactly once, unconditionally, to plain text."""
    values: Dict[str, str] = {}
    dropped: Set[str] = set()
    for assignment in assignments:
        if assignment.scoped:
            continue
        if assignment.name in values or assignment.nested or assignment.append:
            dropped.add(assignment.name)
        values.setdefault(assignment.name, assignment.value)
    constants: Dict[str, str] = {}
    for name, value in values.items():
        resolved = resolve(value, constants) if name not in dropped else None
        if resolved is not None:
            constants[name] = resolved
    return constants


def resolve(text: str, constants: Mapping[str, str]) -> Optional[str]:
    """Expand each ``$NAME`` in ``text``; None if a part of it is unknown."""
    if "$" not in text and "`" not in text:
        return text

    def value(match: "re.Match[str]") -> str:
        return constants.get(match[1] or match[2], match[0])

    result = _EXPANSION.sub(value, text)
    return None if "$" in result or "`" in result or len(result) > 4096 else result


def constant_number(text: Optional[str], constants: Mapping[str, str]) -> Optional[int]:
    """Return the number that a word expands to; None if it is not certain."""
    resolved = resolve(text, constants) if text is not None else None
    if resolved is None or not re.fullmatch(r"[0-9]{1,12}", resolved.strip()):
        return None
    return int(resolved)


def launches_of(commands: Sequence[Command], constants: Mapping[str, str]) -> List[Launch]:
    """Return the calls of ``mpiexec`` and ``mpirun``, also behind ``time``, ``numactl``, profilers or a variable."""
    launches: List[Launch] = []
    for command in commands:
        argv = _expand_first_word(command.argv, constants)
        at = _launcher_at(argv)
        if at is not None:
            launches.append(_launch(command, argv, at, constants))
    return launches


def _expand_first_word(argv: Sequence[Word], constants: Mapping[str, str]) -> Sequence[Word]:
    """Expand the first word if it is a variable, as in ``$MPIRUN -n 4 ./a``."""
    if not argv or not argv[0].raw.startswith("$"):
        return argv
    text = resolve(argv[0].text, constants)
    if not text:
        return argv
    return [argv[0]._replace(text=token, raw=token) for token in text.split()] + list(argv[1:])


def _launcher_at(argv: Sequence[Word]) -> Optional[int]:
    for index, word in enumerate(argv):
        name = word.text.rpartition("/")[2]
        if name in LAUNCHERS:
            return index
        if index == 0 and name not in PREFIX_COMMANDS:
            return None
    return None


def _launch(command: Command, argv: Sequence[Word], launcher_index: int, constants: Mapping[str, str]) -> Launch:
    counts: List[Optional[int]] = []
    count_word: Optional[Word] = None
    outputs: List[Tuple[Word, Optional[Word]]] = []
    program: Tuple[Word, ...] = ()
    has_several_programs = False
    index = launcher_index + 1
    while index < len(argv):
        word = argv[index]
        following = argv[index + 1] if index + 1 < len(argv) else None
        if not word.text.startswith("-"):
            end = next((i for i in range(index, len(argv)) if argv[i].text == ":"), None)
            program = program or tuple(argv[index:end])
            if end is None:
                break
            has_several_programs = True
            index = end + 1
            continue
        if word.text in COUNT_OPTIONS:
            count_word = count_word or following
            counts.append(constant_number(following.text if following else None, constants))
        if OUTPUT_OPTION.fullmatch(word.text):
            outputs.append((word, following))
            index += 1
        index += 1 + _VALUE_COUNTS.get(word.text.lstrip("-"), 0)
    numbers = [number for number in counts if number is not None]
    count = sum(numbers) if numbers and len(numbers) == len(counts) else None
    end = argv.index(program[0]) if program else len(argv)
    options = tuple(argv[launcher_index + 1 : end])
    word = argv[launcher_index]
    return Launch(command, word, count, count_word, tuple(outputs), program, has_several_programs, options)
