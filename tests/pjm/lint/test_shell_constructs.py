"""Tests of the constructs of a shell script that are open at a place."""

from __future__ import annotations

import sys
from types import FrameType

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


def test_a_closer_without_an_opener_searches_nothing() -> None:
    constructs = OpenConstructs("")
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        for line in range(300):
            constructs.open("if", line, 1)
        for _ in range(300):
            constructs.close("done")
    finally:
        sys.setprofile(None)
    assert calls < 2000  # 90,000 with a search
    constructs.close("fi")
    assert len(constructs.unclosed()) == 299


def test_a_closer_ends_constructs_that_are_open_within() -> None:
    constructs = OpenConstructs("")
    for line, opener in enumerate(("if", "for", "while", "case"), 1):
        constructs.open(opener, line, 1)
    constructs.close("done")  # of while: case is open within it
    constructs.close("fi")
    assert [construct.opener for construct in constructs.unclosed()] == ["for", "case"]
    constructs.close("done")
    assert [construct.opener for construct in constructs.unclosed()] == ["for", "case"]
