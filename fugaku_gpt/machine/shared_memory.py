"""Shared memory, through which the ranks of a node exchange messages, and the files that dead ranks leave in it."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import Dict, Iterable, Iterator, List, NamedTuple, Set, Tuple

from fugaku_gpt.machine.system import this_system

SHARED_MEMORY = "dev/shm"  # below the root
# a younger file may be of a run that is just starting, also in another container that shares this memory
_STARTING_SECONDS = 10.0
_LITTLE_ROOM = 32 * 2**20  # bytes that an MPI may want in one piece
# names of the files of MPICH, Open MPI and UCX
_FIRST_NAMESPACE = "pid:[4026531836]"  # of processes, from linux/proc_ns.h: that of no container
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


class Leftovers(NamedTuple):
    """This user's files of MPI in shared memory that are some seconds old and that no living process uses.

    Attributes:
        dead: files that no process has open or mapped.
        unjudged: the others that no process is seen to use, but one may that cannot be looked at.
        reason: which processes these are; empty if there are none.
    """

    dead: List[Path]
    unjudged: List[Path]
    reason: str = ""


def segments(directory: Path) -> Set[Path]:
    """List this user's files of MPI in shared memory.

    Args:
        directory: the file system of shared memory, usually ``/dev/shm``.
    """
    return {path for path, _ in _own_segments(directory)}


def segments_of(process: int) -> List[Path]:
    """List the files of MPI in shared memory that a process has mapped."""
    text = this_system().read(f"proc/{process}/maps") or ""
    paths = {Path(words[5]) for words in (line.split(None, 5) for line in text.splitlines()) if len(words) == 6}
    return sorted(path for path in paths if _SEGMENT_OF_MPI.match(path.name) and path.is_file())


def remove_segments(paths: Iterable[Path]) -> Tuple[int, int]:
    """Remove files; returns their number and bytes."""
    files, size = 0, 0
    for path in paths:
        with contextlib.suppress(OSError):  # another process of this user has just removed it
            length = path.stat().st_size
            path.unlink()
            files, size = files + 1, size + length
    return files, size


def leftover_segments(directory: Path) -> Leftovers:
    """List this user's files of MPI in shared memory that no living process has open or mapped.

    A rank that is killed leaves its files, some MiB each, which take memory until the node is restarted. Who uses a
    file cannot be judged in a container, as processes outside it may share the memory and are not seen, nor beside a
    process that has the right to open the file and may not be looked at.

    Args:
        directory: the file system of shared memory, usually ``/dev/shm``.
    """
    candidates: Dict[Tuple[int, int], Tuple[Path, os.stat_result]] = {}
    for path, status in _own_segments(directory):
        if time.time() - status.st_mtime > _STARTING_SECONDS:
            candidates[status.st_dev, status.st_ino] = path, status
    if not candidates:
        return Leftovers([], [])
    used, are_all_seen = _files_in_use()
    unused = [item for key, item in candidates.items() if key not in used]
    if _is_in_container():
        return Leftovers([], sorted(path for path, _ in unused), "this is a container: processes outside are not seen")
    dead = sorted(path for path, status in unused if are_all_seen or not status.st_mode & 0o077)
    unjudged = sorted(path for path, _ in unused if path not in dead)
    reason = "processes of others who may open them cannot be looked at" if unjudged else ""
    return Leftovers(dead, unjudged, reason)


def _own_segments(directory: Path) -> Iterator[Tuple[Path, os.stat_result]]:
    with contextlib.suppress(OSError):  # no such folder: there are none
        for entry in os.scandir(directory):
            if _SEGMENT_OF_MPI.match(entry.name):
                with contextlib.suppress(OSError):  # removed meanwhile
                    status = entry.stat(follow_symlinks=False)
                    if status.st_uid == os.geteuid():
                        yield Path(entry.path), status


def _is_in_container() -> bool:
    """True if this process sees only a part of the machine's processes."""
    try:
        namespace = os.readlink(this_system().path("proc/self/ns/pid"))
    except OSError:  # a kernel without namespaces has no containers
        return False
    return namespace != _FIRST_NAMESPACE


def _files_in_use() -> Tuple[Set[Tuple[int, int]], bool]:
    """The (device, inode) of each file that a process has open or mapped, and whether all processes of other users
    could be looked at. Those of this user that cannot be have changed their rights, as that of an ssh session has: they
    are no ranks."""
    used: Set[Tuple[int, int]] = set()
    are_all_seen = True
    for process in this_system().path("proc").glob("[0-9]*"):
        try:
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):  # closed meanwhile
                    status = descriptor.stat()
                    used.add((status.st_dev, status.st_ino))
            used.update(_mapped_files(process))  # afterwards: a file is mapped before it is closed
        except PermissionError:
            are_all_seen = are_all_seen and _user_of(process) in (0, os.geteuid())
        except OSError:  # it has ended
            continue
    return used, are_all_seen


def _user_of(process: Path) -> int:
    """The user of a process; -1 where that is not readable."""
    user = re.search(r"^Uid:\s+(\d+)", this_system().read(f"proc/{process.name}/status") or "", re.MULTILINE)
    return int(user[1]) if user else -1


def _mapped_files(process: Path) -> Iterator[Tuple[int, int]]:
    text = (process / "maps").read_text(encoding="utf-8", errors="replace")
    for line in text.splitlines():  # address permissions offset major:minor inode path
        words = line.split(None, 5)
        if len(words) >= 5 and words[4] != "0":
            major, minor = (int(number, 16) for number in words[3].split(":"))
            yield os.makedev(major, minor), int(words[4])
