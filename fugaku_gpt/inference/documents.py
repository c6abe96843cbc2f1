"""Documents whose loss is to be computed, as token ids. No PyTorch here."""

from __future__ import annotations

from pathlib import Path
from typing import List, Optional

import numpy as np

from fugaku_gpt.data.corpus import open_corpus
from fugaku_gpt.data.scored_text import ScoredText
from fugaku_gpt.errors import DataError, UsageError
from fugaku_gpt.inference.text import TextTokenizer
from fugaku_gpt.input_files import read_text
from fugaku_gpt.limits import DOCUMENT


def documents_of_corpus(
    path: str, tokenizer: TextTokenizer, count: Optional[int], counts_bytes: bool
) -> List[ScoredText]:
    """Return the documents of a corpus as they are stored, with the token that ends each.

    Args:
        tokenizer: that of the corpus; its end comes before each document, too.
        count: documents to take, from the first on; None: all.
        counts_bytes: whether to count the bytes of each text, for which it is decoded.

    Raises:
        DataError: there is no corpus, or it is damaged, or holds no token.
    """
    index = open_corpus(path).index
    documents = []
    for number in range(index.documents if count is None else min(count, index.documents)):
        ids = np.concatenate(([tokenizer.end], index.document(number)))
        if len(ids) > 1:
            size = len(tokenizer.decode(ids.tolist()).encode("utf-8")) if counts_bytes else None
            documents.append(ScoredText(f"{number}", ids, 1, size))
    if not documents:
        raise DataError(f"{path}: none of its documents has a token")
    return documents


def document_of_file(path: Path, tokenizer: TextTokenizer) -> ScoredText:
    """Return a text file as one document, with the token that ends it.

    Raises:
        UsageError: it cannot be read, or is not UTF-8.
    """
    try:
        text = read_text(path, DOCUMENT)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
    ids = [*tokenizer.encode_start(text), tokenizer.end]
    return ScoredText(str(path), ids, 1, len(text.encode("utf-8")))
