"""Tests of the constructs of a shell script that are open at a place."""

from __future__ import annotations

from fugaku_gpt.pjm.lint.shell_constructs import OpenConstructs


def test_patterns_may_stand_where_case_is_the_innermost_open_construct() -> None:
    constructs = OpenConstructs("")
    assert not constructs.is_in_case
    constructs.open("case", 1, 1)
    assert constructs.is_in_case
    constructs.open("if", 2, 1)
    assert not constructs.is_in_case
    constructs.close("fi")
    assert constructs.is_in_case
    constructs.close("esac")
    assert not constructs.is_in_case
