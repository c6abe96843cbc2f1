"""The order of a split's documents in an epoch, in memory or in files that all ranks map.

An order takes 16 bytes a document: 16 GB for a thousand million documents, which each rank of a node would hold for
itself. In files its pages are in a node's memory once. They are filled in blocks, so that the memory that rank 0 needs
for it does not grow with the documents.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, Iterator

import numpy as np

from fugaku_gpt.data.corpus import Corpus
from fugaku_gpt.data.index_files import Arrays, IndexArrays
from fugaku_gpt.data.permutation import permutation, random_blocks
from fugaku_gpt.records.files import replaced_atomically

_BLOCK = 2**22  # documents that are ordered at once
_DOCUMENTS, _ENDS = "documents", "ends"


class DocumentOrder(IndexArrays):
    """The documents of an epoch in their order: the permutation of a split's documents by a key.

    ``documents`` and ``ends``, both int64 [documents]: the n-th document of the epoch, numbered within the split, and
    the number of the epoch's tokens up to its end.
    """

    def __init__(self, name: str, corpus: Corpus, first: int, last: int, key: int) -> None:
        """Order the documents [first, last) of a corpus by ``key``; ``name`` is that of the files."""
        shape = ((last - first,), "int64")
        super().__init__(name, {_DOCUMENTS: shape, _ENDS: shape}, self._build_in_memory)
        self._corpus, self._first, self._last, self._stream_key = corpus, first, last, key

    @property
    def size(self) -> int:
        """Number of documents."""
        return self._last - self._first

    def position_of(self, token: int) -> int:
        """Return the position in the order of the document that has a token of the epoch.

        Raises:
            DataError: the file of the ends is damaged.
        """
        position = int(np.searchsorted(self[_ENDS], token, side="right"))
        if position == self.size or (position > 0 and self.end(position - 1) > token) or self.end(position) <= token:
            raise self.damaged(_ENDS, f"none of its {self.size} documents has token {token} of the epoch")
        return position

    def document(self, position: int) -> int:
        """Return the document at a position of the order.

        Raises:
            DataError: the file of the documents is damaged.
        """
        return int(self.entry(_DOCUMENTS, position))

    def end(self, position: int) -> int:
        """Return the number of tokens up to the end of the document at a position of the order.

        Raises:
            DataError: the file of the ends is damaged.
        """
        return int(self.entry(_ENDS, position))

    def _build_in_memory(self) -> Arrays:
        arrays = {name: np.empty(self.size, dtype=np.int64) for name in (_DOCUMENTS, _ENDS)}
        self._fill(arrays[_DOCUMENTS], arrays[_ENDS])
        return arrays

    def _write_files(self, folder: Path) -> None:
        files = (self._file(folder, name) for name in (_DOCUMENTS, _ENDS))
        with contextlib.ExitStack() as stack:
            self._fill(*(stack.enter_context(_mapped(file, self.size)) for file in files))

    def _fill(
        self, documents: "np.ndarray[Any, np.dtype[np.int64]]", ends: "np.ndarray[Any, np.dtype[np.int64]]"
    ) -> None:
        """Write the order to two arrays, in blocks.

        Raises:
            DataError: the lengths in the index are damaged.
        """
        _permute(self._stream_key, documents, ends.view(np.uint64))
        lengths = self._corpus.index.lengths[self._first : self._last]
        total, size = 0, len(documents)
        for first in range(0, size, _BLOCK):
            last = min(first + _BLOCK, size)
            in_order = lengths[documents[first:last]]
            if int(in_order.min()) < 0:
                raise self._corpus.damaged_lengths(self._first, self._last, "one of them is negative")
            ends[first:last] = total + np.cumsum(in_order, dtype=np.int64)
            total = int(ends[last - 1])
        tokens = self._corpus.index.tokens_of(self._first, self._last)
        if total != tokens:
            problem = f"they add up to {total}, and their bytes are {tokens} tokens"
            raise self._corpus.damaged_lengths(self._first, self._last, problem)


def _permute(
    key: int, documents: "np.ndarray[Any, np.dtype[np.int64]]", draws: "np.ndarray[Any, np.dtype[np.uint64]]"
) -> None:
    """Write :func:`permutation` of ``len(documents)`` to ``documents``, a block at a time.

    The permutation sorts documents by their random numbers. These are first dealt into buckets by their highest bits,
    in the order of documents, and then each bucket is sorted: a stable sort of all of them.

    Args:
        draws: as many numbers, to be overwritten.
    """
    size = len(documents)
    bits = (size // _BLOCK).bit_length()
    if bits == 0:
        documents[:] = permutation(key, size)
        return
    shift, buckets = np.uint64(64 - bits), 1 << bits
    counts = np.zeros(buckets, dtype=np.int64)
    for block in random_blocks(key, size, _BLOCK):
        counts += np.bincount((block >> shift).astype(np.int64), minlength=buckets)
    bucket_ends = np.cumsum(counts)
    filled, first = bucket_ends - counts, 0
    for block in random_blocks(key, size, _BLOCK):
        bucket_of = (block >> shift).astype(np.int64)
        by_bucket = np.argsort(bucket_of, kind="stable")
        in_block = np.bincount(bucket_of, minlength=buckets)
        within = np.arange(len(block)) - np.repeat(np.cumsum(in_block) - in_block, in_block)
        positions = np.repeat(filled, in_block) + within
        documents[positions] = first + by_bucket
        draws[positions] = block[by_bucket]
        filled += in_block
        first += len(block)
    for begin, end in zip((bucket_ends - counts).tolist(), bucket_ends.tolist()):
        documents[begin:end] = documents[begin:end][np.argsort(draws[begin:end], kind="stable")]


@contextlib.contextmanager
def _mapped(path: Path, size: int) -> "Iterator[np.ndarray[Any, np.dtype[np.int64]]]":
    """Map a temporary neighbour of a file of NumPy's format, which becomes the file at the end of the block, and is
    removed if the block fails. Its room on the disk is reserved first: writing to a mapping of a full disk would end
    the process by SIGBUS."""
    with replaced_atomically(path) as temporary:
        array = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.int64, shape=(size,))
        with open(temporary, "r+b") as stream:
            os.posix_fallocate(stream.fileno(), 0, os.fstat(stream.fileno()).st_size)
        yield array
        array.flush()
