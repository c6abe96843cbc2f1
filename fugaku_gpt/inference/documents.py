"""Documents whose loss is to be computed, as token ids. No PyTorch here."""

from __future__ import annotations

from pathlib import Path

from fugaku_gpt.data.scored_text import ScoredText
from fugaku_gpt.errors import UsageError
from fugaku_gpt.inference.text import TextTokenizer
from fugaku_gpt.input_files import read_text
from fugaku_gpt.limits import DOCUMENT


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
