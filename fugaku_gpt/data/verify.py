"""Checks all that there is of a corpus, once: what opening it leaves to the look-ups."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np

from fugaku_gpt.data.corpus import TOKENIZER, Corpus, open_corpus
from fugaku_gpt.data.progress import show_progress
from fugaku_gpt.errors import DataError
from fugaku_gpt.input_files import open_file

_BLOCK = 2**24  # bytes that are read at once; a multiple of every size of a token


class VerifiedCorpus(NamedTuple):
    """A corpus in which nothing is wrong.

    Attributes:
        lowest_id, highest_id: the smallest and the largest token id; -1 where the corpus has no token.
        is_fingerprint_checked: whether both files and the tokenizer are those that ``data prepare`` wrote; a pair of
            Megatron has no record of them.
    """

    corpus: Corpus
    lowest_id: int
    highest_id: int
    is_fingerprint_checked: bool


def verify_corpus(path: str) -> VerifiedCorpus:
    """Check every entry of a corpus's index, every token id, and the digests that its manifest records.

    The memory that it takes does not grow with the corpus.

    Raises:
        DataError: there is no corpus, or it is damaged; the message names the first damage.
    """
    corpus = open_corpus(path)
    index = corpus.index
    with show_progress("checking the index", index.sequences, "sequences") as advance:
        index.check_index(advance)
    digest = hashlib.sha256()
    lowest, highest = _check_tokens(corpus, digest)
    if corpus.manifest is None:
        return VerifiedCorpus(corpus, lowest, highest, False)
    _add_file(digest, index.idx_path)
    if digest.hexdigest() != corpus.fingerprint:
        raise DataError(
            f"{path}: {index.bin_path.name} or {index.idx_path.name} has changed since `fugaku-gpt data prepare` wrote "
            f"them (SHA-256 {digest.hexdigest()[:12]}, recorded {corpus.fingerprint[:12]}); copy both again, or "
            "prepare again with --force"
        )
    tokenizer = index.bin_path.with_name(TOKENIZER)
    recorded: Optional[Any] = corpus.manifest.get("tokenizer_sha256")
    digest = hashlib.sha256()
    _add_file(digest, tokenizer)
    if recorded is not None and digest.hexdigest() != recorded:
        raise DataError(
            f"{tokenizer}: has changed since `fugaku-gpt data prepare` wrote it; copy it again, or prepare again with "
            "--force"
        )
    return VerifiedCorpus(corpus, lowest, highest, True)


def _check_tokens(corpus: Corpus, digest: Any) -> "tuple[int, int]":
    """Return the smallest and the largest token id, and add all tokens to a digest."""
    index, lowest, highest, done = corpus.index, -1, -1, 0
    size = index.tokens * index.dtype.itemsize
    with show_progress("checking the tokens", size) as advance, _opened(index.bin_path) as stream:
        for block in iter(lambda: stream.read(_BLOCK), b""):
            digest.update(block)
            ids = np.frombuffer(block, index.dtype)
            block_lowest, block_highest = int(ids.min()), int(ids.max())
            if block_lowest < 0 or (corpus.vocab_size is not None and block_highest >= corpus.vocab_size):
                limit = corpus.vocab_size if corpus.vocab_size is not None else np.iinfo(index.dtype).max + 1
                number = int(np.flatnonzero((ids < 0) | (ids >= limit))[0])
                raise DataError(
                    f"{index.bin_path}: token {done // index.dtype.itemsize + number} has id {int(ids[number])}; "
                    f"valid: 0 to {limit - 1}; copy it again, or prepare again"
                )
            lowest = block_lowest if done == 0 else min(lowest, block_lowest)
            highest = max(highest, block_highest)
            done += len(block)
            advance(done)
    return lowest, highest


def _add_file(digest: Any, path: Path) -> None:
    with _opened(path) as stream:
        for block in iter(lambda: stream.read(_BLOCK), b""):
            digest.update(block)


def _opened(path: Path) -> Any:
    try:
        return open_file(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
