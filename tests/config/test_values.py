"""Tests that values are read as they are written, whatever YAML 1.1 would make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fugaku_gpt.config import load_run_config, valid_keys
from fugaku_gpt.config.values import format_duration, parse_duration
from fugaku_gpt.errors import ConfigError

TEXTS = ("model.name", "job.name", "data.paths")  # any text is valid
PATHS = ("job.rank_map_file", "job.transfer", "job.transfer_dirs", "job.tarball", "job.profile", "job.template")


def written(tmp_path: Path, text: str) -> Any:
    file = tmp_path / "run.yaml"
    file.write_text(text, encoding="utf-8")
    return load_run_config(file)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1:00:00", 3600), ("01:00:00", 3600), ("24:00:00", 86400), ("3600", 3600), ("10:00", 600), ("1h30m", 5400),
     ("90s", 90), ("'2:00:00'", 7200), ("1d", 86400), ("0:00:01", 1)],
)  # fmt: skip
def test_durations(tmp_path: Path, text: str, seconds: float) -> None:
    assert (
        written(tmp_path, f"job: {{elapse: {text}}}" if "'" in text else f"job:\n  elapse: {text}").job.elapse
        == seconds
    )


@pytest.mark.parametrize(
    "text",
    ["1:60:00", "1:00:60", "1-00:00:00", "soon", "-5", "0", "1:2:3:4", "nan", "inf",
     "9" * 400 + ":00:00", "9" * 5000 + ":00:00", "9" * 400 + "h", "''", "1:00 00"],
)  # fmt: skip
def test_invalid_durations_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"run.yaml:2: job.elapse: .*valid: seconds or H:MM:SS, above 0, or null"):
        written(tmp_path, f"job:\n  elapse: {text}")


@given(st.integers(0, 10**7))
def test_a_duration_is_read_back_as_it_was_written(seconds: int) -> None:
    assert parse_duration(format_duration(seconds)) == seconds


@pytest.mark.parametrize(("text", "value"), [("2e-4", 2e-4), ("1E-3", 1e-3), (".5", 0.5), ("1", 1.0), ("'3e-4'", 3e-4)])
def test_numbers(tmp_path: Path, text: str, value: float) -> None:
    assert written(tmp_path, f"training: {{lr: {text}, min_lr: 0}}").training.lr == value


@pytest.mark.parametrize(("text", "value"), [("0777", 777), ("1_000", 1000), ("1e3", 1000), ("12", 12)])
def test_integers(tmp_path: Path, text: str, value: int) -> None:
    assert written(tmp_path, f"training:\n  iterations: {text}").training.iterations == value


@pytest.mark.parametrize(
    "text",
    ["1.5", "ten", "0x10", "true", "[1, 2]", "{a: 1}", "''", "0", "-3", "null",
     "1e400", "1e19", "9223372036854775808", "nan", "0" * 5000 + "1"],
)  # fmt: skip
def test_a_value_that_is_no_positive_integer_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="run.yaml"):
        written(tmp_path, f"training:\n  iterations: {text}")


@pytest.mark.parametrize(
    ("text", "value"), [("yes", True), ("on", True), ("True", True), ("no", False), ("off", False), ("false", False)]
)
def test_booleans(tmp_path: Path, text: str, value: bool) -> None:
    assert written(tmp_path, f"node:\n  tcmalloc: {text}").node.tcmalloc is value


@pytest.mark.parametrize("text", ["no", "1:00:00", "12", "2e-4", "'null'"])
def test_a_text_stays_a_text(tmp_path: Path, text: str) -> None:
    assert written(tmp_path, f"job:\n  name: {text}").job.name == text.strip("'")


def test_null_leaves_an_optional_field_unset(tmp_path: Path) -> None:
    config = written(tmp_path, "node: {freq_mhz: null, threads_per_rank: ~}\njob:\n  elapse:\n")
    assert (config.node.freq_mhz, config.node.threads_per_rank, config.job.elapse) == (None, None, None)


def test_lists_and_a_single_item() -> None:
    config = load_run_config(overrides=["data.paths=[a, 'b c']", "data.weights=[1, 2.5e-1]", "data.split=[8, 1, 1]"])
    assert config.data.paths == ("a", "b c") and config.data.weights == (1.0, 0.25)
    assert load_run_config(overrides=["data.paths=one"]).data.paths == ("one",)


KEYS = [key for key in valid_keys() if key not in TEXTS]
VALUES = st.text(max_size=30) | st.from_regex(r"[-+0-9_.:eEdhms ]{1,30}", fullmatch=True)


@settings(max_examples=300, deadline=None)
@given(key=st.sampled_from(KEYS), value=VALUES)
def test_a_value_of_any_text_is_accepted_or_refused_with_the_key(key: str, value: str) -> None:
    try:
        load_run_config(overrides=[f"{key}={value}"])
    except ConfigError as error:
        assert key in str(error) or "not valid YAML" in str(error) or "levels" in str(error)


@pytest.mark.parametrize("key", [key for key in KEYS if key not in PATHS])
def test_a_wrong_value_of_any_key_is_reported_with_file_line_key_and_valid_values(tmp_path: Path, key: str) -> None:
    section, _, leaf = key.partition(".")
    with pytest.raises(ConfigError) as caught:
        written(tmp_path, f"# a comment\n{section}:\n  {leaf}: certainly wrong\n")
    assert str(caught.value).startswith(f"{tmp_path / 'run.yaml'}:3: {key}: 'certainly wrong': ")
    assert "; valid: " in str(caught.value)


@pytest.mark.parametrize("key", PATHS)
@pytest.mark.parametrize("value", ["a\\nb", "\\0", "tab\\there", "\\x7f"])
def test_a_path_with_control_characters_is_refused(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match="a path without control characters"):
        load_run_config(overrides=[f'{key}=["{value}"]' if "transfer" in key else f'{key}="{value}"'])


@pytest.mark.parametrize("key", valid_keys())
def test_the_nearest_name_of_any_misspelt_key_is_offered(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        written(tmp_path, f"{key}x: 1")
    assert f"run.yaml:1: {key}x: unknown key (value '1'); did you mean {key}?" in str(caught.value)


def test_none_is_a_value_where_the_field_has_it(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("node: {large_pages: none, paging_policy: none}\n")
    node = load_run_config(file).node
    assert node.large_pages == "none" and node.paging_policy is None
    assert load_run_config(overrides=["node.large_pages=none"]).node.large_pages == "none"
    assert load_run_config(overrides=["node.large_pages=null"]).node.large_pages is None
