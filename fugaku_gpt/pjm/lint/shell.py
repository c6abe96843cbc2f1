"""A scanner for the commands of a shell script. It executes nothing and never fails.

It handles words and quotes, comments, continuation lines, here-documents, lists (``&&``, ``||``, ``;``, ``|``, ``&``),
redirections, assignments and the nesting of compound commands. What it cannot follow (``eval``, callers of functions,
results of substitutions) stays text. An unclosed quote or bracket is treated as a plain character, and reported.
"""

from __future__ import annotations

import re
from typing import Dict, List, Mapping, NamedTuple, Optional, Set, Tuple

from fugaku_gpt.pjm.lint.shell_constructs import OpenConstructs, Unclosed
from fugaku_gpt.pjm.lint.shell_quotes import end_of_bracket, end_of_expansion, unescape

_TOKEN = re.compile(
    r"(?P<plain>[^\s'\"\\$`|&;()<>#]+)(?P<gap>[ \t]+)?"
    r"|(?P<space>(?:[ \t\r\f\v]|\\\r?\n)+)"
    r"|(?P<newline>\n)"
    r"|(?P<single>\$'(?:[^'\\]|\\.)*'|'[^']*')"
    r"|(?P<opening>[$][({]|[\"`])"
    r"|(?P<operator>&&|\|\||;;&?|;&|\|&|<<<|<<-?|&>>?|>&|<&|>>|>\||<>|[|&;()<>])"
    r"|(?P<escape>\\.)"
    r"|(?P<other>.)",
    re.DOTALL,
)
# a line of plain words, the first of which assigns nothing: most lines of long scripts, scanned without their tokens
_PLAIN_LINE = re.compile(r"[ \t]*([^\s'\"\\$`|&;()<>#=]+)(?:[ \t]+[^\s'\"\\$`|&;()<>#]+)*[ \t]*\n")
_PLAIN_WORD = re.compile(r"[^\s]+")
_IDLE_LINES = re.compile(r"(?:[ \t]*(?:#[^\n]*)?\n)+")
_NAME = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?:\[[^\]]*\])?(\+?)=")
_REDIRECTIONS = ("<", ">", ">>", ">|", "<>", ">&", "<&", "&>", "&>>", "<<<", "<<", "<<-")
_OPENERS = {"if", "for", "while", "until", "case", "select", "{"}
_LOOPS = {"for", "while", "until", "select"}
_CLOSERS = {"fi", "done", "esac", "}"}
_LEADERS = {"if", "then", "elif", "else", "do", "while", "until", "!", "{", "time", "fi", "done", "esac", "}"}
# commands before `&&` that fail in case of an error alone: what follows is not one of two branches
_PREPARATIONS = frozenset({
    "cd", "pushd", "popd", "mkdir", "cp", "mv", "ln", "rm", "touch", "export", "source", ".", "module", "ulimit", "set",
    "unset", "date", "echo", "printf",
})  # fmt: skip
_KEYWORDS = {"function", *_OPENERS, *_CLOSERS, *_LEADERS}
_MAX_FAILURES = 8  # searches for closing brackets up to the end of the file; the limit keeps the scan linear


class Word(NamedTuple):
    """A word of a command.

    ``text``: without quotes, expansions as written. ``raw``: as written. ``line``, ``column``: position, from 1.
    """

    text: str
    raw: str
    line: int
    column: int


class Setting(NamedTuple):
    """An assignment ``NAME=value``, before a command or alone."""

    name: str
    value: Word
    append: bool


class Command(NamedTuple):
    """One simple command.

    ``argv``: the command and its arguments. ``name``: file name of the command; empty for assignments alone.
    ``nested``: inside a loop, a condition, a function or a subshell, or after ``&&`` or ``||``: it may run never or
    repeatedly. ``in_branch``: inside a condition or a function, after ``||``, or after ``&&`` and a command that is a
    condition: it may run never.
    ``background``: it, or the pipeline, list or compound command that it is part of, ends in ``&``. ``list_start``:
    position of the first command of that list; commands of one list run one after the other. ``in_loop``: inside
    ``for``, ``while``, ``until`` or ``select``; one in the background, only if the loop starts its list repeatedly.
    ``function``: name of the function whose body it is in; empty outside of any. ``in_function_branch``: as
    ``in_branch``, but within that function. ``executor``: number of the shell or
    subshell that executes it. ``waiter``: number of the shell that has put it in the background, whose ``wait`` waits
    for it.
    """

    line: int
    column: int
    settings: Tuple[Setting, ...]
    argv: Tuple[Word, ...]
    redirections: Tuple[Tuple[str, Word], ...]
    nested: bool
    background: bool
    name: str
    in_loop: bool
    in_branch: bool = False
    list_start: int = 0
    function: str = ""
    executor: int = 0
    waiter: int = 0
    in_function_branch: bool = False


class Body(NamedTuple):
    """The body of a script: its commands in order, and the lines inside a here-document, string or other long word.

    ``documents``: position of a command in ``commands`` → its here-document, and the number of that's first line.
    ``unclosed``: the quotes, here-documents and compound commands that never end.
    """

    commands: Tuple[Command, ...]
    enclosed_lines: Set[int]
    documents: Mapping[int, Tuple[str, int]]
    unclosed: Tuple[Unclosed, ...] = ()


def scan_commands(text: str, first_line: int = 1) -> Body:
    """Scan ``text``, whose first line has the number ``first_line``. Never raises."""
    return _Scanner(text, first_line).run()


class _Scanner:
    def __init__(self, text: str, first_line: int) -> None:
        self.text = text
        self.position = 0
        self.line = first_line
        self.line_start = 0  # position of the current line's first character
        self.commands: List[Command] = []
        self.enclosed_lines: Set[int] = set()
        self.loops = 0
        self.parens = 0
        # of each open compound command: start of the list around; whether in a branch, and in one of its function
        self.open: List[Tuple[int, bool, bool]] = []
        self.constructs = OpenConstructs(text)
        self.list_start = 0  # position in `commands` of the first command of the present list or pipeline
        self.next_function = ""  # the name, after ``NAME()``
        self.functions: List[str] = []  # for each open compound command, the function that it is in
        self.failures = 0
        # delimiters of here-documents that begin at the next newline, with the positions of their commands
        self.heredocs: List[Tuple[Word, bool, int]] = []
        self.documents: Dict[int, Tuple[str, int]] = {}
        self.after_and_or = False
        self.after_condition = False
        self.shells = [0]  # numbers of the open shell and its subshells
        self.last_shell = 0
        self._new_command()
        self._new_word()

    def _new_word(self) -> None:
        self.pieces: List[str] = []
        self.raws: List[str] = []
        self.word_at: Optional[Tuple[int, int]] = None

    def _new_command(self) -> None:
        self.settings: List[Setting] = []
        self.argv: List[Word] = []
        self.redirections: List[Tuple[str, Word]] = []
        self.redirect = ""
        self.command_at: Optional[Tuple[int, int]] = None
        self.is_timed = False  # after the word `time`

    def run(self) -> Body:
        text, match, size = self.text, _TOKEN.match, len(self.text)
        while self.position < size:
            if self.position == self.line_start and self._scan_plain_line():
                continue
            token = match(text, self.position)
            assert token is not None  # `other` takes any character
            kind, raw = token.lastgroup, token.group()
            if kind == "gap" or kind == "plain":  # most tokens are of these kinds, so _add is not called
                if self.word_at is None:
                    self.word_at = (self.line, self.position - self.line_start + 1)
                word = token[1]
                self.pieces.append(word)
                self.raws.append(word)
                if kind == "gap":
                    self._end_word()
                self.position = token.end()
            elif kind == "space":
                if self.word_at is not None:
                    self._end_word()
                if "\n" in raw:
                    self._advance(raw)
                else:
                    self.position = token.end()
            elif kind == "newline":
                self._end_command()
                self.list_start = len(self.commands)
                self._advance(raw)
                if self.heredocs:
                    self._skip_documents()
                idle = _IDLE_LINES.match(text, self.position)
                if idle:
                    self._advance(idle.group())
            elif kind == "single":
                self._add_piece(raw[1:-1] if raw[0] == "'" else raw[2:-1], raw)
            elif kind == "opening":
                self._scan_opening(raw)
            elif kind == "operator":
                self._scan_operator(raw)
            elif kind == "escape":
                self._add_piece(raw[1], raw)
            elif raw == "#" and self.word_at is None:
                end = text.find("\n", self.position)
                self.position = end if end >= 0 else len(text)
            else:
                if raw == "'":
                    self.constructs.add_quote(raw, self.position, self.line, self.position - self.line_start + 1)
                self._add_piece(raw, raw)
        self._end_command()
        for delimiter, _, _ in self.heredocs:
            self.constructs.add_document(delimiter.text, delimiter.line, delimiter.column)
        return Body(tuple(self.commands), self.enclosed_lines, self.documents, self.constructs.unclosed())

    def _scan_plain_line(self) -> bool:
        """Scan a line of plain words at its start as one command; returns whether it is one."""
        if self.word_at is not None or self.argv or self.settings or self.redirections or self.redirect:
            return False
        match = _PLAIN_LINE.match(self.text, self.position)
        if match is None or match[1] in _KEYWORDS or self.heredocs or self.command_at is not None:
            return False
        start = self.line_start - 1
        words = _PLAIN_WORD.finditer(self.text, self.position, match.end())
        self.argv = [Word(word[0], word[0], self.line, word.start() - start) for word in words]
        self.command_at = (self.line, self.argv[0].column)
        self._end_command()
        self.after_condition = False
        self.list_start = len(self.commands)
        self.line += 1
        self.position = self.line_start = match.end()
        idle = _IDLE_LINES.match(self.text, self.position)
        if idle:
            self._advance(idle.group())
        return True

    def _advance(self, raw: str) -> None:
        breaks = raw.count("\n")
        if breaks:
            self.line += breaks
            self.line_start = self.position + raw.rindex("\n") + 1
        self.position += len(raw)

    def _add_piece(self, piece: str, raw: str) -> None:
        if self.word_at is None:
            self.word_at = (self.line, self.position - self.line_start + 1)
        self.pieces.append(piece)
        self.raws.append(raw)
        before = self.line
        self._advance(raw)
        if self.line > before:
            self.enclosed_lines.update(range(before + 1, self.line + 1))

    def _scan_opening(self, raw: str) -> None:
        closed = -1
        if self.failures < _MAX_FAILURES:
            closed = end_of_expansion(self.text, self.position, 0)
            self.failures += closed < 0
        if closed < 0:
            self.constructs.add_quote(raw, self.position, self.line, self.position - self.line_start + 1)
            self._add_piece(raw, raw)
            return
        enclosed = self.text[self.position : closed]
        self.constructs.check_enclosed(enclosed)
        self._add_piece(unescape(enclosed[1:-1]) if raw == '"' else enclosed, enclosed)

    def _end_word(self) -> None:
        if self.word_at is None:
            return
        if len(self.raws) == 1:
            text, raw = self.pieces[0], self.raws[0]
        else:
            text, raw = "".join(self.pieces), "".join(self.raws)
        word = Word(text, raw, self.word_at[0], self.word_at[1])
        if self.command_at is None:
            self.command_at = self.word_at
        self._new_word()
        if self.redirect:
            if self.redirect in ("<<", "<<-"):
                self.heredocs.append((word, self.redirect == "<<-", len(self.commands)))
            self.redirections.append((self.redirect, word))
            self.redirect = ""
        elif not self.argv:
            match = _NAME.match(raw) if "=" in raw else None
            if match:
                value = Word(word.text[match.end() :], raw[match.end() :], word.line, word.column)
                self.settings.append(Setting(match[1], value, bool(match[2])))
            elif raw in _OPENERS or raw in _CLOSERS or raw in _LEADERS:
                self._scan_keyword(word)
            elif raw == "-p" and self.is_timed:
                self.command_at = None
            else:
                self.argv.append(word)
        elif raw == "{" and self.argv[0].raw == "function":
            self.next_function = self.argv[1].text if len(self.argv) > 1 else ""
            self._new_command()
            self._open_compound(is_branch=True)
            self.constructs.open("{", word.line, word.column)
        else:
            self.argv.append(word)

    def _scan_keyword(self, word: Word) -> None:
        if word.raw in _OPENERS:
            self._open_compound(is_branch=word.raw in ("if", "case"))
            self.constructs.open(word.raw, word.line, word.column)
        elif word.raw in _CLOSERS:
            self._close_compound()
            is_pattern = self.constructs.is_in_case and self.text.startswith(")", self.position)
            if word.raw == "esac" or not is_pattern:
                self.constructs.close(word.raw)
        if word.raw in _LOOPS:
            self.loops += 1
        elif word.raw == "done":
            self.loops = max(0, self.loops - 1)
        self.is_timed = word.raw == "time"
        if word.raw not in _LEADERS:
            self.argv.append(word)  # `for x in ...`, `case x in`: the words that follow are not a command
        else:
            self.command_at = None

    def _open_compound(self, is_branch: bool) -> None:
        outer = self.functions[-1] if self.functions else ""
        self.functions.append(self.next_function or outer)
        _, in_branch, in_function_branch = self.open[-1] if self.open else (0, False, False)
        is_function = bool(self.next_function)
        # what follows `function NAME {` is that function's body itself, and no branch of it
        relative = not is_function and (is_branch or in_function_branch)
        self.open.append((self.list_start, is_branch or is_function or in_branch, relative))
        self.list_start = len(self.commands)
        self.next_function = ""

    def _close_compound(self) -> None:
        if self.open:
            self.list_start = self.open.pop()[0]
            self.functions.pop()

    def _put_in_background(self) -> None:
        """Mark the commands of the present list, but for those that are in the background by themselves."""
        start, is_repeated = self.list_start, self.loops > 0
        self.commands[start:] = [
            command
            if command.background
            else command._replace(background=True, list_start=start, in_loop=is_repeated, waiter=self.shells[-1])
            for command in self.commands[start:]
        ]

    def _end_command(self) -> None:
        if self.word_at is not None:
            self._end_word()
        if self.argv or self.settings or self.redirections:
            line, column = self.command_at or (self.line, 1)
            in_branch = self.after_condition or (bool(self.open) and self.open[-1][1])
            self.commands.append(
                Command(
                    line,
                    column,
                    tuple(self.settings),
                    tuple(self.argv),
                    tuple(self.redirections),
                    bool(self.open) or self.after_and_or,
                    False,
                    self.argv[0].text.rpartition("/")[2] if self.argv else "",
                    self.loops > 0,
                    in_branch,
                    self.list_start,
                    self.functions[-1] if self.functions else "",
                    self.shells[-1],
                    0,
                    self.after_condition or (bool(self.open) and self.open[-1][2]),
                )  # fmt: skip
            )
            self._new_command()
        self.after_and_or = False
        self.redirect, self.command_at = "", None

    def _scan_operator(self, raw: str) -> None:
        if raw in _REDIRECTIONS:
            number = self.word_at is not None and "".join(self.raws).isdecimal()
            if number:  # the descriptor of `2>`
                self._new_word()
            else:
                self._end_word()
            if self.command_at is None:
                self.command_at = (self.line, self.position - self.line_start + 1)
            self.redirect = raw
            self.position += len(raw)
            return
        if raw == "(" and self._array_or_arithmetic():
            return
        self._end_command()
        if raw == "(":
            self._open_compound(is_branch=False)
            self.constructs.open(raw, self.line, self.position - self.line_start + 1)
            self.parens += 1
            self.last_shell += 1
            self.shells.append(self.last_shell)
        if raw == ")":
            self.constructs.close(raw)
        if raw == ")" and self.parens:  # else it ends a pattern of `case`
            self._close_compound()
            self.parens -= 1
            self.shells.pop()
            if self.text[self.position - 1] == "(" and self.commands:  # the name of a function is no command
                self.next_function = self.commands.pop().name
        elif raw == "&":
            self._put_in_background()
        if raw in ("&", ";", ";;"):
            self.list_start = len(self.commands)
        self.after_and_or = raw in ("&&", "||")
        is_prepared = bool(self.commands) and self.commands[-1].name in _PREPARATIONS
        self.after_condition = raw == "||" or (raw == "&&" and (self.after_condition or not is_prepared))
        self.position += len(raw)

    def _array_or_arithmetic(self) -> bool:
        """Scan ``NAME=(...)`` or ``((...))`` as one word; return whether there is one."""
        array = self.word_at is not None and self.raws[-1].endswith("=")
        arithmetic = self.word_at is None and not self.argv and self.text.startswith("((", self.position)
        if not (array or arithmetic) or self.failures >= _MAX_FAILURES:
            return False
        closed = end_of_bracket(self.text, self.position + 1, ")", 0)
        if closed < 0:
            self.failures += 1
            return False
        enclosed = self.text[self.position : closed]
        self._add_piece(enclosed, enclosed)
        return True

    def _skip_documents(self) -> None:
        for delimiter, tabs, command in self.heredocs:
            pattern = re.compile(("^\t*" if tabs else "^") + re.escape(delimiter.text) + r"\r?$", re.MULTILINE)
            match = pattern.search(self.text, self.position)
            if match is None:
                self.constructs.add_document(delimiter.text, delimiter.line, delimiter.column)
            first = self.line
            self.documents[command] = (self.text[self.position : match.start() if match else len(self.text)], first)
            self._advance(self.text[self.position : match.end() if match else len(self.text)])
            self.enclosed_lines.update(range(first, self.line + 1))
        self.heredocs = []
