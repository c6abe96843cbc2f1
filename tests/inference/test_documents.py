"""Tests of documents and questions as token ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fugaku_gpt.data.scored_text import TextLoss
from fugaku_gpt.errors import UsageError
from fugaku_gpt.inference.documents import document_of_file, read_questions
from fugaku_gpt.inference.text import TextTokenizer
from tests.support import tokenizers

pytest.importorskip("tokenizers", reason="tokenizers is not installed: make install")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    return TextTokenizer(tokenizers.make_tokenizer(tokenizers.BYTE_LEVEL, folder / "tokenizer.json"))


def test_a_file_is_a_document_with_an_end(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("naïve", encoding="utf-8")
    document = document_of_file(tmp_path / "a.txt", tokenizer)
    assert document.ids == [tokenizer.end, *tokenizer.encode("naïve"), tokenizer.end]
    assert (document.first, document.bytes) == (1, 6)


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


def test_losses_are_given_for_tokens_and_bytes() -> None:
    loss = TextLoss("a", 6.0, 3, 4)
    assert (loss.loss, loss.perplexity) == (2.0, pytest.approx(7.389056))
    assert loss.bits_per_byte == pytest.approx(2.164043)
    assert TextLoss("a", 6.0, 3, None).bits_per_byte is None
    assert TextLoss("a", 1e4, 1, 4).perplexity == float("inf")
