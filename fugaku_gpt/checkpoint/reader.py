"""Reading a checkpoint by logical coordinates, whatever layout has written it."""

from __future__ import annotations

import zlib
from bisect import bisect_left
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Optional, Tuple, Type

import numpy as np

from fugaku_gpt.checkpoint import file_system
from fugaku_gpt.checkpoint.data_file import Entry, FilePlan, read_plan
from fugaku_gpt.checkpoint.manifest import DataFile, LogicalTensor, Manifest, read_manifest
from fugaku_gpt.checkpoint.safetensors import DTYPES, NotSafetensors, read_into
from fugaku_gpt.errors import CheckpointError
from fugaku_gpt.layout.regions import Region, full_region, intersection

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

_OPEN_FILES = 32


class _Shard(NamedTuple):
    """A data file that is open: its layout, and the indices of the pieces of each (kind, tensor)."""

    descriptor: int
    plan: FilePlan
    pieces: Dict[Tuple[str, str], List[int]]


class Checkpoint:
    """An open checkpoint. Every piece that is read is checked against its sum first.

    Files are opened only until what is wanted is found, those near the last one that held something first: a rank finds
    its share of every tensor in the same few files, and thousands of ranks do not open thousands of files each.

    Attributes:
        path: its folder.
        manifest: what it holds.
    """

    def __init__(self, path: Path, manifest: Optional[Manifest] = None, start_fraction: float = 0.0) -> None:
        """``manifest``: what another rank has read; default: it is read here. ``near``: which files to look into first,
        as a share of all of them."""
        self.path = path
        self.manifest: Manifest = manifest if manifest is not None else read_manifest(path)
        self._open: Dict[str, _Shard] = {}  # oldest first
        self._first_file = int(start_fraction * len(self.manifest.files))
        self._files: Dict[str, List[int]] = {name: [] for name in self.manifest.tensors}
        names = self.manifest.tensor_names
        for file_index, file in enumerate(self.manifest.files):
            for index in file.tensors:
                self._files[names[index]].append(file_index)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the files back."""
        while self._open:
            file_system.close(self._open.popitem()[1].descriptor)

    def has_tensor(self, kind: str, name: str) -> bool:
        """Whether there is such a tensor of this kind."""
        return name in self.manifest.tensors and kind in self.manifest.tensors[name].kinds

    def tensor(self, kind: str, name: str) -> "Array":
        """A whole tensor, of the dtype that it was saved in.

        Raises:
            CheckpointError: as :meth:`read_region`.
        """
        logical = self._logical(kind, name)
        out: Array = np.empty(logical.shape, DTYPES[logical.kinds[kind]])
        self.read_region(kind, name, full_region(logical.shape), out)
        return out

    def read_region(self, kind: str, name: str, region: Region, out: "Array") -> None:
        """Read a part of a tensor.

        Args:
            region: which part, in coordinates of the whole tensor.
            out: of the region's shape; of another dtype where that is wanted. It may be any view.

        Raises:
            CheckpointError: there is no such tensor, a file is missing or damaged, or the pieces leave a gap. What is
                in ``out`` is then not to be used.
            ValueError: the region is not inside the tensor, or ``out`` not of its shape.
        """
        logical = self._logical(kind, name)
        if out.shape != region.shape or intersection(region, full_region(logical.shape)) != region:
            raise ValueError(f"{kind}/{name}{region}: tensor of {logical.shape}, array of {out.shape}")
        filled = 0
        file_indices = self._files[name]
        first = bisect_left(file_indices, self._first_file)
        for file_index in (*file_indices[first:], *file_indices[:first]):
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
                f"{self.path}: {kind} of {name}{region}: {filled} of {region.size} elements are there"
            )

    def _read_piece(self, file: DataFile, shard: _Shard, index: int, shared: Region, out: "Array") -> None:
        """Check a piece and take the part of it that is wanted."""
        entry = shard.plan.entries[index]
        dtype = DTYPES[entry.dtype]
        straight = shared == entry.region and out.dtype == dtype and out.flags.c_contiguous
        piece: Array = out if straight else np.empty(entry.region.shape, dtype)
        try:
            total = read_into(shard.descriptor, shard.plan.tensors[index], piece)
        except (OSError, NotSafetensors) as error:
            raise CheckpointError(f"{self.path / file.name}: {_why(error)}") from None
        if total != file.crc32[index]:
            raise CheckpointError(f"{self.path / file.name}: {damage_message(entry)}")
        if not straight:
            out[...] = piece[shared.within(entry.region)]

    def _logical(self, kind: str, name: str) -> LogicalTensor:
        if not self.has_tensor(kind, name):
            raise CheckpointError(f"{self.path}: holds no {kind} of {name}")
        return self.manifest.tensors[name]

    def _shard(self, file: DataFile) -> _Shard:
        shard = self._open.pop(file.name, None)
        if shard is None:
            if len(self._open) >= _OPEN_FILES:
                file_system.close(self._open.pop(next(iter(self._open))).descriptor)
            descriptor, plan = open_shard(self.path, file)
            pieces: Dict[Tuple[str, str], List[int]] = {}
            for index, entry in enumerate(plan.entries):
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
    """(descriptor, layout) of a data file whose length and header are what the manifest says.

    Raises:
        CheckpointError: it is missing, or they are not.
    """
    path = checkpoint / file.name
    try:
        size = file_system.size_of(path)
        if size != file.bytes:
            raise CheckpointError(f"{path}: {size:,} bytes long, not {file.bytes:,}: cut short or another's")
        descriptor = file_system.open_to_read(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {_why(error)}") from None
    try:
        plan = read_plan(descriptor, size)
        if zlib.crc32(plan.header.content) != file.header_crc32 or len(plan.entries) != len(file.crc32):
            raise NotSafetensors("its header is damaged, or it is not this checkpoint's")
    except (OSError, NotSafetensors) as error:
        file_system.close(descriptor)
        raise CheckpointError(f"{path}: {_why(error)}") from None
    return descriptor, plan


def damage_message(entry: Entry) -> str:
    """What is said of a piece whose sum is another."""
    return f"damaged: {entry}: its CRC-32 is another"


def _why(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "missing"
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror}"
    return str(error)
