"""Tests of the wire form of event files: checksums, framing, numbers of files, and a full disk."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import pytest

from fugaku_gpt.records.event_file import EventFile, crc32c, framed, is_event_file


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),  # the examples of RFC 3720, appendix B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_checksums_are_those_of_the_standard(data: bytes, crc: int) -> None:
    assert crc32c(data) == crc


def test_a_record_has_a_length_and_two_checksums() -> None:
    record = framed(b"123456789")
    assert record[:8] == struct.pack("<Q", 9) and record[12:21] == b"123456789" and len(record) == 25
    rotated = (0xE3069283 >> 15 | 0xE3069283 << 17) & 0xFFFFFFFF
    assert record[21:] == struct.pack("<I", (rotated + 0xA282EAD8) % 2**32)


def test_a_later_file_of_a_folder_comes_later_by_name_whatever_the_clock_is(tmp_path: Path) -> None:
    paths = [EventFile(tmp_path / "events", wall_time).path for wall_time in (2e9, 1e9, 0.0)]
    (tmp_path / "events" / "events.out.tfevents.0000000007").touch()
    (tmp_path / "events" / "notes.txt").touch()
    paths.append(EventFile(tmp_path / "events", 0.0).path)
    assert paths == sorted(paths) and paths[-1].name == "events.out.tfevents.0000000008"
    assert all(is_event_file(path.name) for path in paths) and not is_event_file("metrics.jsonl")


def test_no_file_of_another_session_is_written_over(tmp_path: Path) -> None:
    other = tmp_path / "events.out.tfevents.1732816800.node17.4711.0"  # by a library: its number is the time
    other.write_bytes(b"theirs")
    assert EventFile(tmp_path, 0.0).path.name == "events.out.tfevents.1732816801"
    assert other.read_bytes() == b"theirs"


@pytest.mark.parametrize("value", [1e300, -1e300, 10**400, 2.0**128], ids=lambda value: f"{len(str(value))} digits")
def test_a_number_beyond_float32_is_infinite(value: float, tmp_path: Path) -> None:
    file = EventFile(tmp_path, 0.0)
    file.write_scalars(1, 0.0, [("a", value)])
    file.close()
    assert struct.pack("<f", float("inf") if value > 0 else float("-inf")) in file.path.read_bytes()


def test_a_full_disk_is_named_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = EventFile(tmp_path, 0.0)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, file._stream.fileno())
    os.close(full)
    with pytest.raises(OSError) as caught:
        file.write_scalars(1, 0.0, [("loss", 1.0)])
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(file.path))
    monkeypatch.setattr(file, "_stream", _HalfFull())
    with pytest.raises(OSError) as caught:
        file.write_scalars(1, 0.0, [("loss", 1.0)])
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(file.path))


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "events").touch()
    with pytest.raises(OSError) as caught:
        EventFile(tmp_path / "events", 0.0)
    assert caught.value.filename == str(tmp_path / "events")


class _HalfFull:
    """A stream of a disk that has room for half of what is written."""

    def write(self, record: bytes) -> int:
        """Write half of a record."""
        return len(record) // 2
