"""Shared memory, through which the ranks of a node exchange messages, and the files that dead ranks leave in it."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import Iterator, List, Set, Tuple

from fugaku_gpt.machine.system import this_system

SHARED_MEMORY = "dev/shm"  # below the root
# a younger file may be of a run that is just starting, also in another container that shares this memory
_STARTING_SECONDS = 10.0
_LITTLE_ROOM = 32 * 2**20  # bytes that an MPI may want in one piece
# names of the files of MPICH, Open MPI and UCX
_SEGMENT_OF_MPI = re.compile(r"mpich_|vader_segment\.|sm_segment\.|osc_sm\.|ucx_shm_posix_")


def bus_error_cause(directory: Path) -> str:
    """Return what has probably ended a process of this node by SIGBUS just now, and how to mend it.

    The kernel sends it to a process that writes to a mapped file for which its file system has no space left, or reads
    past the end of one: most often that of MPI in ``/dev/shm``, which containers make small.

    Args:
        directory: the file system of shared memory, usually ``/dev/shm``.
    """
    try:
        status = os.statvfs(directory)
    except OSError:
        return f"there is no {directory}, through which ranks of a node exchange messages: mount it"
    free, size = (blocks * status.f_frsize for blocks in (status.f_bavail, status.f_blocks))
    if free >= _LITTLE_ROOM:
        return "a file that was mapped into memory is shorter than it was, or its disk is full: see df and the corpora"
    return (
        f"{directory}, through which ranks of a node exchange messages, is full: {free / 2**20:.0f} of "
        f"{size / 2**20:.0f} MiB are free; enlarge it, as by docker run --shm-size=1g, or by mount -o remount,size=1g"
    )


def leftover_segments(directory: Path) -> List[Path]:
    """List this user's files of MPI in shared memory that no living process has open or mapped, and that are some
    seconds old.

    A rank that is killed leaves its files, some MiB each, which take memory until the node is restarted. Processes of
    other users cannot be looked at, but they have no use for this user's files.

    Args:
        directory: the file system of shared memory, usually ``/dev/shm``.
    """
    candidates = {}
    with contextlib.suppress(OSError):  # no such folder: nothing is left
        for entry in os.scandir(directory):
            if _SEGMENT_OF_MPI.match(entry.name):
                with contextlib.suppress(OSError):  # removed meanwhile
                    status = entry.stat(follow_symlinks=False)
                    is_old = time.time() - status.st_mtime > _STARTING_SECONDS
                    if is_old and status.st_uid == os.geteuid():
                        candidates[status.st_dev, status.st_ino] = Path(entry.path)
    used = _files_in_use() if candidates else set()
    return sorted(path for key, path in candidates.items() if key not in used)


def remove_leftover_segments(directory: Path) -> Tuple[int, int]:
    """Remove what :func:`leftover_segments` lists; returns the number of files and their bytes."""
    files, size = 0, 0
    for path in leftover_segments(directory):
        with contextlib.suppress(OSError):  # another process of this user has just removed it
            length = path.stat().st_size
            path.unlink()
            files, size = files + 1, size + length
    return files, size


def _files_in_use() -> Set[Tuple[int, int]]:
    """The (device, inode) of each file that a process of this user has open or mapped."""
    used: Set[Tuple[int, int]] = set()
    for process in this_system().path("proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    status = descriptor.stat()
                    used.add((status.st_dev, status.st_ino))
        used.update(_mapped_files(process))  # afterwards: a file is mapped before it is closed
    return used


def _mapped_files(process: Path) -> Iterator[Tuple[int, int]]:
    try:
        text = (process / "maps").read_text(encoding="utf-8", errors="replace")
    except OSError:  # it has ended, or is another user's
        return
    for line in text.splitlines():  # address permissions offset major:minor inode path
        words = line.split(None, 5)
        if len(words) >= 5 and words[4] != "0":
            major, minor = (int(number, 16) for number in words[3].split(":"))
            yield os.makedev(major, minor), int(words[4])
