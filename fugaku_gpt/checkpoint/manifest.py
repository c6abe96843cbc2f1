"""``manifest.json`` of a checkpoint: its tensors, its files, and checksums that prove it complete.

The manifest contains a SHA-256 over all its other values, and a CRC-32 of every header and every piece of data, so data
that matches the manifest is the data that was saved.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence, Tuple

from fugaku_gpt.checkpoint import file_system
from fugaku_gpt.checkpoint.data_file import FilePlan
from fugaku_gpt.checkpoint.safetensors import DTYPES
from fugaku_gpt.errors import CheckpointError
from fugaku_gpt.input_files import is_possible_name
from fugaku_gpt.limits import cut
from fugaku_gpt.versioned_json import parse_versioned_json

FORMAT = "fugaku-gpt checkpoint"
VERSION = 1
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
class DataFile:
    """One data file.

    Attributes:
        name: name of the file in the checkpoint's folder.
        bytes: length of the file.
        header_crc32: CRC-32 of everything before the data.
        tensors: indices of the tensors of which it holds pieces, into the sorted names of the manifest's tensors.
        crc32: CRC-32 of each piece, in the header's order.
    """

    name: str
    bytes: int
    header_crc32: int
    tensors: Tuple[int, ...]
    crc32: Tuple[int, ...]


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
        files: data files in the order of their names.
    """

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    tensors: Mapping[str, LogicalTensor]
    files: Tuple[DataFile, ...]
    state: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    data_fingerprint: str = ""
    build: Mapping[str, Any] = field(default_factory=dict)

    @property
    def data_bytes(self) -> int:
        """Total length of the data files."""
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


def manifest_text(manifest: Manifest) -> bytes:
    """Serialise a manifest.

    Raises:
        ValueError: a number of ``state`` is not finite.
    """
    values = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
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
        (VERSION,),
        _verified_manifest,
        mend="use another checkpoint",
        error=CheckpointError,
    )


def _verified_manifest(values: Dict[str, Any]) -> Manifest:
    if values["format"] != FORMAT:
        raise ValueError(f"its format is {values['format']!r}, not {FORMAT!r}")
    if values.pop("digest", None) != _digest(values):
        raise ValueError("its SHA-256 does not match")
    return _manifest(values)


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(values)).hexdigest()


def _canonical(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def _manifest(values: Dict[str, Any]) -> Manifest:
    tensors = {
        str(name): LogicalTensor(tuple(map(int, entry["shape"])), dict(entry["kinds"]))
        for name, entry in values["tensors"].items()
    }
    for name, tensor in tensors.items():
        unknown = sorted(set(tensor.kinds.values()) - set(DTYPES))
        if unknown:
            raise ValueError(f"{name} is of the unknown data type {unknown[0]!r}")
    files = tuple(
        DataFile(
            _plain(entry["name"]),
            int(entry["bytes"]),
            int(entry["header_crc32"]),
            tuple(map(int, entry["tensors"])),
            tuple(map(int, entry["crc32"])),
        )
        for entry in values["files"]
    )
    if any(not 0 <= index < len(tensors) for file in files for index in file.tensors):
        raise ValueError("a file holds a tensor that is not there")
    if any(size < 0 for tensor in tensors.values() for size in tensor.shape) or any(file.bytes < 0 for file in files):
        raise ValueError("a size is below 0")
    needed = sum(
        math.prod(tensor.shape) * DTYPES[dtype].itemsize
        for tensor in tensors.values()
        for dtype in tensor.kinds.values()
    )
    if needed > sum(file.bytes for file in files):
        raise ValueError("its tensors are larger than its files")
    return Manifest(
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


def _plain(name: str) -> str:
    if Path(name).name != name or not is_possible_name(
        name
    ):  # a foreign manifest must not make us read outside of its folder
        raise ValueError(f"{cut(repr(name))} is not a file's name")
    return name
