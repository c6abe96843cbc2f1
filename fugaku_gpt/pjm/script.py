"""A ``#PJM`` script as data: what ``pjsub`` would read in it, and what it would not.

The lexical rules are those of the Command Reference (J2UL-2549, pjsub) and the End-user's Guide (J2UL-2534, 2.1.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Mapping, Optional, Tuple


@dataclass(frozen=True)
class Directive:
    """One option of a directive line, or one key of an option that takes a list of keys.

    Attributes:
        line: from 1.
        option: as written, such as ``-L`` or ``--rsc-list``.
        key: of a list option (``elapse`` of ``-L elapse=1:00:00``), else None.
        value: text after ``=``, or the option's argument, quotes removed; None where there is none.
        known: whether the option, and the key of ``--mpi`` and ``--llio``, are pjsub's own.
    """

    line: int
    option: str
    key: Optional[str]
    value: Optional[str]
    is_supported: bool = True


@dataclass(frozen=True)
class Problem:
    """A line that pjsub would refuse, ignore or misread, found while reading; the lint rules give it its name.

    Attributes:
        kind: ``unbalanced-quotes``, ``stray-word``, ``missing-argument``, ``line-too-long``, ``too-many-options``,
            ``unexpected-argument`` (of a flag), ``empty-item`` (of a list), ``wrong-separator`` (of a rank map),
            ``command-substitution`` (a word that ``pjsub`` cuts at its blanks) or ``byte-order-mark``.
        text: the word, words or line in question.
    """

    line: int
    kind: str
    text: str


@dataclass(frozen=True)
class PjmScript:
    """What a script says.

    Attributes:
        lines: of the whole script, without newlines; bytes that are not UTF-8 as surrogate escapes.
        directives: in force, in order.
        body: line number (from 1) of the first command, 0 where there is none; directives are read only above it.
        late: line numbers of ``#PJM`` lines below the first command: pjsub ignores them.
        disabled: line numbers that look like directives and are comments (``# PJM``, `` #PJM``, ``##PJM``).
        problems: see :class:`Problem`.
        options: canonical option name (``name``, ``group``, ``resources``, ...) → the value in force after merging
            repeats: a mapping key → value for list options (with canonical keys), a tuple of texts for options that
            add up (the K computer's staging), text or True for others. Variables of ``--vset`` are put in here, not in
            ``directives``.
        marks: canonical name → line on which the value in force was written; list options as ``resources.elapse``.
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
