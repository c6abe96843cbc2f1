"""Tests of questions with choices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, List

import pytest

from fugaku_gpt.data.scored_text import ScoredText, TextLoss
from fugaku_gpt.errors import UsageError
from fugaku_gpt.inference.questions import Question, count_right_answers, read_questions
from fugaku_gpt.inference.text import TextTokenizer
from tests.support import tokenizers

pytest.importorskip("tokenizers", reason="tokenizers is not installed: make install")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    return TextTokenizer(tokenizers.make_tokenizer(tokenizers.BYTE_LEVEL, folder / "tokenizer.json"))


def test_the_tokens_of_a_choice_are_predicted_after_the_question(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps({"question": "def f", "choices": ["(x)", " return"], "answer": 1}), encoding="utf-8")
    ((answer, choices),) = read_questions(path, tokenizer)
    assert answer == 1
    for choice, text in zip(choices, ("(x)", " return")):
        assert tokenizer.decode(choice.ids[choice.first :]) == text
        assert tokenizer.decode(choice.ids[: choice.first]) == "def f" and choice.bytes == len(text)


def test_a_token_that_reaches_over_the_boundary_is_predicted(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps({"question": "some wor", "choices": ["ds", "ld"], "answer": 0}), encoding="utf-8")
    ((_, choices),) = read_questions(path, tokenizer)
    for choice, text in zip(choices, ("some words", "some world")):
        assert tokenizer.decode(choice.ids) == text
        assert "some wor".startswith(tokenizer.decode(choice.ids[: choice.first]))
    # of one choice alone, "wor" would be a token of the context, and cost nothing
    assert choices[0].first == choices[1].first and len({choice.ids[choice.first] for choice in choices}) == 2


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "expected question .a text. and choices"),
        ({"question": "x", "choices": [], "answer": 0}, "expected question"),
        ({"question": "x", "choices": ["a", ""], "answer": 0}, "expected question"),
        ({"question": "x", "choices": ["a", "b"], "answer": 2}, "answer 2: valid: 0 to 1"),
        ({"question": "x", "choices": ["a", "b"], "answer": True}, "answer True: valid"),
        ({"question": "x", "choices": ["a", "b"]}, "answer None: valid"),
    ],
)
def test_other_questions_are_refused(value: Any, message: str, tokenizer: TextTokenizer, tmp_path: Path) -> None:
    (tmp_path / "questions.jsonl").write_text(json.dumps(value), encoding="utf-8")
    with pytest.raises(UsageError, match=rf"questions.jsonl:1: .*{message}"):
        read_questions(tmp_path / "questions.jsonl", tokenizer)


def test_the_choice_with_the_smallest_loss_counts_and_the_smallest_for_each_byte() -> None:
    def choices(*sizes: int) -> List[ScoredText]:
        return [ScoredText("", [0, 1], 1, size) for size in sizes]

    questions = [Question(0, choices(1, 10)), Question(1, choices(1, 10)), Question(1, choices(2, 2))]
    nats = [1.0, 2.0, 1.0, 2.0, 5.0, 4.0]
    losses = [
        TextLoss("", value, 1, text.bytes) for value, text in zip(nats, [c for q in questions for c in q.choices])
    ]
    assert count_right_answers(questions, losses) == (3, 2, 2)
