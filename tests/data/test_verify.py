"""Tests of the check of a whole corpus: each damage that opening leaves to look-ups is named."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Callable, List

import pytest

from fugaku_gpt.data import indexed
from fugaku_gpt.data.corpus import open_corpus
from fugaku_gpt.data.verify import verify_corpus
from fugaku_gpt.errors import DataError
from tests.data.files import write_megatron

SEQUENCES = [[5, 6, 7], [8], [], [9, 10, 100, 12]]
LENGTHS, STARTS, DOCUMENTS = 34, 34 + 4 * 4, 34 + 12 * 4


@pytest.fixture(autouse=True)
def _large_corpora(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opens each corpus as if it had more sequences than are checked at once, and checks them in blocks of two."""
    monkeypatch.setattr(indexed, "CHECKED_AT_ONCE", 2)


def _patch(path: Path, at: int, form: str, value: int) -> None:
    content = bytearray(path.read_bytes())
    struct.pack_into(form, content, at, value)
    path.write_bytes(bytes(content))


def test_a_sound_pair_is_described(tmp_path: Path) -> None:
    write_megatron(tmp_path / "c", SEQUENCES)
    verified = verify_corpus(str(tmp_path / "c"))
    assert verified[1:] == (5, 100, False) and verified.corpus.index.tokens == 8


@pytest.mark.parametrize(
    ("at", "form", "value", "message", "sequence"),
    [
        (LENGTHS + 4, "<i", -3, "sequence 1 has a negative length, -3 tokens", 1),
        (LENGTHS, "<i", 4, r"sequence 1 starts at byte 12, where 16 are before it", 0),
        (LENGTHS + 8, "<i", 1, r"sequence 3 starts at byte 16, where 20 are before it", 2),
        (STARTS + 8, "<q", -12, r"sequence 1 starts at byte -12, where 12 are before it", 0),
        (STARTS + 8, "<q", 2**62, r"sequence 1 starts at byte \d+, where 12 are before it", 1),
        (STARTS + 16, "<q", 20, r"sequence 2 starts at byte 20, where 16 are before it", 2),
    ],
)
def test_damage_within_a_large_index_is_left_to_verify_and_to_look_ups(
    tmp_path: Path, at: int, form: str, value: int, message: str, sequence: int
) -> None:
    write_megatron(tmp_path / "c", SEQUENCES)
    _patch(tmp_path / "c.idx", at, form, value)
    index = open_corpus(str(tmp_path / "c")).index
    with pytest.raises(DataError, match=rf"c\.idx: damaged.*sequence {sequence} "):
        index.sequence(sequence)
    with pytest.raises(DataError, match=message):
        verify_corpus(str(tmp_path / "c"))


def test_documents_out_of_order_are_left_to_verify_and_to_look_ups(tmp_path: Path) -> None:
    write_megatron(tmp_path / "c", SEQUENCES)
    _patch(tmp_path / "c.idx", DOCUMENTS + 24, "<q", 1)
    index = open_corpus(str(tmp_path / "c")).index
    assert index.document(0).tolist() == [5, 6, 7]
    with pytest.raises(DataError, match="document 2 spans sequences 2 to 1 of 4"):
        index.document(2)
    with pytest.raises(DataError, match="document 2 begins at sequence 2 and ends before it, at 1"):
        verify_corpus(str(tmp_path / "c"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: _patch(folder / "corpus.bin", 4, "<i", 300), "token 1 has id 300; valid: 0 to 299"),
        (lambda folder: _patch(folder / "corpus.bin", 8, "<i", -1), "token 2 has id -1; valid: 0 to 299"),
        (lambda folder: _patch(folder / "corpus.bin", 4, "<i", 7), "has changed since `fugaku-gpt data prepare`"),
        (lambda folder: (folder / "tokenizer.json").write_text("{ }"), "tokenizer.json: has changed since"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json: cannot be read: No such file"),
    ],
)
def test_a_prepared_folder_is_checked_against_the_manifest(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    folder = _prepared(tmp_path, SEQUENCES)
    assert verify_corpus(str(folder)).is_fingerprint_checked
    damage(folder)
    with pytest.raises(DataError, match=message):
        verify_corpus(str(folder))


def _prepared(tmp_path: Path, sequences: List[List[int]]) -> Path:
    """Writes a folder with the manifest entries that readers use, and the digests of its files."""
    import hashlib

    folder = tmp_path / "prepared"
    folder.mkdir()
    write_megatron(folder / "corpus", sequences)
    (folder / "tokenizer.json").write_text("{}")
    files = [(folder / name).read_bytes() for name in ("corpus.bin", "corpus.idx")]
    manifest = {
        "version": 1, "tokens": sum(map(len, sequences)), "documents": len(sequences), "vocab_size": 300,
        "fingerprint": hashlib.sha256(b"".join(files)).hexdigest(),
        "tokenizer_sha256": hashlib.sha256(b"{}").hexdigest(),
        "end_of_document": {"id": 0, "token": "<end>"},
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder
