"""Multiple choice: questions whose choices are texts behind the same context, and how many a model answers rightly.

No PyTorch here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, List, NamedTuple, Sequence, Tuple

from fugaku_gpt.data.scored_text import ScoredText, TextLoss
from fugaku_gpt.errors import UsageError
from fugaku_gpt.inference.text import TextTokenizer
from fugaku_gpt.input_files import read_text
from fugaku_gpt.json_text import parse_json
from fugaku_gpt.limits import PROMPTS_TEXT, cut


class Question(NamedTuple):
    """A question with choices: number of the right one, and the texts of all behind the same context."""

    answer: int
    choices: List[ScoredText]


class Answers(NamedTuple):
    """Numbers of questions, and of right answers: by the probability of a choice, and by that for each of its bytes."""

    questions: int
    right: int
    right_by_byte: int


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


def count_right_answers(questions: Sequence[Question], losses: Sequence[TextLoss]) -> Answers:
    """Count the questions whose right choice has the smallest loss, and the smallest for each byte.

    Args:
        losses: of the choices of all questions, one question's behind another's.
    """
    right, right_by_byte, at = 0, 0, 0
    for question in questions:
        choices = losses[at : at + len(question.choices)]
        at += len(choices)
        best = min(range(len(choices)), key=lambda number: choices[number].nats)
        best_by_byte = min(range(len(choices)), key=lambda number: choices[number].nats / (choices[number].bytes or 1))
        right += best == question.answer
        right_by_byte += best_by_byte == question.answer
    return Answers(len(questions), right, right_by_byte)


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
