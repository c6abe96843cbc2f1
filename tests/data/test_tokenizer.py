"""Tests of the tokenizer, and of the worker processes that use it."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any, Iterator, List

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tokenizers")

from fugaku_gpt.data import workers
from fugaku_gpt.data.tokenizer import END_OF_DOCUMENT, Encoder, split_text, train_tokenizer
from fugaku_gpt.errors import DataError

TEXTS = [Path(textwrap.__file__).read_bytes(), "naïve — 東京\n\n  end".encode(), b"x"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(TEXTS, 400, path)
    return path


def decode(path: Path, ids: "np.ndarray[Any, np.dtype[Any]]") -> str:
    import tokenizers

    text: str = tokenizers.Tokenizer.from_file(str(path)).decode(ids.tolist())
    return text


def test_encoded_text_is_decoded_to_the_same_text(tokenizer: Path) -> None:
    encoder = Encoder(tokenizer)
    assert (encoder.vocab_size, encoder.end_name, encoder.dtype) == (400, END_OF_DOCUMENT, np.dtype("<u2"))
    for text in TEXTS:
        ids = encoder.encode(text)
        assert ids[-1] == encoder.end and encoder.end not in ids[:-1].tolist()
        assert decode(tokenizer, ids) == text.decode("utf-8")


def test_text_cannot_contain_the_end_of_document_token(tokenizer: Path) -> None:
    encoder = Encoder(tokenizer)
    assert encoder.encode(END_OF_DOCUMENT.encode()).tolist().count(encoder.end) == 1


def test_training_is_deterministic(tokenizer: Path, tmp_path: Path) -> None:
    train_tokenizer(iter(TEXTS), 400, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == tokenizer.read_bytes()


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="ab \n\t1'\u3000é", max_size=60), st.integers(1, 10))
def test_cuts_change_no_token(tokenizer: Path, text: str, size: int) -> None:
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(tokenizer))
    pieces = list(split_text(text, size))
    assert "".join(pieces) == text
    assert [i for piece in pieces for i in library.encode(piece).ids] == library.encode(text).ids


def test_text_is_never_cut_behind_several_newlines() -> None:
    assert list(split_text("aa\n\nbb\ncc", 1)) == ["aa\n\nbb\n", "cc"]


def test_a_tokenizer_that_cannot_be_used_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    with pytest.raises(DataError, match=r"no such file; --tokenizer takes"):
        Encoder(tmp_path / "gone.json")
    (tmp_path / "bad.json").write_text('{"version": "1.0"}')
    with pytest.raises(DataError, match=r"bad\.json: not a tokenizer\.json"):
        Encoder(tmp_path / "bad.json")
    (tmp_path / "endless.json").write_text(tokenizer.read_text().replace(END_OF_DOCUMENT, "[PAD]"))
    with pytest.raises(
        DataError, match=r"endless\.json: no special token has the name of an end; candidates: '\[PAD\]'; name"
    ):
        Encoder(tmp_path / "endless.json")


@pytest.mark.slow
def test_worker_processes_keep_the_order(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "BATCH_BYTES", 500)
    documents = [text * (number % 7) for number, text in enumerate([b"word ", b"def f(x):\n    ", b"12 "] * 40)]
    alone = [ids.tolist() for ids in workers.encode_documents(documents, tokenizer, 1)]
    together = [ids.tolist() for ids in workers.encode_documents(iter(documents), tokenizer, 3)]
    assert together == alone and len(alone) == 120


def _pids() -> List[int]:
    """Process ids of this process's workers."""
    process_ids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            is_child = int((process / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid()
            if is_child and b"fugaku_gpt.data.workers" in (process / "cmdline").read_bytes():
                process_ids.append(int(process.name))
        except OSError:
            continue
    return process_ids


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_a_worker_that_dies_is_an_error(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "BATCH_BYTES", 100)

    def documents() -> Iterator[bytes]:
        for number in range(10_000):
            if number == 50:
                os.kill(_pids()[0], signal.SIGKILL)
            yield b"some text " * 20

    with pytest.raises(DataError, match=r"died \(killed by signal 9\).*fewer --workers"):
        for _ in workers.encode_documents(documents(), tokenizer, 2):
            pass
    assert _pids() == []


@pytest.mark.slow
def test_a_document_that_a_worker_cannot_encode_is_an_error(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "BATCH_BYTES", 100)
    documents = [b"some text " * 20] * 30
    documents[17] = b"\xff"
    with pytest.raises(DataError, match="a worker process could not encode a document: UnicodeDecodeError: "):
        list(workers.encode_documents(documents, tokenizer, 2))


@pytest.mark.slow
def test_no_more_batches_are_read_ahead_than_can_be_pending(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "BATCH_BYTES", 1)  # a batch for each document
    read = 0

    def documents() -> Iterator[bytes]:
        nonlocal read
        for _ in range(100):
            read += 1
            yield b"some text"

    for written, _ in enumerate(workers.encode_documents(documents(), tokenizer, 2)):
        assert read <= written + 2 * workers._PENDING_PER_WORKER
    assert read == 100
