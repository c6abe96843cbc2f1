"""Documents whose loss is to be computed, as token ids. No PyTorch here."""

from __future__ import annotations

from pathlib import Path
from typing import List

from fugaku_gpt.data.eval_documents import texts_of_file
from fugaku_gpt.data.scored_text import ScoredText
from fugaku_gpt.inference.text import TextTokenizer


def documents_of_file(path: Path, tokenizer: TextTokenizer, name: str) -> List[ScoredText]:
    """Return the documents of a text file as those of ``training.eval_files``, each with the token that ends it.

    Args:
        name: the name of the file in theirs; ``path`` may be a copy.

    Raises:
        DataError: it cannot be read, is not UTF-8, or holds no text.
    """
    documents = []
    contents = texts_of_file(path, Path(name))
    for number, content in enumerate(contents, 1):
        ids = [*tokenizer.encode_start(content.decode("utf-8")), tokenizer.end]
        documents.append(ScoredText(f"{name}:{number}" if len(contents) > 1 else name, ids, 1, len(content)))
    return documents
