"""The data files of a checkpoint as its manifest lists them: in the manifest itself or, where they are many, in parts.

A part describes :data:`FILES_PER_PART` files and is a file of its own beside the manifest, which holds its SHA-256 and
which tensors its files have. So a rank that resumes one of ten thousand reads the few parts with its tensors, and not
the checksums of millions of pieces.
"""

from __future__ import annotations

import hashlib
import json
import struct
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Sequence, Tuple, Union, overload

from fugaku_gpt.checkpoint import file_system
from fugaku_gpt.errors import CheckpointError
from fugaku_gpt.input_files import is_possible_name
from fugaku_gpt.json_text import parse_json
from fugaku_gpt.limits import cut

VERSION = 1
FILES_PER_PART = 256
_OPEN_PARTS = 4  # parts that are held in memory


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
class FilePart:
    """A file that describes consecutive data files.

    Attributes:
        name: name of the file in the checkpoint's folder.
        files: number of data files.
        bytes: length of these data files together.
        tensors: ranges (first, last) of indices of the tensors of which they hold pieces.
        sha256: of the file.
    """

    name: str
    files: int
    bytes: int
    tensors: Tuple[Tuple[int, int], ...]
    sha256: str

    def has_tensor(self, tensor: int) -> bool:
        """True if some of its data files hold pieces of a tensor."""
        return any(first <= tensor <= last for first, last in self.tensors)


class PartedFiles(Sequence[DataFile]):
    """Data files that parts describe, which are read when they are needed; the last few stay in memory."""

    def __init__(self, folder: Path, parts: Sequence[FilePart]) -> None:
        self._folder = folder
        self.parts = tuple(parts)
        self._firsts = [0]  # index of the first file of each part, and of the end
        for part in self.parts:
            self._firsts.append(self._firsts[-1] + part.files)
        self._open: "OrderedDict[int, Tuple[DataFile, ...]]" = OrderedDict()  # the one used last is at the end

    def __len__(self) -> int:
        return self._firsts[-1]

    @overload
    def __getitem__(self, index: int) -> DataFile: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[DataFile]: ...

    def __getitem__(self, index: Union[int, slice]) -> Union[DataFile, Sequence[DataFile]]:
        """The file of an index.

        Raises:
            CheckpointError: its part is missing or damaged.
            IndexError: there is no such file.
        """
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(index)
        part = self._part_of(index)
        return self._files(part)[index - self._firsts[part]]

    def __iter__(self) -> Iterator[DataFile]:
        return chain.from_iterable(self._files(part) for part in range(len(self.parts)))

    def indices_with(self, tensor: int, first: int) -> Iterator[int]:
        """The indices of the files with pieces of a tensor: from ``first`` to the end, and then those before it.

        Raises:
            CheckpointError: a part is missing or damaged.
        """
        for begin, end in ((first, len(self)), (0, first)):
            for part, first_of_part in enumerate(self._firsts[:-1]):
                low, high = max(begin, first_of_part), min(end, self._firsts[part + 1])
                if low < high and self.parts[part].has_tensor(tensor):
                    files = self._files(part)
                    yield from (index for index in range(low, high) if tensor in files[index - first_of_part].tensors)

    def _part_of(self, index: int) -> int:
        return bisect_right(self._firsts, index) - 1

    def _files(self, part: int) -> Tuple[DataFile, ...]:
        files = self._open.pop(part, None)
        if files is None:
            files = _read_part(self._folder, self.parts[part])
            while len(self._open) >= _OPEN_PARTS:
                self._open.popitem(last=False)
        self._open[part] = files
        return files


def parts_of(files: Sequence[DataFile]) -> List[Tuple[FilePart, bytes]]:
    """Cut a list of data files into parts; returns each with the content of its file; none if the files are few."""
    parts: List[Tuple[FilePart, bytes]] = []
    if len(files) <= FILES_PER_PART:
        return parts
    for first in range(0, len(files), FILES_PER_PART):
        described = files[first : first + FILES_PER_PART]
        content = {"version": VERSION, "files": [_file_values(file) for file in described]}
        encoded = (json.dumps(content, separators=(",", ":")) + "\n").encode("ascii")
        part = FilePart(
            name=f"manifest-{len(parts):06d}.json",
            files=len(described),
            bytes=sum(file.bytes for file in described),
            tensors=_ranges({tensor for file in described for tensor in file.tensors}),
            sha256=hashlib.sha256(encoded).hexdigest(),
        )
        parts.append((part, encoded))
    return parts


def part_values(part: FilePart) -> Dict[str, Any]:
    """A part as JSON values of the manifest."""
    return {**asdict(part), "tensors": [list(bounds) for bounds in part.tensors]}


def parse_part(values: Mapping[str, Any]) -> FilePart:
    """The part of which a manifest holds the values.

    Raises:
        KeyError, TypeError, ValueError: they are not those of a part.
    """
    part = FilePart(
        name=file_name_of(values["name"]),
        files=int(values["files"]),
        bytes=int(values["bytes"]),
        tensors=tuple((int(first), int(last)) for first, last in values["tensors"]),
        sha256=str(values["sha256"]),
    )
    if part.files < 1 or part.files > FILES_PER_PART or part.bytes < 0:
        raise ValueError(f"{cut(repr(part.name))} describes {part.files} files of {part.bytes} bytes")
    return part


def file_name_of(name: str) -> str:
    """The name of a file in a checkpoint's folder.

    Raises:
        ValueError: it is not a plain name: a foreign manifest must not make us read outside of its folder.
    """
    if Path(name).name != name or not is_possible_name(name):
        raise ValueError(f"{cut(repr(name))} is not a file's name")
    return name


def _read_part(folder: Path, part: FilePart) -> Tuple[DataFile, ...]:
    path = folder / part.name
    try:
        content = file_system.read_file(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}; use another checkpoint") from None
    try:
        if hashlib.sha256(content).hexdigest() != part.sha256:
            raise ValueError("its SHA-256 does not match")
        values = parse_json(content)
        if values["version"] != VERSION:
            raise ValueError(f"version {values['version']!r}; this program reads version {VERSION}")
        files = tuple(map(_parse_file, values["files"]))
        if len(files) != part.files or sum(file.bytes for file in files) != part.bytes:
            raise ValueError(f"it does not describe {part.files} files of {part.bytes} bytes")
        if not all(part.has_tensor(tensor) for file in files for tensor in file.tensors):
            raise ValueError("a file holds a tensor that is not there")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, struct.error) as error:
        raise CheckpointError(
            f"{path}: not a part of a manifest, or damaged: {cut(str(error))}; use another checkpoint"
        ) from None
    return files


def _file_values(file: DataFile) -> Dict[str, Any]:
    return {
        "name": file.name,
        "bytes": file.bytes,
        "header_crc32": file.header_crc32,
        "tensors": _ranges(file.tensors),
        "crc32": struct.pack(f">{len(file.crc32)}I", *file.crc32).hex(),
    }


def _parse_file(values: Mapping[str, Any]) -> DataFile:
    checksums = bytes.fromhex(values["crc32"])
    ranges = [range(int(first), int(last) + 1) for first, last in values["tensors"]]
    length = int(values["bytes"])
    if length < 0 or sum(map(len, ranges)) > len(checksums) // 4:
        raise ValueError(f"{cut(repr(values['name']))} has {length} bytes, or fewer pieces than tensors")
    return DataFile(
        name=file_name_of(values["name"]),
        bytes=length,
        header_crc32=int(values["header_crc32"]),
        tensors=tuple(chain.from_iterable(ranges)),
        crc32=struct.unpack(f">{len(checksums) // 4}I", checksums),
    )


def _ranges(tensors: Iterable[int]) -> Tuple[Tuple[int, int], ...]:
    """Ranges (first, last) of consecutive numbers."""
    ranges: List[Tuple[int, int]] = []
    for tensor in sorted(tensors):
        if ranges and tensor <= ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], tensor)
        else:
            ranges.append((tensor, tensor))
    return tuple(ranges)
