"""Safetensors files with NumPy alone: the safetensors library need not be available on compute nodes with PyTorch 1.7.

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
from fugaku_gpt.json_text import parse_json
from fugaku_gpt.limits import SAFETENSORS_HEADER

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

DTYPES: Dict[str, "np.dtype[Any]"] = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2")}
BFLOAT16 = "BF16"  # NumPy has no such type: it is the upper half of a float32
ITEM_BYTES = {**{name: dtype.itemsize for name, dtype in DTYPES.items()}, BFLOAT16: 2}

_METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 64  # bytes: the data begins at a multiple of this
_CHUNK_BYTES = 4 << 20  # bytes that are checked and written together, while they are in the cache


class NotSafetensors(ValueError):
    """A file is not safetensors, or is damaged; the message says why, without the file's name."""


class TensorInfo(NamedTuple):
    """A tensor in a file.

    Attributes:
        offset: offset of its data from the file's beginning, in bytes.
        length: length of its data in bytes.
    """

    name: str
    dtype: str
    shape: Tuple[int, ...]
    offset: int
    length: int


class Header(NamedTuple):
    """The header of a file.

    Attributes:
        content: bytes of the file before the data.
        tensors: the tensors in the order of the data.
        length: length of the file in bytes, data included.
    """

    content: bytes
    tensors: Tuple[TensorInfo, ...]
    length: int


def make_header(
    tensors: Sequence[Tuple[str, str, Tuple[int, ...]]], metadata: Optional[Mapping[str, str]] = None
) -> Header:
    """Lay out a file of tensors, each given as (name, key of ``ITEM_BYTES``, shape)."""
    table: Dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    ends = [0]
    for name, dtype, shape in tensors:
        ends.append(ends[-1] + math.prod(shape) * ITEM_BYTES[dtype])
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": ends[-2:]}
    text = json.dumps(table, separators=(",", ":")).encode("ascii")
    text += b" " * (-(_LENGTH.size + len(text)) % _ALIGNMENT)
    content = _LENGTH.pack(len(text)) + text
    begin = len(content)
    items = (
        TensorInfo(name, dtype, shape, begin + first, stop - first)
        for (name, dtype, shape), first, stop in zip(tensors, ends, ends[1:])
    )
    return Header(content, tuple(items), begin + ends[-1])


def read_header(descriptor: int, length: int) -> Header:
    """Read the header of a file of ``length`` bytes.

    Raises:
        NotSafetensors: it is not such a file, its header is damaged, or its length differs from that in the header.
        OSError: it cannot be read.
    """
    if length < _LENGTH.size:
        raise NotSafetensors("cut short")
    size_bytes = _read(descriptor, 0, _LENGTH.size)
    size = _LENGTH.unpack(size_bytes)[0]
    if size > SAFETENSORS_HEADER.value:
        raise NotSafetensors(f"its header is damaged, or longer than {SAFETENSORS_HEADER}")
    if _LENGTH.size + size > length:
        raise NotSafetensors("its header is damaged or cut short")
    text = _read(descriptor, _LENGTH.size, size)
    begin = _LENGTH.size + size
    try:
        table = parse_json(text.decode("utf-8"))
        table.pop(_METADATA, None)
        items = sorted(
            (_tensor_info(name, begin, values) for name, values in table.items()), key=lambda info: info.offset
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise NotSafetensors("its header is damaged, or it is no safetensors file") from None
    end = begin
    for info in items:
        if info.offset != end:
            raise NotSafetensors(f"its header gives {info.name} a wrong place")
        end += info.length
    if end != length:
        raise NotSafetensors(f"{length:,} bytes long, and its header says {end:,}")
    return Header(size_bytes + text, tuple(items), length)


def _tensor_info(name: str, begin: int, values: Mapping[str, Any]) -> TensorInfo:
    dtype, shape, (first, stop) = values["dtype"], tuple(values["shape"]), values["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, first, stop)) or first > stop:
        raise ValueError(name)
    if dtype in DTYPES and stop - first != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(name)
    return TensorInfo(name, dtype, shape, begin + first, stop - first)


def write_tensor(descriptor: int, info: TensorInfo, array: "Array") -> int:
    """Write a tensor's data at its offset; returns their CRC-32.

    No copy is made if the array is contiguous and of the file's dtype; to bfloat16 float32 is rounded, to even where it
    lies between two. The interpreter's lock is released meanwhile.

    Raises:
        OSError: as reported by the file system.
        ValueError: the array does not have the tensor's shape.
    """
    if array.shape != info.shape:
        raise ValueError(f"{info.name}: data of shape {array.shape}, not {info.shape}")
    if info.dtype == BFLOAT16:
        content = _as_bytes(_upper_halves(array))
    else:
        content = _as_bytes(np.ascontiguousarray(array, dtype=DTYPES[info.dtype]))
    crc = 0
    for first in range(0, len(content), _CHUNK_BYTES):
        chunk = content[first : first + _CHUNK_BYTES]
        crc = zlib.crc32(chunk, crc)
        file_system.write_all(descriptor, chunk, info.offset + first)
    return crc


def read_into(descriptor: int, info: TensorInfo, out: "Array") -> int:
    """Read a tensor's data into a contiguous array of its shape and dtype; returns their CRC-32.

    Raises:
        NotSafetensors: the file ends too early.
        OSError: it cannot be read.
    """
    return _fill(descriptor, info.offset, _as_bytes(out))


def read_tensor(descriptor: int, info: TensorInfo) -> "Array":
    """Read a tensor; bfloat16 as float32, which represents each of its values.

    Raises:
        NotSafetensors: the file ends too early, or the tensor has a data type that is not supported.
        OSError: it cannot be read.
    """
    if info.dtype == BFLOAT16 and info.length == 2 * math.prod(info.shape):
        halves: Array = np.empty(info.shape, np.dtype("<u2"))
        read_into(descriptor, info, halves)
        return (halves.astype(np.uint32) << 16).view(np.float32)
    if info.dtype not in DTYPES:
        raise NotSafetensors(f"{info.name} is of type {info.dtype}; known are {', '.join(DTYPES)} and {BFLOAT16}")
    out: Array = np.empty(info.shape, DTYPES[info.dtype])
    read_into(descriptor, info, out)
    return out


def checksum(descriptor: int, info: TensorInfo) -> int:
    """Compute the CRC-32 of a tensor's data.

    Raises:
        NotSafetensors: the file ends too early.
        OSError: it cannot be read.
    """
    chunk = memoryview(bytearray(min(info.length, _CHUNK_BYTES)))
    crc = 0
    for first in range(0, info.length, _CHUNK_BYTES):
        crc = _fill(descriptor, info.offset + first, chunk[: min(_CHUNK_BYTES, info.length - first)], crc)
    return crc


def _upper_halves(array: "Array") -> "Array":
    """The bits of float32 numbers as bfloat16, rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(array, dtype="<f4").view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    halves: Array = np.where(is_nan, quiet, rounded).astype("<u2")
    return halves


def _as_bytes(array: "Array") -> memoryview:
    """The memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data


def _read(descriptor: int, offset: int, size: int) -> bytes:
    content = bytearray(size)
    _fill(descriptor, offset, memoryview(content))
    return bytes(content)


def _fill(descriptor: int, offset: int, into: memoryview, crc: int = 0) -> int:
    """Fill memory from an offset of a file; returns the CRC-32 of these bytes, continued from ``crc``."""
    while len(into):
        count = file_system.read_at(descriptor, into[:_CHUNK_BYTES], offset)
        if count == 0:
            raise NotSafetensors("cut short")
        crc = zlib.crc32(into[:count], crc)
        into, offset = into[count:], offset + count
    return crc
