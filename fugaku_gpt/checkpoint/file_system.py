"""Every call by which a checkpoint touches the file system, and nothing else.

Writer, reader and keeper of checkpoints go through these few functions, so that tests can make each single call fail
(killed, full disk, broken disk, short write) and look at what is left. All raise OSError as the system says it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import Iterator, List, Union

Buffer = Union[bytes, bytearray, memoryview]


def make_folder(path: Path) -> None:
    """One folder; no error where it is there already."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)


def create(path: Path) -> int:
    """Descriptor of a file to write; made where it is not there, and never emptied: ranks may share it."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)


def open_to_read(path: Path) -> int:
    """Descriptor of a file to read."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def write_at(descriptor: int, content: Buffer, offset: int) -> int:
    """Bytes written at an offset; may be fewer than there are."""
    return os.pwrite(descriptor, content, offset)


def read_at(descriptor: int, into: memoryview, offset: int) -> int:
    """Bytes read from an offset straight into memory; may be fewer than fit, 0 at the end of the file."""
    return os.preadv(descriptor, [into], offset)


def sync(descriptor: int) -> None:
    """Wait until a file's content is on the disk."""
    os.fsync(descriptor)


def close(descriptor: int) -> None:
    """Give a descriptor back."""
    os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    """Atomic; replaces a file that is there, and refuses to replace a folder with something in it."""
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
    """No error where it is gone already."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def remove_folder(path: Path) -> None:
    """An empty folder; no error where it is gone already."""
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(path)


def names_in(path: Path) -> List[str]:
    """Names in a folder, sorted."""
    return sorted(os.listdir(path))


def is_folder(path: Path) -> bool:
    """Whether there is a folder, and not a link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def exists(path: Path) -> bool:
    """Whether there is anything of this name."""
    return os.path.lexists(path)


def size_of(path: Path) -> int:
    """Bytes of a file."""
    return os.stat(path).st_size


def free_bytes(path: Path) -> int:
    """What this user may still write to the file system of an existing path; quotas of projects are not seen."""
    statistics = os.statvfs(path)
    return statistics.f_bavail * statistics.f_frsize


def write_all(descriptor: int, content: memoryview, offset: int) -> None:
    """Write until everything is written; Linux takes at most 2 GiB at once, a full disk what it has room for.

    Raises:
        OSError: also where a write takes nothing at all.
    """
    while len(content):
        written = write_at(descriptor, content, offset)
        if written <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        content, offset = content[written:], offset + written


@contextlib.contextmanager
def synced_file(path: Path) -> Iterator[int]:
    """Descriptor of a file to write; it is on the disk at the end of the ``with``."""
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
    """A small file, on the disk when this returns."""
    with synced_file(path) as descriptor:
        write_all(descriptor, memoryview(content), 0)


def read_file(path: Path) -> bytes:
    """A small file."""
    return path.read_bytes()
