"""Documents whose loss is to be computed, and questions with choices, as token ids. No PyTorch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from fugaku_gpt.data.corpus import open_corpus
from fugaku_gpt.data.scored_text import ScoredText
from fugaku_gpt.errors import DataError, UsageError
from fugaku_gpt.inference.text import TextTokenizer
from fugaku_gpt.input_files import read_text
from fugaku_gpt.json_text import parse_json
from fugaku_gpt.limits import DOCUMENT, PROMPTS_TEXT, cut


class Question(NamedTuple):
    """A question with choices: number of the right one, and the texts of all behind the same context."""

    answer: int
    choices: List[ScoredText]


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


def read_questions(path: Path, tokenizer: TextTokenizer) -> List[Question]:
    """Read questions in JSON lines: ``question``, ``choices`` (texts that may follow it) and ``answer`` (the number of
    the right choice, from 0).

    Raises:
        UsageError: the file cannot be read, or a line is not valid.
    """
    try:
        lines = read_text(path, PROMPTS_TEXT).split("\n")
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
    questions = [_question(f"{path}:{n}", line, tokenizer) for n, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise UsageError(f"{path}: holds no question")
    return questions


def _question(place: str, line: str, tokenizer: TextTokenizer) -> Question:
    try:
        value = parse_json(line)
    except ValueError as error:
        raise UsageError(f"{place}: not JSON: {error}") from None
    question, choices, answer = _fields_of_question(value)
    if not (isinstance(question, str) and choices and all(isinstance(choice, str) and choice for choice in choices)):
        raise UsageError(f"{place}: {cut(line)}: expected question (a text) and choices (a list of texts)")
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise UsageError(f"{place}: answer {cut(str(answer))}: valid: 0 to {len(choices) - 1}, the number of a choice")
    context = tokenizer.encode_start(question)
    encoded = [tokenizer.encode_start(question + choice) for choice in choices]
    # all choices are predicted after the same context; a token that has a part of both differs between choices
    first = max(1, min(_shared_length(context, ids) for ids in encoded))
    if any(len(ids) <= first for ids in encoded):
        raise UsageError(f"{place}: choices: the tokenizer makes no token of one of them")
    texts = zip(choices, encoded)
    return Question(
        answer,
        [ScoredText(f"{place} {n}", ids, first, len(text.encode("utf-8"))) for n, (text, ids) in enumerate(texts)],
    )


def _fields_of_question(value: Any) -> Tuple[Any, List[Any], Any]:
    if not isinstance(value, dict) or not isinstance(value.get("choices"), list):
        return None, [], None
    return value.get("question"), value["choices"], value.get("answer")


def _shared_length(left: Sequence[int], right: Sequence[int]) -> int:
    """The number of tokens with which both begin."""
    pairs = enumerate(zip(left, right))
    return next((number for number, (a, b) in pairs if a != b), min(len(left), len(right)))
