"""One data file of a checkpoint: valid safetensors, written in place by one rank or by several.

Each entry is a piece of a logical tensor, named ``<kind>/<tensor>@<start of each dimension>``:
``weights/blocks.0.mlp.up.weight@128,0`` of shape [64, 32] is the rows 128 to 191 of that weight.

The header depends only on names and shapes, so it is known before any data, and several ranks can write to their own
places in a file without a word to each other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterable, List, Sequence, Tuple

from fugaku_gpt.checkpoint import file_system
from fugaku_gpt.checkpoint.safetensors import (
    DTYPES,
    Header,
    NotSafetensors,
    TensorInfo,
    make_header,
    read_header,
    write_tensor,
)
from fugaku_gpt.layout.regions import Region

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_NAME = re.compile(r"([a-z_]+)/([^@]+)@((?:\d+(?:,\d+)*)?)")


@dataclass(frozen=True)
class Entry:
    """A piece of a tensor.

    Attributes:
        kind: ``weights``, ``first_moment`` or ``second_moment``; with ``kept_`` before it, of the copy to which a loss
            spike returns.
        tensor: name of the logical tensor, as in ``layout/tensors.py``.
        region: which part of it.
        dtype: F32 or F64.
    """

    kind: str
    tensor: str
    region: Region
    dtype: str = "F32"

    @property
    def name(self) -> str:
        """Name in the file."""
        return f"{self.kind}/{self.tensor}@{','.join(map(str, self.region.start))}"

    def __str__(self) -> str:
        return f"{self.kind} of {self.tensor}{self.region}"


@dataclass(frozen=True)
class FilePlan:
    """A data file before it is written, or as it was read.

    Attributes:
        entries: in the order of the data.
        header: their places.
    """

    entries: Tuple[Entry, ...]
    header: Header

    @property
    def length(self) -> int:
        """Of the file, bytes."""
        return self.header.length

    @property
    def tensors(self) -> Tuple[TensorInfo, ...]:
        """The entries' places in the file."""
        return self.header.tensors


def file_name(index: int) -> str:
    """Name of the index-th data file."""
    return f"data-{index:06d}.safetensors"


def plan_file(entries: Sequence[Entry]) -> FilePlan:
    """Lay out a data file.

    Raises:
        ValueError: two entries have one name, or an entry is empty.
    """
    names = set()
    for entry in entries:
        if entry.name in names or not entry.region.size:
            raise ValueError(f"{entry.name}: {'empty' if not entry.region.size else 'twice'} in one file")
        names.add(entry.name)
    return FilePlan(tuple(entries), make_header([(entry.name, entry.dtype, entry.region.shape) for entry in entries]))


def write_pieces(
    path: Path, plan: FilePlan, pieces: Iterable[Tuple[int, "Array"]], *, header: bool = True
) -> List[int]:
    """Write some entries of a data file to their places, and wait until they are on the disk.

    Args:
        pieces: (index of the entry, its data) each.
        header: whether to write the header too: exactly one of the ranks that share a file does.

    Returns:
        CRC-32 of each piece, in their order.

    Raises:
        OSError: as the file system says it.
        ValueError: a piece is not of its entry's shape.
    """
    with file_system.synced_file(path) as descriptor:
        if header:
            file_system.write_all(descriptor, memoryview(plan.header.content), 0)
        return [write_tensor(descriptor, plan.tensors[index], array) for index, array in pieces]


def describe_dtype(dtype: "np.dtype[Any]") -> str:
    """What a dtype is called in files.

    Raises:
        ValueError: they do not hold it.
    """
    for name, stored_dtype in DTYPES.items():
        if stored_dtype == dtype:
            return name
    raise ValueError(f"checkpoints hold {', '.join(DTYPES)}, not {dtype}")


def read_plan(descriptor: int, length: int) -> FilePlan:
    """The layout of a data file of so many bytes.

    Raises:
        NotSafetensors: it is not a data file of a checkpoint, or damaged.
        OSError: it cannot be read.
    """
    header = read_header(descriptor, length)
    return FilePlan(tuple(map(_entry, header.tensors)), header)


def _entry(info: TensorInfo) -> Entry:
    matched = _NAME.fullmatch(info.name)
    start = tuple(int(text) for text in matched[3].split(",") if text) if matched is not None else ()
    if matched is None or len(start) != len(info.shape) or info.dtype not in DTYPES:
        raise NotSafetensors(f"{info.name!r} is no piece of a checkpoint's tensor")
    return Entry(matched[1], matched[2], Region(start, info.shape), info.dtype)
