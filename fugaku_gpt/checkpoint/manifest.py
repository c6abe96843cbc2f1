"""``manifest.json`` of a checkpoint: its tensors, its files, and checksums that prove it complete.

The manifest contains a SHA-256 over all its other values, and a CRC-32 of every header and every piece of data, so data
that matches the manifest is the data that was saved. Where data files are many, parts of the manifest describe them
(``file_list.py``): it contains a SHA-256 of each part, and its version is 2.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence, Tuple

from fugaku_gpt.checkpoint import file_system
from fugaku_gpt.checkpoint.data_file import FilePlan
from fugaku_gpt.checkpoint.file_list import DataFile, FilePart, PartedFiles, file_name_of, parse_part, part_values
from fugaku_gpt.checkpoint.safetensors import DTYPES
from fugaku_gpt.errors import CheckpointError
from fugaku_gpt.versioned_json import parse_versioned_json

FORMAT = "fugaku-gpt checkpoint"
VERSION = 1
PARTED_VERSION = 2  # of a manifest whose data files are described by parts
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class LogicalTensor:
    """A tensor of the model as a whole, however it is split into pieces.

    Attributes:
        shape: full shape, without the vocabulary's padding.
        kinds: kind → dtype, such as ``{"weights": "F32"}``.
    """

    shape: Tuple[int, ...]
    kinds: Mapping[str, str]


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint's manifest.

    Attributes:
        iteration: number of finished iterations.
        consumed_samples: number of consumed samples, which is the whole state of the data.
        consumed_tokens: number of tokens consumed in all iterations.
        state: the trainer's scalars, as JSON values.
        config: the run's configuration, with every field.
        data_fingerprint: fingerprint of the corpus; empty if there is none.
        build: facts about the build that has written the checkpoint.
        tensors: name → tensor.
        files: data files in the order of their names; from a manifest in parts, they are read when they are needed.
    """

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    tensors: Mapping[str, LogicalTensor]
    files: Sequence[DataFile]
    state: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    data_fingerprint: str = ""
    build: Mapping[str, Any] = field(default_factory=dict)

    @property
    def data_bytes(self) -> int:
        """Total length of the data files."""
        if isinstance(self.files, PartedFiles):
            return sum(part.bytes for part in self.files.parts)
        return sum(file.bytes for file in self.files)

    @property
    def tensor_names(self) -> List[str]:
        """The sorted names into which ``DataFile.tensors`` holds indices."""
        return sorted(self.tensors)


def describe_file(name: str, plan: FilePlan, checksums: Sequence[int], tensor_names: Sequence[str]) -> DataFile:
    """Describe a written file for the manifest.

    Args:
        checksums: CRC-32 of each entry, as returned by :func:`~fugaku_gpt.checkpoint.data_file.write_pieces`.
        tensor_names: names of all tensors, sorted.
    """
    if len(checksums) != len(plan.entries):
        raise ValueError(f"{name}: {len(checksums)} sums for {len(plan.entries)} entries")
    index_of_tensor = {tensor: index for index, tensor in enumerate(tensor_names)}
    tensor_indices = sorted({index_of_tensor[entry.tensor] for entry in plan.entries})
    return DataFile(name, plan.length, zlib.crc32(plan.header.content), tuple(tensor_indices), tuple(checksums))


def manifest_text(manifest: Manifest, parts: Sequence[FilePart] = ()) -> bytes:
    """Serialise a manifest.

    Args:
        parts: those that describe its data files, if these are not to be in the manifest itself; those of a manifest
            that was read in parts are taken from it.

    Raises:
        ValueError: a number of ``state`` is not finite.
    """
    values = {field.name: getattr(manifest, field.name) for field in fields(manifest)}
    values["tensors"] = {name: asdict(tensor) for name, tensor in manifest.tensors.items()}
    if isinstance(manifest.files, PartedFiles):
        parts = manifest.files.parts
    if parts:
        del values["files"]
        values["parts"] = [part_values(part) for part in parts]
    else:
        values["files"] = [asdict(file) for file in manifest.files]
    values = {"format": FORMAT, "version": PARTED_VERSION if parts else VERSION, **values}
    return _canonical({**values, "digest": _digest(values)}) + b"\n"


def read_manifest(checkpoint: Path) -> Manifest:
    """Read the manifest of a checkpoint's folder.

    Raises:
        CheckpointError: it is missing, damaged, or not a manifest of this version.
    """
    path = checkpoint / MANIFEST
    try:
        text = file_system.read_file(path)
    except (FileNotFoundError, NotADirectoryError):
        hint = "not a checkpoint" if checkpoint.is_dir() else "no such folder"
        raise CheckpointError(f"{checkpoint}: {hint}: it holds no {MANIFEST}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    return parse_manifest(text, path)


def parse_manifest(text: bytes, path: Path) -> Manifest:
    """Parse the output of :func:`manifest_text`; ``path`` names it in messages.

    Raises:
        CheckpointError: it is damaged, or not a manifest of this version.
    """
    return parse_versioned_json(
        text,
        path,
        "the manifest of a checkpoint, or damaged",
        (VERSION, PARTED_VERSION),
        lambda values: _verified_manifest(values, path.parent),
        mend="use another checkpoint",
        error=CheckpointError,
    )


def _verified_manifest(values: Dict[str, Any], folder: Path) -> Manifest:
    if values["format"] != FORMAT:
        raise ValueError(f"its format is {values['format']!r}, not {FORMAT!r}")
    if values.pop("digest", None) != _digest(values):
        raise ValueError("its SHA-256 does not match")
    return _manifest(values, folder)


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(values)).hexdigest()


def _canonical(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def _manifest(values: Dict[str, Any], folder: Path) -> Manifest:
    tensors = {
        str(name): LogicalTensor(tuple(map(int, entry["shape"])), dict(entry["kinds"]))
        for name, entry in values["tensors"].items()
    }
    for name, tensor in tensors.items():
        unknown = sorted(set(tensor.kinds.values()) - set(DTYPES))
        if unknown:
            raise ValueError(f"{name} is of the unknown data type {unknown[0]!r}")
    files = _files(values, len(tensors), folder)
    if any(size < 0 for tensor in tensors.values() for size in tensor.shape):
        raise ValueError("a size is below 0")
    needed = sum(
        math.prod(tensor.shape) * DTYPES[dtype].itemsize
        for tensor in tensors.values()
        for dtype in tensor.kinds.values()
    )
    manifest = Manifest(
        iteration=int(values["iteration"]),
        consumed_samples=int(values["consumed_samples"]),
        consumed_tokens=int(values["consumed_tokens"]),
        tensors=tensors,
        files=files,
        state=dict(values["state"]),
        config=dict(values["config"]),
        data_fingerprint=str(values["data_fingerprint"]),
        build=dict(values["build"]),
    )
    if needed > manifest.data_bytes:
        raise ValueError("its tensors are larger than its files")
    return manifest


def _files(values: Mapping[str, Any], tensor_count: int, folder: Path) -> Sequence[DataFile]:
    """The data files of a manifest of either version."""
    if values["version"] == PARTED_VERSION:
        parts = [parse_part(part) for part in values["parts"]]
        if any(not 0 <= first <= last < tensor_count for part in parts for first, last in part.tensors):
            raise ValueError("a file holds a tensor that is not there")
        return PartedFiles(folder, parts)
    files = tuple(
        DataFile(
            file_name_of(entry["name"]),
            int(entry["bytes"]),
            int(entry["header_crc32"]),
            tuple(map(int, entry["tensors"])),
            tuple(map(int, entry["crc32"])),
        )
        for entry in values["files"]
    )
    if any(not 0 <= index < tensor_count for file in files for index in file.tensors):
        raise ValueError("a file holds a tensor that is not there")
    if any(file.bytes < 0 for file in files):
        raise ValueError("a size is below 0")
    return files
