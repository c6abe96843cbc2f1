"""``data merge``, ``data split`` and ``data sample``: write documents of corpora that are there into new ones.

Documents are copied as they are, with the sequences of which they consist. A new corpus of prepared folders is a
prepared folder; of Megatron pairs it is a folder with a pair, ``corpus.bin`` and ``corpus.idx``. Memory grows with the
number of documents that are chosen at random, by 8 bytes of each, and otherwise not at all.
"""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from fugaku_gpt.data.corpus import CORPUS, MANIFEST, MANIFEST_VERSION, TOKENIZER, Corpus, open_corpus, prepared_folder
from fugaku_gpt.data.corpus_folder import publish, sha256_of, temporary_folder
from fugaku_gpt.data.indexed import CHECKED_AT_ONCE, bin_file, idx_file, index_header
from fugaku_gpt.data.progress import Advance, show_progress
from fugaku_gpt.errors import DataError
from fugaku_gpt.input_files import resolved
from fugaku_gpt.records.files import write_json_atomically

_BLOCK = 1 << 24  # bytes that are copied at once
_CARRIED = ("vocab_size", "end_of_document", "dtype", "tokenizer_sha256")  # from a manifest into that of a new corpus


class DocumentRange(NamedTuple):
    """The documents [first, last) of a corpus."""

    corpus: Corpus
    first: int
    last: int


class Written(NamedTuple):
    """A corpus that has been written."""

    path: Path
    documents: int
    tokens: int


def merge_corpora(paths: Sequence[str], out: Path) -> Written:
    """Write the documents of all corpora into one, in the order of ``paths``.

    Raises:
        DataError: a corpus is damaged, they do not fit together, or ``out`` is there or cannot be written.
    """
    corpora = _opened(paths)
    with _new_folder(out) as folder:
        ranges = [DocumentRange(corpus, 0, corpus.index.documents) for corpus in corpora]
        documents, tokens = _write(folder, ranges, "merge")
    return Written(out, documents, tokens)


def sample_corpus(path: str, out: Path, documents: Optional[int], tokens: Optional[int], seed: int) -> Written:
    """Write documents that are drawn without replacement, in their old order.

    Args:
        documents: how many; None: as many as have ``tokens`` tokens together, the one that reaches them included.
        tokens: tokens to reach; None: ``documents`` are counted.

    Raises:
        DataError: the corpus is damaged or has fewer, or ``out`` is there or cannot be written.
    """
    (corpus,) = _opened([path])
    index = corpus.index
    order = np.random.default_rng(seed).permutation(index.documents)
    if documents is not None and documents > index.documents:
        raise DataError(f"{path}: has {index.documents:,} documents, not {documents:,}; ask for fewer")
    if documents is None:
        assert tokens is not None
        if tokens > index.tokens:
            raise DataError(f"{path}: has {index.tokens:,} tokens, not {tokens:,}; ask for fewer")
        documents = int(np.searchsorted(np.cumsum(index.document_lengths(order)), tokens)) + 1
    with _new_folder(out) as folder:
        counts = _write(folder, _ranges_of(corpus, np.sort(order[:documents])), f"sample with seed {seed}")
    return Written(out, *counts)


def split_corpus(path: str, out: Path, shares: Dict[str, float], seed: int) -> List[Written]:
    """Write each document into one of several corpora ``out/NAME``, by shares of the number of documents.

    Which documents a part has is drawn; within it they are in their old order.

    Args:
        shares: positive weight of each part by its name; only their ratios count.

    Raises:
        DataError: the corpus is damaged, a part would have no document, or ``out`` is there or cannot be written.
    """
    (corpus,) = _opened([path])
    documents = corpus.index.documents
    order = np.random.default_rng(seed).permutation(documents)
    bounds = np.rint(np.cumsum([0.0, *shares.values()]) / sum(shares.values()) * documents).astype(np.int64)
    for name, first, last in zip(shares, bounds, bounds[1:]):
        if first == last:
            raise DataError(f"{path}: of {documents:,} documents the part {name} would have none; raise its share")
    parts = []
    with _new_folder(out) as folder:
        for name, first, last in zip(shares, bounds, bounds[1:]):
            (folder / name).mkdir()
            ranges = _ranges_of(corpus, np.sort(order[first:last]))
            counts = _write(folder / name, ranges, f"split with seed {seed}: {name} of {shares}")
            parts.append(Written(out / name, *counts))
    return parts


def _opened(paths: Sequence[str]) -> List[Corpus]:
    """The corpora, with every entry of their indices checked.

    Raises:
        DataError: one is damaged, or they differ in what a corpus has one of.
    """
    corpora = [open_corpus(path) for path in paths]
    first = corpora[0]
    for corpus in corpora:
        if (corpus.manifest is None) != (first.manifest is None):
            raise DataError(f"{first.path} and {corpus.path}: a prepared folder and a Megatron pair; name either kind")
        if corpus.index.dtype != first.index.dtype:
            types = f"{first.index.dtype.name} and {corpus.index.dtype.name}"
            raise DataError(f"{first.path} and {corpus.path}: tokens are {types}; corpora of one type can be merged")
        if corpus.manifest is not None and first.manifest is not None:
            for key in ("tokenizer_sha256", "end_of_document"):
                if corpus.manifest.get(key) != first.manifest.get(key):
                    raise DataError(
                        f"{first.path} and {corpus.path}: were prepared with different tokenizers; prepare one of them "
                        "again with --tokenizer, the tokenizer.json of the other"
                    )
    for corpus in corpora:
        if corpus.index.sequences > CHECKED_AT_ONCE:  # others have been checked when they were opened
            corpus.index.check_index()
    return corpora


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder that gets the name ``out`` at the end of the block.

    Raises:
        DataError: ``out`` is there and not an empty folder, or cannot be written.
    """
    if os.path.lexists(out) and not (out.is_dir() and not os.listdir(out)):
        raise DataError(f"{out}: is there already; choose another --out, or remove it")
    final = Path(os.path.realpath(out))
    with temporary_folder(final) as folder:
        yield folder
        publish(folder, final)


def _ranges_of(corpus: Corpus, numbers: "np.ndarray[Any, np.dtype[np.int64]]") -> List[DocumentRange]:
    """Ranges of neighbours among ascending numbers of documents."""
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    firsts, lasts = numbers[np.append(0, breaks)], numbers[np.append(breaks - 1, len(numbers) - 1)] + 1
    return [DocumentRange(corpus, first, last) for first, last in zip(firsts.tolist(), lasts.tolist())]


def _write(folder: Path, ranges: Sequence[DocumentRange], origin: str) -> Tuple[int, int]:
    """Write the corpus of some documents into a folder; returns the numbers of its documents and tokens."""
    prefix = folder / CORPUS
    with show_progress("bytes", sum(end - begin for begin, end in map(_bytes_of, ranges))) as advance:
        _copy_tokens(bin_file(prefix), ranges, advance)
    documents = sum(last - first for _, first, last in ranges)
    _write_index(idx_file(prefix), ranges, documents)
    tokens = bin_file(prefix).stat().st_size // ranges[0].corpus.index.dtype.itemsize
    corpora = {corpus.path: corpus for corpus, _, _ in ranges}
    source = next(iter(corpora.values()))
    prepared = prepared_folder(source.path)
    if prepared is not None and source.manifest is not None:
        shutil.copyfile(prepared / TOKENIZER, folder / TOKENIZER)
        manifest = {
            "version": MANIFEST_VERSION,
            "documents": documents,
            "tokens": tokens,
            **{key: source.manifest[key] for key in _CARRIED if key in source.manifest},
            "fingerprint": sha256_of([bin_file(prefix), idx_file(prefix)]),
            "made_by": origin,
            "made_from": [
                {"name": resolved(Path(path)).name, "fingerprint": corpus.fingerprint}
                for path, corpus in corpora.items()
            ],
        }
        write_json_atomically(folder / MANIFEST, manifest)
    return documents, tokens


def _bytes_of(members: DocumentRange) -> Tuple[int, int]:
    """The first byte of the tokens of some documents, and the one after the last."""
    return members.corpus.index.bytes_of_documents(members.first, members.last)


def _copy_tokens(path: Path, ranges: Sequence[DocumentRange], advance: Advance) -> None:
    done = 0
    with open(path, "wb") as stream:
        for members in ranges:
            begin, end = _bytes_of(members)
            for start in range(begin, end, _BLOCK):
                stream.write(members.corpus.index.bytes_at(start, min(start + _BLOCK, end)))
                done += min(start + _BLOCK, end) - start
                advance(done)
        stream.flush()
        os.fsync(stream.fileno())


def _write_index(path: Path, ranges: Sequence[DocumentRange], documents: int) -> None:
    """Write the lengths, starts and documents of the sequences, each in a pass of its own over the ranges."""
    spans = [members.corpus.index.sequences_of_documents(members.first, members.last) for members in ranges]
    sequences = sum(last - first for first, last in spans)
    dtype = ranges[0].corpus.index.dtype
    with open(path, "wb") as stream:
        stream.write(index_header(dtype, sequences, documents + 1))
        for members, (first, last) in zip(ranges, spans):
            _write_blocks(stream.write, members.corpus.index.lengths[first:last], "<i4", 0)
        begin = 0
        for members, (first, last) in zip(ranges, spans):
            starts, (first_byte, end_byte) = members.corpus.index.starts_of_sequences(first, last), _bytes_of(members)
            _write_blocks(stream.write, starts, "<i8", begin - first_byte)
            begin += end_byte - first_byte
        begin = 0
        for members, (first, last) in zip(ranges, spans):
            begins = members.corpus.index.document_begins(members.first, members.last)
            _write_blocks(stream.write, begins, "<i8", begin - first)
            begin += last - first
        stream.write(np.array([sequences], "<i8").tobytes())
        stream.flush()
        os.fsync(stream.fileno())


def _write_blocks(
    write: Callable[[bytes], object], values: "np.ndarray[Any, np.dtype[Any]]", dtype: str, shift: int
) -> None:
    """Write integers, each larger by ``shift``, in blocks."""
    for first in range(0, len(values), CHECKED_AT_ONCE):
        write((values[first : first + CHECKED_AT_ONCE] + shift).astype(dtype).tobytes())
