"""The commands in the order in which a script runs them: bodies of functions stand where these are called."""

from __future__ import annotations

import re
from collections import Counter
from typing import Dict, List, NamedTuple, Sequence, Set, Tuple

from fugaku_gpt.pjm.lint.launches import LAUNCHERS
from fugaku_gpt.pjm.lint.shell import Command, Word

_MAX_LEVEL = 4  # of functions that call functions
_MAX_STEPS = 20000  # with the bodies of called functions; further calls stay calls
_STRIDE = 1 << 40  # between the numbers of lists and shells of different calls
_NAME = re.compile(r"[\w.-]+")


class Step(NamedTuple):
    """A command, and where the script starts it.

    ``command``: with the list, shell and background that it gets by the call of its function. ``word``: the first word
    of the outermost call that runs it, or its own first word; None for assignments alone. ``is_indirect``: whether it
    stands in a function that the script may call by other means than its name as a command, such as ``trap``.
    """

    command: Command
    word: "Word | None"
    is_indirect: bool = False


def flow_of(commands: Sequence[Command], defined: "Counter[str]") -> Tuple[Step, ...]:
    """Return the commands as they run.

    Functions that nothing names are left out. The bodies of those that are named as an argument, or defined several
    times, stand in the order of the text.

    Args:
        defined: how often the text defines each function.
    """
    return tuple(_Flow(commands, defined).steps())


class _Flow:
    def __init__(self, commands: Sequence[Command], defined: "Counter[str]") -> None:
        self.commands = commands
        self.bodies: Dict[str, List[Command]] = {}
        for command in commands:
            if command.function:
                self.bodies.setdefault(command.function, []).append(command)
        arguments, called = _names_in(commands, set(self.bodies))
        self.in_text = {name for name in self.bodies if name in arguments or defined[name] > 1}
        self.expanded = {name for name in called if name not in self.in_text and name not in LAUNCHERS}
        self.calls = 0
        self.size = 0

    def steps(self) -> List[Step]:
        result: List[Step] = []
        for command in self.commands:
            if not command.function or command.function in self.in_text:
                self._add(result, Step(command, _word_of(command), bool(command.function)), ())
        return result

    def _add(self, result: List[Step], step: Step, callers: Tuple[str, ...]) -> None:
        name = step.command.name
        body = self.bodies[name] if name in self.expanded else []
        if not body or name in callers or len(callers) >= _MAX_LEVEL or self.size + len(body) > _MAX_STEPS:
            result.append(step)
            return
        self.size += len(body)
        self.calls += 1
        base = self.calls * _STRIDE
        outer = min(command.executor for command in body)
        for command in body:
            placed = _placed(command, step.command, base, outer)
            self._add(result, Step(placed, step.word, step.is_indirect), (*callers, name))


def _names_in(commands: Sequence[Command], functions: Set[str]) -> Tuple[Set[str], Set[str]]:
    """Return the functions that stand in arguments and values, and those that are called."""
    arguments: Set[str] = set()
    called: Set[str] = set()
    for command in commands:
        if command.name in functions and command.name != command.function:
            called.add(command.name)
        if functions:
            words = (*command.argv[1:], *(setting.value for setting in command.settings))
            arguments.update(name for word in words for name in _NAME.findall(word.text) if name in functions)
    return arguments, called


def _word_of(command: Command) -> "Word | None":
    return command.argv[0] if command.argv else None


def _placed(inner: Command, call: Command, base: int, outer: int) -> Command:
    """A command of a function's body as a call runs it."""
    own_shell = base if call.background else call.executor  # a function in the background runs in a subshell

    def shell(number: int) -> int:
        return own_shell if number == outer else base + number

    moved = inner._replace(
        nested=inner.nested or call.nested,
        in_loop=inner.in_loop or call.in_loop,
        in_branch=inner.in_function_branch or call.in_branch,
        function=call.function,
        executor=shell(inner.executor),
        list_start=base + inner.list_start,
    )
    if inner.background:
        return moved._replace(waiter=shell(inner.waiter))
    if call.background:
        return moved._replace(background=True, waiter=call.waiter, list_start=call.list_start)
    return moved
