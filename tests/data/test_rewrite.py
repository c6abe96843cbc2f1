"""Tests of corpora that are merged, split and sampled, token by token and document by document."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, List, Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fugaku_gpt.data import rewrite
from fugaku_gpt.data.corpus import open_corpus
from fugaku_gpt.data.indexed import IndexedCorpus
from fugaku_gpt.data.prepare import prepare
from fugaku_gpt.data.rewrite import merge_corpora, sample_corpus, split_corpus
from fugaku_gpt.data.verify import verify_corpus
from fugaku_gpt.errors import DataError
from tests.data.files import write_megatron
from tests.data.test_prepare import request

CORPORA = st.lists(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=6), min_size=1, max_size=4)


def documents_of(index: IndexedCorpus) -> List[List[int]]:
    return [index.document(number).tolist() for number in range(index.documents)]


def prepared(
    folder: Path, name: str, texts: Sequence[str], tokenizer: "Path | None" = None, vocab_size: int = 257
) -> str:
    source = folder / f"{name}.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare(request(folder / name, source, vocab_size=vocab_size, tokenizer=tokenizer))
    return str(folder / name)


def test_folders_are_divided_and_drawn_from(tmp_path: Path) -> None:
    path = prepared(tmp_path, "a", [f"text {number}" for number in range(20)])
    split_corpus(path, tmp_path / "out", {"train": 3.0, "test": 1.0}, seed=2)
    sample_corpus(path, tmp_path / "few", 3, None, seed=2)
    for part, documents in (("out/train", 15), ("out/test", 5), ("few", 3)):
        verified = verify_corpus(str(tmp_path / part))
        assert verified.is_fingerprint_checked and verified.corpus.index.documents == documents


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(corpora=CORPORA)
def test_a_merged_pair_has_all_documents_in_order(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, corpora: "list[list[list[int]]]"
) -> None:
    monkeypatch.setattr(rewrite, "_BLOCK", 3)
    folder = tmp_path_factory.mktemp("pairs")
    paths = [str(folder / str(number)) for number in range(len(corpora))]
    for path, documents in zip(paths, corpora):
        write_megatron(Path(path), documents, code=8)
    merged = merge_corpora(paths, folder / "out")
    index = open_corpus(str(folder / "out" / "corpus")).index
    index.check_index()
    every = [document for documents in corpora for document in documents]
    assert documents_of(index) == every
    assert (merged.documents, merged.tokens) == (len(every), sum(map(len, every)))


def test_sequences_of_documents_stay(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", [[1, 2], [3], [4, 5, 6], [7]], code=4, documents=[0, 1, 3, 4])
    merge_corpora([str(tmp_path / "a")] * 2, tmp_path / "out")
    index = open_corpus(str(tmp_path / "out" / "corpus")).index
    assert index.lengths.tolist() == [2, 1, 3, 1] * 2 and index.documents == 6
    assert documents_of(index)[3:] == [[1, 2], [3, 4, 5, 6], [7]]


def test_a_merged_folder_is_sound_and_lists_both_corpora(tmp_path: Path) -> None:
    first = prepared(tmp_path, "a", ["one", "two"])
    second = prepared(tmp_path, "b", ["three"], Path(first, "tokenizer.json"))
    merge_corpora([first, second], tmp_path / "out")
    assert verify_corpus(str(tmp_path / "out")).is_fingerprint_checked
    corpus = open_corpus(str(tmp_path / "out"))
    assert corpus.manifest is not None and corpus.vocab_size == 257
    assert [entry["name"] for entry in corpus.manifest["made_from"]] == ["a", "b"]
    assert documents_of(corpus.index) == documents_of(open_corpus(first).index) + documents_of(
        open_corpus(second).index
    )


def test_every_document_is_in_a_single_part(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", [[number] * (number % 3) for number in range(50)], code=4)
    shares = {"train": 7.0, "valid": 1.0, "test": 2.0}
    split_corpora = split_corpus(str(tmp_path / "a"), tmp_path / "out", shares, seed=3)
    assert [part.documents for part in split_corpora] == [35, 5, 10]
    indices = [open_corpus(str(part.path / "corpus")).index for part in split_corpora]
    members = [[document for document in documents_of(index) if document] for index in indices]
    assert sorted(sum(members, [])) == [[number] * (number % 3) for number in range(50) if number % 3]
    assert all(documents == sorted(documents) for documents in members)
    split_corpus(str(tmp_path / "a"), tmp_path / "again", shares, seed=3)
    for part in shares:
        first, second = (tmp_path / name / part / "corpus.bin" for name in ("out", "again"))
        assert first.read_bytes() == second.read_bytes()
    with pytest.raises(DataError, match="of 50 documents the part small would have none; raise its share"):
        split_corpus(str(tmp_path / "a"), tmp_path / "none", {"large": 1.0, "small": 0.001}, seed=3)
    assert not (tmp_path / "none").exists()


def test_a_sample_has_documents_of_the_corpus_without_repeats(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", [[number, number] for number in range(40)], code=4)
    sample_corpus(str(tmp_path / "a"), tmp_path / "ten", 10, None, seed=1)
    numbers = [document[0] for document in documents_of(open_corpus(str(tmp_path / "ten" / "corpus")).index)]
    assert len(set(numbers)) == 10 and numbers == sorted(numbers) and numbers != list(range(10))
    written = sample_corpus(str(tmp_path / "a"), tmp_path / "tokens", None, 11, seed=1)
    assert (written.documents, written.tokens) == (6, 12)
    every_document = sample_corpus(str(tmp_path / "a"), tmp_path / "every", None, 80, seed=1)
    assert every_document.documents == 40
    for documents, tokens, message in ((41, None, "has 40 documents, not 41"), (None, 81, "has 80 tokens, not 81")):
        with pytest.raises(DataError, match=message):
            sample_corpus(str(tmp_path / "a"), tmp_path / "more", documents, tokens, seed=1)


def test_corpora_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    first = prepared(tmp_path, "a", ["one two one two"])
    other = prepared(tmp_path, "b", ["one two one two"], vocab_size=259)
    write_megatron(tmp_path / "e", [[1]], code=8, modes=True)
    write_megatron(tmp_path / "c", [[1]], code=8)
    write_megatron(tmp_path / "d", [[1]], code=4)
    pair, wide = str(tmp_path / "c"), str(tmp_path / "d")
    for paths, message in (
        ([first, pair], "a prepared folder and a Megatron pair"),
        ([pair, wide], "tokens are uint16 and int32"),
        ([first, other], "were prepared with different tokenizers"),
        ([str(tmp_path / "e")], "has modes of multimodal sequences"),
    ):
        with pytest.raises(DataError, match=message):
            merge_corpora(paths, tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    with pytest.raises(DataError, match="is there already; choose another --out"):
        merge_corpora([first], tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["file"]
    Path(first, "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="is not the tokenizer with which the corpus was prepared"):
        merge_corpora([first], tmp_path / "more")
    Path(first, "tokenizer.json").unlink()
    with pytest.raises(DataError, match="cannot be read: No such file"):
        merge_corpora([first], tmp_path / "more")
    assert not (tmp_path / "more").exists()


def test_a_folder_that_fills_meanwhile_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_megatron(tmp_path / "a", [[1]], code=8)
    out = tmp_path / "out"

    def write_and_fill(*arguments: Any) -> "tuple[int, int]":
        out.mkdir()
        (out / "file").touch()
        return 1, 1

    monkeypatch.setattr(rewrite, "_write", write_and_fill)
    with pytest.raises(DataError, match="cannot be put in its place"):
        merge_corpora([str(tmp_path / "a")], out)
    assert os.listdir(out) == ["file"]


def test_documents_without_sequences_are_no_corpus(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", [[1]], code=8, documents=[0, *[0] * 50, 1])
    with pytest.raises(DataError, match="the chosen documents have no sequence"):
        sample_corpus(str(tmp_path / "a"), tmp_path / "out", 1, None, seed=1)
    assert not (tmp_path / "out").exists()


def test_nothing_is_left_of_a_corpus_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_megatron(tmp_path / "a", [[1], [2]], code=8)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rewrite, "_write_index", refuse)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(DataError, match="cannot be written: No space left on device; nothing was left behind"):
        merge_corpora([str(tmp_path / "a")], tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == before


def test_a_large_corpus_is_checked_before_it_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_megatron(tmp_path / "a", [[1], [2], [3]], code=8)
    corpus = open_corpus(str(tmp_path / "a"))
    corpus.index.lengths = np.array([1, -1, 3])
    monkeypatch.setattr(rewrite, "open_corpus", lambda path: corpus)
    monkeypatch.setattr(rewrite, "CHECKED_AT_ONCE", 2)
    with pytest.raises(DataError, match="sequence 1 has a negative length"):
        merge_corpora([str(tmp_path / "a")], tmp_path / "out")
