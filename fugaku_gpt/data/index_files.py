"""Index arrays that are built once, and memory-mapped from files by whoever reads them.

Checksums of blocks of their entries lie in another file. A block has 4 KiB of numbers of 8 bytes, so that looking up an
entry checks little more than the page that is read for it.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Mapping, Optional, Tuple

import numpy as np
from numpy.lib import format as npy_format

from fugaku_gpt.errors import DataError
from fugaku_gpt.machine.clock import steady_time
from fugaku_gpt.records.files import written_atomically

Arrays = Dict[str, "np.ndarray[Any, np.dtype[Any]]"]
_CHECKSUMS = "checksums"
_BLOCK = 512  # entries that have a checksum


class IndexArrays:
    """Named arrays with known shapes, which are built when they are first asked for unless files of them are open.

    Attributes:
        key: name of the files, which says all that the arrays depend on.
    """

    def __init__(
        self, key: str, shapes: Mapping[str, Tuple[Tuple[int, ...], str]], build: Callable[[], Arrays]
    ) -> None:
        """``shapes``: shape and data type of each array that ``build`` returns."""
        self.key = key
        self._shapes = dict(shapes)
        self._first_blocks: Dict[str, int] = {}  # where the checksums of each array begin
        blocks = 0
        for name, (shape, _) in self._shapes.items():
            self._first_blocks[name] = blocks
            blocks += -(-shape[0] // _BLOCK)
        self._shape_of_checksums = ((blocks,), "uint32")
        self._build = build
        self._arrays: Optional[Arrays] = None
        self._folder: Optional[Path] = None  # of open files
        self._checked_blocks: Dict[str, int] = {}  # the block of each array that was checked last

    def __getitem__(self, name: str) -> "np.ndarray[Any, np.dtype[Any]]":
        """Return one array, whose values are not checked; builds all of them in memory if no files are open."""
        if self._arrays is None:
            self._arrays = self._build()
        return self._arrays[name]

    def entry(self, name: str, number: int) -> Any:
        """Return one entry of an array, or one row of it.

        Raises:
            DataError: the array is in a file, and the block of the entry has not the values that were written.
        """
        values = self[name]
        block = number // _BLOCK
        if self._folder is not None and self._checked_blocks.get(name) != block:
            if _checksum(values, block) != self[_CHECKSUMS][self._first_blocks[name] + block]:
                last = min((block + 1) * _BLOCK, len(values)) - 1
                raise self.damaged(name, f"entries {block * _BLOCK} to {last} are not those that were written")
            self._checked_blocks[name] = block
        return values[number]

    def damaged(self, name: str, problem: str) -> DataError:
        """The error of an array with values that cannot be right."""
        folder = self._folder if self._folder is not None else Path()
        return DataError(
            f"{self._file(folder, name)}: an index of the samples is damaged: {problem}; remove {self.key}-*.npy "
            "there, and they are built again when the run is resumed"
        )

    def write(self, folder: Path) -> Optional[float]:
        """Build the arrays and write each to a file of its own, unless all of them are there with their shapes.

        The folder belongs to one run, of which one process writes: temporary files in it were left by a kill, and are
        removed.

        Returns:
            the seconds that this took; None if the files were there.

        Raises:
            DataError: a file cannot be written.
        """
        started = steady_time()
        try:
            for path in folder.glob(".*.tmp"):
                path.unlink()
            if self._read(folder) is not None:
                return None
            folder.mkdir(exist_ok=True)
            self._write_files(folder)
            self._write_checksums(folder)
        except OSError as error:
            raise DataError(f"{error.filename}: an index of the samples cannot be written: {error.strerror}") from None
        return steady_time() - started

    def _write_files(self, folder: Path) -> None:
        for name, built in self._build().items():
            _save(self._file(folder, name), built)

    def _write_checksums(self, folder: Path) -> None:
        arrays = self._read_arrays(folder, self._shapes)
        if arrays is None:
            raise self._missing(folder)
        (count,), kind = self._shape_of_checksums
        _save(self._file(folder, _CHECKSUMS), np.fromiter(_checksums(arrays), dtype=kind, count=count))

    def open(self, folder: Path) -> None:
        """Map the files that :meth:`write` has left in a folder; nothing of them is read yet.

        Raises:
            DataError: a file is missing, or is not such an array.
        """
        arrays = self._read(folder)
        if arrays is None:
            raise self._missing(folder)
        self._arrays, self._folder, self._checked_blocks = arrays, folder, {}

    def _missing(self, folder: Path) -> DataError:
        return DataError(
            f"{folder}: its files {self.key}-*.npy, indices of the samples, are missing or damaged; remove them, "
            "and they are built again"
        )

    def _read(self, folder: Path) -> Optional[Arrays]:
        """Map all files; None if one of them is missing, or has another shape."""
        return self._read_arrays(folder, {**self._shapes, _CHECKSUMS: self._shape_of_checksums})

    def _read_arrays(self, folder: Path, shapes: Mapping[str, Tuple[Tuple[int, ...], str]]) -> Optional[Arrays]:
        arrays: Arrays = {}
        for name, (shape, dtype) in shapes.items():
            try:
                values = np.load(self._file(folder, name), mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError, EOFError, SyntaxError):  # what NumPy raises for a file that is no array
                return None
            if not isinstance(values, np.memmap) or values.shape != shape or values.dtype != np.dtype(dtype):
                return None
            arrays[name] = values
        return arrays

    def _file(self, folder: Path, name: str) -> Path:
        return folder / f"{self.key}-{name}.npy"


def _checksums(arrays: Arrays) -> Iterator[int]:
    """Yield the checksums of all blocks of all arrays, one array after the other."""
    for values in arrays.values():
        for block in range(-(-len(values) // _BLOCK)):
            yield _checksum(values, block)


def _checksum(values: "np.ndarray[Any, np.dtype[Any]]", block: int) -> int:
    """CRC-32 of a block of entries."""
    return zlib.crc32(values[block * _BLOCK : (block + 1) * _BLOCK].data)


def _save(path: Path, array: "np.ndarray[Any, np.dtype[Any]]") -> None:
    """Write an array as NumPy does, whose own function is silent if the disk is full."""
    values = np.ascontiguousarray(array)
    with written_atomically(path) as stream:
        npy_format.write_array_header_1_0(stream, npy_format.header_data_from_array_1_0(values))
        stream.write(values.data)
