"""Tests of the ends of quotes and expansions, and of the text inside."""

from __future__ import annotations

import pytest

from fugaku_gpt.pjm.lint.shell_quotes import end_of_expansion, unescape


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("plain", "plain"),
        ('a \\"b\\" \\$c \\`d\\` \\\\e', 'a "b" $c `d` \\e'),
        ("a\\\nb", "ab"),  # an escaped end of a line
        ("a\\nb", "a\\nb"),  # a backslash before any other character stays
    ],
)
def test_backslashes_in_double_quotes(text: str, inside: str) -> None:
    assert unescape(text) == inside


@pytest.mark.parametrize(
    "expansion",
    [
        "`a \\` b`", '"a"', '"a \\" b"', '"$(echo ")")"', '"${a:-"b"}"', '"`a`"', "$(a)", "$(a (b) c)", "$(echo ')')",
        "$(a # don't )\n)", "${a}", "${a:-{b}}", "${a:-\\}}", "$(a \\) b)", '$(a "b)" c)', "$(a `b)` c)", '"$a$"',
    ],
)  # fmt: skip
def test_an_expansion_ends_where_a_shell_ends_it(expansion: str) -> None:
    assert end_of_expansion(expansion, 0, 0) == len(expansion)
    assert end_of_expansion(f'x {expansion}) }}" `', 2, 0) == len(expansion) + 2
    assert end_of_expansion(expansion[:-1], 0, 0) == -1


@pytest.mark.parametrize("expansion", ["$(a)", "${a}", "`a`", '"a"'])
def test_too_deep_a_nesting_counts_as_unclosed(expansion: str) -> None:
    assert end_of_expansion(expansion, 0, 40) == len(expansion) and end_of_expansion(expansion, 0, 41) == -1
    assert end_of_expansion(f'$("{expansion}")', 0, 37) > 0
    assert end_of_expansion('$("$(a)")', 0, 39) == -1
