"""Tests that damaged, missing and foreign files are detected and named, and that the checkpoint before stays valid."""

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
FLIPS = 60  # flipped bits of each file


@pytest.fixture
def newer_checkpoint(tmp_path: Path) -> Path:
    """The newer of two checkpoints in a directory."""
    save(tmp_path, 10, some_arrays(4), cut_flat(some_arrays(4), 2))
    return save(tmp_path, 20, ARRAYS, cut_flat(ARRAYS, 3))


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(bytes(content))


@pytest.mark.slow
def test_every_flipped_bit_is_detected_and_named(newer_checkpoint: Path) -> None:
    chance = random.Random(1)
    with open_checkpoint(newer_checkpoint) as intact:
        names = [*(file.name for file in intact.manifest.files), MANIFEST]
    for name in names:
        path = newer_checkpoint / name
        plan = None
        if name != MANIFEST:
            descriptor = file_system.open_to_read(path)
            plan = read_plan(descriptor, path.stat().st_size)
            file_system.close(descriptor)
        for bit in chance.sample(range(8 * path.stat().st_size), FLIPS):
            flip(path, bit)
            problems = verify_checkpoint(newer_checkpoint)
            assert len(problems) == 1 and problems[0].startswith(str(path)), (name, bit, problems)
            if plan is not None and bit // 8 >= plan.tensors[0].offset:
                index = max(number for number, item in enumerate(plan.tensors) if item.offset <= bit // 8)
                entry = plan.entries[index]
                assert problems == [
                    f"{path}: damaged: {entry.kind} of {entry.tensor}{entry.region}: its CRC-32 is another"
                ]
                assert verify_checkpoint(newer_checkpoint, deep=False) == []
                with open_checkpoint(newer_checkpoint) as checkpoint:
                    out = np.empty(entry.region.shape, np.float32)
                    with pytest.raises(CheckpointError, match="CRC-32"):
                        checkpoint.read_region(entry.kind, entry.tensor, entry.region, out)
            newest, rejected = newest_valid(checkpoints_at(newer_checkpoint.parent))
            assert newest == newer_checkpoint.parent / "step-00000010" and rejected == [
                (newer_checkpoint.name, problems[0])
            ]
            flip(path, bit)
    assert verify_checkpoint(newer_checkpoint) == []


@pytest.mark.parametrize("keep", [0, 7, 8, 300, -1])
def test_a_file_that_is_cut_short_is_named(newer_checkpoint: Path, keep: int) -> None:
    path = newer_checkpoint / "data-000001.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    (problem,) = verify_checkpoint(newer_checkpoint, deep=False)
    assert problem.startswith(f"{path}: ") and "bytes long, not" in problem
    with open_checkpoint(newer_checkpoint) as checkpoint, pytest.raises(
        CheckpointError, match="data-000001.safetensors"
    ):
        for key in ARRAYS:
            checkpoint.tensor(*key.split("/"))
    descriptor = file_system.open_to_read(path)
    with pytest.raises(NotSafetensors):
        read_plan(descriptor, path.stat().st_size)
    file_system.close(descriptor)


def test_a_missing_file_is_named(newer_checkpoint: Path) -> None:
    (newer_checkpoint / "data-000002.safetensors").unlink()
    assert verify_checkpoint(newer_checkpoint, deep=False) == [f"{newer_checkpoint}/data-000002.safetensors: missing"]
    assert newest_valid(checkpoints_at(newer_checkpoint.parent)).path == newer_checkpoint.parent / "step-00000010"


def test_a_file_of_another_checkpoint_is_not_accepted(newer_checkpoint: Path) -> None:
    other = save(newer_checkpoint.parent, 30, some_arrays(6), cut_flat(some_arrays(6), 3))
    shutil.copy(newer_checkpoint / "data-000000.safetensors", other)
    problems = verify_checkpoint(other)  # the same pieces, other numbers
    assert len(problems) == len(ARRAYS) - 3 and all(
        "CRC-32" in problem and "data-000000" in problem for problem in problems
    )
    third = save(newer_checkpoint.parent, 40, some_arrays(6), cut_flat(some_arrays(6), 2))
    shutil.copy(newer_checkpoint / "data-000000.safetensors", third)
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
    (path / MANIFEST).write_text('{"format": "fugaku-gpt checkpoint", "version": 3}')


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (foreign_file, "it holds no manifest.json"),
        (foreign_folder, "not a checkpoint: it holds no manifest.json"),
        (foreign_manifest, "not the manifest of a checkpoint"),
        (later_version, "version 3 of this format; this program reads version 1 and 2"),
    ],
)
def test_a_foreign_checkpoint_is_reported_and_left_alone(newer_checkpoint: Path, make: Any, message: str) -> None:
    path = newer_checkpoint.parent / "step-00000099"
    make(path)
    (problem,) = verify_checkpoint(path)
    assert str(path) in problem and message in problem
    assert newest_valid(checkpoints_at(newer_checkpoint.parent)) == (newer_checkpoint, [(path.name, problem)])
    save(newer_checkpoint.parent, 99, ARRAYS, cut_flat(ARRAYS, 1))
    assert (
        newest_valid(checkpoints_at(newer_checkpoint.parent)).path == newer_checkpoint.parent / "step-00000099-2"
        and path.exists()
    )


def test_pieces_that_leave_a_gap_are_reported(tmp_path: Path) -> None:
    pieces_by_rank = cut_flat(ARRAYS, 2)
    (lost,) = [piece for piece in pieces_by_rank[1] if piece[0] == "first_moment/a.bias"]
    path = save(tmp_path, 1, ARRAYS, [pieces_by_rank[0], [piece for piece in pieces_by_rank[1] if piece is not lost]])
    (problem,) = verify_checkpoint(path, deep=False)
    assert "the pieces of first_moment of a.bias do not make up the whole" in problem
    with open_checkpoint(path) as checkpoint, pytest.raises(CheckpointError, match="3 of 7 elements"):
        checkpoint.tensor("first_moment", "a.bias")


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_folder_that_may_not_be_written_raises_an_error_and_existing_checkpoints_stay(
    newer_checkpoint: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path) -> None:
        raise OSError(code, "refused", str(path))

    monkeypatch.setattr(file_system, "make_folder", refused)
    with pytest.raises(OSError, match="refused") as caught:
        save(newer_checkpoint.parent, 30, ARRAYS, cut_flat(ARRAYS, 1))
    assert caught.value.errno == code and str(newer_checkpoint.parent) in str(caught.value)
    assert newest_valid(checkpoints_at(newer_checkpoint.parent)) == (newer_checkpoint, [])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate disk of 1 MiB, where a test may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if not _mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", disk):
        pytest.skip("not allowed to mount a small disk here; the injected faults cover the same")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_raises_an_error_and_existing_checkpoints_stay(small_disk: Path) -> None:
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


def test_a_read_only_disk_raises_an_error_and_existing_checkpoints_stay(small_disk: Path) -> None:
    path = save(small_disk, 10, ARRAYS, cut_flat(ARRAYS, 2))
    assert _mount("-o", "remount,ro", small_disk)
    with pytest.raises(OSError, match="Read-only file system"):
        save(small_disk, 20, ARRAYS, cut_flat(ARRAYS, 2))
    assert newest_valid(checkpoints_at(small_disk)) == (path, [])


def _mount(*arguments: Any) -> bool:
    try:
        done = subprocess.run(["mount", *map(str, arguments)], stderr=subprocess.DEVNULL, check=False)
    except FileNotFoundError:
        return False
    return done.returncode == 0
