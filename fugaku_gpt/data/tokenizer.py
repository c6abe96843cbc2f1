"""Byte-level BPE with Hugging Face ``tokenizers``: training, and loading of a ``tokenizer.json``.

Only ``data prepare`` needs it; training a model reads token ids and never imports this module.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Iterable, List

import numpy as np

from fugaku_gpt.errors import DataError

END_OF_DOCUMENT = "<|endoftext|>"
# Names in other tokenizers; the first that a vocabulary has is used.
_END_TOKENS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<EOD>", "<eod>")
SMALLEST_VOCABULARY = 257  # all bytes, and the end of a document
LARGEST_UINT16 = 65500  # Megatron's bound: below it, token ids are stored in two bytes
_PIECE_CHARACTERS = 1 << 20
# Byte-level pre-tokenizers separate a newline from the text after it, and a single one from the text before it, so a
# boundary behind a single newline changes no token. Of several newlines all but the last are one piece; a boundary
# behind them would join it with the last.
_PIECE_BOUNDARY = re.compile(r"(?<=\S)\n(?=\S)")


def train_tokenizer(texts: Iterable[bytes], vocab_size: int, path: Path) -> None:
    """Train a byte-level BPE on UTF-8 documents and save it; equal documents give an equal file.

    The vocabulary is smaller than ``vocab_size`` if the text has too few pairs to merge.
    """
    tokenizers = _import_tokenizers()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(byte_level.alphabet()),
        show_progress=False,
    )
    pieces = (piece for text in texts for piece in split_text(text.decode("utf-8")))
    tokenizer.train_from_iterator(pieces, trainer=trainer)
    tokenizer.save(str(path))


class Encoder:
    """A tokenizer that turns documents into token ids.

    Attributes:
        vocab_size: one more than the largest id.
        end: id of the end-of-document token.
        end_name: text of the end-of-document token.
        dtype: type in which ids are stored.
    """

    def __init__(self, path: Path) -> None:
        """Load a ``tokenizer.json``.

        Raises:
            DataError: the file does not exist, is no tokenizer, or has no token for the end of a document.
        """
        if not path.is_file():
            raise DataError(f"{path}: no such file; --tokenizer takes the tokenizer.json of Hugging Face tokenizers")
        try:
            tokenizer = _import_tokenizers().Tokenizer.from_file(str(path))
        except DataError:
            raise
        except Exception as error:  # the library raises nothing more specific
            raise DataError(f"{path}: not a tokenizer.json of Hugging Face tokenizers: {error}") from None
        # A file may have settings of the model that it was made for; documents are encoded in full and unchanged.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True  # the text "<|endoftext|>" in a document does not end it
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        end_names = [name for name in _END_TOKENS if name in vocabulary]
        if not end_names:
            raise DataError(f"{path}: has no end-of-document token; looked for {', '.join(_END_TOKENS)}")
        self._tokenizer = tokenizer
        self.vocab_size = max(vocabulary.values()) + 1
        self.end_name = end_names[0]
        self.end = int(vocabulary[self.end_name])
        self.dtype = np.dtype("<u2" if self.vocab_size < LARGEST_UINT16 else "<i4")

    def encode(self, document: bytes) -> "np.ndarray[Any, np.dtype[Any]]":
        """Token ids of a UTF-8 document, with the end-of-document token last, in ``dtype``."""
        ids: List[int] = []
        for piece in split_text(document.decode("utf-8")):
            ids.extend(self._tokenizer.encode(piece, add_special_tokens=False).ids)
        ids.append(self.end)
        return np.array(ids, dtype=self.dtype)


def split_text(text: str, size: int = _PIECE_CHARACTERS) -> Iterable[str]:
    """Split a long text into pieces of about ``size`` characters that end in a newline.

    The library needs some 100 bytes of memory for each token of a text that it encodes.
    """
    start = 0
    while len(text) - start > size:
        boundary = _PIECE_BOUNDARY.search(text, start + size)
        if boundary is None:
            break
        yield text[start : boundary.end()]
        start = boundary.end()
    yield text[start:] if start else text


def _import_tokenizers() -> Any:
    # one thread per process: `data prepare` has processes of its own, and results must not depend on their number
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise DataError(
            f"`data prepare` needs the package tokenizers ({error}); install it: pip install 'fugaku_gpt[data]'"
        ) from None
    return tokenizers
