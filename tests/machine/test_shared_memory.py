"""Tests of the files that dead ranks leave in shared memory."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path
from typing import Iterator, List

import pytest

from fugaku_gpt.machine import shared_memory
from fugaku_gpt.machine.shared_memory import leftover_segments, remove_segments, segments, segments_of
from fugaku_gpt.machine.system import System, use_system


def segment(folder: Path, name: str, size: int = 4096) -> Path:
    path = folder / name
    path.write_bytes(bytes(size))
    minute_ago = time.time() - 60
    os.utime(path, (minute_ago, minute_ago))
    return path


def leftover(folder: Path) -> List[str]:
    return [path.name for path in leftover_segments(folder).dead]


@pytest.mark.slow
def test_only_files_of_mpi_that_nobody_uses_are_left_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_is_in_container", lambda: False)  # as these tests may be
    dead, other = segment(tmp_path, "mpich_shm_a1b2_0", 8192), segment(tmp_path, "vader_segment.node.0.1.2", 4096)
    mapped, opened = segment(tmp_path, "mpich_shm_c3d4_0"), segment(tmp_path, "ucx_shm_posix_5")
    foreign = segment(tmp_path, "sem.of-another-program")
    young = segment(tmp_path, "mpich_shm_e5f6_0")
    os.utime(young)  # of a run that is just starting
    assert segments(tmp_path) == {dead, other, mapped, opened, young}
    with open(mapped, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 4096)
    with open(opened, "rb"):
        assert leftover_segments(tmp_path) == ([dead, other], [], "")
        assert remove_segments([dead, other, tmp_path / "none"]) == (2, 12288)
        assert mapped in segments_of(os.getpid()) and opened not in segments_of(os.getpid())
    assert sorted(os.listdir(tmp_path)) == sorted(path.name for path in (mapped, opened, foreign, young))
    memory.close()
    assert leftover(tmp_path) == [mapped.name, opened.name]


def test_no_shared_memory_has_no_leftovers(tmp_path: Path) -> None:
    assert leftover_segments(tmp_path / "none") == ([], [], "") and segments(tmp_path / "none") == set()


def test_in_a_container_nothing_is_judged(tmp_path: Path) -> None:
    """Ranks of another container may use the same shared memory, and their processes are not seen."""
    left = segment(tmp_path, "mpich_shm_a1b2_0")
    namespace = tmp_path / "proc" / "self" / "ns" / "pid"
    namespace.parent.mkdir(parents=True)
    namespace.symlink_to("pid:[4026532211]")
    with use_system(System(tmp_path)):
        leftovers = leftover_segments(tmp_path)
    assert (leftovers.dead, leftovers.unjudged) == ([], [left]) and "container" in leftovers.reason


@pytest.mark.parametrize(
    ("mode", "is_own", "is_judged"), [(0o600, False, True), (0o660, False, False), (0o660, True, True)]
)
def test_a_hidden_process_of_another_user_counts_where_it_may_open_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, is_own: bool, is_judged: bool
) -> None:
    left = segment(tmp_path, "mpich_shm_a1b2_0")
    left.chmod(mode)
    process = tmp_path / "proc" / "77"
    (process / "fd").mkdir(parents=True)
    (process / "status").write_text(f"Name:\tx\nUid:\t{os.geteuid() if is_own else 1234}\t1\t1\t1\n")
    look = Path.iterdir

    def refuse(path: Path) -> Iterator[Path]:
        if path == process / "fd":
            raise PermissionError(13, "Permission denied")
        return look(path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    with use_system(System(tmp_path)):
        leftovers = leftover_segments(tmp_path)
    assert (leftovers.dead, leftovers.unjudged) == (([left], []) if is_judged else ([], [left]))
    assert bool(leftovers.reason) is not is_judged
