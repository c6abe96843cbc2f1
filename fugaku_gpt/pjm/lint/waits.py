"""Which commands in the background a script waits for."""

from __future__ import annotations

import re
from typing import Dict, List, Sequence, Set

from fugaku_gpt.pjm.lint.flow import Step
from fugaku_gpt.pjm.lint.shell import Command

_MAX_CHILDREN = 256  # of a shell, that `wait -n` is followed for; the limit keeps the time linear


def is_wait_for_one(command: Command) -> bool:
    """Whether a ``wait`` outside of a loop waits for one command, whichever ends first."""
    return not command.in_loop and any(word.text == "-n" for word in command.argv[1:])


class Waits:
    """The commands in the background that are waited for, by the steps of a script.

    A ``wait`` waits for the children of its own shell that were started before it; if it runs in the background
    itself, something must wait for it in turn. A trap that waits does so for all.

    Args:
        launches: indices of the steps that are calls of ``mpiexec`` in the background: ``wait -n`` waits for one of
            several of them, and else for that which matters.
    """

    def __init__(self, steps: Sequence[Step], launches: Set[int]) -> None:
        self._waits_of: Dict[int, int] = {}  # step in the background → step that waits for it
        self._complete: Set[int] = set()  # waits after which no child is left
        pending: Dict[int, List[int]] = {}  # number of a shell → its children that run
        always: Set[int] = set()  # shells that wait at their end
        for index, step in enumerate(steps):
            command = step.command
            if _waits_at_end(step):
                always.add(command.executor)
            if command.name == "wait":
                children = pending.pop(command.executor, [])
                few = len(children) <= _MAX_CHILDREN
                if few and is_wait_for_one(command) and sum(child in launches for child in children) > 1:
                    pending[command.executor] = children[1:]
                    children = children[:1]
                elif children:
                    self._complete.add(index)
                self._waits_of.update(dict.fromkeys(children, index))
            if command.background:
                pending.setdefault(command.waiter, []).append(index)
        self._awaited: Set[int] = set()
        for index in range(len(steps) - 1, -1, -1):
            command = steps[index].command
            wait = self._waits_of.get(index)
            is_sure = wait is not None and (not steps[wait].command.background or wait in self._awaited)
            if command.background and (is_sure or command.waiter in always):
                self._awaited.add(index)

    def is_awaited(self, index: int) -> bool:
        """Whether a step in the background is waited for."""
        return index in self._awaited

    def waits_for_all(self, index: int) -> bool:
        """Whether a ``wait`` had children, and leaves none."""
        return index in self._complete


def _waits_at_end(step: Step) -> bool:
    """Whether a command is a trap that waits, or a ``wait`` of a function that a trap may call."""
    command = step.command
    if command.name == "trap":
        return any(re.search(r"\bwait\b", word.text) for word in command.argv[1:])
    return command.name == "wait" and step.is_indirect
