"""What is damaged, missing or foreign is found and named, and the checkpoint before it is still there."""

from __future__ import annotations

import errno
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any, Iterator

import numpy as np
import pytest

from fugaku_gpt.checkpoint import file_system
from fugaku_gpt.checkpoint.data_file import read_plan
from fugaku_gpt.checkpoint.directory import list_checkpoints, require_room
from fugaku_gpt.checkpoint.manifest import MANIFEST
from fugaku_gpt.checkpoint.reader import open_checkpoint
from fugaku_gpt.checkpoint.retention import checkpoints_at, newest_valid, verify_checkpoint
from fugaku_gpt.checkpoint.safetensors import NotSafetensors
from fugaku_gpt.errors import CheckpointError, RunFailed
from tests.support.checkpoints import cut_flat, save, some_arrays

ARRAYS = some_arrays(5)
FLIPS = 60  # of each file


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A directory with an old checkpoint and a new one; the new one's folder."""
    save(tmp_path, 10, some_arrays(4), cut_flat(some_arrays(4), 2))
    return save(tmp_path, 20, ARRAYS, cut_flat(ARRAYS, 3))


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(bytes(content))


@pytest.mark.slow
def test_every_flipped_bit_is_found_and_named(two: Path) -> None:
    chance = random.Random(1)
    with open_checkpoint(two) as whole:
        names = [*(file.name for file in whole.manifest.files), MANIFEST]
    for name in names:
        path = two / name
        plan = None
        if name != MANIFEST:
            descriptor = file_system.open_to_read(path)
            plan = read_plan(descriptor, path.stat().st_size)
            file_system.close(descriptor)
        for bit in chance.sample(range(8 * path.stat().st_size), FLIPS):
            flip(path, bit)
            problems = verify_checkpoint(two)
            assert len(problems) == 1 and problems[0].startswith(str(path)), (name, bit, problems)
            if plan is not None and bit // 8 >= plan.tensors[0].offset:
                index = max(one for one, item in enumerate(plan.tensors) if item.offset <= bit // 8)
                entry = plan.entries[index]
                assert problems == [
                    f"{path}: damaged: {entry.kind} of {entry.tensor}{entry.region}: its CRC-32 is another"
                ]
                assert verify_checkpoint(two, deep=False) == []
                with open_checkpoint(two) as checkpoint:
                    out = np.empty(entry.region.shape, np.float32)
                    with pytest.raises(CheckpointError, match="CRC-32"):
                        checkpoint.read_region(entry.kind, entry.tensor, entry.region, out)
            newest, rejected = newest_valid(checkpoints_at(two.parent))
            assert newest == two.parent / "step-00000010" and rejected == [(two.name, problems[0])]
            flip(path, bit)
    assert verify_checkpoint(two) == []


@pytest.mark.parametrize("keep", [0, 7, 8, 300, -1])
def test_a_file_that_is_cut_short_is_named(two: Path, keep: int) -> None:
    path = two / "data-000001.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    (problem,) = verify_checkpoint(two, deep=False)
    assert problem.startswith(f"{path}: ") and "bytes long, not" in problem
    with open_checkpoint(two) as checkpoint, pytest.raises(CheckpointError, match="data-000001.safetensors"):
        for key in ARRAYS:
            checkpoint.tensor(*key.split("/"))
    descriptor = file_system.open_to_read(path)
    with pytest.raises(NotSafetensors):
        read_plan(descriptor, path.stat().st_size)
    file_system.close(descriptor)


def test_a_missing_file_is_named(two: Path) -> None:
    (two / "data-000002.safetensors").unlink()
    assert verify_checkpoint(two, deep=False) == [f"{two}/data-000002.safetensors: missing"]
    assert newest_valid(checkpoints_at(two.parent)).path == two.parent / "step-00000010"


def test_another_checkpoint_s_file_is_not_taken(two: Path) -> None:
    other = save(two.parent, 30, some_arrays(6), cut_flat(some_arrays(6), 3))
    shutil.copy(two / "data-000000.safetensors", other)
    found = verify_checkpoint(other)  # the same pieces, other numbers
    assert len(found) == len(ARRAYS) - 3 and all("CRC-32" in one and "data-000000" in one for one in found)
    third = save(two.parent, 40, some_arrays(6), cut_flat(some_arrays(6), 2))
    shutil.copy(two / "data-000000.safetensors", third)
    assert "bytes long, not" in verify_checkpoint(third)[0]


def foreign_file(path: Path) -> None:
    path.write_text("hello")


def foreign_folder(path: Path) -> None:
    path.mkdir()
    (path / "model.safetensors").write_text("hello")


def foreign_manifest(path: Path) -> None:
    path.mkdir()
    (path / MANIFEST).write_text('{"format": "something else", "version": 1}')


def later_version(path: Path) -> None:
    path.mkdir()
    (path / MANIFEST).write_text('{"format": "fugaku-gpt checkpoint", "version": 2}')


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (foreign_file, "it holds no manifest.json"),
        (foreign_folder, "not a checkpoint: it holds no manifest.json"),
        (foreign_manifest, "not the manifest of a checkpoint"),
        (later_version, "version 2 of this format; this program reads version 1"),
    ],
)
def test_what_is_not_ours_is_told_and_left_alone(two: Path, make: Any, told: str) -> None:
    path = two.parent / "step-00000099"
    make(path)
    (problem,) = verify_checkpoint(path)
    assert str(path) in problem and told in problem
    assert newest_valid(checkpoints_at(two.parent)) == (two, [(path.name, problem)])
    save(two.parent, 99, ARRAYS, cut_flat(ARRAYS, 1))
    assert newest_valid(checkpoints_at(two.parent)).path == two.parent / "step-00000099-2" and path.exists()


def test_pieces_that_leave_a_gap_are_no_checkpoint(tmp_path: Path) -> None:
    held = cut_flat(ARRAYS, 2)
    (lost,) = [one for one in held[1] if one[0] == "first_moment/a.bias"]
    path = save(tmp_path, 1, ARRAYS, [held[0], [one for one in held[1] if one is not lost]])
    (problem,) = verify_checkpoint(path, deep=False)
    assert "the pieces of first_moment of a.bias do not make up the whole" in problem
    with open_checkpoint(path) as checkpoint, pytest.raises(CheckpointError, match="3 of 7 elements"):
        checkpoint.tensor("first_moment", "a.bias")


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_folder_that_may_not_be_written_says_so_and_keeps_what_is_there(
    two: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path) -> None:
        raise OSError(code, "refused", str(path))

    monkeypatch.setattr(file_system, "make_folder", refused)
    with pytest.raises(OSError, match="refused") as caught:
        save(two.parent, 30, ARRAYS, cut_flat(ARRAYS, 1))
    assert caught.value.errno == code and str(two.parent) in str(caught.value)
    assert newest_valid(checkpoints_at(two.parent)) == (two, [])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB of its own, where a test may have one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if not _mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", disk):
        pytest.skip("not allowed to mount a small disk here; the injected faults cover the same")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_says_so_and_keeps_what_is_there(small_disk: Path) -> None:
    path = save(small_disk, 10, ARRAYS, cut_flat(ARRAYS, 2))
    big = some_arrays(1, {"big": (400, 1000)})
    with pytest.raises(RunFailed, match="a checkpoint needs 5 MiB, and 1 MiB are free; make room"):
        require_room(small_disk, sum(array.nbytes for array in big.values()))
    with pytest.raises(OSError, match="No space left") as caught:
        save(small_disk, 20, big, cut_flat(big, 2))
    assert "data-00000" in str(caught.value.filename)
    assert newest_valid(checkpoints_at(small_disk)) == (path, []) and len(list_checkpoints(small_disk)) == 1
    again = save(small_disk, 30, ARRAYS, cut_flat(ARRAYS, 2))
    assert newest_valid(checkpoints_at(small_disk)) == (again, [])


def test_a_read_only_disk_says_so_and_keeps_what_is_there(small_disk: Path) -> None:
    path = save(small_disk, 10, ARRAYS, cut_flat(ARRAYS, 2))
    assert _mount("-o", "remount,ro", small_disk)
    with pytest.raises(OSError, match="Read-only file system"):
        save(small_disk, 20, ARRAYS, cut_flat(ARRAYS, 2))
    assert newest_valid(checkpoints_at(small_disk)) == (path, [])


def _mount(*words: Any) -> bool:
    try:
        done = subprocess.run(["mount", *map(str, words)], stderr=subprocess.DEVNULL, check=False)
    except FileNotFoundError:
        return False
    return done.returncode == 0
