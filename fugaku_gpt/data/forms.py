"""Opens a text file by what its first bytes say: compression, a table, an archive; names of files are not trusted."""

from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from pathlib import Path
from typing import Any, BinaryIO, Iterator, Optional, Type, cast

from fugaku_gpt.errors import DataError

GZIP, BZIP2, XZ, ZSTD = "gzip", "bzip2", "xz", "Zstandard"
TABLES = PARQUET, ARROW_FILE, ARROW_STREAM = "Parquet file", "Arrow file", "Arrow stream"
COMPRESSION_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
_MAGIC = (
    (b"\x1f\x8b", GZIP),
    (b"BZh", BZIP2),
    (b"\xfd7zXZ\x00", XZ),
    (b"\x28\xb5\x2f\xfd", ZSTD),
    (b"PAR1", PARQUET),
    (b"ARROW1\0\0", ARROW_FILE),
    (b"\xff\xff\xff\xff", ARROW_STREAM),  # the mark before the length of its first message; no UTF-8
)
_ARCHIVES = ((0, b"PK\x03\x04", "zip"), (0, b"7z\xbc\xaf\x27\x1c", "7z"), (257, b"ustar", "tar"))
_LONGEST_MAGIC = 512
_BLOCK = 1 << 17
# bytes that are decompressed at once: a block of 4 bytes may stand for 128 KiB, so these for 32 MiB
_ZSTANDARD_PIECE = 1 << 10
# `zstd --long=31` makes frames whose window has two GiB; the library's own limit is 128 MiB
_LARGEST_WINDOW = 1 << 31


class BadText(DataError):
    """A file or one of its records is damaged or has another form; ``--skip-bad`` leaves it out."""


def detect_form(raw: BinaryIO) -> str:
    """The compression that the first bytes of an open file show, or one of ``TABLES``; empty if it is neither."""
    head = raw.read(_LONGEST_MAGIC)
    raw.seek(0)
    return next((form for magic, form in _MAGIC if head.startswith(magic)), "")


def open_uncompressed(raw: BinaryIO, form: str, path: Path) -> BinaryIO:
    """A stream of the uncompressed bytes of an open file of a form (:func:`detect_form`) other than a table.

    Raises:
        BadText: the content is an archive of files.
        DataError: the library that reads this compression is not installed.
    """
    buffered = io.BufferedReader(_uncompressed(raw, form, path), _BLOCK)
    head = buffered.peek(_LONGEST_MAGIC)
    for start, magic, archive in _ARCHIVES:
        if head[start : start + len(magic)] == magic:
            raise BadText(f"{path}: a {archive} archive, not one text; unpack it, and name the folder")
    return cast(BinaryIO, buffered)


@contextlib.contextmanager
def damage_as_bad_text(form: str, path: Path) -> Iterator[None]:
    """Turn the errors by which streams of :func:`open_uncompressed` report damage into :class:`BadText`."""
    try:
        yield
    except (EOFError, zlib.error, _Damaged, _lzma_error()) as error:
        raise BadText(f"{path}: not a whole {form} file: {error}; copy it again") from None
    except OSError as error:
        if error.errno is not None:
            raise
        raise BadText(f"{path}: not a whole {form} file: {error}; copy it again") from None  # by gzip and bz2


def _uncompressed(raw: BinaryIO, form: str, path: Path) -> Any:
    if form == GZIP:
        return gzip.GzipFile(fileobj=raw)
    if form == ZSTD:
        return _ZstandardStream(raw, _import_zstandard(path))
    if form in (BZIP2, XZ):
        try:
            import bz2
            import lzma
        except ImportError as error:  # a Python that was built without these libraries
            raise DataError(f"{path}: this Python cannot read {form} ({error}); compress the file with gzip") from None
        return bz2.BZ2File(raw) if form == BZIP2 else lzma.LZMAFile(raw)
    return raw


def _lzma_error() -> Type[Exception]:
    try:
        import lzma
    except ImportError:
        return EOFError
    return lzma.LZMAError


def _import_zstandard(path: Path) -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise DataError(
            f"{path}: compressed with Zstandard, which needs the package zstandard ({error}); "
            "install it: pip install 'fugaku_gpt[zstd]'"
        ) from None
    return zstandard


class _Damaged(Exception):
    """A Zstandard stream is damaged or cut short."""


class _ZstandardStream(io.RawIOBase):
    """The uncompressed bytes of Zstandard frames; unlike the library's own stream, it notices a frame that is cut."""

    def __init__(self, raw: BinaryIO, zstandard: Any) -> None:
        self._raw = raw
        self._zstandard = zstandard
        self._frame: Optional[Any] = None
        self._input = memoryview(b"")
        self._output = memoryview(b"")

    def readable(self) -> bool:
        """Whether the stream can be read: always."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer with uncompressed bytes; fewer only at the end.

        Raises:
            _Damaged: a frame is damaged, or the file ends within one.
        """
        target = memoryview(buffer).cast("B")
        filled = 0
        while filled < len(target):
            if not self._output and not self._decompress():
                break
            count = min(len(self._output), len(target) - filled)
            target[filled : filled + count] = self._output[:count]
            self._output = self._output[count:]
            filled += count
        return filled

    def _decompress(self) -> bool:
        """Decompress the next block, which may give no bytes; return False at the end of the file."""
        block = self._input or memoryview(self._raw.read(_BLOCK))
        piece, self._input = block[:_ZSTANDARD_PIECE], block[_ZSTANDARD_PIECE:]
        if not piece:
            if self._frame is not None:
                raise _Damaged("the file ends within a frame")
            return False
        if self._frame is None:
            decompressor = self._zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)
            self._frame = decompressor.decompressobj()
        try:
            self._output = memoryview(self._frame.decompress(piece))
        except self._zstandard.ZstdError as error:
            raise _Damaged(str(error)) from None
        if self._frame.eof:
            self._input, self._frame = memoryview(self._frame.unused_data + bytes(self._input)), None
        return True
