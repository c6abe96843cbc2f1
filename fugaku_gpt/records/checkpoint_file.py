"""One data file of a checkpoint: valid safetensors, written in place by one rank or by several.

A safetensors file is the length of its header (8 bytes, little-endian), the header (JSON: name → dtype, shape,
data_offsets), and the raw data, little-endian and without gaps. So NumPy alone reads it, and so does the safetensors
library. Each entry is a piece of a logical tensor, named ``<kind>/<tensor>@<start of each dimension>``:
``weights/blocks.0.mlp.up.weight@128,0`` of shape [64, 32] is the rows 128 to 191 of that weight.

The header depends only on names and shapes, so it is known before any data, and several ranks can write to their own
places in a file without a word to each other.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Sequence, Tuple

import numpy as np

from fugaku_gpt.layout.regions import Region
from fugaku_gpt.records import checkpoint_io

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

KINDS = (
    "weights",
    "first_moment",
    "second_moment",
    "kept_weights",
    "kept_first_moment",
    "kept_second_moment",
)
DTYPES: Dict[str, "np.dtype[Any]"] = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4")}

_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 64  # bytes: the data begins at a multiple of this
_LONGEST_HEADER = 100_000_000  # bytes, as in the safetensors library
_BLOCK = 4 << 20  # bytes that are checked and written together, while they are in the cache
_NAME = re.compile(r"([a-z_]+)/([^@]+)@((?:\d+(?:,\d+)*)?)")


class NotAShard(ValueError):
    """A file is not one of the kind described here; the message says why, without the file's name."""


@dataclass(frozen=True)
class Entry:
    """A piece of a tensor.

    Attributes:
        kind: one of ``KINDS``.
        tensor: name of the logical tensor, as in ``layout/tensors.py``.
        region: which part of it.
        dtype: a key of ``DTYPES``.
    """

    kind: str
    tensor: str
    region: Region
    dtype: str = "F32"

    @property
    def name(self) -> str:
        """Name in the file."""
        return f"{self.kind}/{self.tensor}@{','.join(map(str, self.region.start))}"

    @property
    def length(self) -> int:
        """Bytes of the data."""
        return self.region.size * DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{self.kind} of {self.tensor}{self.region}"


@dataclass(frozen=True)
class FilePlan:
    """A data file before it is written.

    Attributes:
        entries: in the order of the data.
        offsets: where each entry's data begins, bytes from the file's beginning.
        header: the file's beginning, up to the data.
        length: of the file, bytes.
    """

    entries: Tuple[Entry, ...]
    offsets: Tuple[int, ...]
    header: bytes
    length: int


def file_name(index: int) -> str:
    """Name of the index-th data file."""
    return f"data-{index:06d}.safetensors"


def plan_file(entries: Sequence[Entry]) -> FilePlan:
    """Lay out a data file.

    Raises:
        ValueError: two entries have one name, or an entry is empty.
    """
    table: Dict[str, Any] = {}
    ends = [0]
    for entry in entries:
        if entry.name in table or not entry.region.size:
            raise ValueError(f"{entry.name}: {'empty' if not entry.region.size else 'twice'} in one file")
        ends.append(ends[-1] + entry.length)
        table[entry.name] = {"dtype": entry.dtype, "shape": list(entry.region.shape), "data_offsets": ends[-2:]}
    text = json.dumps(table, separators=(",", ":")).encode("utf-8")
    text += b" " * (-(_LENGTH.size + len(text)) % _ALIGNMENT)
    header = _LENGTH.pack(len(text)) + text
    return FilePlan(tuple(entries), tuple(len(header) + end for end in ends[:-1]), header, len(header) + ends[-1])


def write_pieces(
    path: Path, plan: FilePlan, pieces: Sequence[Tuple[int, "Array"]], *, header: bool = True
) -> List[int]:
    """Write some entries of a data file to their places, and wait until they are on the disk.

    Nothing is copied where an array is contiguous and of the file's dtype. The interpreter's lock is free meanwhile.

    Args:
        pieces: (index of the entry, its data) each.
        header: whether to write the header too: exactly one of the ranks that share a file does.

    Returns:
        CRC-32 of each piece, in their order.

    Raises:
        OSError: as the file system says it.
        ValueError: a piece is not of its entry's shape.
    """
    with checkpoint_io.written(path) as descriptor:
        if header:
            checkpoint_io.write_all(descriptor, memoryview(plan.header), 0)
        return [_write_piece(descriptor, plan, index, array) for index, array in pieces]


def _write_piece(descriptor: int, plan: FilePlan, index: int, array: "Array") -> int:
    entry = plan.entries[index]
    if array.shape != entry.region.shape:
        raise ValueError(f"{entry.name}: data of shape {array.shape}, not {entry.region.shape}")
    content = as_bytes(np.ascontiguousarray(array, dtype=DTYPES[entry.dtype]))
    total = 0
    for first in range(0, len(content), _BLOCK):
        block = content[first : first + _BLOCK]
        total = zlib.crc32(block, total)
        checkpoint_io.write_all(descriptor, block, plan.offsets[index] + first)
    return total


def describe_dtype(dtype: "np.dtype[Any]") -> str:
    """The key of ``DTYPES`` for a dtype.

    Raises:
        ValueError: checkpoints do not hold it.
    """
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    raise ValueError(f"checkpoints hold {' and '.join(DTYPES)}, not {dtype}")


def as_bytes(array: "Array") -> memoryview:
    """The memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data


def read_plan(descriptor: int, length: int) -> FilePlan:
    """The layout of a data file from its header.

    Args:
        length: of the file, bytes.

    Raises:
        NotAShard: it is not a data file of a checkpoint, or damaged.
        OSError: it cannot be read.
    """
    size_bytes = read_exactly(descriptor, 0, min(_LENGTH.size, length))
    if len(size_bytes) < _LENGTH.size:
        raise NotAShard("cut short")
    size = _LENGTH.unpack(size_bytes)[0]
    if size > _LONGEST_HEADER or _LENGTH.size + size > length:
        raise NotAShard("its header is damaged or cut short")
    text = read_exactly(descriptor, _LENGTH.size, size)
    try:
        table = json.loads(text.decode("utf-8"))
        entries, ends = zip(*map(_entry, table.items())) if table else ((), ())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise NotAShard("its header is damaged, or it is not a checkpoint's") from None
    begin = _LENGTH.size + size
    offsets = []
    end = 0
    for entry, (first, stop) in zip(entries, ends):
        if first != end or stop != first + entry.length:
            raise NotAShard(f"its header gives {entry.name} a wrong place")
        offsets.append(begin + first)
        end = stop
    if begin + end != length:
        raise NotAShard(f"{length:,} bytes long, and its header says {begin + end:,}")
    return FilePlan(tuple(entries), tuple(offsets), size_bytes + text, length)


def _entry(item: Tuple[str, Any]) -> Tuple[Entry, Tuple[int, int]]:
    name, values = item
    matched = _NAME.fullmatch(name)
    if matched is None or values["dtype"] not in DTYPES:
        raise ValueError(name)
    start = tuple(int(text) for text in matched[3].split(",") if text)
    shape = tuple(values["shape"])
    first, stop = values["data_offsets"]
    numbers = (*shape, first, stop)
    if len(shape) != len(start) or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(name)
    return Entry(matched[1], matched[2], Region(start, shape), values["dtype"]), (first, stop)


def read_exactly(descriptor: int, offset: int, size: int) -> bytes:
    """Bytes of a file.

    Raises:
        NotAShard: the file ends before them.
    """
    content = bytearray(size)
    fill(descriptor, offset, memoryview(content))
    return bytes(content)


def sum_of(descriptor: int, offset: int, size: int) -> int:
    """CRC-32 of a part of a file.

    Raises:
        NotAShard: the file ends before that.
    """
    block = memoryview(bytearray(min(size, _BLOCK)))
    total = 0
    for first in range(0, size, _BLOCK):
        total = fill(descriptor, offset + first, block[: min(_BLOCK, size - first)], total)
    return total


def fill(descriptor: int, offset: int, into: memoryview, total: int = 0) -> int:
    """Fill memory from a file's offset on; returns the CRC-32 of what was read, after that of what came before.

    Raises:
        NotAShard: the file ends before that.
    """
    while len(into):
        count = checkpoint_io.read_at(descriptor, into[:_BLOCK], offset)
        if count == 0:
            raise NotAShard("cut short")
        total = zlib.crc32(into[:count], total)
        into, offset = into[count:], offset + count
    return total
