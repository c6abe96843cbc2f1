"""Tests of orders of documents: in files they are those in memory, complete or absent."""

from __future__ import annotations

import errno
import os
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fugaku_gpt.config import RunConfig, load_run_config
from fugaku_gpt.data import document_orders, index_files, indexed, samples
from fugaku_gpt.data.corpus import Corpus, open_corpus
from fugaku_gpt.data.document_orders import DocumentOrder
from fugaku_gpt.data.permutation import permutation
from fugaku_gpt.data.samples import SampleSource, open_samples
from fugaku_gpt.errors import DataError
from fugaku_gpt.records.files import is_temporary
from tests.data.files import write_megatron


def _corpus(folder: Path, documents: int = 9) -> Corpus:
    write_megatron(folder / "c", [[1] * (number * 7 % 13) for number in range(documents)] + [[1]])
    return open_corpus(str(folder / "c"))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(0, 2**128 - 1), st.integers(1, 40), st.integers(0, 5))
def test_an_order_sorts_documents_by_their_random_numbers_whatever_the_block(
    documents: int, key: int, block: int, first: int
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(document_orders, "_BLOCK", block)
        corpus = _corpus(Path(folder), documents)
        first = min(first, documents)
        size = documents + 1 - first
        expected = permutation(key, size)
        ends = np.cumsum(corpus.index.lengths[first:][expected], dtype=np.int64)
        in_memory = DocumentOrder("o", corpus, first, documents + 1, key)
        in_files = DocumentOrder("o", corpus, first, documents + 1, key)
        assert in_files.write(Path(folder)) is not None and in_files.write(Path(folder)) is None
        in_files.open(Path(folder))
        for order in (in_memory, in_files):
            assert order["documents"].tolist() == expected.tolist() and order["ends"].tolist() == ends.tolist()
        assert sorted(os.listdir(folder)) == ["c.bin", "c.idx", "o-checksums.npy", "o-documents.npy", "o-ends.npy"]


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    order = DocumentOrder("o", _corpus(tmp_path), 0, 9, 5)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(DataError, match=r"o-documents\.npy: an index of the samples cannot be written: No space left"):
        order.write(tmp_path / "order")
    assert os.listdir(tmp_path / "order") == []


def test_what_a_killed_writer_has_left_is_temporary_and_removed(tmp_path: Path) -> None:
    corpus, order = _corpus(tmp_path), tmp_path / "order"
    writer = os.fork()
    if writer == 0:
        try:
            killed = DocumentOrder("o", corpus, 0, 9, 5)
            killed._fill = lambda *arrays: os._exit(0)  # type: ignore[method-assign]
            killed.write(order)
        finally:
            os._exit(1)
    os.waitpid(writer, 0)
    left = sorted(order.iterdir())
    assert len(left) == 2 and all(map(is_temporary, left))
    assert DocumentOrder("other", corpus, 0, 9, 6).write(order) is not None
    assert not set(left) & set(order.iterdir()) and not any(path.name.startswith(".") for path in order.iterdir())


@pytest.mark.parametrize(
    ("length", "message"),
    [(-3, "lengths of sequences 0 to 8 one of them is negative"), (99, r"they add up to \d+, and their bytes are \d+")],
)
def test_building_an_order_reports_damage_that_opening_does_not_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, message: str
) -> None:
    monkeypatch.setattr(indexed, "CHECKED_AT_ONCE", 2)
    _corpus(tmp_path)
    content = bytearray((tmp_path / "c.idx").read_bytes())
    struct.pack_into("<i", content, 34 + 4 * 3, length)
    (tmp_path / "c.idx").write_bytes(bytes(content))
    order = DocumentOrder("o", open_corpus(str(tmp_path / "c")), 0, 9, 5)
    with pytest.raises(DataError, match=message) as caught:
        order.write(tmp_path / "order")
    assert "`fugaku-gpt data verify " in str(caught.value) and os.listdir(tmp_path / "order") == []


def _config(folder: Path, *overrides: str) -> RunConfig:
    for name, documents in (("a", 40), ("b", 4)):
        (folder / name).mkdir(exist_ok=True)
        _corpus(folder / name, documents)
    paths = f"data.paths=[{folder}/a/c, {folder}/b/c]"
    settings = (paths, "data.split=[1, 0, 0]", "model.vocab_size=4", "model.seq_len=16", "training.global_batch=4")
    return load_run_config(preset="tiny", overrides=[*settings, *overrides])


def test_samples_of_large_corpora_read_their_orders_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config(tmp_path, "training.iterations=20")
    in_memory = open_samples(config, "train")
    assert not in_memory.has_indices
    expected = in_memory.batch(0, 80)
    monkeypatch.setattr(samples, "_DOCUMENTS_IN_FILES", 20)
    shared = open_samples(config, "train")
    assert isinstance(shared, SampleSource) and shared.fingerprint == in_memory.fingerprint
    with monkeypatch.context() as context:
        context.setattr(samples, "DocumentOrder", None)  # the question makes no order
        assert shared.has_indices
    lines = shared.write_indices(tmp_path / "order")
    assert all(line.startswith("the order of 41 documents was built in ") for line in lines)
    assert all("is there" in line for line in open_samples(config, "train").write_indices(tmp_path / "order"))
    shared.open_indices(tmp_path / "order")
    monkeypatch.setattr(DocumentOrder, "_fill", _only_for_small_corpora(DocumentOrder._fill))
    assert shared.batch(0, 80).tolist() == expected.tolist()
    assert len(lines) >= 3  # 80 samples take several epochs, each in files


def _only_for_small_corpora(fill):  # type: ignore[no-untyped-def]
    def checked(order: DocumentOrder, documents: "np.ndarray[tuple[int], np.dtype[np.int64]]", ends: object) -> None:
        assert order.size < 20, "an order that should be in a file is built in memory"
        fill(order, documents, ends)

    return checked


def test_missing_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "_DOCUMENTS_IN_FILES", 20)
    source = open_samples(_config(tmp_path), "train")
    source.write_indices(tmp_path / "order")
    next((tmp_path / "order").glob("*-ends.npy")).write_bytes(b"")
    with pytest.raises(DataError, match="missing or damaged; remove them, and they are built again"):
        source.open_indices(tmp_path / "order")


@pytest.mark.parametrize(("name", "value"), [("documents", 0), ("documents", 10**6), ("ends", 0), ("ends", 10**6)])
def test_damaged_values_in_a_file_are_refused_where_they_are_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: int
) -> None:
    monkeypatch.setattr(samples, "_DOCUMENTS_IN_FILES", 20)
    monkeypatch.setattr(index_files, "_BLOCK", 4)
    config = _config(tmp_path)
    open_samples(config, "train").write_indices(tmp_path / "order")
    for path in (tmp_path / "order").glob(f"*-epoch-0-{name}.npy"):
        np.lib.format.open_memmap(path, mode="r+")[:] = value
    source = open_samples(config, "train")
    source.open_indices(tmp_path / "order")
    with pytest.raises(DataError, match=rf"order/.*-epoch-0-{name}\.npy: .* is damaged: .*; remove .*-epoch-0-\*\.npy"):
        source.batch(0, 8)


def test_each_block_of_a_file_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_files, "_BLOCK", 4)
    corpus = _corpus(tmp_path)
    DocumentOrder("o", corpus, 0, 10, 5).write(tmp_path)
    for number in range(10):
        values = np.lib.format.open_memmap(tmp_path / "o-documents.npy", mode="r+")
        values[number] += 1
        order = DocumentOrder("o", corpus, 0, 10, 5)
        order.open(tmp_path)
        for position in range(10):
            if position // 4 == number // 4:
                with pytest.raises(DataError, match=rf"entries {number // 4 * 4} to {min(number // 4 * 4 + 3, 9)} are"):
                    order.document(position)
            else:
                assert order.document(position) == int(values[position])
        values[number] -= 1
