"""Parser of the ``pjsub`` command line: options by their canonical names, and the scripts."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Sequence, Tuple

from fugaku_gpt.pjm.lexer import read_script
from fugaku_gpt.pjm.options import ASSIGN, FLAG, KEYED, OPTIONAL, SPELLINGS, Option
from fugaku_gpt.pjm.script import PjmScript
from fugaku_gpt.simulator.site import Refusal

_COMMAND_LINE_ONLY = ("all_mount_gfscache", "no_check_gfscache", "no_check_directory")
_MERGED_BY_KEY = {option.name for option in SPELLINGS.values() if option.kind in (KEYED, ASSIGN)}


@dataclass(frozen=True)
class CommandLine:
    """The options and scripts of one ``pjsub`` command.

    Attributes:
        options: canonical name → value, as in :class:`PjmScript`.
        scripts: file names; empty if the script comes from standard input.
    """

    options: Mapping[str, Any]
    scripts: Tuple[str, ...]


def parse_command_line(arguments: Sequence[str]) -> CommandLine:
    """Parse the arguments of ``pjsub``.

    Raises:
        Refusal: an option is unknown or lacks its argument.
    """
    lines: List[str] = []
    index = 0
    while index < len(arguments):
        argument = arguments[index]
        if len(argument) < 2 or argument[0] != "-":
            break
        if argument == "--":
            index += 1
            break
        count = _argument_count(arguments, index)
        option_arguments = arguments[index : index + count]
        if any("\n" in text or "\r" in text for text in option_arguments):
            raise Refusal(3, f"Invalid argument: {argument}.")
        lines.append("#PJM " + " ".join(map(shlex.quote, option_arguments)))
        index += count
    script = read_script("\n".join(lines))
    check_directives(script)
    return CommandLine(script.options, tuple(arguments[index:]))


def _argument_count(arguments: Sequence[str], index: int) -> int:
    """Number of arguments that the option at ``index`` takes up, itself included."""
    option = _find_option(arguments[index])
    following = arguments[index + 1] if index + 1 < len(arguments) else None
    if option is None or option.kind == FLAG or arguments[index] not in SPELLINGS:  # bundled flags, or a glued argument
        return 1
    if option.kind == OPTIONAL:
        return 2 if following in option.choices else 1
    if following is None:
        raise Refusal(1, f"Option {arguments[index]} needs an argument.")
    return 2


def _find_option(argument: str) -> "Option | None":
    """The option that an argument is or starts with; None for bundled flags.

    Raises:
        Refusal: there is no such option.
    """
    if argument in SPELLINGS:
        return SPELLINGS[argument]
    if argument.startswith("--"):
        spelling, equals, _ = argument.partition("=")
        if equals and spelling in SPELLINGS:
            return SPELLINGS[spelling]
    elif argument[:2] in SPELLINGS and SPELLINGS[argument[:2]].kind != FLAG:
        return SPELLINGS[argument[:2]]
    elif all("-" + letter in SPELLINGS and SPELLINGS["-" + letter].kind == FLAG for letter in argument[1:]):
        return None
    raise Refusal(1, f"Invalid option {argument}.")


def check_directives(script: PjmScript) -> List[str]:
    """Refuse what ``pjsub`` refuses in directives; return the warnings.

    Raises:
        Refusal: a directive has a mistake; the code is that of the first one.
    """
    codes = {
        "unbalanced-quotes": (8, "Unbalanced quotation marks"),
        "line-too-long": (25, "Line is too long"),
        "missing-argument": (1, "Option needs an argument"),
        "stray-word": (1, "Invalid option"),
        "unexpected-argument": (1, "Option takes no argument"),
        "wrong-separator": (3, "Invalid argument"),
    }
    warnings = []
    for problem in script.problems:
        if problem.kind == "too-many-options":
            warnings.append(f"Line {problem.line} has too many options; the rest is ignored.")
        elif problem.kind in codes:
            code, text = codes[problem.kind]
            raise Refusal(code, f"{text}: {problem.text[:60]}.")
    for directive in script.directives:
        option = SPELLINGS.get(directive.option)
        if option is None or option.era != "tcs":
            raise Refusal(1, f"Invalid option {directive.option}.")
        if not directive.is_supported:
            raise Refusal(3, f"Invalid argument: {directive.option} {directive.key}.")
    return warnings


def check_script_only(script: PjmScript) -> None:
    """Refuse options that are allowed on the command line only.

    Raises:
        Refusal: the script has such an option.
    """
    for name in _COMMAND_LINE_ONLY:
        if name in script.options:
            raise Refusal(1, f"Invalid option --{name.replace('_', '-')} in a script.")


def with_pjm_prefix(text: str, prefix: str) -> str:
    """The script with ``#PJM`` in place of another prefix of its directives (``-C``)."""
    lines = []
    for line in text.split("\n"):
        if line.startswith("#PJM"):
            line = "#" + line
        elif line.startswith(prefix) and line[len(prefix) : len(prefix) + 1] in ("", " ", "\t"):
            line = "#PJM" + line[len(prefix) :]
        lines.append(line)
    return "\n".join(lines)


def merge_options(script: Mapping[str, Any], command_line: Mapping[str, Any]) -> Dict[str, Any]:
    """The options in force: those of the command line override the script's, and list options are merged key by key."""
    merged = dict(script)
    for name, value in command_line.items():
        merged[name] = {**merged.get(name, {}), **value} if name in _MERGED_BY_KEY else value
    # an option of the command line overrides its opposite in the script
    for first, second in (("stats", "stats_nodes"), ("restart", "norestart")):
        for option, opposite in ((first, second), (second, first)):
            if option in command_line and opposite not in command_line:
                merged.pop(opposite, None)
    return merged
