"""Tests of filter expressions: their values, and the positions and messages of mistakes."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any, Dict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fugaku_gpt.config.expression import parse_expression
from fugaku_gpt.errors import ConfigError
from fugaku_gpt.limits import EXPONENT, EXPRESSION, EXPRESSION_LEVELS

ROW: Dict[str, Any] = {
    "layout.dp": 4,
    "layout.tp": 2,
    "node.tcmalloc": True,
    "node.freq_mhz": None,
    "training.dtype": "float32",
    "training.lr": 2e-4,
    "job.elapse": 5400.0,
    "job.volumes": ("/vol0004", "/vol0005"),
}


def holds(text: str) -> bool:
    return parse_expression(text, "s.yaml:3: where", ROW).holds(ROW.__getitem__, "row dp4")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("layout.dp * layout.tp <= 8 and not node.tcmalloc", False),
        ("layout.dp * layout.tp <= 8 or node.freq_mhz < 3", True),  # the second is never asked
        ("not node.tcmalloc or layout.dp == 4 and layout.tp == 2", True),
        ("not (node.tcmalloc or layout.dp == 4)", False),
        ("1 + 2 * 3 == 7 and (1 + 2) * 3 == 9 and 7 - 2 - 1 == 4 and 8 / 4 / 2 == 1", True),
        ("-layout.dp == -4 and - -2 == +2 and 7 % 4 == 3 and 1/2 == 0.5", True),
        ("1 <= layout.tp < layout.dp < 5", True),
        ("layout.tp not   in (3, 4)", True),
        ("'a  b' != 'a b'", True),  # blanks count within a text
        ("1 <= layout.tp > layout.dp", False),
        ("layout.tp in (1, 2, 4) and layout.tp not in [3] and layout.tp not in ()", True),
        ("layout.tp in (2,)", True),
        ("'/vol0004' in job.volumes and '/vol' not in job.volumes", True),
        ("training.dtype == \"float32\" and '32' in training.dtype and 'a' < 'b'", True),
        ("node.freq_mhz == null and training.lr != null and null == none", True),
        ("node.freq_mhz != 2200", True),
        ("job.elapse == 1:30:00 and job.elapse > 5:00 and training.lr == 2e-4", True),
        ("node.tcmalloc == true and not false", True),
        ("1_000 == 1e3", True),
        ("  node.tcmalloc ", True),
        ("layout.tp\n  == 2\tand (node.tcmalloc)", True),
        ("2 ** 10 == 1024 and -2 ** 2 == -4 and 2 ** 3 ** 2 == 512 and layout.dp ** -1 == 0.25", True),
        ("'\\d' == '\\d' and 'é\n' in 'né\n' and 007 == 7 and 1_ == 1", True),  # no literals of Python's
        ("1 in(1,)and'a'in'ab'", True),
    ],
)
def test_expressions_have_the_expected_value(text: str, expected: bool) -> None:
    assert holds(text) is expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layuot.dp == 1", r"^s.yaml:3: where: 'layuot.dp == 1', character 1: unknown name layuot.dp; did you mean"),
        ("layout.dp == 1 and tp > 1", "character 20: unknown name tp; did you mean layout.tp"),
        ("training.dtype == float32", "character 19: unknown name float32; a text stands in quotes"),
        ("layout.dp = 1", "character 11: '=' means nothing here; equal is =="),
        ("layout.dp == 1 && node.tcmalloc", "character 16: '&' means nothing here; write and"),
        ("training.dtype == 'float32", "character 19: .*the text has no end"),
        ("layout.dp == ", "character 14: the expression ends where a value is expected"),
        ("", "the expression ends"),
        ("(layout.dp in [1, 2", "character 15: '\\[' has no '\\]'"),
        ("(layout.dp == 1", "character 1: '\\(' has no '\\)'"),
        ("layout.dp == 1)", "character 15: '\\)' is not expected here"),
        ("layout.dp 1", "character 11: '1' is not expected"),
        ("()", "is a list, neither true nor false"),
        ("layout.dp not 1", "not stands before what it negates"),
        ("layout.dp == 1 and", "character 19: the expression ends"),
        ("(layout.dp == 1 node.tcmalloc) and true", "character 17: 'node.tcmalloc' is not expected here"),
        ("layout.dp (1)", "character 11: '\\(' is not expected here"),
        ("job.volumes[0] == 1", "character 12: '\\[' is not expected here"),
        ("(layout.dp, 2]", "character 1: '\\(' has no '\\)'"),
        ("layout.dp // 2 == 2", "character 12: '/' stands where a value is expected"),
        ("layout.dp == not 1", "character 14: 'not' stands where a value is expected"),
        ("layout.dp in (*job.volumes, 1)", "character 15: '\\*' stands where a value is expected"),
        ("*job.volumes", "character 1: '\\*' stands where a value is expected"),
        ("(, 1)", "character 2: ',' stands where a value is expected"),
        ("layout.tp in 1, 2", "in stands before a list or a text, not before the number 1"),
        ("1 if node.tcmalloc else 2", "unknown name if"),
        ("layout.dp is 4", "unknown name is"),
        ("layout.dp", "is the number 4, neither true nor false .in row dp4"),
        ("layout.dp and true", "and is of true and false, not of the number 4"),
        ("not layout.dp", "not is of true and false"),
        ("node.freq_mhz < 2200", r"null \(not set\) and the number 2200 have no order .in row dp4"),
        ("node.tcmalloc + 1 == 2", r"\+ is of numbers, not of true"),
        ("-training.dtype == 1", "a sign is of numbers, not of the text 'float32'"),
        ("training.dtype == 32", "the text 'float32' and the number 32 are never equal"),
        ("layout.dp / (layout.tp - 2) == 1", "character 11: division by 0"),
        ("layout.dp % 0 == 1", "division by 0"),
        ("layout.dp in 4", "in stands before a list or a text, not before the number 4"),
        ("layout.dp in job.elapse", "not before the number 5400"),
        ("9" * 101 + " == 1", "expected a number"),
        ("job.elapse < 1:75:00", "minutes and seconds below 60"),
        ("1e300 * 1e300 == 1", "the number is too large"),
        (f"2 ** {EXPONENT.value + 1} == 1", "character 3: the exponent 65 is not from -64 to 64"),
        ("layout.dp ** -65 == 1", "the exponent -65 is not from -64 to 64"),
        ("9 ** 9 ** 9 == 1", "character 3: the exponent 3.8742e.08 is not from"),
        ("1e99 ** 4 == 1", "character 6: the number is too large"),
        ("9" * 100 + " ** 64 == 1", "the number is too large"),
        ("0 ** -1 == 1", "character 3: division by 0"),
        ("(-2) ** 0.5 == 1", "-2 has no power 0.5; a negative number takes whole exponents"),
        ("'a' * 9 == 'a'", r"\* is of numbers, not of the text 'a'"),
        ("1e400 == 1", "character 1: 1e400: the number is too large"),
        ("(" * 60 + "true" + ")" * 60, f"more than {EXPRESSION_LEVELS}"),
        ("not " * 60 + "true", "levels"),
        ("1 == " + "-" * 60 + "1", "levels"),
        ("1 + " * 400 + "1 == 1", "more than 50 levels of signs and operators; brackets around groups"),
        ("-" * 1990 + "1 == 1", "levels"),
        ("not " * 490 + "true", "levels"),
        ("[" * 1990, "levels of brackets"),
        ("true and " * 300 + "true", "an expression of 2704 characters; at most 2,000 characters"),
        ("__import__('os')", "unknown name __import__"),
        ("layout.dp.__class__ == 1", "unknown name layout.dp.__class__"),
        ("lambda: 1", "':' means nothing here"),
        ("a\x00b", "unknown name a|means nothing"),
        ("é == 1", "'é' means nothing here"),
    ],
)
def test_mistakes_are_reported_with_their_position(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        holds(text)


@pytest.mark.slow
@given(st.text(max_size=60) | st.text("()[]+-*/%<>=!., 0123456789'andortilyu_e", max_size=60))
def test_any_text_is_an_expression_or_a_named_mistake(text: str) -> None:
    try:
        value = holds(text)
    except ConfigError as error:
        assert str(error).startswith("s.yaml:3: where: ")
        return
    if len(text) < EXPRESSION_LEVELS.value - 1:  # and so has room for two levels more
        assert holds(f"not ({text})") is not value


_PIECES = [
    *"()[],+-*/%<>=9",
    " ** ",
    " not ",
    " and ",
    " or ",
    " in ",
    "'a'",
    "1:00",
    "1e300",
    "layout.dp",
    "node.tcmalloc",
]


@pytest.mark.slow
@given(
    st.text(max_size=EXPRESSION.value) | st.lists(st.sampled_from(_PIECES), max_size=EXPRESSION.value // 8).map("".join)
)
def test_the_work_for_any_text_is_bounded_by_the_length(text: str) -> None:
    """Calls of functions are counted: a limit on them holds on a machine of any speed."""
    calls: "Counter[str]" = Counter()

    def count(_: FrameType, event: str, __: object) -> None:
        calls[event] += 1

    sys.setprofile(count)
    try:
        holds(text)
    except ConfigError as error:
        assert str(error).startswith("s.yaml:3: where: ")
    finally:
        sys.setprofile(None)
    assert calls["call"] + calls["c_call"] < 1000 + 200 * len(text)


@pytest.mark.parametrize(
    ("text", "value"), [("-".join(["1"] * 45), -43), ("(" * 49 + "1" + ")" * 49, 1), ("- " * 45 + "1", -1)]
)
def test_expressions_just_below_a_limit_are_evaluated(text: str, value: int) -> None:
    assert holds(f"{text} == {value}") and not holds(f"{text} == {value + 1}")


_NUMBERS = st.integers(0, 50)


@pytest.mark.slow
@given(_NUMBERS, _NUMBERS, _NUMBERS, st.sampled_from(["+", "-", "*"]), st.sampled_from(["+", "-", "*"]))
def test_arithmetic_binds_as_in_mathematics(a: int, b: int, c: int, first: str, second: str) -> None:
    apply = {"+": lambda x, y: x + y, "-": lambda x, y: x - y, "*": lambda x, y: x * y}
    if second == "*" and first != "*":
        expected = apply[first](a, b * c)
    else:
        expected = apply[second](apply[first](a, b), c)
    assert holds(f"{a} {first} {b} {second} {c} == {expected}")


def test_an_expression_lists_each_name_once() -> None:
    expression = parse_expression("a.b % 2 == 0 and not (c in [1, a.b])", "here", ["a.b", "c"])
    assert expression.names == ["a.b", "c"]


def test_a_division_or_power_that_may_fail_is_recognised() -> None:
    assert not parse_expression("a / 2 == 1 and a % 2 == 0 and a ** 2 == 4", "s", ["a"]).may_divide_by_zero
    for text in ("1 / a == 1", "1 % (a - 1) == 0", "a / 0 == 1", "a ** -1 == 1", "2 ** a == 4"):
        assert parse_expression(text, "s", ["a"]).may_divide_by_zero


def test_conjuncts_are_the_terms_from_left_to_right() -> None:
    terms = parse_expression("a == 1 and (b == 2 and not c) and (a or b)", "s", ["a", "b", "c"]).conjuncts
    assert [term.names for term in terms] == [["a"], ["b"], ["c"], ["a", "b"]]
    assert [term.holds({"a": 1, "b": 3, "c": False}.__getitem__) for term in terms[:3]] == [True, False, True]
