"""The words of a ``pjsub`` command line: options by their canonical names, and the scripts."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Sequence, Tuple

from fugaku_gpt.pjm.lexer import read_script
from fugaku_gpt.pjm.options import ASSIGN, FLAG, KEYED, OPTIONAL, SPELLINGS, Option
from fugaku_gpt.pjm.script import PjmScript
from fugaku_gpt.simulator.site import Refusal

_SCRIPT_REFUSED = ("all_mount_gfscache", "no_check_gfscache", "no_check_directory")
_MERGED = {option.name for option in SPELLINGS.values() if option.kind in (KEYED, ASSIGN)}


@dataclass(frozen=True)
class CommandLine:
    """What was typed after ``pjsub``.

    Attributes:
        options: canonical name → value, as in :class:`PjmScript`.
        scripts: file names; empty for standard input.
    """

    options: Mapping[str, Any]
    scripts: Tuple[str, ...]


def read_words(words: Sequence[str]) -> CommandLine:
    """Take a command line apart.

    Raises:
        Refusal: an option is not known, or lacks its argument.
    """
    lines: List[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        if len(word) < 2 or word[0] != "-":
            break
        if word == "--":
            at += 1
            break
        taken = _words_of(words, at)
        option_words = words[at : at + taken]
        if any("\n" in part or "\r" in part for part in option_words):
            raise Refusal(3, f"Invalid argument: {word}.")
        lines.append("#PJM " + " ".join(map(shlex.quote, option_words)))
        at += taken
    script = read_script("\n".join(lines))
    check(script)
    return CommandLine(script.options, tuple(words[at:]))


def _words_of(words: Sequence[str], at: int) -> int:
    """How many words the option at ``at`` takes."""
    option = _option_at(words[at])
    following = words[at + 1] if at + 1 < len(words) else None
    if option is None or option.kind == FLAG or words[at] not in SPELLINGS:  # bundled flags, or a glued argument
        return 1
    if option.kind == OPTIONAL:
        return 2 if following in option.words else 1
    if following is None:
        raise Refusal(1, f"Option {words[at]} needs an argument.")
    return 2


def _option_at(word: str) -> "Option | None":
    """The option that a word is or starts with; None for bundled flags.

    Raises:
        Refusal: there is none.
    """
    if word in SPELLINGS:
        return SPELLINGS[word]
    if word.startswith("--"):
        spelling, equals, _ = word.partition("=")
        if equals and spelling in SPELLINGS:
            return SPELLINGS[spelling]
    elif word[:2] in SPELLINGS and SPELLINGS[word[:2]].kind != FLAG:
        return SPELLINGS[word[:2]]
    elif all("-" + letter in SPELLINGS and SPELLINGS["-" + letter].kind == FLAG for letter in word[1:]):
        return None
    raise Refusal(1, f"Invalid option {word}.")


def check(script: PjmScript) -> List[str]:
    """Refuse what ``pjsub`` refuses in directives; returns warnings.

    Raises:
        Refusal: with the code of the first mistake.
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
        if not directive.known:
            raise Refusal(3, f"Invalid argument: {directive.option} {directive.key}.")
    return warnings


def check_script_only(script: PjmScript) -> None:
    """Refuse options that only the command line may have.

    Raises:
        Refusal: the script has one.
    """
    for name in _SCRIPT_REFUSED:
        if name in script.options:
            raise Refusal(1, f"Invalid option --{name.replace('_', '-')} in a script.")


def with_prefix(text: str, prefix: str) -> str:
    """A script whose directives start with another prefix (``-C``), as one with ``#PJM``."""
    lines = []
    for line in text.split("\n"):
        if line.startswith("#PJM"):
            line = "#" + line
        elif line.startswith(prefix) and line[len(prefix) : len(prefix) + 1] in ("", " ", "\t"):
            line = "#PJM" + line[len(prefix) :]
        lines.append(line)
    return "\n".join(lines)


def merge(script: Mapping[str, Any], typed: Mapping[str, Any]) -> Dict[str, Any]:
    """The options in force: the command line's over the script's, of a list option key by key."""
    merged = dict(script)
    for name, value in typed.items():
        merged[name] = {**merged.get(name, {}), **value} if name in _MERGED else value
    # an option that is typed wins over its opposite in the script
    for name, other in (("stats", "stats_nodes"), ("restart", "norestart")):
        for one, opposite in ((name, other), (other, name)):
            if one in typed and opposite not in typed:
                merged.pop(opposite, None)
    return merged
