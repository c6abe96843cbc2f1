"""One data file of a checkpoint: valid safetensors, written in place by one or several ranks.

Each entry is a piece of a logical tensor, named ``<kind>/<tensor>@<start of each dimension>``:
``weights/blocks.0.mlp.up.weight@128,0`` of shape [64, 32] holds rows 128 to 191 of that weight.

The header depends only on names and shapes, so it is determined before any data, and several ranks can write to their
own offsets of a file without communication.
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
    """A piece of a logical tensor.

    Attributes:
        kind: ``weights``, ``first_moment`` or ``second_moment``; with the prefix ``kept_`` for the copy that is
            restored after a loss spike.
        tensor: name of the logical tensor, as in ``layout/tensors.py``.
        region: region of the logical tensor that the piece covers.
        dtype: F32 or F64.
    """

    kind: str
    tensor: str
    region: Region
    dtype: str = "F32"

    @property
    def name(self) -> str:
        """Name of the entry in the file."""
        return f"{self.kind}/{self.tensor}@{','.join(map(str, self.region.start))}"

    def __str__(self) -> str:
        return f"{self.kind} of {self.tensor}{self.region}"


@dataclass(frozen=True)
class FilePlan:
    """A data file before it is written, or as it was read.

    Attributes:
        entries: entries in the order of the data.
        header: header of the file, with the offsets of the entries.
    """

    entries: Tuple[Entry, ...]
    header: Header

    @property
    def length(self) -> int:
        """Length of the file in bytes."""
        return self.header.length

    @property
    def tensors(self) -> Tuple[TensorInfo, ...]:
        """Offsets and shapes of the entries in the file."""
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
    """Write some entries of a data file at their offsets, and wait until they are on the disk.

    Args:
        pieces: (index of the entry, its data) of each piece.
        header: whether to write the header as well: exactly one of the ranks that share a file does.

    Returns:
        CRC-32 of each piece, in their order.

    Raises:
        OSError: as reported by the file system.
        ValueError: a piece does not have its entry's shape.
    """
    with file_system.synced_file(path) as descriptor:
        if header:
            file_system.write_all(descriptor, memoryview(plan.header.content), 0)
        return [write_tensor(descriptor, plan.tensors[index], array) for index, array in pieces]


def describe_dtype(dtype: "np.dtype[Any]") -> str:
    """Name of a dtype in files.

    Raises:
        ValueError: checkpoints do not hold this dtype.
    """
    for name, stored_dtype in DTYPES.items():
        if stored_dtype == dtype:
            return name
    raise ValueError(f"checkpoints hold {', '.join(DTYPES)}, not {dtype}")


def read_plan(descriptor: int, length: int) -> FilePlan:
    """Read the layout of a data file of ``length`` bytes.

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
