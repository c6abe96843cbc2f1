"""Safetensors files with NumPy alone, which PyTorch 1.7 on a compute node has and the safetensors library needs not be.

Such a file is the length of its header (8 bytes, little-endian), the header (JSON: name → dtype, shape, data_offsets),
and the raw data, little-endian and without gaps (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from typing import TYPE_CHECKING, Any, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from fugaku_gpt.checkpoint import file_system

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

DTYPES: Dict[str, "np.dtype[Any]"] = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2")}
BFLOAT16 = "BF16"  # NumPy has no such type: it is the upper half of a float32

_METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 64  # bytes: the data begins at a multiple of this
_LONGEST_HEADER = 100_000_000  # bytes, as in the safetensors library
_BLOCK = 4 << 20  # bytes that are checked and written together, while they are in the cache


class NotSafetensors(ValueError):
    """A file is not safetensors, or is damaged; the message says why, without the file's name."""


class Item(NamedTuple):
    """A tensor in a file.

    Attributes:
        offset: where its data begins, bytes from the file's beginning.
        length: of its data, bytes.
    """

    name: str
    dtype: str
    shape: Tuple[int, ...]
    offset: int
    length: int


class Header(NamedTuple):
    """A file's beginning.

    Attributes:
        content: its bytes, up to the data.
        items: in the order of the data.
        length: of the whole file, bytes.
    """

    content: bytes
    items: Tuple[Item, ...]
    length: int


def make_header(
    tensors: Sequence[Tuple[str, str, Tuple[int, ...]]], metadata: Optional[Mapping[str, str]] = None
) -> Header:
    """Lay out a file of tensors, each (name, key of ``DTYPES``, shape)."""
    table: Dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    ends = [0]
    for name, dtype, shape in tensors:
        ends.append(ends[-1] + math.prod(shape) * DTYPES[dtype].itemsize)
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": ends[-2:]}
    text = json.dumps(table, separators=(",", ":")).encode("ascii")
    text += b" " * (-(_LENGTH.size + len(text)) % _ALIGNMENT)
    content = _LENGTH.pack(len(text)) + text
    begin = len(content)
    items = (
        Item(name, dtype, shape, begin + first, stop - first)
        for (name, dtype, shape), first, stop in zip(tensors, ends, ends[1:])
    )
    return Header(content, tuple(items), begin + ends[-1])


def read_header(descriptor: int, length: int) -> Header:
    """The header of a file of so many bytes.

    Raises:
        NotSafetensors: it is not such a file, or its header is damaged, or it is not of the length that this says.
        OSError: it cannot be read.
    """
    if length < _LENGTH.size:
        raise NotSafetensors("cut short")
    size_bytes = _read(descriptor, 0, _LENGTH.size)
    size = _LENGTH.unpack(size_bytes)[0]
    if size > _LONGEST_HEADER or _LENGTH.size + size > length:
        raise NotSafetensors("its header is damaged or cut short")
    text = _read(descriptor, _LENGTH.size, size)
    begin = _LENGTH.size + size
    try:
        table = json.loads(text.decode("utf-8"))
        table.pop(_METADATA, None)
        items = sorted((_item(name, begin, values) for name, values in table.items()), key=lambda item: item.offset)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise NotSafetensors("its header is damaged, or it is no safetensors file") from None
    end = begin
    for item in items:
        if item.offset != end:
            raise NotSafetensors(f"its header gives {item.name} a wrong place")
        end += item.length
    if end != length:
        raise NotSafetensors(f"{length:,} bytes long, and its header says {end:,}")
    return Header(size_bytes + text, tuple(items), length)


def _item(name: str, begin: int, values: Mapping[str, Any]) -> Item:
    dtype, shape, (first, stop) = values["dtype"], tuple(values["shape"]), values["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, first, stop)) or first > stop:
        raise ValueError(name)
    if dtype in DTYPES and stop - first != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(name)
    return Item(name, dtype, shape, begin + first, stop - first)


def write_tensor(descriptor: int, item: Item, array: "Array") -> int:
    """Write a tensor's data to its place; returns their CRC-32.

    Nothing is copied where the array is contiguous and of the file's dtype. The interpreter's lock is free meanwhile.

    Raises:
        OSError: as the file system says it.
        ValueError: the array is not of the tensor's shape.
    """
    if array.shape != item.shape:
        raise ValueError(f"{item.name}: data of shape {array.shape}, not {item.shape}")
    content = _as_bytes(np.ascontiguousarray(array, dtype=DTYPES[item.dtype]))
    total = 0
    for first in range(0, len(content), _BLOCK):
        block = content[first : first + _BLOCK]
        total = zlib.crc32(block, total)
        file_system.write_all(descriptor, block, item.offset + first)
    return total


def read_into(descriptor: int, item: Item, out: "Array") -> int:
    """Read a tensor's data into a contiguous array of its shape and dtype; returns their CRC-32.

    Raises:
        NotSafetensors: the file ends before that.
        OSError: it cannot be read.
    """
    return _fill(descriptor, item.offset, _as_bytes(out))


def read_tensor(descriptor: int, item: Item) -> "Array":
    """A tensor; bfloat16 as float32, which holds each of its values.

    Raises:
        NotSafetensors: the file ends before that, or the tensor is of a type that is no number of ours.
        OSError: it cannot be read.
    """
    if item.dtype == BFLOAT16 and item.length == 2 * math.prod(item.shape):
        halves: Array = np.empty(item.shape, np.dtype("<u2"))
        read_into(descriptor, item, halves)
        return (halves.astype(np.uint32) << 16).view(np.float32)
    if item.dtype not in DTYPES:
        raise NotSafetensors(f"{item.name} is of type {item.dtype}; known are {', '.join(DTYPES)} and {BFLOAT16}")
    out: Array = np.empty(item.shape, DTYPES[item.dtype])
    read_into(descriptor, item, out)
    return out


def sum_of(descriptor: int, item: Item) -> int:
    """CRC-32 of a tensor's data.

    Raises:
        NotSafetensors: the file ends before their end.
        OSError: it cannot be read.
    """
    block = memoryview(bytearray(min(item.length, _BLOCK)))
    total = 0
    for first in range(0, item.length, _BLOCK):
        total = _fill(descriptor, item.offset + first, block[: min(_BLOCK, item.length - first)], total)
    return total


def _as_bytes(array: "Array") -> memoryview:
    """The memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data


def _read(descriptor: int, offset: int, size: int) -> bytes:
    content = bytearray(size)
    _fill(descriptor, offset, memoryview(content))
    return bytes(content)


def _fill(descriptor: int, offset: int, into: memoryview, total: int = 0) -> int:
    """Fill memory from a file's offset on; returns the CRC-32 of that, after that of what came before."""
    while len(into):
        count = file_system.read_at(descriptor, into[:_BLOCK], offset)
        if count == 0:
            raise NotSafetensors("cut short")
        total = zlib.crc32(into[:count], total)
        into, offset = into[count:], offset + count
    return total
