"""Describes a corpus in one row."""

from __future__ import annotations

from typing import Any, Dict

from fugaku_gpt.config import DataConfig, ModelConfig
from fugaku_gpt.data.corpus import Corpus
from fugaku_gpt.data.samples import SPLITS, splits_of


def describe_corpus(corpus: Corpus) -> Dict[str, Any]:
    """The counts of a corpus, and its sequences and tokens in each split by the default ``data.split``.

    A small corpus has a validation document only if samples of the default ``model.seq_len`` fit.

    Raises:
        DataError: an entry of its index is damaged.
    """
    index = corpus.index
    shares = DataConfig().split
    facts: Dict[str, Any] = {
        "path": corpus.path,
        "form": "Megatron pair" if corpus.manifest is None else "prepared folder",
        "documents": index.documents,
        "sequences": index.sequences,
        "tokens": index.tokens,
        "dtype": index.dtype.name,
        "bytes": index.bin_path.stat().st_size + index.idx_path.stat().st_size,
        "vocab_size": corpus.vocab_size,
        "fingerprint": corpus.fingerprint,
        "split": ":".join(f"{share:g}" for share in shares),
    }
    for name, (first, last) in zip(SPLITS, splits_of(index.lengths, shares, ModelConfig().seq_len)):
        facts[f"{name}_sequences"] = last - first
        facts[f"{name}_tokens"] = index.tokens_of(first, last)
    return facts
