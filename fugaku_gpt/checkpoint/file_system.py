"""Every call by which a checkpoint touches the file system, and nothing else.

Writing, reading and removing checkpoints go through these few functions, so that tests can make each single call fail
(killed, full disk, broken disk, short write) and examine the files left behind. All raise the system's OSError.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import Iterator, List, Union

from fugaku_gpt.input_files import read_bytes
from fugaku_gpt.limits import RECORD

Buffer = Union[bytes, bytearray, memoryview]


def make_folder(path: Path) -> None:
    """Make one folder; no error if it exists."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)


def create(path: Path) -> int:
    """Open a file to write and return its descriptor; it is created if missing, and never truncated: ranks share it."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)


def open_to_read(path: Path) -> int:
    """Open a file to read and return its descriptor."""
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe is refused, not waited for


def write_at(descriptor: int, content: Buffer, offset: int) -> int:
    """Write at an offset; returns the number of bytes written, which may be fewer than given."""
    return os.pwrite(descriptor, content, offset)


def read_at(descriptor: int, into: memoryview, offset: int) -> int:
    """Read from an offset straight into memory; returns the number of bytes, possibly fewer than fit, 0 at the end."""
    return os.preadv(descriptor, [into], offset)


def sync(descriptor: int) -> None:
    """Wait until a file's content is on the disk."""
    os.fsync(descriptor)


def close(descriptor: int) -> None:
    """Close a descriptor."""
    os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    """Rename atomically; replaces an existing file, and fails on a folder that is not empty."""
    os.rename(old, new)


def sync_folder(path: Path) -> None:
    """Wait until a folder's entries are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # this file system has no such thing
            raise
    finally:
        os.close(descriptor)


def remove_file(path: Path) -> None:
    """Remove a file; no error if it is gone already."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def remove_folder(path: Path) -> None:
    """Remove an empty folder; no error if it is gone already."""
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(path)


def names_in(path: Path) -> List[str]:
    """List the names in a folder, sorted."""
    return sorted(os.listdir(path))


def is_folder(path: Path) -> bool:
    """True if there is a folder of this name, and not a link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def exists(path: Path) -> bool:
    """True if there is a file, folder or link of this name."""
    return os.path.lexists(path)


def size_of(path: Path) -> int:
    """Size of a file in bytes."""
    return os.stat(path).st_size


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write to the file system of an existing path; ignores quotas of projects."""
    statistics = os.statvfs(path)
    return statistics.f_bavail * statistics.f_frsize


def write_all(descriptor: int, content: memoryview, offset: int) -> None:
    """Write all bytes; Linux accepts at most 2 GiB at once, and a full disk as many as it has room for.

    Raises:
        OSError: also if a write accepts no byte at all.
    """
    while len(content):
        written = write_at(descriptor, content, offset)
        if written <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        content, offset = content[written:], offset + written


@contextlib.contextmanager
def synced_file(path: Path) -> Iterator[int]:
    """Open a file to write; its content is on the disk at the end of the ``with``."""
    try:
        descriptor = create(path)
        try:
            yield descriptor
            sync(descriptor)
        finally:
            close(descriptor)
    except OSError as error:
        if error.filename is None:  # calls on a descriptor do not know it
            error.filename = str(path)
        raise


def write_file(path: Path, content: bytes) -> None:
    """Write a small file, which is on the disk when this returns."""
    with synced_file(path) as descriptor:
        write_all(descriptor, memoryview(content), 0)


def read_file(path: Path) -> bytes:
    """Read a small file; larger than ``RECORD`` it is refused."""
    return read_bytes(path, RECORD)
