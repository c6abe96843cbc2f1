"""Byte-level BPE by Hugging Face ``tokenizers``: trained here, or loaded from a ``tokenizer.json``.

Only ``data prepare`` needs it; training reads token ids and never imports this module.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Iterable, List

import numpy as np

from fugaku_gpt.errors import DataError

END_OF_DOCUMENT = "<|endoftext|>"
# What other tokenizers call it; the first that a vocabulary has is taken.
_END_NAMES = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<EOD>", "<eod>")
SMALLEST_VOCABULARY = 257  # all bytes and the end of a document
LARGEST_UINT16 = 65500  # Megatron's bound: below it, token ids are stored in two bytes
_PIECE = 1 << 20  # characters
# Byte-level pre-tokenizers part a newline from text after it, and one that stands alone from text before it, so a cut
# behind it changes no token. Of several newlines all but the last are one piece: a cut behind them would join the last.
_CUT = re.compile(r"(?<=\S)\n(?=\S)")


def train_tokenizer(texts: Iterable[bytes], vocab_size: int, path: Path) -> None:
    """Train a byte-level BPE on UTF-8 documents and save it; equal documents give an equal file.

    The vocabulary comes out smaller than asked where the text has too few pairs to merge.
    """
    tokenizers = _library()
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
        end_name: how it is written.
        dtype: in which ids are stored.
    """

    def __init__(self, path: Path) -> None:
        """Load a ``tokenizer.json``.

        Raises:
            DataError: there is no such file, it is not a tokenizer, or it has no token for the end of a document.
        """
        if not path.is_file():
            raise DataError(f"{path}: no such file; --tokenizer takes the tokenizer.json of Hugging Face tokenizers")
        try:
            tokenizer = _library().Tokenizer.from_file(str(path))
        except DataError:
            raise
        except Exception as error:  # the library raises nothing more specific
            raise DataError(f"{path}: not a tokenizer.json of Hugging Face tokenizers: {error}") from None
        # A file may carry the settings of the model that it was made for; documents are encoded whole and as they are.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True  # the text "<|endoftext|>" in a document does not end it
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        names = [name for name in _END_NAMES if name in vocabulary]
        if not names:
            raise DataError(f"{path}: has no end-of-document token; looked for {', '.join(_END_NAMES)}")
        self._tokenizer = tokenizer
        self.vocab_size = max(vocabulary.values()) + 1
        self.end_name = names[0]
        self.end = int(vocabulary[self.end_name])
        self.dtype = np.dtype("<u2" if self.vocab_size < LARGEST_UINT16 else "<i4")

    def encode(self, document: bytes) -> "np.ndarray[Any, np.dtype[Any]]":
        """Token ids of a UTF-8 document, its end-of-document token last, in ``dtype``."""
        ids: List[int] = []
        for piece in split_text(document.decode("utf-8")):
            ids.extend(self._tokenizer.encode(piece, add_special_tokens=False).ids)
        ids.append(self.end)
        return np.array(ids, dtype=self.dtype)


def split_text(text: str, size: int = _PIECE) -> Iterable[str]:
    """A long text in pieces of about ``size`` characters that end in a newline: the library takes some 100 bytes of
    memory for each token that it encodes at a time."""
    start = 0
    while len(text) - start > size:
        found = _CUT.search(text, start + size)
        if found is None:
            break
        yield text[start : found.end()]
        start = found.end()
    yield text[start:] if start else text


def _library() -> Any:
    # One thread per process: `data prepare` has its own processes, and results must not depend on their number.
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
