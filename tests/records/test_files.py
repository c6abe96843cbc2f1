"""Tests that files are complete or absent, the first writer wins where it must, and lines survive kills and writers."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import multiprocessing
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest

from fugaku_gpt.records import files
from fugaku_gpt.records.files import (
    append_line,
    create_json_atomically,
    create_text_atomically,
    leftovers,
    locked,
    write_bytes_atomically,
    write_json_atomically,
    write_text_atomically,
    written_atomically,
)


def test_files_are_complete_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json_atomically(path, {"é": 1})
    assert json.loads(path.read_text(encoding="utf-8")) == {"é": 1}
    with pytest.raises(ValueError):
        write_json_atomically(path, {"x": math.nan})
    with pytest.raises(UnicodeEncodeError):
        write_text_atomically(path, "\ud800")
    assert json.loads(path.read_text(encoding="utf-8")) == {"é": 1}
    assert [child.name for child in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("write", [write_text_atomically, create_text_atomically])
@pytest.mark.parametrize("number", [errno.ENOSPC, None])
def test_an_error_names_the_file_and_keeps_the_message(
    write: Any, number: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: int) -> None:
        raise OSError("no number") if number is None else OSError(number, os.strerror(number), "a hidden neighbour")

    monkeypatch.setattr(os, "fsync", refused)
    with pytest.raises(OSError) as caught:
        write(tmp_path / "a.json", "{}")
    message = "no number" if number is None else f"[Errno {number}] {os.strerror(number)}: '{tmp_path / 'a.json'}'"
    assert str(caught.value) == message
    assert not list(tmp_path.iterdir())


def _without_links(*_: Any, **__: Any) -> None:
    raise OSError(errno.EOPNOTSUPP, "no hard links here")


@pytest.mark.parametrize("links", [True, False])
def test_the_first_of_two_writers_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    if not links:
        monkeypatch.setattr(os, "link", _without_links)
    path = tmp_path / "a.json"
    assert create_json_atomically(path, {"who": 1})
    assert not create_text_atomically(path, "who: 2")
    assert json.loads(path.read_text()) == {"who": 1}
    assert [child.name for child in tmp_path.iterdir()] == ["a.json"]


def test_without_links_an_incomplete_file_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The temporary file fits, and then the disk is full for the file itself."""
    monkeypatch.setattr(os, "link", _without_links)
    synced = []

    def full_for_the_second(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) == 2:
            raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", full_for_the_second)
    with pytest.raises(OSError, match="full"):
        create_text_atomically(tmp_path / "a", "text")
    assert list(tmp_path.iterdir()) == []


def test_other_errors_of_a_file_system_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(OSError, match="full"):
        create_text_atomically(tmp_path / "a", "text")
    assert list(tmp_path.iterdir()) == []


def _race(path: Path, number: int, barrier: Any, won: Any) -> None:
    barrier.wait()
    if create_text_atomically(path, str(number)):
        won.put(number)


@pytest.mark.slow
def test_only_a_single_process_of_many_creates_the_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for attempt in range(10):
        barrier, won = context.Barrier(4), context.Queue()
        path = tmp_path / str(attempt)
        processes = [context.Process(target=_race, args=(path, number, barrier, won)) for number in range(4)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert path.read_text() == str(won.get(timeout=10)) and won.empty()


def test_a_line_after_a_truncated_line_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_line(path, "first")
    with open(path, "ab") as stream:
        stream.write(b"sec")
    append_line(path, "third")
    append_line(path, "fourth")
    assert path.read_text() == "first\nsec\nthird\nfourth\n"


def _append(path: Path, number: int) -> None:
    for line in range(200):
        append_line(path, f"{number} {line} " + "x" * 300)


def test_lines_of_several_writers_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_append, args=(path, number)) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    lines = [line.split() for line in path.read_text().splitlines() if line]
    assert all(len(fields) == 3 and fields[2] == "x" * 300 for fields in lines)
    for number in range(3):
        assert [fields[1] for fields in lines if fields[0] == str(number)] == [str(line) for line in range(200)]


@contextlib.contextmanager
def room_for(total_bytes: int) -> Iterator[None]:
    """Let files grow to this size only: a write beyond it takes what there is room for, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (total_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_short_write_is_an_error_and_costs_no_later_line(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_line(path, "first")
    with room_for(len("first\nsec")), pytest.raises(OSError) as caught:
        append_line(path, "second")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    append_line(path, "third")
    assert path.read_text() == "first\nsec\nthird\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this machine")
def test_a_line_on_a_full_device_is_an_error() -> None:
    with pytest.raises(OSError) as caught:
        append_line(Path("/dev/full"), "a line")
    assert caught.value.errno == errno.ENOSPC


def test_leftovers_are_old_temporary_files_only(tmp_path: Path) -> None:
    for name in (".a.json.0123.tmp", ".b.json.4567.tmp", "mine.tmp", ".hidden"):
        (tmp_path / name).write_text("")
    old = time.time() - 7200
    for name in (".a.json.0123.tmp", "mine.tmp", ".hidden"):
        os.utime(tmp_path / name, (old, old))
    assert leftovers(tmp_path) == [tmp_path / ".a.json.0123.tmp"]


def test_a_lock_keeps_other_processes_out_until_the_block_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    with locked(path), open(tmp_path / ".a.json.lock", "ab") as stream, pytest.raises(BlockingIOError):
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with open(tmp_path / ".a.json.lock", "ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        monkeypatch.setattr(files, "_LOCK_SECONDS", 0.05)  # a holder that does not end is not waited for for ever
        with locked(path):
            write_text_atomically(path, "{}")


def test_without_locks_the_block_runs_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refused)
    with locked(tmp_path / "a.json"):
        pass
    with pytest.raises(OSError, match="a.json'"), locked(tmp_path / "none" / "a.json"):
        pass


def write_pieces(path: Path, content: bytes) -> None:
    with written_atomically(path) as stream:
        stream.write(content)


@pytest.mark.parametrize("write", [write_bytes_atomically, write_pieces])
def test_what_is_no_file_is_written_to_and_stays(write: Callable[[Path, bytes], None], tmp_path: Path) -> None:
    """A rename put a file in the place of /dev/full."""
    pipe, device = tmp_path / "pipe", tmp_path / "device"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="No such device or address"):  # nobody reads it: an error, and no wait
        write(pipe, b"text")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write(pipe, b"text")
    assert os.read(reader, 99) == b"text"
    os.close(reader)
    device.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device.*device"):
        write(device, b"text")
    assert pipe.is_fifo() and device.is_char_device() and sorted(os.listdir(tmp_path)) == ["device", "pipe"]
