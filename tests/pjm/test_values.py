"""Tests of the parsers of option values: accepted values, refused values with reasons, and arbitrary text."""

from __future__ import annotations

import re
from typing import Any, Callable, Optional, Tuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fugaku_gpt.pjm import values
from fugaku_gpt.pjm.options import OPTIONS, SPELLINGS
from fugaku_gpt.pjm.values import (
    Elapse,
    NodeShape,
    StepParameters,
    expand_path,
    format_elapse,
    has_placeholder,
    parse_axes,
    parse_bulk,
    parse_condition,
    parse_count,
    parse_elapse,
    parse_flags,
    parse_limit,
    parse_name,
    parse_node,
    parse_shape,
    parse_size,
    parse_step,
    parse_switch,
    parse_vnode,
    parse_volumes,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("30", 30), ("2:30", 150), ("10:0", 600), ("1:00:00", 3600), ("144:00:00", 518400), ("90:00", 5400)),
        *(("30s", 30), ("2m30s", 150), ("1h0m0s", 3600), ("1H2M3S", 3723), ("unlimited", None), (" 60 ", 60)),
    ],
)
def test_a_fixed_time(text: str, seconds: Optional[int]) -> None:
    assert parse_elapse(text) == Elapse(seconds, seconds)


@pytest.mark.parametrize(
    ("text", "minimum", "maximum"),
    [
        *(
            ("2:30-5:00", 150, 300),
            ("2:00:00-", 7200, None),
            ("600-unlimited", 600, None),
            ("1h0m0s-2h0m0s", 3600, 7200),
        ),
        ("1-00:00:00", 1, 0),  # a day to Slurm
    ],
)
def test_a_range_of_times(text: str, minimum: int, maximum: Optional[int]) -> None:
    assert parse_elapse(text) == Elapse(minimum, maximum, is_range=True)


@pytest.mark.parametrize("text", ["", "1:2:3:4", "1.5", "ten", "-5", "unlimited-", "1:", ":1", "\u0663", "1-2-3"])
def test_an_invalid_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_elapse(text)


@given(st.integers(0, 10**9))
def test_a_formatted_time_is_parsed_back(seconds: int) -> None:
    assert parse_elapse(format_elapse(seconds)) == Elapse(seconds, seconds)


def test_a_placeholder_is_refused_as_a_placeholder() -> None:
    with pytest.raises(ValueError, match="placeholder, which pjsub does not replace"):
        parse_elapse("${ELAPSE}")
    for text in ("$N", "${N}", "$(id)", "`id`", "{{n}}", "@n@", "%(NODE)s", "<n>", "[NODES]"):
        assert has_placeholder(text), text
    for text in ("a$", "%j.out", "user@example.org", "/vol0004", "1<2", "8x8x8:torus"):
        assert not has_placeholder(text), text


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("12", NodeShape((12,))),
        ("4x4", NodeShape((4, 4))),
        ("8x8x8:torus:strict-io", NodeShape((8, 8, 8), "torus", "strict-io")),
        ("8x8x8:strict:torus", NodeShape((8, 8, 8), "torus", "strict")),
        ("2x3x2:io-exclusive:mesh", NodeShape((2, 3, 2), "mesh", "", "io-exclusive")),
        ("16:noncont:no-io-exclusive", NodeShape((16,), "noncont", "", "no-io-exclusive")),
    ],
)
def test_a_node_shape(text: str, shape: NodeShape) -> None:
    assert parse_node(text) == shape


def test_a_shape_has_a_number_of_nodes() -> None:
    assert parse_node("4x6x16:torus").count == 384


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        *(("0", "not a shape"), ("4X4", "not a shape"), ("2x2x2x2", "not a shape"), ("4x", "not a shape")),
        *(("12:tours", "unknown suffix :tours"), ("12:torus:mesh", "exclude each other"), ("", "not a shape")),
        ("9" * 16, "not a shape"),
    ],
)
def test_an_invalid_node_shape_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_node(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("28Gi", 28 * 2**30), ("23GiB", 23 * 2**30), ("64KiB", 65536), ("1Ti", 2**40), ("1Pi", 2**50)),
        *(("100", 100 * 2**20), ("10G", 10**10), ("5M", 5 * 10**6), ("2mi", 2**21)),
    ],
)
def test_a_size_in_bytes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_a_size_without_a_unit_has_the_default_unit() -> None:
    assert parse_size("2", bare=1) == 2


@pytest.mark.parametrize("text", ["", "Gi", "1.5Gi", "1Xi", "-1Gi", "1 0Gi"])
def test_an_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text)


def test_a_limit_may_be_unlimited() -> None:
    assert parse_limit("unlimited") is None
    assert parse_limit("1024", parse_count) == 1024


def test_switch_flags_and_axes() -> None:
    assert (parse_switch("on"), parse_switch("off")) == (True, False)
    assert parse_flags("b, e,s", "besr") == ("b", "e", "s")
    assert parse_axes("YXZ", 3) == parse_axes("YXZ") == "YXZ"
    assert parse_shape("2x3") == (2, 3)
    for parser, text in ((parse_switch, "1"), (lambda text: parse_flags(text, "bes"), "b,x"), (parse_axes, "XX")):
        with pytest.raises(ValueError, match="not"):
            parser(text)
    for text, dims in (("XY", 3), ("XYZ", 2), ("X", 1)):
        with pytest.raises(ValueError):
            parse_axes(text, dims)


def test_virtual_nodes() -> None:
    assert parse_vnode("2") == {"count": "2"}
    assert parse_vnode("2(core=4;mem=1Gi)") == {"count": "2", "core": "4", "mem": "1Gi"}
    assert parse_vnode("(core=1)") == {"count": "1", "core": "1"}
    for text in ("2(", "()", "", "2(core)"):
        with pytest.raises(ValueError, match="not a number of virtual nodes"):
            parse_vnode(text)


def test_volumes_have_a_leading_slash() -> None:
    assert parse_volumes("/vol0004:/vol0003") == ("/vol0004", "/vol0003")
    for text in ("vol0004", "/vol0004:", "/vol0004,/vol0003:x"):
        with pytest.raises(ValueError, match="joined by colons"):
            parse_volumes(text)


def test_bulk_numbers() -> None:
    assert parse_bulk("0-9") == (0, 9)
    for text in ("9", "9-0", "0-1000000", "a-b", "-9"):
        with pytest.raises(ValueError, match="bulk"):
            parse_bulk(text)


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("sn=0", StepParameters(number=0)),
        ("jid=12,sn=1", StepParameters(12, None, 1)),
        ("jnam=chain,sn=2,sd=NONE", StepParameters(None, "chain", 2, "NONE", "NONE")),
        ("jid=1,sn=2,sd=ec==0:one:1", StepParameters(1, None, 2, "ec==0:one:1", "ec==0", "one", (1,))),
        ("jid=1,sd=pc!=0:after:0:1", StepParameters(1, None, None, "pc!=0:after:0:1", "pc!=0", "after", (0, 1))),
        ("jid=1,sd=ec==1,75:all", StepParameters(1, None, None, "ec==1,75:all", "ec==1,75", "all")),
    ],
)
def test_step_parameters(text: str, step: StepParameters) -> None:
    assert parse_step(text) == step


@pytest.mark.parametrize("text", ["", "0-9", "jid=x", "sn=1,sd=ec=0", "sd=ec==0:some", "jid=1,foo=2", "sd=ec==0:one:x"])
def test_invalid_step_parameters_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_step(text)


def test_conditions() -> None:
    assert parse_condition("ec!=0") == ("ec", "!=", (0,))
    assert parse_condition("ec==75,-1") == ("ec", "==", (75, -1))
    assert parse_condition("none") is None
    with pytest.raises(ValueError, match="condition"):
        parse_condition("xx==0")
    assert parse_condition("ec==" + 15 * "9") == ("ec", "==", (10**15 - 1,))
    with pytest.raises(ValueError, match="condition"):
        parse_condition("ec==1," + 16 * "9")


def test_job_names() -> None:
    assert parse_name("a" + "b" * 62) == "a" + "b" * 62
    for text in ("a" * 64, "1job", "", "a/b", "a b", "j\u00f6b", "a;b", "a\n"):
        with pytest.raises(ValueError, match="job name"):
            parse_name(text)


def test_metacharacters_of_output_paths() -> None:
    assert expand_path("%n.%J.%j.out", "239", "job", "239[1]", bulk=1) == "job.239[1].239.out"
    assert expand_path("%b-%s-%%j-%x", "240", step=3) == "-3-%j-%x"
    assert expand_path("%J", "238") == "238"


def test_every_spelling_belongs_to_a_single_option() -> None:
    spellings = [spelling for option in OPTIONS for spelling in option.spellings]
    assert len(spellings) == len(set(spellings)) == len(SPELLINGS)
    assert len({option.name for option in OPTIONS}) == len(OPTIONS)
    assert all(re.fullmatch(r"-[A-Za-z]|--[A-Za-z][a-zA-Z-]+", spelling) for spelling in spellings)


_PARSERS: Tuple[Callable[[str], Any], ...] = (
    *(parse_axes, parse_bulk, parse_condition, parse_count, parse_elapse, parse_limit, parse_name, parse_node),
    *(parse_shape, parse_size, parse_step, parse_switch, parse_vnode, parse_volumes),
)
_ALMOST_VALID = st.text("0123456789:-xhmsGiTorustic=,;()ecpnd!<>_./unlmedvjJab% \u0663\u00b2", max_size=30)


@pytest.mark.slow
@given(st.one_of(st.text(), _ALMOST_VALID, st.text("19", min_size=900)))
def test_any_text_is_parsed_or_refused_with_a_reason(text: str) -> None:
    for parser in (*_PARSERS, lambda text: parse_flags(text, "bes"), lambda text: parse_axes(text, 3)):
        try:
            parser(text)
        except ValueError as error:
            assert 0 < len(str(error)) < 1000
    expand_path(text, "1", text)
    has_placeholder(text)


def test_all_parsers_are_tested() -> None:
    parser_names = {name for name in vars(values) if name.startswith("parse_")}
    assert parser_names == {parser.__name__ for parser in _PARSERS} | {"parse_flags"}


@pytest.mark.parametrize(("length", "shown"), [(60, "x" * 60), (61, "x" * 57 + "..."), (500, "x" * 57 + "...")])
def test_a_long_value_is_cut_in_the_message(length: int, shown: str) -> None:
    with pytest.raises(ValueError, match=f"^'{re.escape(shown)}' is not "):
        parse_count("x" * length)
