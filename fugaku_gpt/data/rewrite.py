"""``data merge``, ``data split`` and ``data sample``: write documents of corpora that are there into new ones.

Documents are copied as they are, with the sequences of which they consist. A new corpus of prepared folders is a
prepared folder; of Megatron pairs it is a folder with a pair, ``corpus.bin`` and ``corpus.idx``. Where documents are
drawn, tens of bytes of memory are needed for each document of the old corpus; otherwise memory does not grow with it.
"""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from fugaku_gpt.data.corpus import CORPUS, MANIFEST, MANIFEST_VERSION, TOKENIZER, Corpus, open_corpus
from fugaku_gpt.data.corpus_folder import publish, sha256_of, temporary_folder
from fugaku_gpt.data.indexed import CHECKED_AT_ONCE, bin_file, flush_to_disk, idx_file, index_header
from fugaku_gpt.data.permutation import permutation, stream_key
from fugaku_gpt.data.progress import show_progress
from fugaku_gpt.errors import DataError
from fugaku_gpt.input_files import resolved
from fugaku_gpt.records.files import write_json_atomically

_BLOCK = 1 << 22  # tokens, or entries of an index, that are copied at once
_CARRIED = ("vocab_size", "end_of_document", "dtype", "tokenizer_sha256")  # from a manifest into that of a new corpus


if TYPE_CHECKING:
    Integers = np.ndarray[Any, np.dtype[np.int64]]


class Selection(NamedTuple):
    """The documents [firsts[i], lasts[i]) of a corpus for every i, which ascend."""

    corpus: Corpus
    firsts: Integers
    lasts: Integers

    @property
    def documents(self) -> int:
        """Number of documents."""
        return int((self.lasts - self.firsts).sum())


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
        selections = [
            Selection(corpus, np.array([0]), np.array([corpus.index.documents], np.int64)) for corpus in corpora
        ]
        counts = _write(folder, selections, {"command": "merge"})
    return Written(out, *counts)


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
    order = permutation(stream_key(seed, "sample"), index.documents)
    if documents is not None and documents > index.documents:
        raise DataError(f"{path}: has {index.documents:,} documents, not {documents:,}; ask for fewer")
    if documents is None:
        assert tokens is not None
        if tokens > index.tokens:
            raise DataError(f"{path}: has {index.tokens:,} tokens, not {tokens:,}; ask for fewer")
        documents = int(np.searchsorted(np.cumsum(index.document_lengths(order)), tokens)) + 1
    with _new_folder(out) as folder:
        selection = _selection_of(corpus, np.sort(order[:documents]))
        counts = _write(folder, [selection], {"command": "sample", "seed": seed})
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
    order = permutation(stream_key(seed, "split"), documents)
    bounds = np.rint(np.cumsum([0.0, *shares.values()]) / sum(shares.values()) * documents).astype(np.int64)
    for name, first, last in zip(shares, bounds, bounds[1:]):
        if first == last:
            raise DataError(f"{path}: of {documents:,} documents the part {name} would have none; raise its share")
    parts = []
    with _new_folder(out) as folder:
        for name, first, last in zip(shares, bounds, bounds[1:]):
            (folder / name).mkdir()
            selection = _selection_of(corpus, np.sort(order[first:last]))
            origin = {"command": "split", "seed": seed, "shares": shares, "part": name}
            counts = _write(folder / name, [selection], origin)
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
        if corpus.index.has_modes:
            raise DataError(f"{corpus.path}: has modes of multimodal sequences, which a new corpus would lose")
        if corpus.manifest is not None and first.manifest is not None:
            _check_tokenizer(corpus)
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
        publish(folder, final, replaces=False)


def _check_tokenizer(corpus: Corpus) -> None:
    """Check that the tokenizer of a prepared folder is the one of its manifest.

    Raises:
        DataError: it is missing, or is another one.
    """
    path = Path(corpus.path) / TOKENIZER
    try:
        is_recorded = corpus.manifest is not None and sha256_of([path]) == corpus.manifest.get("tokenizer_sha256")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; copy the corpus again") from None
    if not is_recorded:
        raise DataError(f"{path}: is not the tokenizer with which the corpus was prepared; copy the corpus again")


def _selection_of(corpus: Corpus, numbers: Integers) -> Selection:
    """Neighbours among ascending numbers of documents as ranges."""
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    return Selection(corpus, numbers[np.append(0, breaks)], numbers[np.append(breaks - 1, len(numbers) - 1)] + 1)


def _write(folder: Path, selections: Sequence[Selection], origin: Dict[str, Any]) -> Tuple[int, int]:
    """Write the corpus of some documents into a folder; returns the numbers of its documents and tokens.

    Raises:
        DataError: the documents have no sequence.
    """
    prefix, source = folder / CORPUS, selections[0].corpus
    spans = [_sequences_of(selection) for selection in selections]
    sequences = sum(int((lasts - firsts).sum()) for firsts, lasts in spans)
    if sequences == 0:
        raise DataError(
            f"{source.path}: the chosen documents have no sequence, and a corpus has one at least; take more"
        )
    documents = sum(selection.documents for selection in selections)
    tokens = _copy_tokens(bin_file(prefix), selections, spans)
    _write_index(idx_file(prefix), selections, spans, index_header(source.index.dtype, sequences, documents + 1))
    if source.manifest is not None:
        shutil.copyfile(Path(source.path) / TOKENIZER, folder / TOKENIZER)
        manifest = {
            "version": MANIFEST_VERSION,
            "documents": documents,
            "tokens": tokens,
            **{key: source.manifest[key] for key in _CARRIED if key in source.manifest},
            "fingerprint": sha256_of([bin_file(prefix), idx_file(prefix)]),
            "made_by": origin,
            "made_from": [
                {"name": resolved(Path(corpus.path)).name, "fingerprint": corpus.fingerprint}
                for corpus, _, _ in selections
            ],
        }
        write_json_atomically(folder / MANIFEST, manifest)
    return documents, tokens


def _sequences_of(selection: Selection) -> Tuple[Integers, Integers]:
    """The first sequences of the ranges of documents, and those after their last ones."""
    index = selection.corpus.index.document_index
    return index[selection.firsts], index[selection.lasts]


def _copy_tokens(path: Path, selections: Sequence[Selection], spans: Sequence[Tuple[Integers, Integers]]) -> int:
    """Write the tokens of the sequences one after the other; returns their number."""
    bounds = []
    for (corpus, _, _), (firsts, lasts) in zip(selections, spans):
        bounds.append((corpus.index.first_tokens(firsts), corpus.index.first_tokens(lasts)))
    total = sum(int((lasts - firsts).sum()) for firsts, lasts in bounds)
    done = 0
    with open(path, "wb") as stream, show_progress("tokens", total, unit="tokens") as advance:
        for (corpus, _, _), (firsts, lasts) in zip(selections, bounds):
            for block in _gathered(corpus.index.tokens_at(0, corpus.index.tokens), firsts, lasts):
                stream.write(block.tobytes())
                done += len(block)
                advance(done)
        flush_to_disk(stream)
    return total


def _write_index(
    path: Path, selections: Sequence[Selection], spans: Sequence[Tuple[Integers, Integers]], header: bytes
) -> None:
    """Write the lengths, starts and documents of the sequences, each in a pass of its own."""
    itemsize = selections[0].corpus.index.dtype.itemsize
    with open(path, "wb") as stream:
        stream.write(header)
        for block in _lengths(selections, spans):
            stream.write(block.astype("<i4").tobytes())
        begin = 0
        for block in _lengths(selections, spans):
            ends = np.cumsum(block, dtype=np.int64) * itemsize + begin
            stream.write((ends - block.astype(np.int64) * itemsize).astype("<i8").tobytes())
            begin = int(ends[-1])
        stream.write(np.zeros(1, "<i8").tobytes())
        begin = 0
        for corpus, firsts, lasts in selections:
            index = corpus.index.document_index
            for ends, begins in zip(_gathered(index[1:], firsts, lasts), _gathered(index[:-1], firsts, lasts)):
                counts = np.cumsum(ends - begins) + begin
                stream.write(counts.astype("<i8").tobytes())
                begin = int(counts[-1])
        flush_to_disk(stream)


def _lengths(selections: Sequence[Selection], spans: Sequence[Tuple[Integers, Integers]]) -> Iterator[Integers]:
    """Yield the lengths of the sequences in blocks."""
    for (corpus, _, _), (firsts, lasts) in zip(selections, spans):
        yield from _gathered(corpus.index.lengths, firsts, lasts)


def _gathered(values: Integers, firsts: Integers, lasts: Integers) -> Iterator[Integers]:
    """Yield values[firsts[0]:lasts[0]], values[firsts[1]:lasts[1]] and so on, in blocks of ``_BLOCK`` entries or fewer.

    No block is empty. Short ranges are gathered together, since a corpus may have 10^8 of them.
    """
    ends = np.cumsum(lasts - firsts)
    first = 0
    while first < len(firsts):
        before = int(ends[first - 1]) if first else 0
        last = max(int(np.searchsorted(ends, before + _BLOCK, side="right")), first + 1)
        if last == first + 1:
            for start in range(int(firsts[first]), int(lasts[first]), _BLOCK):
                yield values[start : min(start + _BLOCK, int(lasts[first]))]
        elif int(ends[last - 1]) > before:
            sizes = lasts[first:last] - firsts[first:last]
            shifts = firsts[first:last] - (np.cumsum(sizes) - sizes)
            yield values[np.repeat(shifts, sizes) + np.arange(int(sizes.sum()))]
        first = last
