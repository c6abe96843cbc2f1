"""Tests of what ``data info`` shows of the documents of a corpus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fugaku_gpt.data import contents
from fugaku_gpt.data.contents import look_into
from fugaku_gpt.data.corpus import open_corpus
from fugaku_gpt.data.indexed import IndexedWriter
from fugaku_gpt.data.prepare import prepare
from fugaku_gpt.errors import DataError
from tests.data.test_prepare import request


def write_corpus(prefix: Path, lengths: Sequence[int]) -> str:
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        for number, length in enumerate(lengths):
            writer.add_document(np.arange(length) + number)
    return str(prefix)


@given(lengths=st.lists(st.integers(0, 300), min_size=1, max_size=30))
def test_ranges_add_up_to_all_documents_and_tokens(
    tmp_path_factory: pytest.TempPathFactory, lengths: "list[int]"
) -> None:
    seen = look_into(open_corpus(write_corpus(tmp_path_factory.mktemp("corpus") / "c", [*lengths, 1])))
    expected = [*lengths, 1]
    assert (seen.documents_read, seen.shortest, seen.longest) == (len(expected), min(expected), max(expected))
    assert seen.median == float(np.median(expected))
    for low, high, documents, tokens in seen.lengths:
        inside = [length for length in expected if low <= length <= high]
        assert (documents, tokens) == (len(inside), sum(inside)) and high in (2 * low - 1, 0)
    assert sum(members.documents for members in seen.lengths) == len(expected)


def test_a_pair_shows_ids_of_five_documents(tmp_path: Path) -> None:
    seen = look_into(open_corpus(write_corpus(tmp_path / "c", [3] * 10)))
    assert [sample.document for sample in seen.samples] == [0, 2, 4, 6, 8]
    assert seen.samples[1] == (2, 3, "2 3 4") and seen.unknown is None


def test_a_large_corpus_is_looked_at_in_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "CHECKED_AT_ONCE", 10)
    monkeypatch.setattr(contents, "_RUN", 2)
    seen = look_into(open_corpus(write_corpus(tmp_path / "c", range(100))))
    assert seen.documents_read == 10 and (seen.shortest, seen.longest) == (0, 79)  # 0, 1, 19, 20, 39, 40 ...


def test_unknown_tokens_are_counted_and_text_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = {"[UNK]": 0, "[END]": 1, "two": 2, "nodes": 3}
    added = [{"id": 1, "content": "[END]", "special": True, "single_word": False, "lstrip": False, "rstrip": False}]
    settings = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "decoder": None, "pre_tokenizer": {"type": "Whitespace"}, "added_tokens": [{**added[0], "normalized": False}],
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    (tmp_path / "a.txt").write_text("two nodes two others")
    out = tmp_path / "out"
    prepare(request(out, tmp_path / "a.txt", tokenizer=tmp_path / "tokenizer.json", end_token="[END]"))
    corpus = open_corpus(str(out))
    seen = look_into(corpus)
    assert (seen.tokens_read, seen.unknown) == (5, 1) and seen.facts["unknown_rate"] == 0.2
    assert seen.samples[0].beginning == "two nodes two [UNK]"
    monkeypatch.setattr(contents, "_BLOCKS", 2)
    monkeypatch.setattr(contents, "_BLOCK_TOKENS", 2)
    assert look_into(corpus).tokens_read == 4


def test_without_its_tokenizer_a_corpus_shows_ids_and_the_reason(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("two nodes")
    prepare(request(tmp_path / "out", tmp_path / "a.txt", vocab_size=257))
    (tmp_path / "out" / "tokenizer.json").write_text("{")
    seen = look_into(open_corpus(str(tmp_path / "out")))
    assert "not a tokenizer.json" in seen.problem and seen.samples[0].beginning.split()[-1] == "0"
    assert seen.longest == len("two nodes") + 1


def test_an_unknown_token_that_ends_documents_is_not_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("two nodes")
    prepare(request(tmp_path / "out", tmp_path / "a.txt", vocab_size=257))
    tokenizer = tmp_path / "out" / "tokenizer.json"
    settings = json.loads(tokenizer.read_text())
    settings["model"]["unk_token"] = "<|endoftext|>"
    tokenizer.write_text(json.dumps(settings))
    assert look_into(open_corpus(str(tmp_path / "out"))).unknown is None


def test_entries_that_are_damaged_are_refused(tmp_path: Path) -> None:
    corpus = open_corpus(write_corpus(tmp_path / "c", [2, 3, 4]))
    damaged = corpus.index
    damaged.document_index = np.array([0, 3, 1, 3])
    with pytest.raises(DataError, match="document 1 spans sequences 3 to 1 of 3"):
        look_into(corpus)
    damaged.document_index = np.array([0, 1, 2, 3])
    damaged._starts = np.array([0, 4, 2])
    with pytest.raises(DataError, match="document 1 does not lie within the 9 tokens"):
        look_into(corpus)
