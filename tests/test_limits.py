"""Tests of the limits on what is read, of reading files of any kind, and of the types of records."""

from __future__ import annotations

import os
import random
import socket
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

import pytest

from fugaku_gpt import input_files, limits
from fugaku_gpt.errors import UsageError
from fugaku_gpt.input_files import lines_of_file, open_file, read_bytes, read_text, start_of_last_lines
from fugaku_gpt.limits import Limit, cut
from fugaku_gpt.typed_json import check_times, is_number, record_of
from fugaku_gpt.versioned_json import read_versioned_json

TEN = Limit(10, "bytes", "a small file")


def test_a_file_longer_than_the_limit_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"x" * 10)
    assert read_bytes(file, TEN) == b"x" * 10
    file.write_bytes(b"x" * 11)
    with pytest.raises(OSError) as caught:
        read_bytes(file, TEN)
    assert caught.value.strerror == "it is longer than 10 bytes, the limit of a small file"
    assert caught.value.filename == str(file)


def test_a_text_has_newlines_whatever_wrote_it(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1\r\n2\r3\n")
    assert read_text(tmp_path / "a", TEN) == (tmp_path / "a").read_text() == "1\n2\n3\n"


@pytest.mark.parametrize("kind", ["folder", "pipe", "socket", "device", "loop", "missing", "NUL", "surrogate", "long"])
def test_paths_without_a_file_are_errors_of_the_system(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = {"device": "/dev/zero", "NUL": "a\0b", "surrogate": "\ud800", "long": "x" * 300}.get(kind, "a")
    if kind == "folder":
        os.mkdir(path)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind(path)
    elif kind == "loop":
        os.symlink("b", "a")
        os.symlink("a", "b")
    with pytest.raises(OSError) as caught:
        read_bytes(path, TEN)
    assert caught.value.strerror and caught.value.filename is not None


def test_a_pipe_that_is_written_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    written = threading.Thread(target=lambda: (tmp_path / "pipe").write_bytes(b"a: 1\n"))
    keeper = os.open(tmp_path / "pipe", os.O_RDWR)  # or the writer might come too late
    written.start()
    with open_file(tmp_path / "pipe") as stream:
        assert stream.read(5) == b"a: 1\n"
    written.join()
    os.close(keeper)
    read_end, write_end = os.pipe()
    os.write(write_end, b"text")
    os.close(write_end)
    assert read_bytes(f"/dev/fd/{read_end}", TEN) == b"text"
    os.close(read_end)


def test_a_pipe_whose_writer_is_silent_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_files, "WAIT_FOR_PIPE", Limit(0, "s", ""))
    os.mkfifo(tmp_path / "pipe")
    keeper = os.open(tmp_path / "pipe", os.O_RDWR)
    with pytest.raises(OSError, match="it is a pipe that was silent for 0 s"):
        read_bytes(tmp_path / "pipe", TEN)
    os.close(keeper)


def test_the_null_device_is_an_empty_file() -> None:
    assert read_bytes(os.devnull, TEN) == b""


def test_long_lines_are_cut_and_other_lines_stay(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"short\n" + b"x" * 35 + b"\n" + b"y" * 9 + b"\nend\xff")
    assert list(lines_of_file(tmp_path / "a", TEN)) == ["short\n", "x" * 10, "y" * 9 + "\n", "end\ufffd"]


def test_lines_end_as_in_any_text(tmp_path: Path) -> None:
    """A progress bar goes back to the start of its line."""
    (tmp_path / "a").write_bytes(b" 1%\r 2%\r\niteration\r\nend\r")
    assert list(lines_of_file(tmp_path / "a", TEN)) == [" 1%\n", " 2%\n", "iteration\n", "end\n"]


def test_every_limit_has_a_meaning() -> None:
    named = limits.all_limits()
    assert len(named) > 20 and all(limit.value > 0 and limit.of for limit in named.values())
    assert str(Limit(4 * 2**20, "bytes", "")) == "4 MiB" and str(Limit(50, "levels", "")) == "50 levels"


def test_a_quoted_value_is_cut_to_a_line() -> None:
    assert cut(" a\n b\t c ") == "a b c"
    assert len(cut("x" * 10**6)) == limits.MESSAGE_VALUE.value and cut("x" * 201).endswith("x…")


@dataclass(frozen=True)
class Inner:
    text: Optional[str] = None


@dataclass(frozen=True)
class Record:
    count: int
    seconds: float
    name: str = ""
    is_done: bool = False
    inner: Dict[str, Inner] = field(default_factory=dict)
    names: Tuple[str, ...] = ()
    anything: Any = None


def test_values_of_the_types_of_the_fields_make_a_record() -> None:
    values = {"count": 1, "seconds": 2, "inner": {"a": {"text": None}}, "names": ["x"], "anything": [{}], "later": 1}
    assert record_of(Record, values) == Record(1, 2, inner={"a": Inner()}, names=("x",), anything=[{}])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("count", True, "count is True, not a whole number"),
        ("count", 1.0, "count is 1.0, not a whole number"),
        ("count", 2**63, "not a whole number"),
        ("seconds", "1", "seconds is '1', not a number"),
        ("seconds", float("nan"), "not a number"),
        ("seconds", float("inf"), "not a number"),
        ("seconds", 10**400, "not a number"),
        ("name", None, "name is None, not a text"),
        ("is_done", 1, "not true or false"),
        ("inner", [], "not an object"),
        ("inner", {"a": {"text": 1}}, "text is 1, not a text"),
        ("names", "x", "not a list"),
        ("names", [1], "not a text"),
        ("name", ["x" * 10**6], "name is .{199}…, not a text"),
    ],
)
def test_a_value_of_another_type_is_refused_with_the_name_of_the_field(key: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        record_of(Record, {"count": 1, "seconds": 2.0, key: value})


def test_missing_fields_and_other_values_than_objects_are_refused() -> None:
    with pytest.raises(KeyError, match="seconds"):
        record_of(Record, {"count": 1})
    with pytest.raises(TypeError):
        record_of(Record, [])  # type: ignore[arg-type]


def test_times_are_those_of_a_calendar() -> None:
    check_times(started=0, ended=None)
    for seconds in (-1, 1e30, 253402300800):
        with pytest.raises(ValueError, match="not a time in seconds since 1970"):
            check_times(started=seconds)
    assert is_number(0.5) and not is_number(True) and not is_number("1") and not is_number(1e300)


@pytest.mark.parametrize("number", ["1e999", "Infinity", "1" * 400, "NaN"])
def test_a_number_that_no_float_holds_is_no_traceback(tmp_path: Path, number: str) -> None:
    (tmp_path / "a.json").write_text(f'{{"version": 1, "seconds": {number}}}')

    def parse(values: Dict[str, Any]) -> int:
        return int(float(values["seconds"]))

    with pytest.raises(UsageError, match=r"a\.json: not a record: .*; remove it"):
        read_versioned_json(tmp_path / "a.json", "a record", (1,), parse, mend="remove it")


@pytest.mark.slow
def test_the_last_lines_of_a_file_begin_where_its_lines_do(tmp_path: Path) -> None:
    chance = random.Random(3)
    for _ in range(300):
        content = b"".join(chance.choice([b"a", b"bc", b"\n", b"\r", b"\r\n", b""]) for _ in range(12))
        (tmp_path / "a").write_bytes(content)
        for lines in range(6):
            with open_file(tmp_path / "a") as stream:
                start = start_of_last_lines(stream, lines, block=chance.randint(1, 7))
            assert content[start:] == b"".join(content.splitlines(keepends=True)[-lines:] if lines else [])


def test_a_pipe_has_no_last_lines(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with open_file(tmp_path / "pipe") as stream, pytest.raises(OSError, match="it is a pipe"):
        start_of_last_lines(stream, 2)
