"""Tests of the words of a directive line."""

from __future__ import annotations

from typing import Tuple

import pytest

from fugaku_gpt.pjm.shell_words import split_line, split_list


@pytest.mark.parametrize(
    ("text", "tokens", "is_unbalanced", "substitutions"),
    [
        (" -L  node=1\t-g a # b", ("-L", "node=1", "-g", "a"), False, ()),
        ("-L a#b", ("-L", "a#b"), False, ()),
        ("'a b'c \"d 'e'\"", ("a bc", "d 'e'"), False, ()),
        ('"a \\" b" a\\ b', ('a " b', "a b"), False, ()),
        ('"a \\\\ \\n"', ("a \\ \\n",), False, ()),
        ("'a b", ("a", "b"), True, ()),  # a quote that is never closed counts as absent
        ('"a b', ("a", "b"), True, ()),
        ("a\\", ("a\\",), False, ()),
        ("x=$(a b)c d", ("x=$(a b)c", "d"), False, ("x=$(a b)c",)),
        ("$(a (b) c) d", ("$(a (b) c)", "d"), False, ("$(a (b) c)",)),
        ("$(a) ${b c} `d e`", ("$(a)", "${b c}", "`d e`"), False, ("${b c}", "`d e`")),
        ("{{ a b }} {% c %}d {e f}", ("{{ a b }}", "{% c %}d", "{e", "f}"), False, ("{{ a b }}", "{% c %}d")),
        ("$(a b", ("$(a", "b"), False, ()),
        ("`a b $c", ("`a", "b", "$c"), False, ()),
        ("`a $(b c", ("`a", "$(b", "c"), False, ()),
        ("", (), False, ()),
    ],
)
def test_a_line_is_split_as_a_shell_splits_it(
    text: str, tokens: Tuple[str, ...], is_unbalanced: bool, substitutions: Tuple[str, ...]
) -> None:
    line = split_line(text)
    assert (line.tokens, line.unbalanced, line.substitutions) == (tokens, is_unbalanced, substitutions)


def test_a_long_substitution_is_none() -> None:
    short, long = "$(" + "a " * 2047 + ")", "$(" + "a " * 2047 + "b)"
    assert split_line(short).tokens == (short,) and len(split_line(long).tokens) > 1


@pytest.mark.parametrize(
    ("text", "items"),
    [("a", ["a"]), ("a=1,b=2", ["a=1", "b=2"]), ("a=(1,2),b", ["a=(1,2)", "b"]), ("a,,b,", ["a", "", "b", ""])],
)
def test_items_are_separated_by_commas_outside_of_parentheses(text: str, items: "list[str]") -> None:
    assert list(split_list(text)) == items
