"""The commands within an argument or a document: of ``bash -c '...'``, ``bash <<END``, ``eval`` and ``coproc``."""

from __future__ import annotations

from types import MappingProxyType
from typing import List, Mapping, Optional, Sequence, Tuple

from fugaku_gpt.pjm.lint.shell import Command, Word, scan_commands

# commands that start the command which follows their own options
PREFIX_COMMANDS = frozenset({
    "time", "env", "nohup", "exec", "command", "numactl", "timeout", "stdbuf", "fapp", "fipp", "xospastop", "nice",
    "strace", "eval", "setsid", "taskset", "ionice", "chrt", "sudo", "catchsegv",
})  # fmt: skip
_SHELLS = ("sh", "bash", "dash", "ksh", "zsh")
_OPTIONS_WITH_VALUE = ("-o", "+o", "-O", "+O", "--rcfile", "--init-file")
_MAX_LEVEL = 4  # of shells that start shells
_STRIDE = 1 << 20  # between the numbers of lists and shells of different texts


def with_inner_commands(
    commands: Sequence[Command], documents: Mapping[int, Tuple[str, int]] = MappingProxyType({})
) -> Tuple[Command, ...]:
    """Return the commands of a script with those of their arguments, which stand after the shell that runs them.

    What ``eval`` runs stands in place of it.

    Args:
        documents: here-documents of the commands, as in :class:`Body`.
    """
    return tuple(_Expansion().expanded(commands, 0, documents))


class _Expansion:
    def __init__(self) -> None:
        self.texts = 0  # number of the texts that were scanned

    def expanded(
        self, commands: Sequence[Command], level: int, documents: Mapping[int, Tuple[str, int]] = MappingProxyType({})
    ) -> List[Command]:
        result: List[Command] = []
        for position, outer in enumerate(commands):
            if outer.name == "coproc" and len(outer.argv) > 1:
                name = outer.argv[1].text.rpartition("/")[2]
                outer = outer._replace(argv=outer.argv[1:], name=name, background=True, waiter=outer.executor)
            text = _inner_text(outer, documents.get(position)) if level < _MAX_LEVEL else None
            if text is None or not text.text.strip():
                result.append(outer)
                continue
            is_same_shell = outer.name == "eval"
            if not is_same_shell:
                result.append(outer)
            elif outer.settings or outer.redirections:
                result.append(outer._replace(argv=(), name=""))
            inner = scan_commands(text.text, text.line).commands
            self.texts += 1
            base = self.texts * _STRIDE
            placed = [_placed(command, outer, text, base, is_same_shell) for command in inner]
            result += self.expanded(placed, level + 1)
        return result


def _inner_text(command: Command, document: Optional[Tuple[str, int]]) -> Optional[Word]:
    """The text that a command runs as a script, of its arguments or its here-document; None if there is none."""
    argv = command.argv
    if command.name == "eval":
        return argv[1]._replace(text=" ".join(word.text for word in argv[1:])) if len(argv) > 1 else None
    at = next((index for index, word in enumerate(argv) if word.text.rpartition("/")[2] in _SHELLS), None)
    if at is None or (at > 0 and command.name not in PREFIX_COMMANDS):
        return None
    index, has_text, reads_input = at + 1, False, False
    while index < len(argv) and argv[index].text[:1] in ("-", "+"):
        option = argv[index].text
        index += 1
        if option == "--":
            break
        is_short = option.startswith("-") and not option.startswith("--")
        has_text = has_text or (is_short and "c" in option)
        reads_input = reads_input or (is_short and "s" in option)
        if option in _OPTIONS_WITH_VALUE or (is_short and option[-1] in "oO"):  # as `-euo pipefail`
            index += 1
    if (index >= len(argv) or reads_input) and not has_text and document is not None:
        return Word(document[0], document[0], document[1], 0)
    return argv[index] if has_text and index < len(argv) else None


def _placed(inner: Command, outer: Command, text: Word, base: int, is_same_shell: bool) -> Command:
    """A command of a text, with its position in the script and as its outer command runs."""
    column = text.column + (0 if is_same_shell else 1)  # after the quote
    line_is_first = inner.line == text.line
    moved = inner._replace(
        column=inner.column + column - 1 if line_is_first else inner.column,
        argv=tuple(
            word._replace(column=word.column + column - 1) if word.line == text.line else word for word in inner.argv
        ),
        nested=True,
        in_loop=inner.in_loop or outer.in_loop,
        in_branch=inner.in_branch or outer.in_branch,
        function=inner.function or outer.function,
        executor=outer.executor if is_same_shell and not inner.executor else base + inner.executor,
        list_start=base + inner.list_start,
    )
    if inner.background:
        return moved._replace(waiter=outer.executor if is_same_shell and not inner.waiter else base + inner.waiter)
    if outer.background:
        return moved._replace(background=True, waiter=outer.waiter, list_start=outer.list_start)
    return moved
