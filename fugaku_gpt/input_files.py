"""Reads files whose origin is not known: what is no file never blocks, and what is too large is not read to its end.

A folder, a device, a socket, a pipe without a writer and a name with a NUL are errors of the system, as a missing file
is, so that callers report all of them in one place.
"""

from __future__ import annotations

import errno
import io
import os
import re
import select
import stat
from pathlib import Path
from typing import Any, BinaryIO, Iterator, Optional, Union, cast

from fugaku_gpt.limits import WAIT_FOR_PIPE, Limit

_BLOCK = 2**20  # bytes of the rest of a long line that are read at once
_LINE_END = re.compile(rb"\n|\r(?!\n)")
_LONGEST_NAME = 255  # bytes, in every file system of a cluster


def read_bytes(path: Union[str, Path], limit: Limit) -> bytes:
    """Return the content of a file.

    Raises:
        OSError: it cannot be read, is no file, or is longer than its limit, which the error states.
    """
    with open_file(path) as stream:
        return read_stream(stream, limit, str(path))


def read_stream(stream: BinaryIO, limit: Limit, name: str) -> bytes:
    """Return what remains of a stream, such as the standard input.

    Raises:
        OSError: it is longer than its limit, which the error states with this name.
    """
    size = _size_of(stream)
    is_longer = size is not None and size > limit.value  # not read first: that would take as much memory as the limit
    content = b"" if is_longer else b"".join(blocks_of(stream, limit.value + 1, (size or _BLOCK) + 1))
    if is_longer or len(content) > limit.value:
        raise OSError(errno.EFBIG, f"it is longer than {limit}, the limit of {limit.of}", name)
    return content


def blocks_of(stream: BinaryIO, most: int, size: int = _BLOCK) -> Iterator[bytes]:
    """Yield the next bytes of a stream, ``most`` at most: a single read would take that much memory for any file.

    Args:
        size: bytes of the first block, if it is less than that of others.
    """
    size = min(size, _BLOCK)
    while most > 0:
        block = stream.read(min(most, size))
        size = _BLOCK
        if not block:
            return
        most -= len(block)
        yield block


def _size_of(stream: BinaryIO) -> Optional[int]:
    """The bytes of a file from its beginning to its end; None for a stream that is none, or a file of the kernel's,
    which has no size. To read a small file in a large block takes longer than all else, since the memory of the block
    is requested anew each time."""
    try:
        status = os.fstat(stream.fileno())
        is_at_start = stat.S_ISREG(status.st_mode) and stream.tell() == 0
    except (OSError, ValueError):  # a stream in memory
        return None
    return status.st_size or None if is_at_start else None


def read_text(path: Union[str, Path], limit: Limit, errors: str = "strict", encoding: str = "utf-8") -> str:
    """Return the text of a file, with its ends of lines as newlines.

    Raises:
        OSError: as of :func:`read_bytes`.
        UnicodeDecodeError: it is not UTF-8, unless ``errors`` says what then happens.
    """
    text = read_bytes(path, limit).decode(encoding, errors)
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def lines_of_file(path: Union[str, Path], limit: Limit) -> Iterator[str]:
    """Yield the lines of a file of any length, whose ends may be of any kind, each with a newline.

    Of a line that is longer than its limit, only as many characters as that are yielded, without a newline. Bytes that
    are no UTF-8 become replacement characters.

    Raises:
        OSError: it cannot be read, or is no file.
    """
    with io.TextIOWrapper(open_file(path), encoding="utf-8", errors="replace") as stream:
        while True:
            line = stream.readline(limit.value)
            if not line:
                return
            yield line
            is_cut = len(line) == limit.value and not line.endswith("\n")
            while is_cut:
                rest = stream.readline(_BLOCK)
                is_cut = len(rest) == _BLOCK and not rest.endswith("\n")


def start_of_last_lines(stream: BinaryIO, lines: int, block: int = 2**16) -> int:
    """Return the position at which the last lines of a file begin; ends of lines are those of :meth:`bytes.splitlines`.

    The file is read from its end, a block at a time, and no further than these lines.

    Raises:
        OSError: it cannot be read, or is no file but a pipe.
    """
    if not stream.seekable():
        raise OSError(errno.ESPIPE, "it is a pipe, which has no end to begin at", str(stream.name))
    size = end = stream.seek(0, os.SEEK_END)
    if lines <= 0:
        return size
    while end > 0:
        start = max(0, end - block)
        stream.seek(start)
        content = stream.read(end - start + 1)  # one byte more: a return before a newline ends no line
        ends = [match.end() for match in _LINE_END.finditer(content) if match.start() < end - start]
        starts = [start + position for position in ends if start + position < size]
        if len(starts) >= lines:
            return starts[-lines]
        lines -= len(starts)
        end = start
    return 0


def open_file(path: Union[str, Path]) -> BinaryIO:
    """Open a file to read it.

    A pipe that another process writes, such as the shell's ``<(command)``, is read as long as it is not silent.

    Raises:
        OSError: it cannot be opened, or is a folder, a device, a socket, or a pipe that nobody writes.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError:  # a NUL, or a character that no name has
        raise OSError(errno.EINVAL, "no file has such a name", ascii(str(path))) from None
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISFIFO(mode):
            return cast(BinaryIO, io.BufferedReader(_Pipe(descriptor, str(path))))
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        is_null = stat.S_ISCHR(mode) and os.path.realpath(path) == os.devnull
        if not stat.S_ISREG(mode) and not is_null:
            raise OSError(errno.EINVAL, "it is a device, not a file", str(path))
        os.set_blocking(descriptor, True)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def is_possible_name(text: str) -> bool:
    """Whether a file can have this name: it is not too long, and has no NUL and no character that is none."""
    try:
        name = os.fsencode(text)
        return len(name) <= _LONGEST_NAME and b"\0" not in name
    except UnicodeEncodeError:
        return False


def resolved(path: Path) -> Path:
    """An absolute path without links, as of :meth:`Path.resolve`, which fails at links that lead to themselves; here
    they stay, and opening the path reports them."""
    return Path(os.path.realpath(path))


class _Pipe(io.RawIOBase):
    """The bytes that another process writes into a pipe; waits for them, but not for ever."""

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor, self.name, self._is_empty = descriptor, name, True

    def readable(self) -> bool:
        """Whether it can be read: always."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the start of a buffer; returns the number of bytes, 0 at the end.

        Raises:
            OSError: nobody writes the pipe, or its writer is silent for too long.
        """
        while True:
            try:
                count = os.readv(self._descriptor, [buffer])
            except BlockingIOError:
                if not select.select([self._descriptor], [], [], WAIT_FOR_PIPE.value)[0]:
                    raise OSError(
                        errno.ETIMEDOUT, f"it is a pipe that was silent for {WAIT_FOR_PIPE}", self.name
                    ) from None
                continue
            if count == 0 and self._is_empty:
                raise OSError(errno.EINVAL, "it is a pipe that nobody writes, not a file", self.name)
            self._is_empty = False
            return count

    def close(self) -> None:
        """Close the pipe."""
        if not self.closed:
            os.close(self._descriptor)
        super().close()
