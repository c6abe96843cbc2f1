"""Reads a checkpoint by logical coordinates, whatever layout has written it."""

from __future__ import annotations

import zlib
from bisect import bisect_left
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Dict, Iterable, List, NamedTuple, Optional, Tuple, Type

import numpy as np

from fugaku_gpt.checkpoint import file_system
from fugaku_gpt.checkpoint.data_file import Entry, FilePlan, read_plan
from fugaku_gpt.checkpoint.file_list import DataFile, PartedFiles
from fugaku_gpt.checkpoint.manifest import MANIFEST, LogicalTensor, Manifest, read_manifest
from fugaku_gpt.checkpoint.safetensors import DTYPES, NotSafetensors, read_into
from fugaku_gpt.errors import CheckpointError
from fugaku_gpt.layout.regions import Region, full_region, intersection
from fugaku_gpt.limits import cut

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

_OPEN_FILES = 32


class _Shard(NamedTuple):
    """An open data file: its layout, and the indices of the pieces of each (kind, tensor)."""

    descriptor: int
    plan: FilePlan
    pieces: Dict[Tuple[str, str], List[int]]


class Checkpoint:
    """An open checkpoint. Every piece that is read is checked against its checksum first.

    Files are opened only until the requested region is complete, beginning at the file that held the last piece: a rank
    finds its share of every tensor in the same few files, and thousands of ranks do not open thousands of files each.

    Attributes:
        path: its folder.
        manifest: its manifest.
    """

    def __init__(self, path: Path, manifest: Optional[Manifest] = None, start_fraction: float = 0.0) -> None:
        """Open a checkpoint; files are opened when they are needed.

        Args:
            manifest: the manifest as read by another rank; by default it is read here.
            start_fraction: the file to search first, as a fraction of all files.
        """
        self.path = path
        self.manifest: Manifest = manifest if manifest is not None else read_manifest(path)
        self._open: Dict[str, _Shard] = {}  # oldest first
        self._first_file = int(start_fraction * len(self.manifest.files))
        self._index_of_tensor = {name: index for index, name in enumerate(self.manifest.tensor_names)}
        self._files: List[List[int]] = [[] for _ in self._index_of_tensor]  # of each tensor; not for files in parts
        if not isinstance(self.manifest.files, PartedFiles):
            for file_index, file in enumerate(self.manifest.files):
                for index in file.tensors:
                    self._files[index].append(file_index)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        while self._open:
            file_system.close(self._open.popitem()[1].descriptor)

    def has_tensor(self, kind: str, name: str) -> bool:
        """True if the checkpoint has a tensor of this kind and name."""
        return name in self.manifest.tensors and kind in self.manifest.tensors[name].kinds

    def tensor(self, kind: str, name: str) -> "Array":
        """Read an entire tensor, in the dtype in which it was saved.

        Raises:
            CheckpointError: as :meth:`read_region`.
        """
        logical = self._logical(kind, name)
        out: Array = np.empty(logical.shape, DTYPES[logical.kinds[kind]])
        self.read_region(kind, name, full_region(logical.shape), out)
        return out

    def read_region(self, kind: str, name: str, region: Region, out: "Array") -> None:
        """Read a region of a tensor.

        Args:
            region: the region, in coordinates of the logical tensor.
            out: array or view of the region's shape; if its dtype differs from the saved one, values are converted.

        Raises:
            CheckpointError: there is no such tensor, a file is missing or damaged, or the pieces leave a gap. The
                content of ``out`` is then undefined.
            ValueError: the region is not inside the tensor, or ``out`` does not have its shape.
        """
        logical = self._logical(kind, name)
        if out.shape != region.shape or intersection(region, full_region(logical.shape)) != region:
            raise ValueError(f"{kind}/{name}{region}: tensor of {logical.shape}, array of {out.shape}")
        filled = 0
        for file_index in self._file_indices(name):
            if filled >= region.size:
                break
            file = self.manifest.files[file_index]
            shard = self._shard(file)
            for index in shard.pieces.get((kind, name), ()):
                piece = shard.plan.entries[index].region
                shared = intersection(piece, region)
                if shared is not None:
                    self._read_piece(file, shard, index, shared, out[shared.within(region)])
                    filled += shared.size
                    self._first_file = file_index
        if filled != region.size:
            raise CheckpointError(
                f"{self.path}: {cut(f'{kind} of {name}{region}')}: {filled} of {region.size} elements are there"
            )

    def _file_indices(self, name: str) -> Iterable[int]:
        """The indices of the files with pieces of a tensor, beginning at the file that held the last piece."""
        files, tensor = self.manifest.files, self._index_of_tensor[name]
        if isinstance(files, PartedFiles):
            return files.indices_with(tensor, self._first_file)
        indices = self._files[tensor]
        first = bisect_left(indices, self._first_file)
        return (*indices[first:], *indices[:first])

    def _read_piece(self, file: DataFile, shard: _Shard, index: int, shared: Region, out: "Array") -> None:
        """Read and check a piece, and copy the region ``shared`` of it to ``out``."""
        entry = shard.plan.entries[index]
        dtype = DTYPES[entry.dtype]
        straight = shared == entry.region and out.dtype == dtype and out.flags.c_contiguous
        piece: Array = out if straight else np.empty(entry.region.shape, dtype)
        try:
            total = read_into(shard.descriptor, shard.plan.tensors[index], piece)
        except (OSError, NotSafetensors) as error:
            raise CheckpointError(f"{self.path / file.name}: {_reason_of(error)}") from None
        if total != file.crc32[index]:
            raise CheckpointError(f"{self.path / file.name}: {damage_message(entry)}")
        if not straight:
            out[...] = piece[shared.within(entry.region)]

    def _check_entry(self, file: DataFile, entry: Entry) -> None:
        logical = self.manifest.tensors.get(entry.tensor)
        is_inside = logical is not None and len(logical.shape) == len(entry.region.shape)
        if logical is None or not is_inside or intersection(entry.region, full_region(logical.shape)) != entry.region:
            raise CheckpointError(f"{self.path / file.name}: {cut(str(entry))} is not of a tensor of {MANIFEST}")

    def _logical(self, kind: str, name: str) -> LogicalTensor:
        if not self.has_tensor(kind, name):
            raise CheckpointError(f"{self.path}: holds no {cut(f'{kind} of {name}')}")
        return self.manifest.tensors[name]

    def _shard(self, file: DataFile) -> _Shard:
        shard = self._open.pop(file.name, None)
        if shard is None:
            if len(self._open) >= _OPEN_FILES:
                file_system.close(self._open.pop(next(iter(self._open))).descriptor)
            descriptor, plan = open_shard(self.path, file)
            pieces: Dict[Tuple[str, str], List[int]] = {}
            for index, entry in enumerate(plan.entries):
                self._check_entry(file, entry)
                pieces.setdefault((entry.kind, entry.tensor), []).append(index)
            shard = _Shard(descriptor, plan, pieces)
        self._open[file.name] = shard  # now the newest
        return shard


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint to read it; close it after use, or use it in a ``with``.

    Raises:
        CheckpointError: it is not a checkpoint, or its manifest is damaged.
    """
    return Checkpoint(path)


def open_shard(checkpoint: Path, file: DataFile) -> Tuple[int, FilePlan]:
    """Open a data file and check its length and header against the manifest; returns (descriptor, layout).

    Raises:
        CheckpointError: it is missing, or does not match the manifest.
    """
    path = checkpoint / file.name
    try:
        size = file_system.size_of(path)
        if size != file.bytes:
            raise CheckpointError(f"{path}: {size:,} bytes long, not {file.bytes:,}: cut short or another's")
        descriptor = file_system.open_to_read(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {_reason_of(error)}") from None
    try:
        plan = read_plan(descriptor, size)
        if zlib.crc32(plan.header.content) != file.header_crc32 or len(plan.entries) != len(file.crc32):
            raise NotSafetensors("its header is damaged, or it is not this checkpoint's")
    except (OSError, NotSafetensors) as error:
        file_system.close(descriptor)
        raise CheckpointError(f"{path}: {_reason_of(error)}") from None
    return descriptor, plan


def damage_message(entry: Entry) -> str:
    """Message about a piece whose checksum differs."""
    return f"damaged: {cut(str(entry))}: its CRC-32 is another"


def _reason_of(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "missing"
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror}"
    return str(error)
