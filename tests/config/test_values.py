"""Tests that values are read as they are written, whatever YAML 1.1 would make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Optional, Tuple, Union

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fugaku_gpt.config import load_run_config, valid_keys
from fugaku_gpt.config.values import (
    BadValue,
    coerce_scalar,
    describe_type,
    format_duration,
    is_optional,
    parse_duration,
    parse_float,
    parse_int,
    size_bytes,
)
from fugaku_gpt.errors import ConfigError

TEXTS = ("model.name", "job.name", "data.paths")  # any text is valid
PATHS = (
    *("job.rank_map_file", "job.transfer", "job.transfer_dirs", "job.tarball", "job.profile", "job.template"),
    *("training.eval_files", "checkpoint.keep_best"),  # the second is a name of a file
)


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


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1d2h3m4.5s", 93784.5), ("2h 5m", 7500), ("2d1h", 176400), ("90:00", 5400), ("1:30.5", 90.5), ("1:02:03", 3723),
     ("1_000", 1000), ("1.5e3", 1500), ("59:59:59", 215999)],
)  # fmt: skip
def test_each_unit_of_a_duration_counts(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00:00"), (59.9, "0:00:59"), (3661, "1:01:01"), (360_000, "100:00:00")]
)
def test_a_duration_is_written_in_seconds_of_two_digits(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("text", "size"), [("3Ki", 3 * 2**10), ("5Mi", 5 * 2**20), ("28Gi", 28 * 2**30), ("1Ti", 2**40)]
)
def test_a_size_is_in_powers_of_two(text: str, size: int) -> None:
    assert size_bytes(text) == size


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


@pytest.mark.parametrize("text", ["9223372036854775807", "-9223372036854775807", "-12", "+3", "9007199254740993"])
def test_integers_of_64_bits_are_exact(text: str) -> None:
    assert parse_int(text) == int(text)


@pytest.mark.parametrize("text", ["9223372036854775808", "-9223372036854775808", "1e19", "1.5", "1e-1", "1e999"])
def test_integers_beyond_64_bits_are_refused(text: str) -> None:
    with pytest.raises(BadValue, match="whole number"):
        parse_int(text)


@pytest.mark.parametrize("parse", [parse_int, parse_float, parse_duration])
def test_a_number_has_a_hundred_characters_at_most(parse: Any) -> None:
    assert parse("1".zfill(100)) == 1
    with pytest.raises(BadValue):
        parse("1".zfill(101))


LIMITS: Tuple[Tuple[Dict[str, float], str, str, str], ...] = (
    ({"at_least": 2.0}, "2", "1.999", "at least 2"),
    ({"at_most": 2.0}, "2", "2.001", "at most 2"),
    ({"above": 2.0}, "2.001", "2", "above 2"),
    ({"below": 2.0}, "1.999", "2", "below 2"),
    ({"at_least": 0.0, "below": 1.0}, "0", "1", "at least 0 and below 1"),
)


@pytest.mark.parametrize(("metadata", "accepted", "refused", "meaning"), LIMITS)
def test_limits_of_a_number(metadata: Dict[str, float], accepted: str, refused: str, meaning: str) -> None:
    assert coerce_scalar(accepted, False, float, metadata) == float(accepted)
    with pytest.raises(BadValue, match="outside the limits"):
        coerce_scalar(refused, False, float, metadata)
    assert describe_type(float, metadata) == f"a number, {meaning}"


@pytest.mark.parametrize(
    ("kind", "metadata", "meaning"),
    [
        (int, {}, "a whole number"),
        (bool, {}, "true or false"),
        (str, {"form": ("[a-z]+", "letters")}, "a text: letters"),
        (Optional[int], {"at_least": 1}, "a whole number, at least 1, or null"),
        (float, {"duration": True}, "seconds or H:MM:SS"),
        (str, {"choices": ("a", "b")}, "one of a, b"),
        (Tuple[int, ...], {}, "a list of whole numbers"),
        (Tuple[str, ...], {}, "a list of texts"),
    ],
)
def test_a_kind_of_value_is_described(kind: Any, metadata: Dict[str, Any], meaning: str) -> None:
    assert describe_type(kind, metadata) == meaning


def test_a_choice_and_a_form_are_asked_for() -> None:
    assert coerce_scalar("a", False, str, {"choices": ("a", "b")}) == "a"
    with pytest.raises(BadValue, match="not one of the choices"):
        coerce_scalar("c", False, str, {"choices": ("a", "b")})
    form = {"form": ("[a-z]+", "letters")}
    assert [coerce_scalar(text, False, str, form) for text in ("ab", "")] == ["ab", ""]
    with pytest.raises(BadValue, match="not of the form"):
        coerce_scalar("ab1", False, str, form)


@pytest.mark.parametrize(
    ("text", "is_quoted", "kind", "value"),
    [("null", False, Optional[str], None), ("null", True, Optional[str], "null"), ("~", False, str, ""),
     ("~", True, str, "~"), ("none", False, Optional[int], None), ("", False, Optional[float], None),
     ("none", False, str, "none")],
)  # fmt: skip
def test_quotes_make_a_text_of_null(text: str, is_quoted: bool, kind: Any, value: Any) -> None:
    assert coerce_scalar(text, is_quoted, kind, {}) == value


@pytest.mark.parametrize(
    ("text", "value"), [("yes", True), ("on", True), ("True", True), ("no", False), ("off", False), ("false", False)]
)
def test_booleans(tmp_path: Path, text: str, value: bool) -> None:
    assert written(tmp_path, f"node:\n  tcmalloc: {text}").node.tcmalloc is value


STATES = {
    "layout.zero": 1,
    "node.eco_state": 2,
    "node.retention_state": 1,
    "node.throttling_state": 9,
    "node.issue_state": 1,
    "node.ex_pipe_state": 1,
    "node.arena_lock": 1,
}


@pytest.mark.parametrize("key", STATES)
def test_states_are_the_numbers_from_0(key: str) -> None:
    section, _, name = key.partition(".")
    for state in range(STATES[key] + 1):
        assert getattr(getattr(load_run_config(overrides=[f"{key}={state}"]), section), name) == state
    for state in (-1, STATES[key] + 1):
        with pytest.raises(ConfigError, match=f"{key}: .*valid: one of 0, 1"):
            load_run_config(overrides=[f"{key}={state}"])


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
    with pytest.raises(ConfigError, match="a (path|name) without control characters"):
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


def test_an_optional_type_is_a_union_with_none() -> None:
    assert is_optional(Optional[int])
    assert not is_optional(Union[int, str]) and not is_optional(int) and not is_optional(Tuple[None, int])
