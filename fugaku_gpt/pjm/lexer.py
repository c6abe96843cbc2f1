"""The lexer: it turns the text of a script, whatever it holds, into a :class:`PjmScript`.

It follows ``pjsub``: ``#PJM`` at column 1, down to the first line that is neither comment nor blank; words split as a
shell splits them; keys of list options merged, with the last value of each in force. Where the behaviour of ``pjsub``
is unknown, nothing is lost: a tab after ``#PJM`` counts as a space, a byte order mark is skipped, and an unclosed quote
counts as absent.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from fugaku_gpt.errors import UsageError
from fugaku_gpt.input_files import read_bytes
from fugaku_gpt.limits import SCRIPT_TEXT
from fugaku_gpt.pjm.options import (
    ASSIGN,
    FLAG,
    K_ERA_MPI_KEYS,
    KEY_ALIASES,
    KEYED,
    KEYS,
    MANY,
    OPTIONAL,
    RANK_MAP_SEPARATORS,
    SPELLINGS,
    Option,
)
from fugaku_gpt.pjm.script import Directive, PjmScript, Problem
from fugaku_gpt.pjm.shell_words import split_line, split_list

MAX_LINE_LENGTH = 4096  # characters; more is refused (PJM 0025)
MAX_LINE_OPTIONS = 64  # options of one line; pjsub ignores more with a warning (PJM 0024)
_MAX_SPLIT_LENGTH = 65536  # characters; a longer line is reported without being split
_MAX_EXPANDED_LENGTH = 65536  # characters of a value after --vset variables are expanded
_DASHES = "-\u2010\u2011\u2012\u2013\u2014\u2015\u2212\uff0d"  # the ASCII dash and those that editors replace it with
_PREFIX = re.compile(r"#PJM(?=[ \t\r\v\f]|$)")
_DISABLED = re.compile(rf"[ \t]*#[# \t-]*PJM[ \t]*[\"']?[{_DASHES}]", re.IGNORECASE)
TEMPLATE_TAG = re.compile(r"[ \t]*(?:\{\{.*\}\}|\{%.*%\}|\{#.*#\}|<%.*%>)[ \t]*")
_BLANK = " \t\r\v\f\0"
_BYTE_ORDER_MARK = "\ufeff"
_VARIABLE = re.compile(r"\$\{(\w+)\}")
# short options whose argument may follow without a space, as in -Lnode=1
_SHORT_OPTION = re.compile(r"-[LgNoexpPmw]")
_NAMES_WITHOUT_DASHES = frozenset(key for keys in KEYS.values() for key in keys) | {
    spelling[2:] for spelling in SPELLINGS if spelling.startswith("--")
}


def read_script_file(path: Path) -> PjmScript:
    """Read a file; bytes that are not UTF-8 become surrogate escapes.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        content = read_bytes(path, SCRIPT_TEXT)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    return read_script(content.decode("utf-8", "surrogateescape"))


def read_script(text: str, skips_template_tags: bool = False) -> PjmScript:
    """Read a script as ``pjsub`` does. Never raises.

    Args:
        skips_template_tags: whether a line with nothing but a tag of a template, such as ``{{#job.name}}``, is passed
            over; to ``pjsub``, which gets no templates, it would be the first command.
    """
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    reader = _DirectiveReader()
    returns = [number for number, line in enumerate(lines, 1) if line.endswith("\r")]
    if returns:
        reader.add_problem(returns[0], "carriage-return", str(len(returns)))
    lines = [line[:-1] if line.endswith("\r") else line for line in lines]
    body_line = 0
    ignored_lines: List[int] = []
    disabled_lines: List[int] = []
    for number, line in enumerate(lines, 1):
        if number == 1 and line.startswith(_BYTE_ORDER_MARK):
            reader.add_problem(1, "byte-order-mark", _BYTE_ORDER_MARK)
            line = line[1:]
        if body_line == 0:
            start = line.lstrip(_BLANK)[:1]
            if start not in ("", "#") and not (skips_template_tags and TEMPLATE_TAG.fullmatch(line)):
                body_line = number
        if "PJM" not in line and "pjm" not in line:
            continue
        prefix = _PREFIX.match(line)
        if prefix is None:
            if _DISABLED.match(line):
                disabled_lines.append(number)
        elif body_line == 0:
            reader.read_line(number, line, prefix.end())
        elif line[prefix.end() :].strip(_BLANK):
            ignored_lines.append(number)
    return PjmScript(
        lines=tuple(lines),
        directives=tuple(reader.directives),
        body_line=body_line,
        ignored_lines=tuple(ignored_lines),
        disabled_lines=tuple(disabled_lines),
        problems=tuple(reader.problems),
        options=reader.options,
        option_lines=reader.option_lines,
    )


class _DirectiveReader:
    """Collects directives and merges them."""

    def __init__(self) -> None:
        self.directives: List[Directive] = []
        self.problems: List[Problem] = []
        self.options: Dict[str, Any] = {}
        self.option_lines: Dict[str, int] = {}

    def add_problem(self, line: int, kind: str, text: str) -> None:
        self.problems.append(Problem(line, kind, text))

    def read_line(self, number: int, line: str, start: int) -> None:
        if len(line) > MAX_LINE_LENGTH:
            self.add_problem(number, "line-too-long", line)
            if len(line) > _MAX_SPLIT_LENGTH:
                return
        split = split_line(line[start:])
        if split.unbalanced:
            self.add_problem(number, "unbalanced-quotes", line)
        for token in split.substitutions:
            self.add_problem(number, "command-substitution", token)
        tokens, index, count = split.tokens, 0, 0
        while index < len(tokens):
            if not _is_option(tokens[index]):
                self.add_problem(number, "stray-word", tokens[index])
                index += 1
                continue
            count += 1
            if count > MAX_LINE_OPTIONS:
                self.add_problem(number, "too-many-options", " ".join(tokens[index:]))
                return
            index += self.read_option(number, tokens, index)

    def read_option(self, number: int, tokens: Tuple[str, ...], index: int) -> int:
        """Store the option at ``index``; return the number of words that it and its argument take."""
        spelling, argument = _split_option(tokens[index])
        option = SPELLINGS.get(spelling)
        following = tokens[index + 1] if index + 1 < len(tokens) else None
        if option is None:
            flags = _bundled_flags(spelling)
            if flags and argument is None:
                for flag in flags:
                    self.store(number, flag, SPELLINGS[flag], None)
                return 1
            is_argument = argument is None and following is not None and not _is_option(following)
            self.store_unknown(number, spelling, following if is_argument else argument)
            return 2 if is_argument else 1
        if option.kind == FLAG:
            if argument is not None:
                self.add_problem(number, "unexpected-argument", tokens[index])
            self.store(number, spelling, option, argument)
            return 1
        if argument is not None:
            self.store(number, spelling, option, argument)
            return 1
        if option.kind == OPTIONAL:
            is_argument = following in option.choices
            self.store(number, spelling, option, following if is_argument else None)
            return 2 if is_argument else 1
        # a word that looks like an option is an argument only if pjsub has no such option
        if following is None or _split_option(following)[0] in SPELLINGS:
            self.add_problem(number, "missing-argument", tokens[index])
            self.directives.append(Directive(number, spelling, None, None, option.era == "tcs"))
            return 1
        self.store(number, spelling, option, following)
        return 2

    def store_unknown(self, number: int, spelling: str, argument: Optional[str]) -> None:
        self.directives.append(Directive(number, spelling, None, argument, is_supported=False))
        self.options[spelling] = True if argument is None else self.expand_variables(argument)
        self.option_lines[spelling] = number

    def store(self, number: int, spelling: str, option: Option, argument: Optional[str]) -> None:
        if option.kind in (KEYED, ASSIGN):
            self.store_list(number, spelling, option, argument or "")
            return
        self.directives.append(Directive(number, spelling, None, argument, option.era == "tcs"))
        value: Any = True if argument is None or option.kind == FLAG else self.expand_variables(argument)
        self.options[option.name] = (*self.options.get(option.name, ()), value) if option.kind == MANY else value
        self.option_lines[option.name] = number

    def store_list(self, number: int, spelling: str, option: Option, argument: str) -> None:
        merged: Dict[str, Optional[str]] = self.options.setdefault(option.name, {})
        self.option_lines[option.name] = number
        for item in split_list(argument):
            if not item.strip():
                self.add_problem(number, "empty-item", argument)
                continue
            key, value, separator = _split_item(item, option)
            if separator is not None and separator != RANK_MAP_SEPARATORS.get(key):
                self.add_problem(number, "wrong-separator", item.strip())
            self.directives.append(Directive(number, spelling, key, value, _supports_key(option, key)))
            canonical = KEY_ALIASES.get(option.name, {}).get(key, key)
            merged.pop(canonical, None)  # the order is that of the values in force
            merged[canonical] = None if value is None else self.expand_variables(value)
            self.option_lines[f"{option.name}.{canonical}"] = number

    def expand_variables(self, value: str) -> str:
        """Expand the variables that a ``--vset`` above defines; all others stay as written."""
        variables = self.options.get("vset")
        if not variables or "${" not in value:
            return value
        expanded = _VARIABLE.sub(lambda match: variables.get(match[1]) or match[0], value)
        return expanded if len(expanded) <= _MAX_EXPANDED_LENGTH else value


def _is_option(word: str) -> bool:
    return len(word) > 1 and word[0] in _DASHES


def _split_option(word: str) -> Tuple[str, Optional[str]]:
    """Split a word into the option's spelling and the argument attached to it."""
    if word in SPELLINGS:
        return word, None
    if word.startswith("--"):
        spelling, equals, argument = word.partition("=")
        return spelling, argument if equals else None
    if _SHORT_OPTION.match(word) and re.split("[=:]", word[1:], maxsplit=1)[0] not in _NAMES_WITHOUT_DASHES:
        return word[:2], word[2:]
    spelling, equals, argument = word.partition("=")
    return spelling, argument if equals else None


def _bundled_flags(word: str) -> List[str]:
    """Split ``-js`` into ``-j`` and ``-s``; empty if not all letters are flags."""
    flags = ["-" + letter for letter in word[1:]]
    are_flags = [SPELLINGS[flag].kind == FLAG for flag in flags if flag in SPELLINGS]
    return flags if 2 <= len(are_flags) == len(flags) and all(are_flags) else []


def _split_item(item: str, option: Option) -> Tuple[str, Optional[str], Optional[str]]:
    """Split an item into key, value and, for rank maps, the separator between them."""
    text = item.strip()
    if option.name == "mpi":
        for key in RANK_MAP_SEPARATORS:
            if text.startswith(key) and text[len(key) : len(key) + 1] in ("=", ":"):
                return key, text[len(key) + 1 :], text[len(key)]
    key, equals, value = text.partition("=")
    return key.strip(), value.strip() if equals else None, None


def _supports_key(option: Option, key: str) -> bool:
    if option.era != "tcs" or (option.name == "mpi" and key in K_ERA_MPI_KEYS):
        return False
    return option.name not in ("mpi", "llio", "policy") or key in KEYS[option.name]
