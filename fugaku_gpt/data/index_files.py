"""Index arrays that are built once, and memory-mapped from files by whoever reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Optional, Tuple

import numpy as np
from numpy.lib import format as npy_format

from fugaku_gpt.errors import DataError
from fugaku_gpt.machine.clock import steady_time
from fugaku_gpt.records.files import written_atomically

Arrays = Dict[str, "np.ndarray[Any, np.dtype[Any]]"]


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
        self._build = build
        self._arrays: Optional[Arrays] = None

    def __getitem__(self, name: str) -> "np.ndarray[Any, np.dtype[Any]]":
        """Return one array; builds all of them in memory if no files are open."""
        if self._arrays is None:
            self._arrays = self._build()
        return self._arrays[name]

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
        except OSError as error:
            raise DataError(f"{error.filename}: an index of the samples cannot be written: {error.strerror}") from None
        return steady_time() - started

    def _write_files(self, folder: Path) -> None:
        for name, built in self._build().items():
            values = np.ascontiguousarray(built)
            with written_atomically(self._file(folder, name)) as stream:  # numpy.save is silent if the disk is full
                npy_format.write_array_header_1_0(stream, npy_format.header_data_from_array_1_0(values))
                stream.write(values.data)

    def open(self, folder: Path) -> None:
        """Map the files that :meth:`write` has left in a folder; nothing of them is read yet.

        Raises:
            DataError: a file is missing, or is not such an array.
        """
        self._arrays = self._read(folder)
        if self._arrays is None:
            raise DataError(
                f"{folder}: its files {self.key}-*.npy, indices of the samples, are missing or damaged; remove them, "
                "and they are built again"
            )

    def _read(self, folder: Path) -> Optional[Arrays]:
        arrays: Arrays = {}
        for name, (shape, dtype) in self._shapes.items():
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
