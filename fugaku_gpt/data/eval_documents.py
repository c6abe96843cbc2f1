"""Reads ``training.eval_files`` as documents of token ids: text files, by the corpora's tokenizer, and corpora; and the
texts of a file as ``eval`` reads them, too.

The ranks of a training never import this module but for rank 0 of a run that has such files: it needs ``tokenizers``.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, Callable, List, Optional, Sequence

from fugaku_gpt.checkpoint.hugging_face_tokenizer import CorpusTokenizer
from fugaku_gpt.data.corpus import is_corpus, prepared_folder, tokenizer_of_corpora
from fugaku_gpt.data.json_records import TextKeys, json_lines, lines_of
from fugaku_gpt.data.scored_text import ScoredText, documents_of_corpus, ids_behind, require_vocabulary
from fugaku_gpt.data.tokenizer import Encoder, import_tokenizers
from fugaku_gpt.errors import DataError
from fugaku_gpt.input_files import open_file, read_text
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
        require_vocabulary(f"training.eval_files: {path}", texts, vocab_size)
        files.append(texts)
    return files


def _documents_of_corpus(path: str, corpora: Sequence[str]) -> List[ScoredText]:
    is_prepared = prepared_folder(path) is not None
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
    try:
        contents = texts_of_file(path)
    except DataError as error:
        raise DataError(f"training.eval_files: {error}") from None
    documents = [(content, ids_behind(tokenizer.end, encoder.encode(content))) for content in contents]
    return [ScoredText(f"{path}:{n}", ids, 1, len(content)) for n, (content, ids) in enumerate(documents, 1)]


def texts_of_file(path: Path, name: Optional[Path] = None) -> List[bytes]:
    """Return the documents of a text file as UTF-8: each line of a ``.jsonl`` file, under the key ``text``; or all of a
    file, with its ends of lines as newlines. Those without text are left out, as ``data prepare`` does.

    Args:
        name: the file of which ``path`` is a copy, whose name tells the form; None: it is none.

    Raises:
        DataError: it cannot be read, is not valid, or holds no text.
    """
    try:
        if (name or path).suffix.lower() == _JSON_LINES:
            with open_file(path) as stream:
                lines = lines_of(stream, DOCUMENT.value)
                contents = list(json_lines(lines, path, TextKeys("text"), DOCUMENT.value, _refuse))
        else:
            contents = [read_text(path, DOCUMENT, encoding="utf-8-sig").encode("utf-8")]
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    contents = [content for content in contents if content and not content.isspace()]
    if not contents:
        raise DataError(f"{path}: holds no document with text")
    return contents


def _refuse(error: DataError) -> None:
    raise error


@lru_cache(maxsize=1)
def _encoder(tokenizer: CorpusTokenizer) -> Encoder:
    return Encoder(tokenizer.path, tokenizer.end_name)


@lru_cache(maxsize=1)
def _decoder(path: Path) -> Callable[[List[int]], str]:
    tokenizer: Any = import_tokenizers().Tokenizer.from_file(str(path))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))
