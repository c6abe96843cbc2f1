"""A ``#PJM`` script as data: the parts that ``pjsub`` would read, and those that it would ignore.

The lexical rules are those of the Command Reference (J2UL-2549, pjsub) and the End-user's Guide (J2UL-2534, 2.1.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Mapping, Optional, Tuple


@dataclass(frozen=True)
class Directive:
    """One option of a directive line, or one key of an option that takes a list of keys.

    Attributes:
        line: line number, from 1.
        option: option as written, such as ``-L`` or ``--rsc-list``.
        key: key of a list option (``elapse`` of ``-L elapse=1:00:00``), otherwise None.
        value: text after ``=``, or the option's argument, quotes removed; None if there is none.
        is_supported: whether ``pjsub`` has the option and, for ``--mpi`` and ``--llio``, the key.
    """

    line: int
    option: str
    key: Optional[str]
    value: Optional[str]
    is_supported: bool


@dataclass(frozen=True)
class Problem:
    """A problem found while reading: text that pjsub would refuse, ignore or misread. Lint rules report it.

    Attributes:
        kind: ``unbalanced-quotes``, ``stray-word``, ``missing-argument``, ``line-too-long``, ``too-many-options``,
            ``unexpected-argument`` (of a flag), ``empty-item`` (of a list), ``wrong-separator`` (of a rank map),
            ``command-substitution`` (a word that ``pjsub`` cuts at its blanks), ``byte-order-mark`` or
            ``carriage-return`` (at the first line that ends in one).
        text: the word, words or line in question; for ``carriage-return`` the number of such lines.
    """

    line: int
    kind: str
    text: str


@dataclass(frozen=True)
class PjmScript:
    """A parsed script.

    Attributes:
        lines: lines of the whole script, without newlines; bytes that are not UTF-8 as surrogate escapes.
        directives: directives in force, in order.
        body_line: number (from 1) of the line with the first command, 0 if there is none; directives are read only
            above it.
        ignored_lines: numbers of the ``#PJM`` lines below the first command, which pjsub ignores.
        disabled_lines: numbers of lines that look like directives but are comments (``# PJM``, `` #PJM``, ``##PJM``).
        problems: see :class:`Problem`.
        options: canonical option name (``name``, ``group``, ``resources``, ...) → the value in force after merging
            repeats: a mapping key → value for list options (with canonical keys), a tuple of texts for options that
            add up (the K computer's staging), text or True for others. Variables of ``--vset`` are expanded here, not
            in ``directives``.
        option_lines: canonical name → line of the value in force; keys of list options as ``resources.elapse``.
    """

    lines: Tuple[str, ...]
    directives: Tuple[Directive, ...]
    body_line: int
    ignored_lines: Tuple[int, ...]
    disabled_lines: Tuple[int, ...]
    problems: Tuple[Problem, ...]
    options: Mapping[str, Any]
    option_lines: Mapping[str, int]

    @property
    def resources(self) -> Dict[str, Optional[str]]:
        """``-L``: key → value, ``rg`` as ``rscgrp`` and ``ru`` as ``rscunit``."""
        return dict(self.options.get("resources", {}))

    @property
    def mpi(self) -> Dict[str, Optional[str]]:
        """``--mpi``: key → value."""
        return dict(self.options.get("mpi", {}))

    @property
    def llio(self) -> Dict[str, Optional[str]]:
        """``--llio``: key → value."""
        return dict(self.options.get("llio", {}))
