"""Tests of documents as token ids."""

from __future__ import annotations

from pathlib import Path

import pytest

from fugaku_gpt.data.scored_text import TextLoss
from fugaku_gpt.inference.documents import document_of_file
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


def test_losses_are_given_for_tokens_and_bytes() -> None:
    loss = TextLoss("a", 6.0, 3, 4)
    assert (loss.loss, loss.perplexity) == (2.0, pytest.approx(7.389056))
    assert loss.bits_per_byte == pytest.approx(2.164043)
    assert TextLoss("a", 6.0, 3, None).bits_per_byte is None
    assert TextLoss("a", 1e4, 1, 4).perplexity == float("inf")
