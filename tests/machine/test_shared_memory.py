"""Tests of the files that dead ranks leave in shared memory."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from fugaku_gpt.machine.shared_memory import leftover_segments, remove_leftover_segments


def segment(folder: Path, name: str, size: int = 4096) -> Path:
    path = folder / name
    path.write_bytes(bytes(size))
    minute_ago = time.time() - 60
    os.utime(path, (minute_ago, minute_ago))
    return path


def test_only_files_of_mpi_that_nobody_uses_are_left_over(tmp_path: Path) -> None:
    dead, other = segment(tmp_path, "mpich_shm_a1b2_0", 8192), segment(tmp_path, "vader_segment.node.0.1.2", 4096)
    mapped, opened = segment(tmp_path, "mpich_shm_c3d4_0"), segment(tmp_path, "ucx_shm_posix_5")
    foreign = segment(tmp_path, "sem.of-another-program")
    young = segment(tmp_path, "mpich_shm_e5f6_0")
    os.utime(young)  # of a run that is just starting
    with open(mapped, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 4096)
    with open(opened, "rb"):
        assert leftover_segments(tmp_path) == [dead, other]
        assert remove_leftover_segments(tmp_path) == (2, 12288)
    assert sorted(os.listdir(tmp_path)) == sorted(path.name for path in (mapped, opened, foreign, young))
    memory.close()
    assert leftover_segments(tmp_path) == [mapped, opened]


def test_no_shared_memory_has_no_leftovers(tmp_path: Path) -> None:
    assert remove_leftover_segments(tmp_path / "none") == (0, 0)
