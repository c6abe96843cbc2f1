"""Tests of the YAML tree: lines, quotes, and texts that must never bring the process down."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Callable, List

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from fugaku_gpt.config import dump_run_config, load_run_config
from fugaku_gpt.config.tree import (
    Scalar,
    Tree,
    _compose,
    _may_exceed_limits,
    check_structure,
    flatten,
    parse_override,
    parse_sections,
    parse_yaml,
)
from fugaku_gpt.errors import ConfigError
from fugaku_gpt.limits import YAML_LEVELS, cut


def test_scalars_keep_their_text_their_quotes_and_their_line() -> None:
    tree = parse_yaml("a: 1:00:00\nb:\n  c: 'no'\n  d: [0777, \"1_000\"]\n", "x.yaml")
    assert tree == {
        "a": Scalar("1:00:00", False, "x.yaml:1"),
        "b": {
            "c": Scalar("no", True, "x.yaml:3"),
            "d": [Scalar("0777", False, "x.yaml:4"), Scalar("1_000", True, "x.yaml:4")],
        },
    }


@given(st.text("aZ09_.+-:#,[]{}'\"&*!|>%@ ", max_size=6))
@example("1e-4")
@example("0x1F")
@example("2026-01-31")
@example("a...")
def test_a_value_of_the_command_line_is_parsed_as_yaml(text: str) -> None:
    def outcome(parse: Callable[[str], Tree]) -> object:
        try:
            return parse(text)
        except ConfigError as error:
            return str(error)

    assert outcome(lambda value: parse_override(f"a={value}")[1]) == outcome(
        lambda value: _compose(value, f"--set {cut(f'a={value}')}")
    )


def test_sections_and_dotted_keys_are_the_same_keys() -> None:
    nested = dict(flatten(parse_yaml("model: {layers: 2}\nlayout:\n  dp: 3\n", "x")))
    dotted = dict(flatten(parse_yaml("model.layers: 2\nlayout.dp: 3\n", "x")))
    assert {key: str(value) for key, value in nested.items()} == {"model.layers": "2", "layout.dp": "3"}
    assert nested.keys() == dotted.keys()


@pytest.mark.parametrize(
    "text", ["layout: {dp: 2}\nlayout.dp: 4", "layout.dp: 2\nlayout:\n  dp: 4", "layout.dp: 2\nlayout.dp: 4"]
)
def test_a_key_written_twice_in_either_way_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"run\.yaml:[23]: layout\.dp: written twice"):
        load_run_config(tmp_path / "run.yaml")


def test_a_tag_creates_no_object() -> None:
    marker = "!!python/object/apply:os.system ['echo harm']"
    with pytest.raises(ConfigError, match="training.lr"):
        load_run_config(overrides=[f"training.lr={marker}"])


DEEP = """
import sys
from fugaku_gpt.config import dump_run_config, load_run_config
from fugaku_gpt.errors import ConfigError
from fugaku_gpt.limits import YAML_LEVELS
try:
    load_run_config(overrides=["data.paths=" + sys.argv[1] * 200000])
except ConfigError as error:
    print(str(error)[-200:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("opening", ["[", "{a: ", "- "])
def test_text_nested_without_end_is_refused_and_does_not_end_the_process(opening: str) -> None:
    program = DEEP if opening != "- " else DEEP.replace('"data.paths="', '"data.paths=\\n"')
    done = subprocess.run([sys.executable, "-c", program, opening], stdout=subprocess.PIPE, check=False)
    assert done.returncode == 0 and f"more than {YAML_LEVELS}" in done.stdout.decode()


def test_levels_up_to_the_limit_are_read() -> None:
    def nested(levels: int) -> str:
        return "a=" + "[" * levels + "x" + "]" * levels

    parse_override(nested(YAML_LEVELS.value))
    with pytest.raises(ConfigError, match="levels"):
        parse_override(nested(YAML_LEVELS.value + 1))


def test_an_argument_of_the_command_line_that_is_not_utf_8_is_refused() -> None:
    argument = b"job.name=\xe9t\xe9".decode("utf-8", "surrogateescape")  # as from a Latin-1 terminal
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load_run_config(overrides=[argument])


@pytest.mark.parametrize("text", ["data.split: []", "training.lr: []"])
def test_an_empty_list_is_reported_with_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_run_config(tmp_path / "run.yaml")
    assert str(caught.value).startswith(f"{tmp_path}/run.yaml: {text}: ")


_LINES = st.one_of(
    st.sampled_from(
        ["model:", "layout:", "  dp: 2", "  paths:", "  - /a/b", "  name: ''", "  split: []", "  lr: 1e-4"]
    ),
    st.sampled_from(
        ["  x: 1:00:00", "  y: -3", "  z: a,b", "  - -", "  q: '", "  order: a: b", "  n:", "- 1", "  d: ~"]
    ),
    st.text("ab:-'[] #/1.,\t\r\x0b\x85", max_size=8),
)


@pytest.mark.slow
@given(lines=st.lists(_LINES, max_size=8))
@example(lines=["model:", "  paths:", "  - a", "  dp: 2", "layout:", "  order: tp,pp,dp"])
@example(lines=["model:", "  dp: 2", "  dp: 3"])
@example(lines=["model:\x0b  dp: 2"])
@example(lines=["model:", "  dp:", "layout:", "  dp: 1"])
def test_reading_lines_of_a_run_file_equals_reading_yaml(lines: List[str]) -> None:
    text = "".join(f"{line}\n" for line in lines)
    sections = parse_sections(text, "x.yaml")
    if sections:
        assert sections == _compose(text, "x.yaml")


def test_the_file_of_a_run_is_read_in_the_short_way() -> None:
    text = dump_run_config(load_run_config(preset="tiny", overrides=["data.paths=[/corpora/a, b]", "model.name=x"]))
    assert parse_sections(text, "config.yaml") == _compose(text, "config.yaml") != {}


@pytest.mark.slow
@given(prefixes=st.lists(st.text(" -?:[{", max_size=8), min_size=1, max_size=60))
@example(prefixes=["- " * number for number in range(30)])
@example(prefixes=[" " * number for number in range(60)])
def test_no_text_that_is_nested_deeply_passes_as_shallow(prefixes: List[str]) -> None:
    text = "".join(f"{prefix}a:\n" for prefix in prefixes)
    try:
        check_structure(text, "x.yaml")
    except ConfigError:
        assert _may_exceed_limits(text)
    except yaml.YAMLError:
        pass


@pytest.mark.parametrize(
    "text",
    ["a:\n  b: 1\n  b: 2\n", "a:\n  b: 1\na:\n  c: 2\n", "a:\n  b:\n  c: 1\n", "a:\n  b: 1", "  b: 1\n", "a: 1\n",
     "a:\n  - 1\n", "a:\n  b:\n"],
)  # fmt: skip
def test_a_text_that_is_not_written_like_the_file_of_a_run_is_left_to_yaml(text: str) -> None:
    assert parse_sections(text, "x.yaml") is None


def test_lists_quotes_and_lines_are_read_in_the_short_way() -> None:
    text = "a:\n  b: 1\n  c:\n  - 2\n  - 3\nd:\n  b: ''\n  e: []\n  f: 4.5e-6\n"
    assert parse_sections(text, "x.yaml") == {
        "a": {
            "b": Scalar("1", False, "x.yaml:2"),
            "c": [Scalar("2", False, "x.yaml:4"), Scalar("3", False, "x.yaml:5")],
        },
        "d": {"b": Scalar("", True, "x.yaml:7"), "e": [], "f": Scalar("4.5e-6", False, "x.yaml:9")},
    }
