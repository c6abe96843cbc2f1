"""Tests of Megatron's files: they are read and written in Megatron's layout, and refused if damaged."""

from __future__ import annotations

import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Callable, List

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fugaku_gpt.data.indexed import IndexedCorpus, IndexedWriter
from fugaku_gpt.errors import DataError
from tests.data.files import FORMATS, write_megatron
from tests.support.imports import ROOT

SEQUENCES = [[5, 6, 7], [8], [], [9, 10, 100, 12]]


@pytest.mark.parametrize("code", FORMATS)
def test_files_in_megatron_s_layout_are_read(tmp_path: Path, code: int) -> None:
    write_megatron(tmp_path / "text_document", SEQUENCES, code)
    corpus = IndexedCorpus(tmp_path / "text_document")
    assert (corpus.sequences, corpus.documents, corpus.tokens) == (4, 4, 8)
    assert corpus.dtype == np.dtype("<" + FORMATS[code])
    assert [corpus.sequence(number).tolist() for number in range(4)] == SEQUENCES
    assert corpus.sequence(3, 1, 2).tolist() == [10, 100]


def test_documents_of_several_sequences_and_modes(tmp_path: Path) -> None:
    write_megatron(tmp_path / "corpus", SEQUENCES, documents=[0, 2, 2, 4], modes=True)
    corpus = IndexedCorpus(tmp_path / "corpus")
    assert (corpus.sequences, corpus.documents) == (4, 3)
    assert [corpus.document(number).tolist() for number in range(3)] == [[5, 6, 7, 8], [], [9, 10, 100, 12]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["corpus.idx", "corpus.bin"])
def test_every_truncation_is_refused(tmp_path: Path, name: str) -> None:
    write_megatron(tmp_path / "corpus", SEQUENCES)
    content = (tmp_path / name).read_bytes()
    for length in range(len(content)):
        (tmp_path / name).write_bytes(content[:length])
        with pytest.raises(DataError, match="corpus"):
            IndexedCorpus(tmp_path / "corpus")
    (tmp_path / name).write_bytes(content + b"\0\0\0")
    with pytest.raises(DataError, match=r"cut short"):
        IndexedCorpus(tmp_path / "corpus")


def _patch(at: int, data: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content[:at] + data + content[at + len(data) :]


LENGTHS, STARTS, DOCUMENTS = 34, 34 + 4 * 4, 34 + 12 * 4


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: b"", "0 bytes"),
        (_patch(0, b"TNTIDX\x00\x00"), "not a Megatron memory-mapped index"),
        (_patch(9, struct.pack("<Q", 2)), "version 2"),
        (_patch(17, b"\x09"), "code 9; valid: 1, 2"),
        (_patch(17, b"\x06"), "float64"),
        (_patch(17, b"\x07"), "float32"),
        (_patch(18, struct.pack("<Q", 2**62)), "cut short"),
        (_patch(18, struct.pack("<QQ", 0, 1)), "cut short|empty"),
        (_patch(LENGTHS, struct.pack("<i", -3)), "sequence 0 has a negative length, -3 tokens"),
        (_patch(LENGTHS, struct.pack("<i", 4)), r"sequence 1 starts at byte \d+, where \d+ are before it"),
        (_patch(STARTS, struct.pack("<q", 4)), "sequence 0 starts at byte 4, where 0 are before it"),
        (_patch(STARTS + 8, struct.pack("<q", -12)), r"sequence 1 starts at byte -12, where \d+ are before it"),
        (_patch(DOCUMENTS, struct.pack("<q", 1)), "its 4 documents span sequences 1 to 4, and it has 4 sequences"),
        (_patch(DOCUMENTS + 8, struct.pack("<q", 4)), "document 1 begins at sequence 4 and ends before it, at 2"),
        (_patch(DOCUMENTS + 32, struct.pack("<q", 3)), "its 4 documents span sequences 0 to 3, and it has 4 sequences"),
    ],
)
def test_a_damaged_index_is_refused_with_the_reason(
    tmp_path: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    write_megatron(tmp_path / "corpus", SEQUENCES)
    path = tmp_path / "corpus.idx"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=message) as caught:
        IndexedCorpus(tmp_path / "corpus")
    assert str(path) in str(caught.value)


_OPENS_IT = """
import resource, sys
from pathlib import Path
from fugaku_gpt.data.indexed import IndexedCorpus
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
corpus = IndexedCorpus(Path(sys.argv[1]))
sequence = corpus.sequence(0)
print(corpus.documents, corpus.tokens, len(sequence), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_opening_reads_no_more_of_a_corpus_of_a_thousand_million_documents(tmp_path: Path) -> None:
    documents, tokens = 10**9, 10**13
    starts = 34 + 4 * documents
    with open(tmp_path / "c.idx", "wb") as stream:  # sparse: the first two and the last sequence have tokens
        stream.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 1, documents, documents + 1))
        for at, form, value in (
            (34, "<i", 7), (starts - 4, "<i", 1000), (starts + 8, "<q", 7),
            (starts + 8 * (documents - 1), "<q", tokens - 1000), (starts + 16 * documents, "<q", documents),
        ):  # fmt: skip
            stream.seek(at)
            stream.write(struct.pack(form, value))
    with open(tmp_path / "c.bin", "wb") as stream:
        stream.truncate(tokens)
    opened = subprocess.run(
        [sys.executable, "-c", _OPENS_IT, str(tmp_path / "c")], cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    *counts, kilobytes = map(int, opened.stdout.split())
    assert counts == [documents, tokens, 7] and kilobytes < 200 * 1024


def test_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"corpus\.idx: no such file"):
        IndexedCorpus(tmp_path / "corpus")
    write_megatron(tmp_path / "corpus", SEQUENCES)
    (tmp_path / "corpus.bin").unlink()
    with pytest.raises(DataError, match=r"corpus\.bin: no such file"):
        IndexedCorpus(tmp_path / "corpus")


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    write_megatron(tmp_path / "corpus", [])
    with pytest.raises(DataError, match=r"empty corpus \(0 sequences\)"):
        IndexedCorpus(tmp_path / "corpus")


@pytest.mark.parametrize(("entries", "phrase"), [([], "0 document entries"), ([0], "1 document entry")])
def test_a_corpus_whose_documents_never_ended_is_refused(tmp_path: Path, entries: List[int], phrase: str) -> None:
    write_megatron(tmp_path / "corpus", SEQUENCES, documents=entries)
    with pytest.raises(DataError, match=rf"corpus\.idx: {phrase} for 4 sequences; .*never ended a document"):
        IndexedCorpus(tmp_path / "corpus")


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 65535), max_size=20), min_size=1, max_size=10), st.sampled_from(["u2", "i4"]))
def test_written_documents_are_read_back(sequences: List[List[int]], dtype: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder, "corpus")
        with IndexedWriter(prefix, np.dtype(dtype)) as writer:
            for sequence in sequences:
                writer.add_document(np.array(sequence, dtype=np.int64))
        corpus = IndexedCorpus(prefix)
        assert [corpus.document(number).tolist() for number in range(corpus.documents)] == sequences
        written = [Path(folder, name).read_bytes() for name in ("corpus.bin", "corpus.idx")]
        write_megatron(prefix, sequences, {"u2": 8, "i4": 4}[dtype])
        assert [Path(folder, name).read_bytes() for name in ("corpus.bin", "corpus.idx")] == written


def test_a_writer_that_fails_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="do not fit uint16"), IndexedWriter(tmp_path / "c", np.dtype("u2")) as writer:
        writer.add_document(np.array([1, 2]))
        writer.add_document(np.array([65536]))
    assert list(tmp_path.iterdir()) == []
