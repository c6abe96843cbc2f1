"""Keeps account of what is open in the text of a shell script, to name the constructs that never end."""

from __future__ import annotations

import re
from collections import Counter
from typing import List, NamedTuple, Tuple

_CLOSER_OF = {
    "if": "fi", "for": "done", "while": "done", "until": "done", "select": "done", "case": "esac", "{": "}", "(": ")",
}  # fmt: skip
_CLOSING = {"'": "'", '"': '"', "`": "`", "$(": ")", "${": "}"}
_DELIMITER = re.compile(r"[A-Za-z_!.+-][\w!.+-]*")
_CLOSING_DOUBLE_QUOTE = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


class Unclosed(NamedTuple):
    """A construct that never ends.

    ``kind``: ``quote``, ``document`` or ``compound``. ``opener``: the quote, delimiter or keyword. ``closer``: the text
    that is missing. ``line``, ``column``: position of the opener, from 1.
    """

    kind: str
    opener: str
    closer: str
    line: int
    column: int


class OpenConstructs:
    """The open constructs of a text, while a scanner goes through it.

    What is not sure is not reported: after a quote or bracket that the scanner could not follow, though a closing
    character comes later, nothing more is.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.is_sure = True
        self._stack: List[Unclosed] = []
        self._counts: "Counter[str]" = Counter()  # of the stack's openers by their closer: no search through it
        self._unclosed: List[Unclosed] = []

    @property
    def is_in_case(self) -> bool:
        """Whether the innermost open construct is ``case``, where a pattern may stand."""
        return bool(self._stack) and self._stack[-1].opener == "case"

    def open(self, opener: str, line: int, column: int) -> None:
        """Note that a compound command, or a subshell, begins."""
        self._stack.append(Unclosed("compound", opener, _CLOSER_OF[opener], line, column))
        self._counts[_CLOSER_OF[opener]] += 1

    def close(self, closer: str) -> None:
        """Note its end: what was opened within it and still is open never ends."""
        if self._stack and self._stack[-1].closer == closer:
            self._pop()
        elif closer != ")" and self._counts[closer]:  # a bracket alone may end a pattern of `case`
            while self._stack[-1].closer != closer:
                self._add(self._pop())
            self._pop()

    def add_quote(self, opener: str, position: int, line: int, column: int) -> None:
        """Note a quote or bracket whose end was not found."""
        if opener == '"':
            is_unclosed = _CLOSING_DOUBLE_QUOTE.match(self.text, position) is None
        else:
            is_unclosed = self.text.find(_CLOSING[opener], position + len(opener)) < 0
        if is_unclosed:
            self._add(Unclosed("quote", opener, _CLOSING[opener], line, column))
        self.is_sure = False  # what follows stands within the quote to a shell

    def check_enclosed(self, enclosed: str) -> None:
        """Note the text of a substitution or string; one with a here-document may hold lone quotes."""
        if "<<" in enclosed and "\n" in enclosed and enclosed[0] != "'" and ("$(" in enclosed or "`" in enclosed):
            self.is_sure = False

    def add_document(self, delimiter: str, line: int, column: int) -> None:
        """Note a here-document without its last line."""
        if _DELIMITER.fullmatch(delimiter):
            self._add(Unclosed("document", "<<" + delimiter, delimiter, line, column))

    def unclosed(self) -> Tuple[Unclosed, ...]:
        """Return what has not ended at the end of the text, in order of lines."""
        # a quote or here-document swallows what would have closed the compound commands around it
        if self.is_sure and not any(construct.kind != "compound" for construct in self._unclosed):
            self._unclosed += self._stack
        return tuple(sorted(self._unclosed, key=lambda construct: (construct.line, construct.column)))

    def _pop(self) -> Unclosed:
        construct = self._stack.pop()
        self._counts[construct.closer] -= 1
        return construct

    def _add(self, construct: Unclosed) -> None:
        if self.is_sure:
            self._unclosed.append(construct)
