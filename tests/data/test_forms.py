"""Tests of the forms of text: a file is read as its content shows, whatever its name."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import sys
import tarfile
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any, Callable, List, Optional

import pytest

from fugaku_gpt.data.forms import ZSTD, open_uncompressed
from fugaku_gpt.data.sources import TEXT_SUFFIXES, ReadOptions, SourceCounts, find_files, read_documents
from fugaku_gpt.errors import DataError

RECORDS = [{"text": "one", "url": "u"}, {"text": "two\nthree"}, {"text": "caf\u00e9"}]
EXPECTED = ["one", "two\nthree", "caf\u00e9"]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
ARRAY = json.dumps(RECORDS).encode()
PRETTY = json.dumps(RECORDS, indent=2).encode()
SEPARATE = b"\n".join(json.dumps(record, indent=1).encode() for record in RECORDS)
ADJACENT = b"".join(json.dumps(record).encode() for record in RECORDS)


def texts(path: Path, key: str = "text", counts: Optional[SourceCounts] = None, skip_bad: bool = False) -> List[str]:
    files = find_files([path], False, TEXT_SUFFIXES, 0).files
    return [
        text.decode("utf-8")
        for text in read_documents(files, ReadOptions((key,), skip_bad), None, counts or SourceCounts())
    ]


def as_file(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def zstandard_frame(content: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed: make dev")
    frame: bytes = zstandard.ZstdCompressor().compress(content)
    return frame


COMPRESSIONS: List[Callable[[bytes], bytes]] = [bytes, gzip.compress, bz2.compress, lzma.compress, zstandard_frame]


@pytest.mark.parametrize("compress", COMPRESSIONS)
@pytest.mark.parametrize("content", [LINES, b"\xef\xbb\xbf\n" + LINES, ARRAY, PRETTY, SEPARATE])
@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.txt", "a.txt.zst", "a", "part-00.zst", "a.xml"])
def test_json_is_read_under_any_name(
    tmp_path: Path, name: str, content: bytes, compress: Callable[[bytes], bytes]
) -> None:
    assert texts(as_file(tmp_path, name, compress(content))) == EXPECTED


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.ndjson.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("content", [LINES, ARRAY, PRETTY, SEPARATE, ADJACENT, LINES.replace(b"\n", b"\r")])
def test_files_of_json_lines_may_hold_other_json(tmp_path: Path, name: str, content: bytes) -> None:
    assert texts(as_file(tmp_path, name, content)) == EXPECTED


def test_two_bad_lines_at_the_beginning_do_not_hide_the_rest(tmp_path: Path) -> None:
    path = as_file(tmp_path, "a.jsonl", b"a heading\n{broken\n" + LINES)
    counts = SourceCounts()
    assert (texts(path, counts=counts, skip_bad=True), counts.bad) == (EXPECTED, 2)
    with pytest.raises(DataError, match=r"a\.jsonl:1: not JSON: .*; or leave such .* out with --skip-bad$"):
        texts(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json.gz"])
def test_json_in_utf_16_is_called_that(tmp_path: Path, name: str) -> None:
    """As a shell of Windows writes it."""
    compress = gzip.compress if name.endswith(".gz") else bytes
    path = as_file(tmp_path, name, compress(LINES.decode().encode("utf-16")))
    with pytest.raises(DataError, match=r"UTF-16; JSON is UTF-8: convert it with iconv"):
        texts(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", "[1] A reference.\n"),
        ("a.txt", "{ int x; }\n"),
        ("a.txt", '{"quoted" in braces} and prose\n'),
        ("a.txt", "[\n  [nested prose]\n"),
        ("a.md", "[link](there) and more\n"),
        ("a.md", '{"example": 1}\nis JSON, says this page\n'),
        ("__manifest__.py", '{"name": "module", \'depends\': []}\n'),
        ("a.c", "{}\n"),
        ("a.txt", 'She said:\n{"text": "x"}\n'),
    ],
)
def test_text_that_only_has_brackets_stays_text(tmp_path: Path, name: str, content: str) -> None:
    assert texts(as_file(tmp_path, name, content.encode())) == [content]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b'[{"text": "one"}, {"text": "tw', r"a\.txt:1: not JSON: .*cut short"),
        ("a.txt", b'{"title": "one"}\n{"title": "two"}\n', r"a\.txt:1: no text under .* texts of this record: title"),
        ("a.txt", b'["one", "two"]', r"a\.txt:1: expected a JSON object such as"),
        ("a.md", b'[\n{"body": {"raw": "x"}}]', r"a\.md:2: no text under the key 'text'; .*: body\.raw; name one"),
        ("a.json", b"prose", r"a\.json:1: not JSON"),
        ("a.json", b'"a string"', r"a\.json:1: not JSON objects, but str at the top"),
        ("a.json", b'[{"text": "x"} {"text": "y"}]', r"a\.json:1: not JSON: expected , or \]"),
        ("a.json", b'{\n"text": "caf\xe9"}', r"a\.json: not JSON: .*utf-8"),
        ("a.json", b"[" * 100_000, r"a\.json:1: not JSON"),
        ("a.txt", b'{"text": "one"}\n{"text": broken}\n', r"a\.txt:2: not JSON"),
    ],
)
def test_json_without_documents_is_refused_and_never_taken_as_prose(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        texts(as_file(tmp_path, name, content))


def test_a_key_within_keys_names_the_text(tmp_path: Path) -> None:
    records = [{"meta": {"body": "one"}}, {"meta.body": "two"}, {"meta": {"x.y": "no", "body": "three"}}]
    path = as_file(tmp_path, "a.json", json.dumps(records).encode())
    assert texts(path, "meta.body") == ["one", "two", "three"]
    path = as_file(tmp_path, "b.json", json.dumps([{"a.b": {"c": {"d": "x"}}}]).encode())
    assert texts(path, "a.b.c.d") == ["x"]
    with pytest.raises(DataError, match=r"texts of this record: a\.b\.c\.d"):
        texts(path, "a.b.c")


def test_bad_records_and_files_are_left_out_and_counted(tmp_path: Path) -> None:
    as_file(tmp_path, "a.jsonl", b'{"text": "cut\n' + LINES + b'{"id": 1}\n[2]\n')
    as_file(tmp_path, "b.json", b'[{"text": "four"}, 5, {"text": "five"}, {"text": "s')
    as_file(tmp_path, "c.txt.gz", gzip.compress(b"prose" * 1000)[:-9])
    as_file(tmp_path, "d.txt", b"prose")
    counts = SourceCounts()
    assert sorted(texts(tmp_path, counts=counts, skip_bad=True)) == sorted([*EXPECTED, "four", "five", "prose"])
    assert counts.bad == 3 + 2 + 1 and counts.files == 4
    assert len(counts.bad_examples) == 3 and all(str(tmp_path) in example for example in counts.bad_examples)
    with pytest.raises(DataError):
        texts(tmp_path)


def test_archives_and_binaries_are_not_prose(tmp_path: Path) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.add(as_file(tmp_path, "prose", b"prose"), "prose")
    with pytest.raises(DataError, match=r"a\.txt\.gz: a tar archive, not one text; unpack it"):
        texts(as_file(tmp_path, "a.txt.gz", gzip.compress(archive.getvalue())))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as zipped:
        zipped.writestr("prose", "prose")
    with pytest.raises(DataError, match=r"a\.txt: a zip archive"):
        texts(as_file(tmp_path, "a.txt", packed.getvalue()))
    counts = SourceCounts()
    assert texts(as_file(tmp_path, "b.txt", "UTF-16".encode("utf-16-le")), counts=counts) == []
    assert counts.undecodable == ["b.txt"]


def test_zstandard_frames_are_joined_and_a_cut_frame_is_refused(tmp_path: Path) -> None:
    prose = b"prose" * 100_000
    both = zstandard_frame(prose) + zstandard_frame(b"end")
    assert texts(as_file(tmp_path, "a.txt.zst", both)) == [(prose + b"end").decode()]
    assert texts(as_file(tmp_path, "a.txt.zst", zstandard_frame(b""))) == []
    for damaged in (both[:-3], both[:30], both[:20] + b"\xff" * 20, b"\x28\xb5\x2f\xfd" + b"\xf7" * 50):
        with pytest.raises(DataError, match=r"a\.txt\.zst: not a whole Zstandard file: .*copy it again"):
            texts(as_file(tmp_path, "a.txt.zst", damaged))


@pytest.mark.parametrize(
    "damaged", [bz2.compress(b"prose" * 99)[:-5], bz2.compress(b"prose")[:9] + b"x" * 40, lzma.compress(b"prose")[:-9]]
)
def test_a_damaged_file_of_any_compression_is_refused(tmp_path: Path, damaged: bytes) -> None:
    with pytest.raises(DataError, match=r"a\.txt: not a whole (bzip2|xz) file: .*copy it again"):
        texts(as_file(tmp_path, "a.txt", damaged))


def test_a_small_zstandard_file_that_stands_for_gigabytes_is_read_in_pieces(tmp_path: Path) -> None:
    pytest.importorskip("zstandard", reason="zstandard is not installed: make dev")
    # RFC 8878, 3.1.1.2: a header of 3 bytes, of type 1 and size 128 KiB, and the byte that is repeated
    block = ((1 << 17) << 3 | 1 << 1).to_bytes(3, "little") + b"\n"
    path = as_file(tmp_path, "a.txt.zst", b"\x28\xb5\x2f\xfd\x00\x58" + block * 20_000)
    tracemalloc.start()
    try:
        with open(path, "rb") as raw:
            assert open_uncompressed(raw, ZSTD, path).read(10) == b"\n" * 10
        assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    finally:
        tracemalloc.stop()


def parquet_file(path: Path, columns: Any) -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: make dev")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), path)
    return path


def test_parquet_is_read_by_row(tmp_path: Path) -> None:
    path = parquet_file(tmp_path / "a.txt", {"text": EXPECTED, "meta": [{"body": str(row)} for row in range(3)]})
    assert texts(path) == EXPECTED
    assert texts(path, "meta.body") == ["0", "1", "2"]
    with pytest.raises(DataError, match=r"a\.txt: no column 'content'; columns: text, meta; name one with --text-key"):
        texts(path, "content")
    path = parquet_file(tmp_path / "b.parquet", {"text": [b"caf\xc3\xa9", b"\xff", None]})
    counts = SourceCounts()
    assert texts(path, counts=counts, skip_bad=True) == ["caf\u00e9"] and counts.bad == 2
    with pytest.raises(DataError, match=r"b\.parquet: row 2: no text under the key 'text'"):
        texts(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"b\.parquet: not a complete Parquet file: .*; copy it again"):
        texts(path)


def test_a_text_of_parquet_that_is_no_utf_8_is_a_bad_row(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    starts = pyarrow.py_buffer((0).to_bytes(4, "little") + (1).to_bytes(4, "little") + (3).to_bytes(4, "little"))
    column = pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, starts, pyarrow.py_buffer(b"a\xff\xfe")])
    path = parquet_file(tmp_path / "a.parquet", {"text": column})
    with pytest.raises(DataError, match=r"a\.parquet: row 2: no UTF-8"):
        texts(path)
    counts = SourceCounts()
    assert texts(path, counts=counts, skip_bad=True) == ["a"] and counts.bad == 1


@pytest.mark.parametrize(
    ("name", "head", "library", "extra"),
    [
        ("a.zst", b"\x28\xb5\x2f\xfd", "zstandard", "zstd"),
        ("a.txt", b"PAR1", "pyarrow", "parquet"),
        ("a.txt", b"ARROW1\0\0", "pyarrow", "parquet"),
        ("a.txt", b"\xff\xff\xff\xff", "pyarrow", "parquet"),
    ],
)
def test_a_missing_library_is_named_with_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, head: bytes, library: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(DataError, match=rf"needs the package {library} .*pip install 'fugaku_gpt\[{extra}\]'$"):
        texts(as_file(tmp_path, name, head + b"x" * 50), skip_bad=True)
