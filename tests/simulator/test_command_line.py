"""Tests of command lines: options are read as they were written, and no input makes the parsers fail."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fugaku_gpt.pjm.lexer import _split_option
from fugaku_gpt.pjm.options import SPELLINGS
from fugaku_gpt.simulator.command_line import check_directives, merge_options, parse_command_line, with_pjm_prefix
from fugaku_gpt.simulator.pjstat import BadArguments, parse_options
from fugaku_gpt.simulator.protocol import Invocation
from fugaku_gpt.simulator.request import build_request
from fugaku_gpt.simulator.settings import Settings
from fugaku_gpt.simulator.site import Refusal

TEXT = st.text(st.characters(blacklist_categories=["Cs"]), max_size=20)
WORD = st.one_of(st.sampled_from(sorted(SPELLINGS)), TEXT, st.sampled_from(["node=1", "0-1", "jid=1,sd=ec==0", "--"]))


@settings(max_examples=300, deadline=None)
@given(st.lists(WORD, max_size=8))
@pytest.mark.slow
def test_any_command_line_is_read_or_refused(arguments: "list[str]") -> None:
    try:
        line = parse_command_line(arguments)
    except Refusal as refusal:
        assert 0 < refusal.code < 100
        return
    try:
        build_request(
            line.options,
            Settings(),
            name="job.sh",
            directory="/",
            text="true\n",
            environment={},
            umask=0o022,
            timestamp=0.0,
        )
    except Refusal as refusal:
        assert 0 < refusal.code < 100


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(TEXT, st.sampled_from(["-H", "day=3", "--choose", "jid,st", "--filter", "-vE"])), max_size=6))
def test_any_pjstat_is_read_or_refused(arguments: "list[str]") -> None:
    try:
        parse_options(arguments, 1e9)
    except BadArguments as error:
        assert 200 < error.code < 300


VALUE = st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF, blacklist_characters=",()${}`"), min_size=1)


@pytest.mark.slow
@given(VALUE, VALUE)
def test_arguments_come_through_whatever_quotes_they_have(comment: str, name: str) -> None:
    # an option of pjsub is no argument, alone or with its own argument behind it (-m0)
    assume(not {_split_option(text)[0] for text in (comment, name)} & set(SPELLINGS))
    line = parse_command_line(["--comment", comment, "-o", name, "script.sh", "-x"])
    assert (line.options["comment"], line.options["out"]) == (comment, name)
    assert line.scripts == ("script.sh", "-x")


@pytest.mark.parametrize("word", ["-m", "-m0", "-Lnode=2", "--name=x"])
def test_an_option_is_no_argument_of_the_option_before_it(word: str) -> None:
    with pytest.raises(Refusal, match="Option needs an argument: -o"):
        parse_command_line(["-o", word, "script.sh"])


def test_forms_of_options() -> None:
    line = parse_command_line(
        ["-Lnode=2", "-js", "--name=abc", "-z", "jid", "-x", "A=1,B=2", "-L", "elapse=1:00", "a", "b"]
    )
    assert line.options["resources"] == {"node": "2", "elapse": "1:00"}
    assert line.options["join"] is True and line.options["stats"] is True
    assert (line.options["name"], line.options["quiet"]) == ("abc", "jid")
    assert line.options["environment"] == {"A": "1", "B": "2"}
    assert line.scripts == ("a", "b")
    assert parse_command_line(["-z", "job.sh"]).scripts == ("job.sh",)


def test_a_typed_option_wins_over_an_opposite_option_in_the_script() -> None:
    merged = merge_options(
        {"stats": True, "restart": True, "mpi": {"proc": "4"}}, {"stats_nodes": True, "mpi": {"shape": "1"}}
    )
    assert merged == {"restart": True, "stats_nodes": True, "mpi": {"proc": "4", "shape": "1"}}


def test_another_prefix_of_directives() -> None:
    from fugaku_gpt.pjm.lexer import read_script

    script = read_script(with_pjm_prefix("#!/bin/sh\n#PJM -N one\n#XYZ -N two\n", "#XYZ"))
    assert script.options["name"] == "two"
    assert check_directives(script) == []


def test_a_call_is_plain_data() -> None:
    call = Invocation("pjsub", ["-z"], "/", {"A": "b"}, 0o22, None)
    assert Invocation(**vars(call)) == call
