"""Event files of TensorBoard, written with the standard library.

A file is a sequence of TFRecords, each of them an ``Event`` in the wire form of Protocol Buffers. The framing is that
of ``tensorflow/core/lib/io/record_writer.h``: length (uint64), masked CRC-32C of the length (uint32), data, masked
CRC-32C of the data, all little-endian; a CRC is masked as ``rotate_right(crc, 15) + 0xa282ead8``. The messages are
those of ``event.proto`` and ``summary.proto``, with these fields::

    Event:         1 wall_time (double), 2 step (int64), 3 file_version (string), 5 summary, 7 session_log
    Summary:       1 value, repeated
    Summary.Value: 1 tag (string), 2 simple_value (float)
    SessionLog:    1 status (enum; 1 is START)

The first event of a file states ``brain.Event:2``: of such files a reader drops earlier events only where a session
starts, those of its step and of later ones.
"""

from __future__ import annotations

import errno
import os
import re
import struct
from pathlib import Path
from typing import List, Sequence, Tuple

from fugaku_gpt.records.files import naming_file

_VERSION = b"brain.Event:2"
_POLYNOMIAL = 0x82F63B78  # of CRC-32C, its bits reversed
_MASK = 0xA282EAD8
_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5  # wire types
_NAME = re.compile(r"events\.out\.tfevents\.([0-9]{10})")
_LARGEST = 9_999_999_999  # number of a file


class EventFile:
    """A new event file in a folder, which is made if it is not there.

    Files are numbered, since TensorBoard reads those of a folder by the order of their names: a session that continues
    another comes after it, whatever the clocks of their nodes are. Each event is one write, without a buffer, so that a
    kill costs at most the event that is being written; readers end a file at a record that is not complete.

    Raises:
        OSError: the file cannot be made or written; names it.
    """

    def __init__(self, directory: Path, wall_time: float) -> None:
        with naming_file(directory):
            directory.mkdir(parents=True, exist_ok=True)
            number = 1 + max(map(_number, os.listdir(directory)), default=0)
        self.path = directory / f"events.out.tfevents.{number:010d}"
        with naming_file(self.path):
            self._stream = open(self.path, "xb", buffering=0)  # noqa: SIM115  # open for the whole run
        self._append(_event(wall_time, 0, _field(3, _VERSION)))

    def start_session(self, step: int, wall_time: float) -> None:
        """Have readers drop the events of this step and of later ones in the files before.

        Raises:
            OSError: it cannot be written; names the file.
        """
        self._append(_event(wall_time, step, _field(7, _key(1, _VARINT) + _varint(1))))

    def write_scalars(self, step: int, wall_time: float, scalars: Sequence[Tuple[str, float]]) -> None:
        """Write one event with the value of each tag, as float32.

        Raises:
            OSError: it cannot be written; names the file.
        """
        values = (_field(1, _field(1, tag.encode("utf-8", "replace")) + _simple_value(value)) for tag, value in scalars)
        self._append(_event(wall_time, step, _field(5, b"".join(values))))

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def _append(self, data: bytes) -> None:
        record = framed(data)
        with naming_file(self.path):
            written = self._stream.write(record)
            if written != len(record):  # a full disk takes as many bytes as it has room for
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def is_event_file(name: str) -> bool:
    """Whether TensorBoard takes a file of this name for one of events."""
    return "tfevents" in name


def framed(data: bytes) -> bytes:
    """A TFRecord with this data."""
    length = struct.pack("<Q", len(data))
    return b"".join((length, struct.pack("<I", _masked(length)), data, struct.pack("<I", _masked(data))))


def crc32c(data: bytes) -> int:
    """The CRC-32C (Castagnoli) of bytes, as of RFC 3720, section 12.1."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _table() -> List[int]:
    table = []
    for crc in range(256):
        for _ in range(8):
            crc = (crc >> 1) ^ (_POLYNOMIAL if crc & 1 else 0)
        table.append(crc)
    return table


_TABLE = _table()


def _masked(data: bytes) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


def _number(name: str) -> int:
    """The number in the name of an event file of ours; 0 of any other file."""
    match = _NAME.match(name)
    return min(int(match.group(1)), _LARGEST - 1) if match is not None else 0


def _event(wall_time: float, step: int, content: bytes) -> bytes:
    return _key(1, _DOUBLE) + struct.pack("<d", wall_time) + _key(2, _VARINT) + _varint(step % 2**64) + content


def _simple_value(value: float) -> bytes:
    try:
        number = struct.pack("<f", float(value))
    except OverflowError:  # beyond float32
        number = struct.pack("<f", float("inf") if value > 0 else float("-inf"))
    return _key(2, _FLOAT) + number


def _field(number: int, content: bytes) -> bytes:
    return _key(number, _BYTES) + _varint(len(content)) + content


def _key(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _varint(value: int) -> bytes:
    """A number from 0 on, the lowest seven bits first."""
    octets = bytearray()
    while value > 0x7F:
        octets.append(value & 0x7F | 0x80)
        value >>= 7
    octets.append(value)
    return bytes(octets)
