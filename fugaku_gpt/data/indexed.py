"""Megatron's memory-mapped corpus: tokens in ``PREFIX.bin``, their lengths and documents in ``PREFIX.idx``.

``.idx``, little-endian: magic ``MMIDIDX\\0\\0``, version 1 (u64), data type code (u8), number of sequences (u64),
length of the document index (u64); then the length of each sequence in tokens (i32), its start in bytes (i64), and the
document index (i64): document d is sequences [index[d], index[d+1]). Multimodal files have one mode (i8) per sequence
at the end, which is ignored here.
"""

from __future__ import annotations

import os
import struct
from array import array
from pathlib import Path
from typing import Any, BinaryIO, Callable, Dict, Optional, Type

import numpy as np

from fugaku_gpt.errors import DataError
from fugaku_gpt.input_files import open_file

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
CHECKED_AT_ONCE = 2**20  # sequences of an index that is checked as a whole when it is opened; that takes milliseconds
_MAX_SEQUENCE = 2**31 - 1  # tokens: the length of a sequence is an i32
DTYPE_CODES: Dict[int, str] = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


def bin_file(prefix: Path) -> Path:
    """The path of the file of tokens."""
    return prefix.parent / (prefix.name + ".bin")


def idx_file(prefix: Path) -> Path:
    """The path of the file of lengths and documents."""
    return prefix.parent / (prefix.name + ".idx")


def count_of_sequences(prefix: Path) -> int:
    """Number of sequences by the header alone; 0 if it cannot be read, which opening the corpus reports."""
    try:
        with open_file(idx_file(prefix)) as stream:
            _, _, _, sequences, _ = HEADER.unpack(stream.read(HEADER.size))
    except (OSError, struct.error):
        return 0
    return int(sequences)


def index_header(dtype: "np.dtype[Any]", sequences: int, entries: int) -> bytes:
    """The beginning of an index: the type of a token, the number of sequences, and the length of the document index."""
    (code,) = (code for code, text in DTYPE_CODES.items() if np.dtype(text) == dtype)
    return HEADER.pack(MAGIC, VERSION, code, sequences, entries)


class IndexedCorpus:
    """A corpus that is open for reading. Both files are mapped; what is read of them does not grow with the corpus.

    An index of at most ``CHECKED_AT_ONCE`` sequences is checked as a whole when it is opened. Of a larger one the
    header, the ends and the sizes are, and each look-up checks the entries that it uses; :meth:`check_index` checks
    all.

    Attributes:
        sequences, documents, tokens: number of each.
        dtype: type of a token in the file.
        lengths: [sequences] number of tokens of each sequence, a view of the file.
        document_index: [documents + 1] the first sequence of each document, and the end of the last; also a view.
        has_modes: whether the index has the modes of multimodal sequences, which are not read.
    """

    def __init__(self, prefix: Path) -> None:
        """Open both files and check them against each other.

        Raises:
            DataError: a file is missing, truncated, of another format, or disagrees with the other.
        """
        self.prefix = prefix
        self.bin_path, self.idx_path = bin_file(prefix), idx_file(prefix)
        for path in (self.idx_path, self.bin_path):
            if not path.is_file():
                raise DataError(
                    f"{path}: no such file; a corpus is a pair PREFIX.bin and PREFIX.idx, "
                    "made by `fugaku-gpt data prepare` or Megatron"
                )
        index = self._map(self.idx_path)
        self.dtype, sequences, entries = self._read_header(index)
        lengths_start = HEADER.size
        expected_bytes = lengths_start + 4 * sequences + 8 * sequences + 8 * entries
        if len(index) not in (expected_bytes, expected_bytes + sequences):  # with modes
            raise self._damaged(
                f"its header announces {sequences} sequences and {entries} document entries, "
                f"which take {expected_bytes} bytes, but it has {len(index)}"
            )
        self.lengths = np.frombuffer(index, "<i4", sequences, lengths_start)
        self._starts = np.frombuffer(index, "<i8", sequences, lengths_start + 4 * sequences)
        self.document_index = np.frombuffer(index, "<i8", entries, lengths_start + 12 * sequences)
        self.has_modes = len(index) > expected_bytes
        self.sequences = sequences
        self.documents = entries - 1
        self._check_ends()
        self.tokens = self._end_byte(sequences - 1) // self.dtype.itemsize
        if sequences <= CHECKED_AT_ONCE:
            self.check_index()
        self._data = self._map(self.bin_path)
        self._check_data()

    def sequence(self, number: int, first: int = 0, count: Optional[int] = None) -> "np.ndarray[Any, np.dtype[Any]]":
        """Tokens [first, first + count) of one sequence, by default all from ``first``, as a view of the file.

        Raises:
            DataError: the entries of the sequence are damaged.
        """
        start, length = int(self._starts[number]), int(self.lengths[number])
        next_start = int(self._starts[number + 1]) if number + 1 < self.sequences else len(self._data)
        if not 0 <= start <= start + length * self.dtype.itemsize == next_start <= len(self._data):
            raise self._damaged(
                f"sequence {number} of {length} tokens starts at byte {start}, and the next one at {next_start}"
            )
        if count is None:
            count = length - first
        return np.frombuffer(self._data, self.dtype, count, start + first * self.dtype.itemsize)

    def document(self, number: int) -> "np.ndarray[Any, np.dtype[Any]]":
        """All tokens of one document.

        Raises:
            DataError: the entries of the document are damaged.
        """
        begin, end = self._sequences_of_document(number)
        sequences = [self.sequence(index) for index in range(begin, end)]
        return np.concatenate(sequences) if sequences else np.empty(0, self.dtype)

    def document_beginning(self, number: int, count: int) -> "np.ndarray[Any, np.dtype[Any]]":
        """The first ``count`` tokens of one document, or all where it has fewer, read from its sequences in turn.

        Raises:
            DataError: the entries of the document are damaged.
        """
        begin, end = self._sequences_of_document(number)
        pieces = [np.empty(0, self.dtype)]
        while begin < end and count > 0:
            pieces.append(self.sequence(begin)[:count])
            begin, count = begin + 1, count - len(pieces[-1])
        return np.concatenate(pieces)

    def document_lengths(self, numbers: "np.ndarray[Any, np.dtype[np.int64]]") -> "np.ndarray[Any, np.dtype[np.int64]]":
        """Tokens of each of the documents ``numbers``, as int64, by the first and last of their entries.

        Raises:
            DataError: an entry of one of them is damaged.
        """
        begins, ends = self.document_index[numbers], self.document_index[numbers + 1]
        is_damaged = (begins < 0) | (begins > ends) | (ends > self.sequences)
        if is_damaged.any():
            self._sequences_of_document(int(numbers[int(is_damaged.argmax())]))
        counts = (self._starts_of(ends) - self._starts_of(begins)) // self.dtype.itemsize
        if int(counts.min()) < 0 or int(counts.max()) > self.tokens:
            number = int(numbers[int(((counts < 0) | (counts > self.tokens)).argmax())])
            raise self._damaged(f"document {number} does not lie within the {self.tokens} tokens")
        return np.asarray(counts, dtype=np.int64)

    def _starts_of(self, sequences: "np.ndarray[Any, np.dtype[np.int64]]") -> "np.ndarray[Any, np.dtype[np.int64]]":
        """The byte at which each of the sequences starts; the number after the last one is the end of the data."""
        inner = np.minimum(sequences, self.sequences - 1)
        return np.where(sequences < self.sequences, self._starts[inner], len(self._data))

    def _sequences_of_document(self, number: int) -> "tuple[int, int]":
        """The first sequence of a document, and the one after its last.

        Raises:
            DataError: the entries of the document are damaged.
        """
        begin, end = int(self.document_index[number]), int(self.document_index[number + 1])
        if not 0 <= begin <= end <= self.sequences:
            raise self._damaged(f"document {number} spans sequences {begin} to {end} of {self.sequences}")
        return begin, end

    def first_tokens(self, sequences: "np.ndarray[Any, np.dtype[np.int64]]") -> "np.ndarray[Any, np.dtype[np.int64]]":
        """The number of tokens before each of the sequences; the number of sequences stands for the end of the last."""
        return self._starts_of(sequences) // self.dtype.itemsize

    def tokens_at(self, first: int, count: int) -> "np.ndarray[Any, np.dtype[Any]]":
        """The tokens [first, first + count) of all, whatever documents they belong to, as a view of the file."""
        return np.frombuffer(self._data, self.dtype, count, first * self.dtype.itemsize)

    def tokens_of(self, first: int, last: int) -> int:
        """Number of tokens of the sequences [first, last), by the first and the last of them alone.

        Raises:
            DataError: the entries of the last one are damaged.
        """
        if first >= last:
            return 0
        count, remainder = divmod(self._end_byte(last - 1) - int(self._starts[first]), self.dtype.itemsize)
        if count < 0 or remainder:
            raise self._damaged(
                f"sequence {first} starts at byte {int(self._starts[first])} and sequence {last - 1} ends at "
                f"{self._end_byte(last - 1)}"
            )
        return count

    def check_index(self, advance: Callable[[int], object] = lambda done: None) -> None:
        """Check all entries of the index against each other, in blocks, so that memory does not grow with it.

        Args:
            advance: is called with the number of sequences that were checked so far.

        Raises:
            DataError: the first entry that is damaged.
        """
        end = 0
        for first in range(0, self.sequences, CHECKED_AT_ONCE):
            last = min(first + CHECKED_AT_ONCE, self.sequences)
            end = self._check_sequences(first, last, end)
            advance(last)
        for first in range(0, self.documents, CHECKED_AT_ONCE):
            falls = np.flatnonzero(np.diff(self.document_index[first : first + CHECKED_AT_ONCE + 1]) < 0)
            if len(falls):
                number = first + int(falls[0])
                raise self._damaged(
                    f"document {number} begins at sequence {int(self.document_index[number])} and ends before it, at "
                    f"{int(self.document_index[number + 1])}"
                )

    def _read_header(self, index: Any) -> "tuple[np.dtype[Any], int, int]":
        if len(index) < HEADER.size:
            raise self._damaged(f"it has {len(index)} bytes and the header alone takes {HEADER.size}")
        magic, version, code, sequences, entries = HEADER.unpack_from(index)
        if magic != MAGIC:
            raise DataError(
                f"{self.idx_path}: not a Megatron memory-mapped index (it starts with {bytes(magic)!r}, "
                f"not {MAGIC!r}); files of the older `lazy` and `cached` forms must be preprocessed again"
            )
        if version != VERSION:
            raise DataError(f"{self.idx_path}: version {version} of the format; valid: {VERSION}")
        if code not in DTYPE_CODES:
            raise DataError(f"{self.idx_path}: data type code {code}; valid: {', '.join(map(str, DTYPE_CODES))}")
        dtype = np.dtype(DTYPE_CODES[code])
        if dtype.kind == "f":
            raise DataError(f"{self.idx_path}: holds {dtype.name} values; token ids are whole numbers")
        if sequences == 0:
            raise DataError(f"{self.idx_path}: an empty corpus (0 sequences); prepare it from text that is not empty")
        if entries < 2:
            raise DataError(
                f"{self.idx_path}: {_count(entries, 'document entry', 'document entries')} for "
                f"{_count(sequences, 'sequence', 'sequences')}; the entries are the beginnings of documents and the "
                "end of the last, so there are at least 2: its writer never ended a document; preprocess the text again"
            )
        return dtype, sequences, entries

    def _end_byte(self, number: int) -> int:
        """The byte at which a sequence ends, by its own entries."""
        return int(self._starts[number]) + int(self.lengths[number]) * self.dtype.itemsize

    def _check_sequences(self, first: int, last: int, end: int) -> int:
        """Check that the sequences [first, last) follow each other from a byte on; returns the byte at their end."""
        lengths, starts = self.lengths[first:last], self._starts[first:last]
        if int(lengths.min()) < 0:
            number = int(lengths.argmin())
            raise self._damaged(f"sequence {first + number} has a negative length, {int(lengths[number])} tokens")
        expected = np.full(last - first + 1, end, dtype=np.int64)
        expected[1:] += np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
        if not np.array_equal(starts, expected[:-1]):
            number = int(np.flatnonzero(starts != expected[:-1])[0])
            raise self._damaged(
                f"sequence {first + number} starts at byte {int(starts[number])}, where {int(expected[number])} are "
                "before it"
            )
        return int(expected[-1])

    def _check_ends(self) -> None:
        """Check the first and last entries, which the numbers of tokens and documents follow from."""
        last_length = int(self.lengths[-1])
        if int(self._starts[0]) != 0:
            raise self._damaged(f"sequence 0 starts at byte {int(self._starts[0])}, where 0 are before it")
        if last_length < 0 or int(self._starts[-1]) < 0:
            raise self._damaged(
                f"sequence {len(self.lengths) - 1} of {last_length} tokens starts at byte {int(self._starts[-1])}"
            )
        sequences = _count(len(self.lengths), "sequence", "sequences")
        first, last = int(self.document_index[0]), int(self.document_index[-1])
        if first != 0 or last != len(self.lengths):
            raise self._damaged(
                f"its {_count(self.documents, 'document', 'documents')} span sequences {first} to {last}, and it has "
                f"{sequences}"
            )

    def _check_data(self) -> None:
        end = self._end_byte(self.sequences - 1)
        if end != len(self._data):
            raise DataError(
                f"{self.bin_path}: has {len(self._data)} bytes where {self.idx_path.name} describes {end}; "
                "one of them is cut short or belongs to another corpus: copy both again, or prepare again"
            )

    def _damaged(self, problem: str) -> DataError:
        return DataError(f"{self.idx_path}: damaged or cut short: {problem}; copy it again, or prepare again")

    @staticmethod
    def _map(path: Path) -> Any:
        try:
            if path.stat().st_size == 0:  # an empty file cannot be mapped
                return b""
            return np.memmap(path, dtype=np.uint8, mode="r").data
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None


class IndexedWriter:
    """Writes a corpus document by document; the complete files appear with :meth:`finish`.

    As a context manager it finishes at the end of the block, and leaves no files if the block raises.
    """

    def __init__(self, prefix: Path, dtype: "np.dtype[Any]") -> None:
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._limits = np.iinfo(self._dtype)
        self._final = (bin_file(prefix), idx_file(prefix))
        self._temporary = tuple(path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in self._final)
        self._lengths = array("q")
        self._stream = open(self._temporary[0], "wb")  # noqa: SIM115  # open until finish or abort

    def add_document(self, tokens: "np.ndarray[Any, np.dtype[Any]]") -> None:
        """Append one document, as one sequence.

        Raises:
            DataError: the document is too long for the format, or an id does not fit the data type.
        """
        if len(tokens) > _MAX_SEQUENCE:
            raise DataError(f"a document of {len(tokens)} tokens; the format holds at most {_MAX_SEQUENCE}: split it")
        if len(tokens) and not self._limits.min <= int(tokens.min()) <= int(tokens.max()) <= self._limits.max:
            raise DataError(f"token ids {int(tokens.min())} to {int(tokens.max())} do not fit {self._dtype.name}")
        self._stream.write(np.ascontiguousarray(tokens, dtype=self._dtype).tobytes())
        self._lengths.append(len(tokens))

    def finish(self) -> None:
        """Write the index and make both files visible."""
        flush_to_disk(self._stream)
        self._stream.close()
        lengths = np.array(self._lengths, dtype="<i4")
        starts = np.zeros(len(lengths), dtype="<i8")
        np.cumsum(lengths[:-1], dtype=np.int64, out=starts[1:])
        starts *= self._dtype.itemsize
        with open(self._temporary[1], "wb") as stream:
            stream.write(index_header(self._dtype, len(lengths), len(lengths) + 1))
            for values in (lengths, starts, np.arange(len(lengths) + 1, dtype="<i8")):
                stream.write(values.tobytes())
            flush_to_disk(stream)
        for temporary, final in zip(self._temporary, self._final):
            os.replace(temporary, final)

    def abort(self) -> None:
        """Close and remove the temporary files."""
        self._stream.close()
        for temporary in self._temporary:
            if temporary.exists():
                temporary.unlink()

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], *_: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.abort()  # after finish there is nothing to remove


def _count(number: int, singular: str, plural: str) -> str:
    return f"{number} {singular if number == 1 else plural}"


def flush_to_disk(stream: BinaryIO) -> None:
    """Wait until what was written to a file is on the disk."""
    stream.flush()
    os.fsync(stream.fileno())
