"""The facts about a script, computed once for all rules. The value of a placeholder or variable is unknown."""

from __future__ import annotations

import re
from collections import Counter
from functools import cached_property
from typing import Any, Callable, Dict, FrozenSet, Iterator, List, Mapping, Optional, Tuple, TypeVar

from fugaku_gpt.pjm.groups import GroupLimits, SiteLimits
from fugaku_gpt.pjm.lexer import TEMPLATE_TAG
from fugaku_gpt.pjm.lint.flow import Step, flow_of
from fugaku_gpt.pjm.lint.inner_shells import with_inner_commands
from fugaku_gpt.pjm.lint.launches import (
    Assignment,
    Launch,
    assignments_of,
    constant_number,
    constants_of,
    launches_of,
    resolve,
)
from fugaku_gpt.pjm.lint.shell import Body, Command, scan_commands
from fugaku_gpt.pjm.lint.sites import FUGAKU
from fugaku_gpt.pjm.options import parse_count, parse_elapse, parse_node, parse_size
from fugaku_gpt.pjm.script import PjmScript
from fugaku_gpt.pjm.values import Elapse, NodeShape, has_placeholder

_SHELLS = re.compile(r"#!.*\b(ba|da|k|z|c|tc)?sh\b")
# placeholders that the parser does not know: Python's {name}, %(name)s, __NAME__, %NAME%, ***, ???, ...
_FUNCTION = re.compile(r"^[ \t]*(?:function[ \t]+([\w.-]+)|([\w.-]+)[ \t]*\(\))", re.MULTILINE)
_WORD = re.compile(r"[A-Za-z_]\w*")

_TEMPLATE_SUFFIXES = (".tmpl", ".tpl", ".template", ".j2", ".jinja", ".jinja2", ".mustache", ".erb", ".in")

Value = TypeVar("Value")


def is_unfilled(value: Optional[str]) -> bool:
    """Whether a value that should be a number, shape or time is a placeholder that is still to be filled in."""
    if value is None:
        return False
    return has_placeholder(value) or bool(_WORD.fullmatch(value.strip()))


def printable(value: object) -> str:
    """Format a value for a message: one line, no control characters, at most 60 characters."""
    text = str(value)
    text = "".join(
        mark if mark.isprintable() else mark.encode("unicode_escape", "surrogatepass").decode() for mark in text[:200]
    )
    return text if len(text) <= 60 else text[:57] + "..."


class Facts:
    """The facts about one script that rules use.

    Attributes:
        script: the parsed script.
        limits: limits of the site.
        site: the site that the script is for; see :mod:`fugaku_gpt.pjm.lint.sites`.
        is_fugaku: whether that is Fugaku.
        file: name of the file, empty for standard input.
    """

    def __init__(self, script: PjmScript, limits: SiteLimits, site: str, file: str = "") -> None:
        self.script = script
        self.limits = limits
        self.site = site
        self.is_fugaku = site == FUGAKU
        self.file = file
        self.resources = script.resources
        self.mpi = script.mpi
        self.llio = script.llio

    @cached_property
    def is_template(self) -> bool:
        """Whether the script is a template that is yet to be filled in: lines above its first command are nothing but
        tags, or its file's name says so."""
        head = self.script.lines[: (self.script.body_line or len(self.script.lines) + 1) - 1]
        return any(TEMPLATE_TAG.fullmatch(line) for line in head) or self.file.endswith(_TEMPLATE_SUFFIXES)

    # positions

    @cached_property
    def top(self) -> int:
        """The line of the first directive, for findings about something missing."""
        return self.script.directives[0].line if self.script.directives else 1

    def line_of(self, *names: str) -> int:
        """Return the line of the first of these options or keys that is given, such as ``resources.node``."""
        return next((self.script.option_lines[name] for name in names if name in self.script.option_lines), self.top)

    def position(self, name: str, text: str = "") -> Tuple[int, int]:
        """Return line and column of the value of an option or key."""
        line = self.line_of(name)
        return line, self.column(line, text or name.rpartition(".")[2])

    def column(self, line: int, text: str) -> int:
        """Return the column of ``text`` in a line; 1 if it is not there."""
        content = self.script.lines[line - 1] if 0 < line <= len(self.script.lines) else ""
        return max(0, content.find(text)) + 1

    # resources

    @cached_property
    def group(self) -> Optional[str]:
        """The resource group, or the site's default if none is named; None if it is a placeholder."""
        value = self.resources.get("rscgrp")
        if value is None:
            return self.limits.default_group or None if "rscgrp" not in self.resources else None
        return None if has_placeholder(value) else value

    @cached_property
    def group_limits(self) -> Optional[GroupLimits]:
        """The limits of the group, from the data file of the site; None where there is none."""
        return self.limits.groups.get(self.group) if self.group else None

    @cached_property
    def node_shape(self) -> Optional[NodeShape]:
        """The value of ``node=``; None if missing, invalid or a placeholder."""
        return _read(parse_node, self.resources.get("node"))

    @cached_property
    def nodes(self) -> Optional[int]:
        """The total number of nodes, if the script gives it."""
        return self.node_shape.count if self.node_shape else None

    @cached_property
    def elapse(self) -> Optional[Elapse]:
        """The value of ``elapse=``; None if missing, invalid or a placeholder."""
        return _read(parse_elapse, self.resources.get("elapse"))

    @cached_property
    def proc(self) -> Optional[int]:
        """The value of ``--mpi proc=``."""
        return _read(parse_count, self.mpi.get("proc"))

    @cached_property
    def max_ranks_per_node(self) -> Optional[int]:
        """The value of ``--mpi max-proc-per-node=``."""
        return _read(parse_count, self.mpi.get("max-proc-per-node"))

    @cached_property
    def ranks_per_node(self) -> Optional[int]:
        """Processes on each node (End-user's Guide, table 2.28); one by default, None if unknown."""
        if "max-proc-per-node" in self.mpi:
            return self.max_ranks_per_node or None
        if "proc" not in self.mpi:
            return 1
        if not self.nodes or not self.proc:
            return None
        return -(-self.proc // self.nodes)

    @cached_property
    def ranks(self) -> Optional[int]:
        """The total number of processes."""
        if "proc" in self.mpi:
            return self.proc
        return self.nodes * self.ranks_per_node if self.nodes and self.ranks_per_node else None

    def knob(self, name: str) -> Optional[int]:
        """Return the value of a power knob; None if missing or invalid."""
        return _read(parse_count, self.resources.get(name))

    def size(self, values: Mapping[str, Optional[str]], name: str) -> Optional[int]:
        """Return a size in bytes; None if missing, invalid or a placeholder."""
        return _read(parse_size, values.get(name))

    @cached_property
    def directive_environment(self) -> Dict[str, str]:
        """Variables of ``-x``: name → value."""
        values: Mapping[str, Any] = self.script.options.get("environment", {})
        return {name: value or "" for name, value in values.items()}

    # the body

    @cached_property
    def is_shell(self) -> bool:
        """Whether the body is a shell script; Python and Perl can be job scripts too."""
        first = self.script.lines[0] if self.script.lines else ""
        return not first.startswith("#!") or bool(_SHELLS.match(first))

    @cached_property
    def body_text(self) -> str:
        """The text from the first command on; empty if there is none, or if the script is not a shell script."""
        start = self.script.body_line
        return "\n".join(self.script.lines[start - 1 :]) if start and self.is_shell else ""

    @cached_property
    def body(self) -> Body:
        """The parsed body of the script."""
        return scan_commands(self.body_text, self.script.body_line)

    @cached_property
    def functions(self) -> FrozenSet[str]:
        """Names of the functions that the body defines."""
        return frozenset(match[1] or match[2] for match in _FUNCTION.finditer(self.body_text))

    @cached_property
    def commands(self) -> Tuple[Command, ...]:
        """The commands in order, with those within ``bash -c '...'``, ``bash <<END`` and ``eval``."""
        return with_inner_commands(self.body.commands, self.body.documents)

    @cached_property
    def flow(self) -> Tuple[Step, ...]:
        """The commands in the order in which they run, as far as that can be seen."""
        return flow_of(self.commands, Counter(match[1] or match[2] for match in _FUNCTION.finditer(self.body_text)))

    @cached_property
    def has_job_control(self) -> bool:
        """Whether the script turns job control on, without which ``fg`` fails in scripts."""
        return any(
            command.name == "set"
            and re.search(r" -[a-zA-Z]*m| -o monitor", " " + " ".join(w.text for w in command.argv))
            for command in self.commands
        )

    @cached_property
    def assignments(self) -> List[Assignment]:
        """Assignments of variables: first those of ``-x``, then those of the commands."""
        line = self.script.option_lines.get("environment", self.top)
        given = [
            Assignment(
                name,
                value,
                self.script.option_lines.get(f"environment.{name}", line),
                1,
                True,
                False,
                False,
                False,
                True,
            )
            for name, value in self.directive_environment.items()
        ]
        return given + assignments_of(self.commands)

    def assignments_to(self, name: str) -> List[Assignment]:
        """Return all assignments to one variable."""
        return self._assignments_by_name.get(name, [])

    @cached_property
    def _assignments_by_name(self) -> Dict[str, List[Assignment]]:
        by_name: Dict[str, List[Assignment]] = {}
        for assignment in self.assignments:
            by_name.setdefault(assignment.name, []).append(assignment)
        return by_name

    @cached_property
    def constants(self) -> Dict[str, str]:
        """Values of variables that are certain, including those that PJM sets."""
        constants = constants_of(self.assignments)
        for name, value in (
            ("PJM_NODE", self.nodes),
            ("PJM_MPI_PROC", self.ranks),
            ("PJM_PROC_BY_NODE", self.ranks_per_node),
        ):
            if value is not None:
                constants.setdefault(name, str(value))
        return constants

    def sole_number(self, name: str) -> Optional[Tuple[int, Assignment]]:
        """Return a variable's number and its last assignment, if all its assignments agree on one number."""
        assignments = self.assignments_to(name)
        if not assignments:
            return None
        numbers = {
            None if assignment.append else constant_number(assignment.value, self.constants)
            for assignment in assignments
        }
        number = numbers.pop()
        return None if numbers or number is None else (number, assignments[-1])

    def sole_text(self, name: str) -> Optional[Tuple[str, Assignment]]:
        """Return a variable's value and last assignment, if it has only one value."""
        assignments = self.assignments_to(name)
        texts = {resolve(assignment.value, self.constants) for assignment in assignments}
        text = texts.pop() if len(texts) == 1 else None
        return None if text is None else (text, assignments[-1])

    @cached_property
    def launches(self) -> List[Launch]:
        """The calls of ``mpiexec``."""
        return launches_of(self.commands, self.constants)

    def find_uses(self, pattern: "re.Pattern[str]") -> Iterator[Tuple[Command, Tuple[int, int]]]:
        """Yield the commands that match ``pattern`` in a word, value or redirection, with the position of the match."""
        if not pattern.search(self.body_text):
            return
        for command in self.commands:
            values = [setting.value for setting in command.settings]
            for word in (*values, *command.argv, *(target for _, target in command.redirections)):
                if pattern.search(word.raw):
                    yield command, (word.line, word.column)
                    break


def _read(reader: Callable[[str], Value], value: Optional[str]) -> Optional[Value]:
    try:
        return None if value is None else reader(value)
    except ValueError:
        return None
