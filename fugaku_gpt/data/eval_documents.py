"""Reads ``training.eval_files`` as documents of token ids: text files, by the corpora's tokenizer, and corpora.

The ranks of a training never import this module but for rank 0 of a run that has such files: it needs ``tokenizers``.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, Callable, Iterator, List, Sequence

from fugaku_gpt.checkpoint.hugging_face_tokenizer import CorpusTokenizer
from fugaku_gpt.data.corpus import is_corpus, tokenizer_of_corpora
from fugaku_gpt.data.json_records import json_lines, lines_of
from fugaku_gpt.data.scored_text import ScoredText, documents_of_corpus
from fugaku_gpt.data.tokenizer import Encoder, import_tokenizers
from fugaku_gpt.errors import DataError
from fugaku_gpt.input_files import open_file, read_bytes
from fugaku_gpt.limits import DOCUMENT

_JSON_LINES = ".jsonl"


def read_eval_files(paths: Sequence[str], corpora: Sequence[str], vocab_size: int) -> List[List[ScoredText]]:
    """Return the documents of each file, each behind the end of another and with an end, as ``eval`` reads them.

    Args:
        paths: text files (``.jsonl``: a document in each line, under the key ``text``; else one document) and corpora.
        corpora: those that the model is trained on, whose tokenizer is the model's.
        vocab_size: tokens of the model.

    Raises:
        DataError: a file cannot be read, holds no document, or was encoded by another tokenizer; or the corpora have no
            tokenizer.
    """
    files = []
    for path in paths:
        texts = _documents_of_corpus(path, corpora) if is_corpus(path) else _documents_of_text(Path(path), corpora)
        largest = max(int(max(text.ids)) for text in texts)
        if largest >= vocab_size:
            raise DataError(f"{path}: has token {largest}, more than model.vocab_size {vocab_size} allows")
        files.append(texts)
    return files


def _documents_of_corpus(path: str, corpora: Sequence[str]) -> List[ScoredText]:
    is_prepared = Path(path).is_dir()
    try:
        # a Megatron pair has no tokenizer; it was encoded by that of the corpora
        tokenizer = tokenizer_of_corpora([*corpora, path] if is_prepared else corpora)
    except DataError as error:
        raise DataError(f"training.eval_files: {path}: must have the tokenizer of data.paths: {error}") from None
    return documents_of_corpus(path, tokenizer.end, _decoder(tokenizer.path))


def _documents_of_text(path: Path, corpora: Sequence[str]) -> List[ScoredText]:
    try:
        tokenizer = tokenizer_of_corpora(corpora)
    except DataError as error:
        raise DataError(f"training.eval_files: {path}: needs the tokenizer of data.paths: {error}") from None
    encoder = _encoder(tokenizer)
    texts = []
    try:
        for number, text in enumerate(_texts_of(path), 1):
            ids = [tokenizer.end, *(int(token) for token in encoder.encode(text))]
            texts.append(ScoredText(f"{path}:{number}", ids, 1, len(text)))
    except (OSError, ValueError) as error:
        raise DataError(f"training.eval_files: {path}: cannot be read: {error}") from None
    if not texts:
        raise DataError(f"training.eval_files: {path}: holds no document")
    return texts


def _texts_of(path: Path) -> Iterator[bytes]:
    if path.suffix != _JSON_LINES:
        text = read_bytes(path, DOCUMENT).decode("utf-8-sig")
        yield text.replace("\r\n", "\n").replace("\r", "\n").encode("utf-8")
        return
    with open_file(path) as stream:
        yield from json_lines(lines_of(stream, DOCUMENT.value), path, "text", DOCUMENT.value, _refuse)


def _refuse(error: DataError) -> None:
    raise error


@lru_cache(maxsize=1)
def _encoder(tokenizer: CorpusTokenizer) -> Encoder:
    return Encoder(tokenizer.path, tokenizer.end_name)


@lru_cache(maxsize=1)
def _decoder(path: Path) -> Callable[[List[int]], str]:
    tokenizer: Any = import_tokenizers().Tokenizer.from_file(str(path))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))
