"""Tests of documents as token ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fugaku_gpt.data.scored_text import ScoredText, TextLoss, ids_behind, require_vocabulary
from fugaku_gpt.errors import DataError, UsageError
from fugaku_gpt.inference.documents import documents_of_file
from fugaku_gpt.inference.text import TextTokenizer
from tests.support import tokenizers

pytest.importorskip("tokenizers", reason="tokenizers is not installed: make install")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    return TextTokenizer(tokenizers.make_tokenizer(tokenizers.BYTE_LEVEL, folder / "tokenizer.json"))


def test_a_file_is_a_document_with_an_end(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("naïve", encoding="utf-8")
    (document,) = documents_of_file(tmp_path / "a.txt", tokenizer, str(tmp_path / "a.txt"))
    assert document.ids == [tokenizer.end, *tokenizer.encode("naïve"), tokenizer.end]
    assert (document.name, document.first, document.bytes) == (str(tmp_path / "a.txt"), 1, 6)


@pytest.mark.parametrize("name", ["a.jsonl", "A.JSONL"])
def test_each_line_of_json_is_a_document(tokenizer: TextTokenizer, tmp_path: Path, name: str) -> None:
    lines = ['\ufeff{"text": "one"}', '{"text": " \\n"}', "", '{"text": "\u00ef\\r"}']
    (tmp_path / name).write_text("\r\n".join(lines), encoding="utf-8")
    documents = documents_of_file(tmp_path / name, tokenizer, str(tmp_path / name))
    assert [tokenizer.decode(document.ids) for document in documents] == ["one", "\u00ef\r"]
    assert [document.bytes for document in documents] == [3, 3]
    assert [document.name for document in documents] == [f"{tmp_path / name}:1", f"{tmp_path / name}:2"]


def test_a_mark_of_the_byte_order_and_ends_of_lines_are_no_text(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfabc\r\n")
    (document,) = documents_of_file(tmp_path / "a.txt", tokenizer, str(tmp_path / "a.txt"))
    assert document.bytes == 4 and tokenizer.decode(document.ids) == "abc\n"


@pytest.mark.parametrize(("name", "content"), [("a.txt", ""), ("a.txt", "\n \n"), ("a.jsonl", '{"text": ""}\n')])
def test_a_file_without_text_is_refused(tokenizer: TextTokenizer, tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=f"{name}: holds no document with text"):
        documents_of_file(tmp_path / name, tokenizer, str(tmp_path / name))


def test_losses_are_given_for_tokens_and_bytes() -> None:
    loss = TextLoss("a", 6.0, 3, 4)
    assert (loss.loss, loss.perplexity) == (2.0, pytest.approx(7.389056))
    assert loss.bits_per_byte == pytest.approx(2.164043)
    assert TextLoss("a", 6.0, 3, None).bits_per_byte is None
    assert TextLoss("a", 1e4, 1, 4).perplexity == float("inf")


@pytest.mark.parametrize(
    ("before", "dtype", "expected"),
    [(7, "<u2", "uint16"), (70_000, "<u2", "int64"), (70_000, "<i4", "int32"), (2**31, "<i4", "int64")],
)
def test_ids_keep_their_type_where_it_holds_the_id_before_them(before: int, dtype: str, expected: str) -> None:
    ids = ids_behind(before, np.array([1, 65_000], dtype=dtype))
    assert (ids.tolist(), ids.dtype.name) == ([before, 1, 65_000], expected)


def test_texts_with_tokens_that_the_model_has_not_are_refused() -> None:
    texts = [ScoredText("0", np.array([1, 9]), 1, 2), ScoredText("1", [3, 10, 4], 1, 2)]
    require_vocabulary("corpus", texts, 11)
    with pytest.raises(DataError, match="corpus: has token 10, more than model.vocab_size 10 allows"):
        require_vocabulary("corpus", texts, 10)
