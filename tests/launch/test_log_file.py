"""Tests of the log of a command's output where its disk fills up."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fugaku_gpt.errors import UsageError
from fugaku_gpt.launch.log_file import LogFile


def test_lines_are_appended(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_bytes(b"before\n")
    log = LogFile(tmp_path / "log.txt")
    log.write(b"one\n")
    log.write(b"two")  # the last of a process that was killed
    log.close()
    log.write(b"after it was closed\n")
    assert (tmp_path / "log.txt").read_bytes() == b"before\none\ntwo"


def test_lines_that_do_not_fit_are_counted_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log, room, write = LogFile(tmp_path / "log.txt"), [9], os.write

    def write_into_room(descriptor: int, content: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(descriptor, content[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(os, "write", write_into_room)
    for line in (b"first\n", b"second\n", b"third\n"):
        log.write(line)
    room[0] = 1000
    log.write(b"fourth\n")
    log.write(b"fifth\n")
    monkeypatch.undo()
    assert (tmp_path / "log.txt").read_text().splitlines() == [
        "first", "sec", "[fugaku-gpt: 2 lines are lost here: No space left on device]", "fourth", "fifth",
    ]  # fmt: skip
    assert capsys.readouterr().err == (
        f"fugaku-gpt: {tmp_path}/log.txt: cannot be written: No space left on device; what is printed from here on is "
        "not in it, until it can be\n"
    )


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="none/log.txt: cannot be written: No such file or directory"):
        LogFile(tmp_path / "none" / "log.txt")
