"""Reads the header of a GGUF file, the format of llama.cpp's models, and its tensors one by one.

A file is its magic, version, and numbers of tensors and of metadata values; the values (key, type, value); for each
tensor name, shape, type and offset; and the tensors' data, each at a multiple of ``general.alignment``
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Quantised tensors become float32 by the package ``gguf``
of llama.cpp, which nothing else here needs: its own reader of headers believes every count that a file claims.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, NamedTuple, Sequence, Tuple

import numpy as np

from fugaku_gpt.checkpoint import file_system
from fugaku_gpt.checkpoint.safetensors import BFLOAT16, ITEM_BYTES, NotSafetensors, TensorInfo, read_into, read_tensor
from fugaku_gpt.errors import UsageError
from fugaku_gpt.limits import GGUF_HEADER, GGUF_KEYS, GGUF_TENSORS, GGUF_VALUES, cut

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

MAGIC = b"GGUF"
QUANTISATION_VERSION = 2  # of the formats of blocks; files with older ones are from before 2023-10
_VERSIONS = (2, 3)
_ALIGNMENT = 32  # bytes, where the metadata name no other
_DIMENSIONS = 4
_LONGEST_NAME = 256  # bytes, of a key or tensor; llama.cpp's limits are 65535 and 64
_BLOCK = 1 << 20  # bytes of the header that are read at once
_DEQUANTISED_AT_ONCE = 1 << 22  # elements
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
# ggml's numbers of the types that are no blocks, as safetensors calls them
_PLAIN = {0: "F32", 1: "F16", 28: "F64", 30: BFLOAT16}
_INSTALL = "install it: pip install 'fugaku_gpt[gguf]' (Python 3.10 or newer)"


class NotGguf(ValueError):
    """A file is no GGUF file, or is damaged; the message says why, without the file's name."""


class GgufTensor(NamedTuple):
    """A tensor in an open file.

    Attributes:
        dtype: F32, F16, F64 or BF16, or the name of a quantised format.
        shape: the slowest dimension first, unlike the file.
        offset, length: of its data in the file, in bytes.
        block: elements and bytes of one block of a quantised format; (1, bytes) of a plain type.
        number: ggml's number of the type.
    """

    path: Path
    descriptor: int
    name: str
    dtype: str
    shape: Tuple[int, ...]
    offset: int
    length: int
    block: Tuple[int, int]
    number: int

    def read(self) -> "Array":
        """Read it; bfloat16 and quantised formats become float32.

        Raises:
            UsageError: it cannot be read, or its format cannot be dequantised.
        """
        info = TensorInfo(self.name, self.dtype, self.shape, self.offset, self.length)
        try:
            if self.number in _PLAIN:
                return read_tensor(self.descriptor, info)
            return _dequantised(self)
        except OSError as error:
            raise UsageError(f"{self.path}: cannot be read: {error.strerror}") from None
        except NotSafetensors as error:
            raise UsageError(f"{self.path}: {error}") from None

    def has_same_data(self, other: "GgufTensor") -> bool:
        """Whether another tensor has the same shape, format and bytes."""
        if (self.number, self.shape) != (other.number, other.shape):
            return False
        for start in range(0, self.length, _BLOCK):
            size = min(_BLOCK, self.length - start)
            if not np.array_equal(_bytes_of(self, start, size), _bytes_of(other, start, size)):
                return False
        return True


class GgufHeader(NamedTuple):
    """The header of a file: all that it says before its data.

    Attributes:
        values: the metadata by key: int, float, bool, str, a list of str, or an array of numbers.
        tensors: the tensors by name.
    """

    values: Mapping[str, Any]
    tensors: Dict[str, GgufTensor]


def is_gguf(descriptor: int) -> bool:
    """Whether an open file begins as a GGUF file does."""
    head = bytearray(len(MAGIC))
    return file_system.read_at(descriptor, memoryview(head), 0) == len(MAGIC) and bytes(head) == MAGIC


def read_header(path: Path, descriptor: int, length: int) -> GgufHeader:
    """Read the header of an open file of ``length`` bytes.

    Raises:
        NotGguf: it is no such file, or is damaged or cut short.
        OSError: it cannot be read.
        UsageError: it has quantised tensors and the package gguf is not installed.
    """
    if not is_gguf(descriptor):
        raise NotGguf("not a GGUF file; `ckpt import` takes those, and folders of Hugging Face")
    cursor = _Cursor(descriptor, length)
    cursor.take(len(MAGIC))
    (version,) = cursor.unpack("<I")
    if version not in _VERSIONS:
        if version & 0xFFFF == 0 and version:
            raise NotGguf("the numbers in it are big-endian; convert it with gguf-convert-endian FILE little")
        raise NotGguf(f"version {version} of GGUF; those that are read are {', '.join(map(str, _VERSIONS))}")
    count, keys = cursor.unpack("<QQ")
    for number, limit in ((keys, GGUF_KEYS), (count, GGUF_TENSORS)):
        if number > limit.value:
            raise NotGguf(f"claims {number:,} {limit.unit}, more than {limit}, the limit of {limit.of}: it is damaged")
    values: Dict[str, Any] = {}
    for _ in range(keys):
        key = cursor.name("a key of the metadata")
        if key in values:
            raise NotGguf(f"has the key {key!r} twice")
        values[key] = cursor.value(key, cursor.unpack("<I")[0])
    listed = [_listed_tensor(cursor) for _ in range(count)]
    alignment = values.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= 2**20 or alignment & (alignment - 1):
        raise NotGguf(f"general.alignment is {cut(repr(alignment))}, not a power of two")
    begin = -(-cursor.position // alignment) * alignment
    return GgufHeader(values, _placed(path, descriptor, listed, begin, length))


class _Listed(NamedTuple):
    name: str
    shape: Tuple[int, ...]
    number: int
    offset: int


def _listed_tensor(cursor: "_Cursor") -> _Listed:
    name = cursor.name("the name of a tensor")
    (dimensions,) = cursor.unpack("<I")
    if not 0 < dimensions <= _DIMENSIONS:
        raise NotGguf(f"{name} has {dimensions} dimensions, not 1 to {_DIMENSIONS}")
    shape = cursor.unpack(f"<{dimensions}Q")[::-1]
    if 0 in shape:
        raise NotGguf(f"a size of {name} is 0")
    number, offset = cursor.unpack("<IQ")
    return _Listed(name, shape, number, offset)


def _placed(path: Path, descriptor: int, listed: Sequence[_Listed], begin: int, length: int) -> Dict[str, GgufTensor]:
    """The tensors, whose data lie within the file and do not overlap."""
    formats = _Formats(path)
    tensors: Dict[str, GgufTensor] = {}
    for name, shape, number, offset in listed:
        dtype, block = formats.find(name, number)
        elements, size = block
        if shape[-1] % elements:
            raise NotGguf(f"{name}: rows of {shape[-1]} elements are no whole blocks of {dtype}, of {elements}")
        if name in tensors:
            raise NotGguf(f"has the tensor {name!r} twice")
        data_length = math.prod(shape) // elements * size
        tensors[name] = GgufTensor(path, descriptor, name, dtype, shape, begin + offset, data_length, block, number)
    end = begin
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise NotGguf(f"its header gives {tensor.name} a wrong place")
        end = tensor.offset + tensor.length
        if end > length:
            raise NotGguf(f"cut short: {length:,} bytes long, and {tensor.name} ends at {end:,}; copy it again")
    return tensors


class _Formats:
    """The formats of tensors by ggml's numbers; quantised ones are those that the package gguf has."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: Dict[int, Tuple[str, Tuple[int, int]]] = {
            number: (name, (1, ITEM_BYTES[name])) for number, name in _PLAIN.items()
        }

    def find(self, tensor: str, number: int) -> Tuple[str, Tuple[int, int]]:
        """Return (name, (elements, bytes) of a block)."""
        if number not in self._found:
            gguf = _import_gguf(self._path, tensor)
            try:
                kind = gguf.GGMLQuantizationType(number)
                elements, size = gguf.GGML_QUANT_SIZES[kind]
            except (ValueError, KeyError):
                raise NotGguf(
                    f"{tensor} is of type {number}, which the installed package gguf does not have; a newer one may: "
                    "pip install --upgrade gguf"
                ) from None
            self._found[number] = (str(kind.name), (int(elements), int(size)))
        return self._found[number]


def _import_gguf(path: Path, tensor: str) -> Any:
    try:
        import gguf
    except ImportError as error:
        raise UsageError(f"{path}: {tensor} is quantised, which needs the package gguf ({error}); {_INSTALL}") from None
    return gguf


def _dequantised(tensor: GgufTensor) -> "Array":
    """Read and dequantise some rows after the others: beside the tensor in float32, little memory is needed."""
    gguf = _import_gguf(tensor.path, tensor.name)
    kind = gguf.GGMLQuantizationType(tensor.number)
    elements, size = tensor.block
    columns = tensor.shape[-1]
    rows, row_bytes = math.prod(tensor.shape[:-1]), columns // elements * size
    out: Array = np.empty((rows, columns), np.float32)
    step = max(1, _DEQUANTISED_AT_ONCE // columns)
    try:
        with np.errstate(all="ignore"):  # a scale that is no number is as the file has it
            for start in range(0, rows, step):
                count = min(step, rows - start)
                packed = _bytes_of(tensor, start * row_bytes, count * row_bytes).reshape(count, row_bytes)
                out[start : start + count] = gguf.dequantize(packed, kind)
    except NotImplementedError:
        raise UsageError(
            f"{tensor.path}: {tensor.name} is of type {tensor.dtype}, which the package gguf cannot dequantise"
        ) from None
    return out.reshape(tensor.shape)


def _bytes_of(tensor: GgufTensor, start: int, size: int) -> "Array":
    content: Array = np.empty(size, np.uint8)
    read_into(tensor.descriptor, TensorInfo(tensor.name, tensor.dtype, (size,), tensor.offset + start, size), content)
    return content


class _Cursor:
    """A position in a header, from which values are read; nothing larger than what the file has left is allocated."""

    def __init__(self, descriptor: int, length: int) -> None:
        self._descriptor, self._length = descriptor, length
        self._content, self._begin = b"", 0
        self.position = 0
        self._elements = 0

    def take(self, size: int) -> bytes:
        """Return the next bytes.

        Raises:
            NotGguf: the file ends before, or the header is longer than its limit.
        """
        self._require(size)
        start = self.position - self._begin
        if start + size > len(self._content):
            wanted = min(max(size, _BLOCK), self._length - self.position)
            self._content, self._begin, start = self._read(wanted), self.position, 0
        self.position += size
        return self._content[start : start + size]

    def unpack(self, form: str) -> Tuple[Any, ...]:
        """Return the next numbers."""
        return struct.unpack(form, self.take(struct.calcsize(form)))

    def name(self, of: str) -> str:
        """Return the next string, which is a name."""
        (size,) = self.unpack("<Q")
        if size > _LONGEST_NAME:
            raise NotGguf(f"{of} has {size:,} bytes, more than {_LONGEST_NAME}: it is damaged")
        text = self.take(size).decode("utf-8", "replace")
        if not text.isprintable() or "\ufffd" in text:
            raise NotGguf(f"{of} is {cut(repr(text))}, which no name is: it is damaged")
        return text

    def string(self) -> str:
        """Return the next string; what is no UTF-8 becomes U+FFFD."""
        return self.take(self.unpack("<Q")[0]).decode("utf-8", "replace")

    def value(self, key: str, kind: int) -> Any:
        """Return the next value of the metadata, of one of GGUF's types."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise NotGguf(f"{key} is of type {kind}, which metadata have not: it is damaged")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()

    def _array(self, key: str) -> Any:
        kind, count = self.unpack("<IQ")
        self._elements += count
        if self._elements > GGUF_VALUES.value:
            raise NotGguf(f"{key}: with its {count:,} elements there are more than {GGUF_VALUES} in lists of metadata")
        if kind == _STRING:
            strings: List[str] = [self.string() for _ in range(count)]
            return strings
        if kind not in _SCALARS:
            raise NotGguf(f"{key} is a list of type {kind}, which is not read")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)

    def _require(self, size: int) -> None:
        if self.position + size > self._length:
            raise NotGguf(f"its header is cut short or damaged: {size:,} bytes at {self.position:,} are not there")
        if self.position + size > GGUF_HEADER.value:
            raise NotGguf(f"its header is damaged, or longer than {GGUF_HEADER}")

    def _read(self, size: int) -> bytes:
        content = np.empty(size, np.uint8)
        try:
            read_into(self._descriptor, TensorInfo("header", "U8", (size,), self.position, size), content)
        except NotSafetensors:
            raise NotGguf("cut short while it is read") from None
        return content.tobytes()
