"""Writes files that are either complete or absent, and lines that are complete or ignored by readers.

Every file system of a cluster provides a rename, a hard link and a single appending write; only a file that is read,
changed and written again needs a lock as well, which some file systems lack.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import time
import uuid
from pathlib import Path
from typing import Any, BinaryIO, Iterator, List

from fugaku_gpt.errors import UsageError

_LOCK_SECONDS = 5.0  # time for which a lock that is held is waited for; its holders need milliseconds
_LOCK_INTERVAL = 0.01
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}\.tmp")
_LEFTOVER_SECONDS = 3600.0  # a temporary file this old has lost its writer


def write_text_atomically(path: Path, text: str) -> None:
    """Write a text as UTF-8 through :func:`write_bytes_atomically`."""
    write_bytes_atomically(path, text.encode("utf-8"))


def write_bytes_atomically(path: Path, content: bytes) -> None:
    """Write a file through a temporary neighbour and a rename, so that no reader ever sees half of it.

    What is no file but a pipe, a terminal or another device, such as ``/dev/stdout``, is written to and not replaced.

    Raises:
        OSError: it cannot be written; names the file, not its neighbour.
    """
    with written_atomically(path) as stream:
        stream.write(content)


@contextlib.contextmanager
def written_atomically(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary neighbour of a file, to be written piece by piece; it becomes the file at the end of the block,
    and is removed if the block fails. What is no file is written to, as by :func:`write_bytes_atomically`.

    Raises:
        OSError: it cannot be written; names the file, not its neighbour.
    """
    if _is_device(path):
        with naming_file(path), _open_device(path) as stream:
            yield stream
        return
    with replaced_atomically(path) as temporary, open(temporary, "wb") as stream:
        yield stream
        _sync(stream)


@contextlib.contextmanager
def replaced_atomically(path: Path) -> Iterator[Path]:
    """Give the path of a temporary neighbour of a file, which the block makes; it becomes the file at the end of the
    block, and is removed if the block fails.

    Raises:
        OSError: it cannot be written; names the file, not its neighbour.
    """
    temporary = _temporary(path)
    with naming_file(path):
        try:
            yield temporary
            os.replace(temporary, path)
        except BaseException:
            _remove(temporary)
            raise


def write_json_atomically(path: Path, value: Any) -> None:
    """Write indented JSON, its keys in the given order, through :func:`write_text_atomically`."""
    write_text_atomically(path, _json(value))


def create_text_atomically(path: Path, text: str) -> bool:
    """Like :func:`write_text_atomically`, but the first writer wins: returns False, and changes nothing, if the file
    exists.

    Where the file system has no hard links, the first writer still wins, but a reader may find the file empty for a
    moment, or for good if the writer is killed in that moment.

    Raises:
        OSError: it cannot be written; names the file, not its neighbour.
    """
    temporary = _temporary(path)
    with naming_file(path):
        try:
            _write(temporary, text.encode("utf-8"))
            return _link(temporary, path, text)
        finally:
            _remove(temporary)


def create_json_atomically(path: Path, value: Any) -> bool:
    """Create a file of JSON through :func:`create_text_atomically`."""
    return create_text_atomically(path, _json(value))


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes from changing a file under this lock while the block runs; it is held on ``.NAME.lock``.

    The kernel releases the lock when its holder dies. Where the file system has no locks, or the lock is not free
    within seconds, the block runs without it: a change by another process may then get lost, but no file is damaged.

    Raises:
        OSError: the file of the lock cannot be written; names ``path``.
    """
    with naming_file(path):
        stream = open(path.with_name(f".{path.name}.lock"), "ab")  # noqa: SIM115  # its end is that of the block
    with stream:
        end = time.monotonic() + _LOCK_SECONDS
        while not _try_lock(stream) and time.monotonic() < end:
            time.sleep(_LOCK_INTERVAL)
        yield


def append_line(path: Path, line: str) -> None:
    """Append one line to a file that several processes may append to. A line that a kill has cut short stays a separate
    line.

    Raises:
        OSError: the line could not be written completely.
    """
    content = line.encode("utf-8") + b"\n"
    with open(path, "ab+", buffering=0) as stream:
        if not _ends_a_line(stream):
            content = b"\n" + content
        written = stream.write(content)
        if written != len(content):  # a full disk takes as many bytes as it has room for
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


@contextlib.contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Make errors of the system in the block name this file: those of a write name none, those of a temporary
    neighbour name that."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # not from the system: its message is all there is
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def remove_file(path: Path) -> None:
    """Remove a file, if it is there.

    Raises:
        UsageError: it cannot be removed.
    """
    try:
        path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"{path}: cannot be removed: {error.strerror}") from None


def is_temporary(path: Path) -> bool:
    """True if a file is a temporary of :func:`replaced_atomically` or :func:`create_text_atomically`, whose writer was
    killed or is still writing."""
    return _TEMPORARY.fullmatch(path.name) is not None


def leftovers(directory: Path) -> List[Path]:
    """List temporary files in a directory whose writer was killed before its rename."""
    stale_files = []
    for path in directory.glob(".*.tmp"):
        with contextlib.suppress(OSError):  # renamed meanwhile
            if time.time() - path.stat().st_mtime > _LEFTOVER_SECONDS:
                stale_files.append(path)
    return stale_files


def _create_in_place(path: Path, text: str) -> bool:
    try:
        stream = open(path, "xb")  # noqa: SIM115  # closed below, whether or not it can be written
    except FileExistsError:
        return False
    try:
        with stream:
            _write_and_sync(stream, text.encode("utf-8"))
    except BaseException:
        _remove(path)
        raise
    return True


def _try_lock(stream: Any) -> bool:
    """Take a lock; False if another process holds it, True also where the file system has none."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _ends_a_line(stream: Any) -> bool:
    end = stream.seek(0, os.SEEK_END)
    if end == 0:
        return True
    stream.seek(end - 1)
    return bool(stream.read(1) == b"\n")


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def _link(temporary: Path, path: Path, text: str) -> bool:
    """Give a complete file its name, unless another file has it; returns whether it was given."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        # over NFS the reply to a successful link can be lost, and the second try then finds the file there
        return os.stat(temporary).st_nlink == 2
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _create_in_place(path, text)
    return True


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")


def _is_device(path: Path) -> bool:
    """True if a path is a pipe, a terminal or another device: a rename would put a file in its place."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _open_device(path: Path) -> BinaryIO:
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe that nobody reads is an error
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "wb")


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb") as stream:
        _write_and_sync(stream, content)


def _write_and_sync(stream: BinaryIO, content: bytes) -> None:
    stream.write(content)
    _sync(stream)


def _sync(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
