"""Tests of the assignments of a script, and of the calls of ``mpiexec``: processes, program and options."""

from __future__ import annotations

import pytest

from fugaku_gpt.pjm.lint.launches import assignments_of, constants_of, launches_of
from fugaku_gpt.pjm.lint.shell import scan_commands


@pytest.mark.parametrize(
    ("text", "value", "exported", "scoped"),
    [
        ("A=1", "1", False, False),
        ("A=1; export A", "1", True, False),
        ("export A=1", "1", True, False),
        ("declare A=1", "1", False, False),
        ("declare -x A=1", "1", True, False),
        ("declare -rx A=1", "1", True, False),
        ("typeset -i A=1", "1", False, False),
        ("typeset -x A=1", "1", True, False),
        ("local A=1", "1", False, False),
        ("readonly A=1", "1", False, False),
        ("readonly B; A=1", "1", False, False),
        ("declare -x A; A=1", "1", True, False),
        ("A=1 run", "1", True, True),
        ("setenv A 1", "1", True, False),
        ("setenv A", "", True, False),
        ("env A=1 run", "1", True, True),
        ("env -i B=2 A=1 run", "1", True, True),
        ("mpiexec -x A=1 run", "1", True, True),
        ("mpiexec -n 1 -env A=1 run", "1", True, True),
    ],
)
def test_an_assignment(text: str, value: str, exported: bool, scoped: bool) -> None:
    (assignment,) = (item for item in assignments_of(scan_commands(text).commands) if item.name == "A")
    assert (assignment.value, assignment.exported, assignment.scoped) == (value, exported, scoped)


@pytest.mark.parametrize(
    "text", ["echo A=1", "env run A=1", "mpiexec -n 1 run A=1", "export A", "set -x A=1", "setenv"]
)
def test_no_assignment(text: str) -> None:
    assert not [item for item in assignments_of(scan_commands(text).commands) if item.name == "A"]


@pytest.mark.parametrize(
    ("text", "processes", "program", "options"),
    [
        ("mpiexec ./run a", None, "./run a", ""),
        ("mpiexec -n 4 ./run", 4, "./run", "-n 4"),
        ("mpirun -np 4 -mca btl self ./run -n 8", 4, "./run -n 8", "-np 4 -mca btl self"),
        ("mpirun --mca a b -gmca c d -n 2 ./run", 2, "./run", "--mca a b -gmca c d -n 2"),
        ("time mpiexec -n 3 ./run", 3, "./run", "-n 3"),
        ("N=6\nmpiexec -n $N ./run", 6, "./run", "-n $N"),
        ("mpiexec -n $N ./run", None, "./run", "-n $N"),
        ("LAUNCH='mpiexec -n 5'\n$LAUNCH ./run", 5, "./run", "-n 5"),
    ],
)
def test_a_launch(text: str, processes: int, program: str, options: str) -> None:
    commands = scan_commands(text).commands
    (launch,) = launches_of(commands, constants_of(assignments_of(commands)))
    assert launch.processes == processes
    assert " ".join(word.text for word in launch.program) == program
    assert " ".join(word.text for word in launch.options) == options
