"""Tests of the parts of a manifest, which describe the data files where these are many."""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import List

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fugaku_gpt.checkpoint import file_list, file_system
from fugaku_gpt.checkpoint.file_list import DataFile, PartedFiles, part_values, parts_of
from fugaku_gpt.checkpoint.manifest import (
    MANIFEST,
    LogicalTensor,
    Manifest,
    manifest_text,
    parse_manifest,
    read_manifest,
)
from fugaku_gpt.checkpoint.reader import Checkpoint
from fugaku_gpt.checkpoint.retention import newest_valid, remove_old_checkpoints, verify_checkpoint
from fugaku_gpt.errors import CheckpointError
from tests.support.checkpoints import cut_flat, save, some_arrays

ARRAYS = some_arrays(5)
PART = "manifest-000000.json"


@pytest.fixture
def files_per_part(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(file_list, "FILES_PER_PART", 2)
    return 2


@pytest.fixture
def parted_checkpoint(tmp_path: Path, files_per_part: int) -> Path:
    """The newer of two checkpoints in a directory: five files in three parts."""
    save(tmp_path, 10, some_arrays(4), cut_flat(some_arrays(4), 2))
    return save(tmp_path, 20, ARRAYS, cut_flat(ARRAYS, 5))


def data_file(number: int, tensors: List[int]) -> DataFile:
    tensors = sorted(set(tensors))
    return DataFile(f"data-{number:06d}.safetensors", 8 * number, 2**32 - 1 - number, tuple(tensors), tuple(tensors))


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), max_size=9), st.integers(0, 9), st.data())
def test_split_file_lists_are_read_back_and_searched_by_tensor(
    tensors_of_files: List[List[int]], tensor: int, data: st.DataObject
) -> None:
    files = [data_file(number, tensors) for number, tensors in enumerate(tensors_of_files)]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_list, "FILES_PER_PART", data.draw(st.integers(1, 3)))
        described = parts_of(files)
        assert bool(described) == (len(files) > file_list.FILES_PER_PART)
        for part, content in described:
            (Path(folder) / part.name).write_bytes(content)
        if described:
            parted = PartedFiles(Path(folder), [part for part, _ in described])
            assert (list(parted), len(parted), parted[-1]) == (files, len(files), files[-1])
            assert parted[1:3] == files[1:3] and [parted[index] for index in range(len(files))] == files
            first = data.draw(st.integers(0, len(files)))
            expected = [*range(first, len(files)), *range(first)]
            assert list(parted.indices_with(tensor, first)) == [n for n in expected if tensor in files[n].tensors]
            with pytest.raises(IndexError):
                parted[len(files)]


def test_a_reader_opens_only_lists_with_its_tensors(
    tmp_path: Path, files_per_part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, 20, ARRAYS, cut_flat(ARRAYS, 24))
    manifest, real, opened = read_manifest(path), file_system.read_file, []
    monkeypatch.setattr(file_system, "read_file", lambda path: opened.append(path.name) or real(path))
    assert isinstance(manifest.files, PartedFiles)
    with_tensor = [part.name for part in manifest.files.parts if part.has_tensor(0)]
    kind = next(iter(manifest.tensors[manifest.tensor_names[0]].kinds))
    with Checkpoint(path, manifest) as checkpoint:
        assert opened == []
        checkpoint.tensor(kind, manifest.tensor_names[0])
        checkpoint.tensor(kind, manifest.tensor_names[0])
    assert set(opened) <= set(with_tensor) and len(with_tensor) < len(manifest.files.parts)


def test_many_files_make_a_short_manifest_of_another_version() -> None:
    tensors = {f"t{number:02d}": LogicalTensor((4,), {"weights": "F32"}) for number in range(10)}
    files = [data_file(number + 1, [number % 10]) for number in range(1000)]
    manifest = Manifest(1, 8, 64, tensors, files)
    described = parts_of(files)
    head = manifest_text(manifest, [part for part, _ in described])
    assert json.loads(manifest_text(manifest))["version"] == 1 and json.loads(head)["version"] == 2
    assert len(described) == 4 and len(head) < 4096
    parsed = parse_manifest(head, Path("folder") / MANIFEST)
    assert (len(parsed.files), parsed.data_bytes) == (1000, manifest.data_bytes)
    assert manifest_text(parsed) == head  # as it is broadcast to ranks


def test_every_flipped_bit_of_a_part_is_detected_and_named(parted_checkpoint: Path) -> None:
    chance = random.Random(1)
    for name in (PART, "manifest-000002.json", MANIFEST):
        path = parted_checkpoint / name
        intact = path.read_bytes()
        for bit in chance.sample(range(8 * len(intact)), 20):
            damaged = bytearray(intact)
            damaged[bit // 8] ^= 1 << (bit % 8)
            path.write_bytes(bytes(damaged))
            problems = verify_checkpoint(parted_checkpoint)
            assert len(problems) == 1 and problems[0].startswith(str(path)), (name, bit, problems)
            newest, rejected = newest_valid([parted_checkpoint, parted_checkpoint.parent / "step-00000010"])
            assert newest is not None and newest.name == "step-00000010" and rejected[0][1] == problems[0]
        path.write_bytes(intact)
    assert verify_checkpoint(parted_checkpoint) == []


def test_a_missing_part_is_named_and_its_checkpoint_is_not_complete(parted_checkpoint: Path) -> None:
    (parted_checkpoint / PART).unlink()
    assert verify_checkpoint(parted_checkpoint) == [
        f"{parted_checkpoint / PART}: cannot be read: No such file or directory; use another checkpoint"
    ]
    with Checkpoint(parted_checkpoint) as checkpoint, pytest.raises(CheckpointError, match=PART):
        checkpoint.tensor("weights", "a.weight")
    remove_old_checkpoints(parted_checkpoint.parent, 1, None, None)
    assert (parted_checkpoint.parent / "step-00000010").is_dir()


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../manifest-000000.json"},
        {"name": "a/b"},
        {"files": 0},
        {"files": 3},
        {"bytes": -1},
        {"tensors": [[0, 10**30]]},
        {"tensors": [[2, 1]]},
        {"tensors": [1]},
        {"sha256": "0" * 64},
        {"files": 1},
        {"bytes": 1},
    ],
)
def test_forged_descriptions_of_lists_are_refused(parted_checkpoint: Path, change: "dict[str, object]") -> None:
    manifest = read_manifest(parted_checkpoint)
    assert isinstance(manifest.files, PartedFiles)
    first, *rest = manifest.files.parts
    with pytest.raises((CheckpointError, KeyError, TypeError, ValueError)):
        forged = file_list.parse_part({**part_values(first), **change})
        files = PartedFiles(parted_checkpoint, [forged, *rest])
        text = manifest_text(replace(manifest, files=files))  # a manifest that is sound by itself
        list(parse_manifest(text, parted_checkpoint / MANIFEST).files)


def with_its_digest(checkpoint: Path) -> PartedFiles:
    """The files of a checkpoint whose first part was changed, as a manifest with the digest of that part lists them."""
    manifest = read_manifest(checkpoint)
    assert isinstance(manifest.files, PartedFiles)
    first, *rest = manifest.files.parts
    sealed = replace(first, sha256=hashlib.sha256((checkpoint / PART).read_bytes()).hexdigest())
    return PartedFiles(checkpoint, [sealed, *rest])


def test_a_part_of_a_later_version_is_refused(parted_checkpoint: Path) -> None:
    path = parted_checkpoint / PART
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "version": 2}))
    with pytest.raises(CheckpointError, match="version 2; this program reads version 1"):
        list(with_its_digest(parted_checkpoint))


@pytest.mark.parametrize(
    "change",
    [
        {"crc32": "zz"},
        {"crc32": 7},
        {"crc32": "00" * 30},
        {"crc32": "00" * 33},
        {"bytes": -1},
        {"name": "../x"},
        {"tensors": [[0, 10**9]]},
        {"tensors": [[0, 10**40]]},
        {"tensors": None},
    ],
)
def test_forged_files_of_a_part_are_refused(parted_checkpoint: Path, change: "dict[str, object]") -> None:
    path = parted_checkpoint / PART
    values = json.loads(path.read_bytes())
    values["files"][0].update(change)
    path.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="not a part of a manifest, or damaged"):
        list(with_its_digest(parted_checkpoint))
