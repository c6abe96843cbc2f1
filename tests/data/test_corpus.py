"""Tests that prepared folders are checked against their manifest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict

import pytest

from fugaku_gpt.config import load_run_config
from fugaku_gpt.data import corpus as corpus_module
from fugaku_gpt.data.corpus import count_of_sequences, is_corpus, open_corpus, tokenizer_of_corpora
from fugaku_gpt.data.samples import open_samples
from fugaku_gpt.errors import DataError
from tests.data.files import write_megatron


def _folder(folder: Path, **changes: Any) -> Path:
    write_megatron(folder / "corpus", [[1, 2, 3], [4]])
    manifest: Dict[str, Any] = {"version": 1, "tokens": 4, "documents": 2, "vocab_size": 300, "fingerprint": "ab"}
    (folder / "manifest.json").write_text(json.dumps({**manifest, **changes}))
    return folder


def test_a_prepared_folder_is_opened(tmp_path: Path) -> None:
    corpus = open_corpus(str(_folder(tmp_path)))
    assert (corpus.fingerprint, corpus.vocab_size, corpus.index.tokens) == ("ab", 300, 4)


def test_a_folder_beside_a_pair_with_its_name_is_a_cache_unless_it_was_prepared(tmp_path: Path) -> None:
    write_megatron(tmp_path / "c", [[1, 2, 3], [4], [5]])
    alone = open_corpus(str(tmp_path / "c"))
    (tmp_path / "c" / "cache" / "GPTDataset_indices").mkdir(parents=True)  # as Megatron-Core makes it
    for name in ("c", "c.bin", "c.idx"):
        path = str(tmp_path / name)
        assert is_corpus(path) and count_of_sequences(path) == 3
        assert open_corpus(path).fingerprint == alone.fingerprint
    with pytest.raises(DataError, match="c: a Megatron pair has no tokenizer"):
        tokenizer_of_corpora([str(tmp_path / "c")])
    _folder(tmp_path / "c")
    assert (open_corpus(str(tmp_path / "c")).fingerprint, count_of_sequences(str(tmp_path / "c"))) == ("ab", 2)
    assert open_corpus(str(tmp_path / "c.bin")).fingerprint == alone.fingerprint, "the file that was named"


@pytest.mark.parametrize("path", [".", "/"])
def test_a_folder_without_a_name_is_refused_as_one_that_was_not_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert not is_corpus(path) and count_of_sequences(path) == 0
    with pytest.raises(
        DataError, match=r"has no manifest\.json; .*: name such a folder, or the prefix of a \.bin/\.idx"
    ):
        open_corpus(path)
    _folder(tmp_path)
    assert open_corpus(".").fingerprint == "ab"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version 2 of this format; this program reads version 1"),
        ({"tokens": "4"}, "not the manifest of a corpus: tokens '4' is not a number"),
        ({"documents": 3}, "counts 4 tokens in 3 documents, but the corpus has 4 in 2"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(tmp_path: Path, changes: Dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_corpus(str(_folder(tmp_path, **changes)))


def test_a_manifest_that_is_not_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no manifest\.json"):
        open_corpus(str(tmp_path))
    (_folder(tmp_path) / "manifest.json").write_text("{")
    with pytest.raises(DataError, match="not the manifest of a corpus: it is not JSON"):
        open_corpus(str(tmp_path))


def test_a_vocabulary_larger_than_the_model_s_is_refused(tmp_path: Path) -> None:
    overrides = ["model.vocab_size=256", "model.seq_len=2", f"data.paths=[{_folder(tmp_path)}]"]
    with pytest.raises(DataError, match=r"has 300 tokens, more than model.vocab_size 256.*--set model.vocab_size=300"):
        open_samples(load_run_config(overrides=overrides), "train")


@pytest.mark.parametrize("order", ["ours", "megatron"])
@pytest.mark.parametrize("has_mask", ["false", "true"])
def test_the_fingerprint_of_a_large_index_by_older_versions_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str, has_mask: str
) -> None:
    for name in ("c", "d"):
        write_megatron(tmp_path / name, [[1, 2, 3]] * 400)
    write_megatron(tmp_path / "e", [[1, 2, 3]] * 399 + [[1, 2]])

    def samples_of(name: str) -> Any:
        paths = f"data.paths={json.dumps([str(tmp_path / 'c'), str(tmp_path / name)])}"
        settings = ("data.weights=[1,1]", f"data.order={order}", f"data.document_mask={has_mask}")
        return open_samples(load_run_config(preset="tiny", overrides=[paths, *settings]), "train")

    older = samples_of("d")  # every version reads a small index as a whole
    monkeypatch.setattr(corpus_module, "_LARGE_INDEX", 1000)
    sampled = samples_of("d")
    assert sampled.fingerprint != older.fingerprint
    assert sampled.has_fingerprint(older.fingerprint) and not older.has_fingerprint("ab")
    assert not samples_of("e").has_fingerprint(older.fingerprint)
    assert not samples_of("e").has_fingerprint(sampled.fingerprint)

    def refuse(*_: object) -> None:
        raise AssertionError("a large index is read as a whole")

    monkeypatch.setattr(corpus_module.Corpus, "older_fingerprint", refuse)
    assert sampled.has_fingerprint(sampled.fingerprint)
