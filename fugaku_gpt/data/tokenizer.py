"""Byte-level BPE with Hugging Face ``tokenizers``: training, and loading of a ``tokenizer.json``.

``data prepare``, ``generate`` and ``eval`` need it; training a model reads token ids and never imports this module.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any, Iterable, Iterator, List, Mapping, Optional, Sequence

import numpy as np

from fugaku_gpt.data.end_token import end_of_document, without_text_of_end
from fugaku_gpt.errors import DataError
from fugaku_gpt.input_files import read_text
from fugaku_gpt.json_text import parse_json
from fugaku_gpt.limits import TOKENIZER_TEXT, cut

END_OF_DOCUMENT = "<|endoftext|>"
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
    tokenizers = import_tokenizers()
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

    def __init__(self, path: Path, end_token: Optional[str] = None) -> None:
        """Load a ``tokenizer.json``.

        Args:
            path: the file.
            end_token: the token that ends documents; None: see :func:`end_of_document`.

        Raises:
            DataError: the file does not exist, is no tokenizer, or does not say which token ends a document.
        """
        if not path.is_file():
            raise DataError(f"{path}: no such file; --tokenizer takes the tokenizer.json of Hugging Face tokenizers")
        library = import_tokenizers()
        with refusing(f"{path}: not a tokenizer.json of Hugging Face tokenizers"):
            vocabulary = library.Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
            settings = parse_json(read_text(path, TOKENIZER_TEXT))
        self.end_name = end_of_document(path, settings, vocabulary, end_token)
        self.end = int(vocabulary[self.end_name])
        self.vocab_size = max(vocabulary.values()) + 1
        self.dtype = np.dtype("<u2" if self.vocab_size < LARGEST_UINT16 else "<i4")
        self._piece_size = _PIECE_CHARACTERS if cuts_are_harmless(settings) else None
        with refusing(f"{path}: cannot be used without the text of {cut(self.end_name)!r}"):
            self._tokenizer = library.Tokenizer.from_str(json.dumps(without_text_of_end(settings, self.end_name)))
        # A file may have settings of the model that it was made for; documents are encoded in full and unchanged.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # the text "<|endoftext|>" in a document does not end it

    def encode(self, document: bytes) -> "np.ndarray[Any, np.dtype[Any]]":
        """Token ids of a UTF-8 document, with the end-of-document token last, in ``dtype``.

        Raises:
            DataError: the tokenizer makes its end-of-document token of something within the document, or fails.
        """
        text = document.decode("utf-8")
        ids: List[int] = []
        with refusing("the tokenizer cannot encode a document"):
            for piece in split_text(text, self._piece_size) if self._piece_size is not None else [text]:
                ids.extend(self._tokenizer.encode(piece, add_special_tokens=False).ids)
        if self.end in ids:
            raise DataError(
                f"the tokenizer encodes a part of a document as {self.end_name!r}, which would end it there "
                f"(the document begins with {text[:40]!r}); name another token with --end-token"
            )
        ids.append(self.end)
        return np.array(ids, dtype=self.dtype)


class LoadedTokenizer:
    """A ``tokenizer.json`` that turns token ids into text, to show what a corpus has.

    Attributes:
        unknown_id: id of the token for what the tokenizer does not know; None if it has none.
    """

    def __init__(self, path: Path) -> None:
        """Load the file.

        Raises:
            DataError: it does not exist, or is no tokenizer.
        """
        library = import_tokenizers()
        with refusing(f"{path}: not a tokenizer.json of Hugging Face tokenizers"):
            self._tokenizer = library.Tokenizer.from_file(str(path))
            model = parse_json(read_text(path, TOKENIZER_TEXT))["model"]
            unknown = model.get("unk_id")  # of a Unigram; other models name the token
            if unknown is None and model.get("unk_token") is not None:
                unknown = self._tokenizer.token_to_id(model["unk_token"])
            self.unknown_id: Optional[int] = None if unknown is None else int(unknown)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens.

        Raises:
            DataError: the tokenizer fails.
        """
        with refusing("the tokenizer cannot decode a document"):
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


@contextlib.contextmanager
def refusing(reason: str) -> Iterator[None]:
    """Turn whatever the library raises into a ``DataError`` that begins with a reason.

    The library raises no error more specific than ``Exception``, and a panic of its Rust code is not even that. A panic
    also prints its own lines to standard error, which cannot be prevented from here.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{reason}: {cut(str(error))}") from None


def cuts_are_harmless(settings: Mapping[str, Any]) -> bool:
    """Whether :func:`split_text` changes no token, by the content of a ``tokenizer.json``.

    It does not where words never reach across a newline between two characters that are not blank, and where the
    beginning of a text is encoded as any other word: a space or a mark before the first word would come before each
    piece. Only combinations are listed for which a test has shown this; with all others, documents are not cut.
    """
    pre_tokenizer, normalizer = settings.get("pre_tokenizer") or {}, settings.get("normalizer")
    kind = pre_tokenizer.get("type")
    for token in settings.get("added_tokens") or ():
        # special tokens are encoded as any other text
        is_plain = not (token.get("lstrip") or token.get("rstrip")) and not re.search(r"\s", token["content"])
        if not token.get("special") and not is_plain:
            return False
    if kind == "ByteLevel":
        return normalizer is None and not pre_tokenizer.get("add_prefix_space") and pre_tokenizer.get("use_regex", True)
    if kind == "BertPreTokenizer":
        return normalizer is None or normalizer.get("type") == "BertNormalizer"
    return kind in ("Whitespace", "WhitespaceSplit") and normalizer is None


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


def import_tokenizers() -> Any:
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
            f"text needs the package tokenizers ({error}); install it: pip install 'fugaku_gpt[data]'"
        ) from None
    return tokenizers
