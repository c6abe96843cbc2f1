"""Tests of the scanner of shell commands."""

from __future__ import annotations

import shlex
from typing import List

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fugaku_gpt.pjm.lint.inner_shells import with_inner_commands
from fugaku_gpt.pjm.lint.shell import scan_commands

PIECES = [
    "'",
    '"',
    "`",
    "$(",
    "${",
    "((",
    "(",
    ")",
    "}",
    "<<E\n",
    "\nE\n",
    "\\",
    "\n",
    "#",
    " ",
    ";",
    "&&",
    "|",
    "&",
    "a",
]


def argument_lists(text: str) -> List[List[str]]:
    return [[argument.text for argument in command.argv] for command in scan_commands(text).commands]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b && c; d | e\nf & g || h", [["a", "b"], ["c"], ["d"], ["e"], ["f"], ["g"], ["h"]]),
        ("a 'b c' \"d e\" f\\ g", [["a", "b c", "d e", "f g"]]),
        ("a \\\n  b", [["a", "b"]]),
        ("a # b\n# c\nd#e", [["a"], ["d#e"]]),
        ('a "$(dirname "$0")/x"', [["a", '$(dirname "$0")/x']]),
        ("a ${b:-c d} `e f`", [["a", "${b:-c d}", "`e f`"]]),
        ("cat <<EOF > x\nb\nEOF\nc", [["cat"], ["c"]]),
        ("cat <<-'EOF'\n\tb\n\tEOF\nc", [["cat"], ["c"]]),
        ("cat <<A <<B\n1\nA\n2\nB\nc", [["cat"], ["c"]]),
        ("a <<< b\nc", [["a"], ["c"]]),
        ("if a; then b; else c; fi", [["a"], ["b"], ["c"]]),
        ("while ! a; do b; done; { c; }", [["a"], ["b"], ["c"]]),
        ("x=(a b c) d", [["d"]]),
        ("((i <<= 1))\na", [["((i <<= 1))"], ["a"]]),
        ("a 2>&1 >b <c", [["a"]]),
        ("a 'b\nc' d", [["a", "b\nc", "d"]]),
        ("a $((1 + (2))) b", [["a", "$((1 + (2)))", "b"]]),
    ],
)
def test_commands_are_split_into_arguments(text: str, expected: List[List[str]]) -> None:
    assert argument_lists(text) == expected


def test_assignments_redirections_and_positions() -> None:
    first, second = scan_commands('A=1 B="x y" cmd arg 2> err &\nC+=3', first_line=10).commands
    assert [(assignment.name, assignment.value.text, assignment.append) for assignment in first.settings] == [
        ("A", "1", False),
        ("B", "x y", False),
    ]
    assert [(operator, target.text) for operator, target in first.redirections] == [(">", "err")]
    assert (first.line, first.argv[1].column, first.background, first.name) == (10, 17, True, "cmd")
    assert (second.line, second.settings[0].append, second.argv) == (11, True, ())


def test_commands_that_may_not_run_are_nested() -> None:
    text = "a\nif b; then c; fi\nfor x in y; do d; done\n(e)\nf && g\nfunction h {\ni\n}\nj"
    nested = {command.argv[0].text: command.nested for command in scan_commands(text).commands}
    assert nested["a"] is False and nested["j"] is False and nested["f"] is False
    assert all(nested[name] for name in "cdegi")


def test_lines_inside_quotes_and_heredocs_are_enclosed() -> None:
    assert scan_commands("cat <<E\n#PJM -S\nE\nb '\n#PJM\n'\n").enclosed_lines == {2, 3, 5, 6}


def test_an_unclosed_quote_is_an_ordinary_character() -> None:
    assert argument_lists("echo it's\nmpiexec ./a")[-1] == ["mpiexec", "./a"]


@pytest.mark.slow
@given(st.lists(st.sampled_from(PIECES), max_size=60).map("".join) | st.text(max_size=200))
def test_any_text_can_be_scanned(text: str) -> None:
    lines = text.count("\n") + 1
    for command in scan_commands(text).commands:
        assert 1 <= command.line <= lines
        for argument in command.argv:
            assert argument.raw in text and argument.column >= 1


MANY = 20000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("piece", "expected"),
    [
        *((piece, [[piece * MANY]]) for piece in ("$(", "`", '"$(', "${", '"${')),  # never closed: plain characters
        *((quote, [[""]]) for quote in ("'", '"')),  # each second one closes
        *((bracket, []) for bracket in ("(", "((")),
        ("x=(", [[]] * MANY),  # an assignment in a subshell
        ("a\\\n", [["a"] * MANY]),
        ("<<a\n", [[]]),  # the rest is the first one's document
    ],
)
def test_long_repeated_openings_can_be_scanned(piece: str, expected: List[List[str]]) -> None:
    assert argument_lists(piece * MANY) == expected


def test_an_unclosed_document_takes_the_rest() -> None:
    body = scan_commands("<<a\n" * MANY)
    assert body.enclosed_lines == set(range(2, MANY + 2))
    assert [(operator, word.text) for operator, word in body.commands[0].redirections] == [("<<", "a")]


def test_the_commands_of_inner_shells_have_their_positions_and_shells() -> None:
    text = "nohup sh -c 'cd a; mpiexec ./a' &\neval \"mpiexec\" ./b '&'\n(./c & wait)\nwait\nbash -x script.sh -c no\n"
    commands = with_inner_commands(scan_commands(text, 3).commands)
    names = [(command.name, command.line, command.column, command.background) for command in commands]
    assert names == [
        ("nohup", 3, 1, True),
        ("cd", 3, 14, True),
        ("mpiexec", 3, 20, True),
        ("mpiexec", 4, 6, True),
        ("c", 5, 2, True),
        ("wait", 5, 8, False),
        ("wait", 6, 1, False),
        ("bash", 7, 1, False),
    ]
    nohup, cd, first, evaluated, inner, inner_wait, wait, _ = commands
    assert nohup.waiter == first.waiter == evaluated.waiter == wait.executor == 0
    assert cd.executor == first.executor != 0 and evaluated.executor == 0 and first.list_start == cd.list_start
    assert inner.waiter == inner_wait.executor not in (0, first.executor)
    assert first.argv[1].column == 28


def test_shells_in_shells_end_at_some_level() -> None:
    text = "true"
    for _ in range(9):
        text = f"sh -c {shlex.quote(text)}"
    assert [command.name for command in with_inner_commands(scan_commands(text).commands)] == ["sh"] * 5


def test_a_command_is_in_a_branch_if_something_around_it_is() -> None:
    text = "a\nif b; then\n(c; { d; })\nfi\n(e)\nf && g\nh() { i; }\nwhile j; do k; if l; then m; fi; n; done\no\n"
    in_branch = {command.argv[-1].text: command.in_branch for command in scan_commands(text).commands if command.argv}
    assert "".join(name for name in "abcdefghijklmno" if in_branch.get(name)) == "bcdgilm"


def test_a_plain_line_after_a_condition_ends_the_branch() -> None:
    in_branch = {command.name: command.in_branch for command in scan_commands("test a &&\nb c\nd e\n").commands}
    assert in_branch == {"test": False, "b": True, "d": False}


@pytest.mark.parametrize(
    "text",
    [
        "bash -euo pipefail -c 'mpiexec ./a'",
        "bash -o pipefail -c 'mpiexec ./a'",
        "bash -s -- x <<END\nmpiexec ./a\nEND\n",
        "bash -s x <<END\nmpiexec ./a\nEND\n",
    ],
)
def test_an_inner_shell_is_found_behind_options(text: str) -> None:
    body = scan_commands(text)
    assert [command.name for command in with_inner_commands(body.commands, body.documents)] == ["bash", "mpiexec"]


def test_a_script_file_is_no_inner_shell() -> None:
    body = scan_commands("bash -eu -- ./a <<END\nmpiexec ./a\nEND\n")
    assert [command.name for command in with_inner_commands(body.commands, body.documents)] == ["bash"]
