"""What a script's commands set and start: variables, and the calls of ``mpiexec``."""

from __future__ import annotations

import re
from typing import Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from fugaku_gpt.pjm.lint.shell import Command, Word

LAUNCHERS = ("mpiexec", "mpirun")
# commands that start the command which follows their own options
_WRAPPERS = {
    "time", "env", "nohup", "exec", "command", "numactl", "timeout", "stdbuf", "fapp", "fipp", "xospastop", "nice",
    "strace", "eval",
}  # fmt: skip
# options of mpiexec and how many words they take; others are taken for flags
_ONE_WORD = (
    "n", "np", "c", "stdin", "x", "H", "host", "hostfile", "machinefile", "vcoordfile", "wdir", "wd", "app", "npernode",
    "ppn", "map-by", "bind-to", "env", "f", "configfile",
)  # fmt: skip
_ARITY = {**dict.fromkeys(_ONE_WORD, 1), "mca": 2, "gmca": 2}
_COUNT_OPTIONS = ("-n", "-np", "--np", "--n", "-c")
OUTPUT_OPTION = re.compile(r"--?(std|stdout|stderr|of|ofout|oferr)(-proc)?")
_EXPANSION = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


class Assignment(NamedTuple):
    """A variable's value.

    ``exported``: processes started later see it. ``scoped``: holds for one command alone. ``nested``: as
    :class:`Command`. ``directive``: from a ``-x`` of the directives.
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

    ``processes``: how many it asks for; None where not said or not known, ``stated`` tells which. ``outputs``: option
    and path of where output goes. ``program``: the words of what each process runs. ``several``: it starts several
    programs (``:``).
    """

    command: Command
    word: Word
    processes: Optional[int]
    stated: Optional[Word]
    outputs: Tuple[Tuple[Word, Optional[Word]], ...]
    program: Tuple[Word, ...]
    several: bool


def assignments_of(commands: Sequence[Command]) -> List[Assignment]:
    """All variables that the commands set, in order."""
    found: List[Assignment] = []
    exported: Set[str] = set()
    for command in commands:
        scoped = bool(command.words)
        for setting in command.settings:
            value = setting.value
            found.append(
                Assignment(
                    setting.name, value.text, value.line, value.column, scoped or setting.name in exported, scoped,
                    command.nested, setting.append,
                )
            )  # fmt: skip
        name = command.name
        if name in ("export", "declare", "typeset", "readonly", "local"):
            options = [word.text for word in command.words[1:] if word.text.startswith("-")]
            exports = name == "export" or any("x" in option for option in options)
            for word in command.words[1:]:
                part = _ASSIGNMENT.fullmatch(word.text)
                if part:
                    here = (word.line, word.column)
                    found.append(Assignment(part[1], part[2], *here, exports, False, command.nested))
                if exports:
                    exported.add(part[1] if part else word.text)
        elif name == "setenv" and len(command.words) >= 2:
            word = command.words[1]
            value_text = command.words[2].text if len(command.words) > 2 else ""
            found.append(Assignment(word.text, value_text, word.line, word.column, True, False, command.nested))
        elif name == "env" or name in LAUNCHERS:
            found.extend(_scoped(command))
    return [item._replace(exported=True) if item.name in exported else item for item in found]


def _scoped(command: Command) -> Iterator[Assignment]:
    """``env A=b ...`` and ``mpiexec -x A=b``."""
    words = command.words
    for before, word in zip(words, words[1:]):
        if command.name == "env" or before.text in ("-x", "-env", "-export"):
            part = _ASSIGNMENT.fullmatch(word.text)
            if part:
                yield Assignment(part[1], part[2], word.line, word.column, True, True, command.nested)
            elif command.name == "env" and not word.text.startswith("-"):
                return


def constants_of(assignments: Sequence[Assignment]) -> Dict[str, str]:
    """Variables that are set once, to a plain text, whatever the script does."""
    values: Dict[str, str] = {}
    dropped: Set[str] = set()
    for item in assignments:
        if item.scoped:
            continue
        if item.name in values or item.nested or item.append:
            dropped.add(item.name)
        values.setdefault(item.name, item.value)
    known: Dict[str, str] = {}
    for name, value in values.items():
        resolved = resolve(value, known) if name not in dropped else None
        if resolved is not None:
            known[name] = resolved
    return known


def resolve(text: str, known: Mapping[str, str]) -> Optional[str]:
    """``text`` with ``$NAME`` put in; None where something in it is not known."""
    if "$" not in text and "`" not in text:
        return text

    def value(found: "re.Match[str]") -> str:
        return known.get(found[1] or found[2], found[0])

    result = _EXPANSION.sub(value, text)
    return None if "$" in result or "`" in result or len(result) > 4096 else result


def whole_number(text: Optional[str], known: Mapping[str, str]) -> Optional[int]:
    """The number that a word stands for, if that is sure."""
    resolved = resolve(text, known) if text is not None else None
    if resolved is None or not re.fullmatch(r"[0-9]{1,12}", resolved.strip()):
        return None
    return int(resolved)


def launches_of(commands: Sequence[Command], known: Mapping[str, str]) -> List[Launch]:
    """The calls of ``mpiexec`` and ``mpirun``, also behind ``time``, ``numactl``, profilers or a variable."""
    found: List[Launch] = []
    for command in commands:
        words = _expanded(command.words, known)
        at = _launcher_at(words)
        if at is not None:
            found.append(_launch(command, words, at, known))
    return found


def _expanded(words: Sequence[Word], known: Mapping[str, str]) -> Sequence[Word]:
    """A first word that is a variable, as the words in it: ``$MPIRUN -n 4 ./a``."""
    if not words or not words[0].raw.startswith("$"):
        return words
    text = resolve(words[0].text, known)
    if not text:
        return words
    return [words[0]._replace(text=part, raw=part) for part in text.split()] + list(words[1:])


def _launcher_at(words: Sequence[Word]) -> Optional[int]:
    for index, word in enumerate(words):
        name = word.text.rpartition("/")[2]
        if name in LAUNCHERS:
            return index
        if index == 0 and name not in _WRAPPERS:
            return None
    return None


def _launch(command: Command, words: Sequence[Word], at: int, known: Mapping[str, str]) -> Launch:
    counts: List[Optional[int]] = []
    stated: Optional[Word] = None
    outputs: List[Tuple[Word, Optional[Word]]] = []
    program: Tuple[Word, ...] = ()
    several = False
    index = at + 1
    while index < len(words):
        word = words[index]
        following = words[index + 1] if index + 1 < len(words) else None
        if not word.text.startswith("-"):
            end = next((i for i in range(index, len(words)) if words[i].text == ":"), None)
            program = program or tuple(words[index:end])
            if end is None:
                break
            several = True
            index = end + 1
            continue
        if word.text in _COUNT_OPTIONS:
            stated = stated or following
            counts.append(whole_number(following.text if following else None, known))
        if OUTPUT_OPTION.fullmatch(word.text):
            outputs.append((word, following))
            index += 1
        index += 1 + _ARITY.get(word.text.lstrip("-"), 0)
    numbers = [number for number in counts if number is not None]
    count = sum(numbers) if numbers and len(numbers) == len(counts) else None
    return Launch(command, words[at], count, stated, tuple(outputs), program, several)
