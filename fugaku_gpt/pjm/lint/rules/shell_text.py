"""Rules for text that the shell reads otherwise than meant (PJM087 and PJM088)."""

from __future__ import annotations

import re
from typing import Iterator, Optional

from fugaku_gpt.pjm.lint.facts import Facts, printable
from fugaku_gpt.pjm.lint.registry import WARNING, Hit, rule
from fugaku_gpt.pjm.lint.shell import Command, Word

_OTHER_SHELL = re.compile(r"#!.*\b(?:c|tc|z)sh\b")
_NAME = re.compile(r"[A-Za-z_]\w*")
_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_SYNTAX_ERROR = "the shell stops there with a syntax error"


def _is_bourne(facts: Facts) -> bool:
    """Whether the body is of a shell with the syntax of bash; without a ``#!`` line it is taken for one."""
    first = facts.script.lines[0] if facts.script.lines else ""
    return facts.is_shell and not _OTHER_SHELL.match(first)


@rule(
    "PJM087",
    WARNING,
    "a quote, here-document or compound command that never ends",
    why="The shell reads on to the end of the file: all commands behind a quote or a here-document are text, and a "
    "quote or a compound command without its end is a syntax error. mpiexec is not called.",
    fix="write the end where it belongs",
    source="bash(1), QUOTING, Here Documents, Compound Commands",
)
def unclosed(facts: Facts) -> Iterator[Hit]:
    if not _is_bourne(facts) or facts.is_template:
        return
    end = next((command.line for command in facts.commands if _ends_script(command)), None)
    for construct in facts.body.unclosed:
        if end is not None and construct.line > end:
            return  # a shell reads no further than its `exit`
        opener, closer = printable(construct.opener), printable(construct.closer)
        if construct.kind == "document":
            message = f"no line {closer} ends {opener}: all that follows is its text, and is not run"
            fix = f"write {closer} alone on a line, from column 1, without blanks behind it"
        elif construct.kind == "quote":
            message = f"{opener} is never closed: {_SYNTAX_ERROR}, and runs nothing behind it"
            fix = f"write the missing {closer}; it may be that of an earlier line"
        else:
            message = f"{opener} has no {closer}: {_SYNTAX_ERROR}, and runs nothing of it"
            fix = f"write the missing {closer}"
        yield Hit(construct.line, message, construct.column, fix)
        return  # what follows is read differently once this is mended


def _ends_script(command: Command) -> bool:
    return (
        command.name in ("exit", "exec")
        and not command.nested
        and not command.background
        and not (command.name == "exec" and len(command.argv) == 1)
    )


@rule(
    "PJM088",
    WARNING,
    "blanks around the equals sign of an assignment",
    why="The shell takes `NAME = VALUE` for a command NAME, and `export NAME = VALUE` for three names: the variable "
    "does not get the value.",
    fix="write NAME=VALUE without blanks",
    source="bash(1), PARAMETERS and SHELL BUILTIN COMMANDS",
)
def spaced_assignment(facts: Facts) -> Iterator[Hit]:
    if not _is_bourne(facts):
        return
    for command in facts.commands:
        word = _spaced_name(command)
        if word is not None and word.text not in facts.functions:
            name = printable(word.text)
            value = "" if command.name not in _DECLARING else f"{command.name} "
            message = f"{value}{name} with a blank beside the equals sign does not set {name}"
            yield Hit(word.line, message, word.column, f"write {value}{name}=VALUE without blanks")


def _spaced_name(command: Command) -> Optional[Word]:
    """The name that an assignment with blanks is meant to set; None for any other command."""
    argv = command.argv
    if not argv:
        return None
    if command.name not in _DECLARING:
        is_assignment = len(argv) > 1 and argv[1].raw == "=" and _NAME.fullmatch(argv[0].raw)
        if is_assignment:
            return argv[0]
        last = command.settings[-1] if command.settings else None  # `NAME= 12`
        if last is not None and not last.value.raw and argv[0].raw.isdecimal():
            return last.value._replace(text=last.name)
        return None
    for before, word in zip(argv[1:], argv[2:]):
        if word.raw.startswith("=") and _NAME.fullmatch(before.raw):
            return before
        if before.raw.endswith("=") and _NAME.fullmatch(before.raw[:-1]) and re.match(r"[\d$'\"/]", word.raw):
            return before._replace(text=before.raw[:-1])
    return None
