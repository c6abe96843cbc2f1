"""Tests of documents from real files: which files are read, in which order, and what is refused."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import List, Optional, Sequence

import pytest

from fugaku_gpt.data import sources
from fugaku_gpt.data.sources import (
    TEXT_SUFFIXES,
    ReadOptions,
    SourceCounts,
    describe_suffixes,
    find_files,
    read_documents,
)
from fugaku_gpt.errors import DataError


def labels(*paths: Path, suffixes: Sequence[str] = TEXT_SUFFIXES, seed: int = 0) -> List[str]:
    return [file.label for file in find_files(paths, False, suffixes, seed).files]


def texts(
    *paths: Path,
    key: str = "text",
    limit: Optional[int] = None,
    counts: Optional[SourceCounts] = None,
    skip_bad: bool = False,
) -> List[str]:
    files = find_files(paths, False, TEXT_SUFFIXES, 0).files
    return [
        text.decode("utf-8")
        for text in read_documents(files, ReadOptions((key,), skip_bad), limit, counts or SourceCounts())
    ]


def test_a_folder_is_searched(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    for name in ("a.txt", "b.md.gz", "deep/er/c.jsonl", "d.bin", ".hidden.txt", ".git/e.txt", "f.xml"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    os.symlink(tmp_path / "gone", folder / "dangling.txt")
    assert sorted(labels(folder)) == ["texts/a.txt", "texts/b.md.gz", "texts/deep/er/c.jsonl"]
    assert labels(folder, suffixes=(".xml",)) == ["texts/f.xml"]
    assert labels(folder / "d.bin") == ["d.bin"], "a file that is named is taken whatever its suffix"
    assert len(labels(folder, folder / "a.txt", folder)) == 3, "each file once"


def test_the_order_is_shuffled_by_the_seed_alone(tmp_path: Path) -> None:
    for folder in ("here/texts", "there/texts"):
        (tmp_path / folder).mkdir(parents=True)
        for number in range(30):
            (tmp_path / folder / f"{number}.txt").write_text("x")
    first = labels(tmp_path / "here/texts", seed=1)
    assert first == labels(tmp_path / "there/texts", seed=1), "not by where they are"
    assert first != labels(tmp_path / "here/texts", seed=2)
    assert first != sorted(first)


def test_missing_files_and_empty_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        labels(tmp_path / "gone")
    with pytest.raises(DataError, match=r"has no file that ends in \.txt.*--suffix"):
        labels(tmp_path)
    for name in ("a.xml", "b.xml", "c.pdf"):
        (tmp_path / name).write_text("x")
    with pytest.raises(DataError, match=r"; it has 2 \.xml, 1 \.pdf; name others with --suffix"):
        labels(tmp_path)


def test_files_that_a_folder_has_besides_are_counted_by_suffix(tmp_path: Path) -> None:
    for name in ("a.txt", "part-00.zst", "x.xml", "y.xml", "z.tar.gz", "LICENSE", ".hidden.xml", ".git/c.xml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    files, left_out = find_files([tmp_path], False, TEXT_SUFFIXES, 0)
    assert sorted(file.path.name for file in files) == ["a.txt", "part-00.zst"]
    assert left_out == {".xml": 2, ".tar.gz": 1, "": 1}
    assert describe_suffixes(left_out) == "2 .xml, 1 without a suffix, 1 .tar.gz"
    many = {f".s{number:02}": 20 - number for number in range(10)}
    assert describe_suffixes(many).endswith(", 13 .s07 and 23 with other suffixes")


def test_text_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress("ünï".encode()))
    (tmp_path / "c.txt").write_bytes(b" \n")
    (tmp_path / "d.txt").write_bytes(b"caf\xe9")
    counts = SourceCounts()
    assert sorted(texts(tmp_path, counts=counts)) == ["one\r\ntwo\n", "ünï"]
    assert (counts.files, counts.empty, counts.undecodable) == (4, 1, [f"{tmp_path.name}/d.txt"])
    assert counts.bytes == 9 + 5
    assert counts.disk_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_json_lines_are_read(tmp_path: Path) -> None:
    lines = [{"text": "one"}, {"text": "", "id": 2}, {"text": "two\nthree"}, {"text": "half \ud83d, whole \U0001f600"}]
    data = "\n".join(json.dumps(line) for line in lines) + "\n\n"
    (tmp_path / "a.jsonl").write_text("\ufeff" + data, encoding="utf-8")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(data.encode()))
    expected = ["one", "two\nthree", "half \ufffd, whole \U0001f600"]
    assert texts(tmp_path / "a.jsonl") == texts(tmp_path / "b.jsonl.gz") == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not JSON"),
        (b'{"text": "caf\xe9"}', "not JSON.*utf-8"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "expected a JSON object"),
        (
            b'{"content": "x", "n": 1}',
            "no text under the key 'text'; texts of this record: content; name one with --text",
        ),
        (b'{"text": 1}', "no text under the key 'text'; it has no text"),
    ],
)
def test_a_bad_line_is_reported_with_file_and_line(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(DataError, match=rf"a\.jsonl:2: .*{message}"):
        texts(tmp_path)


def test_text_is_read_under_another_key(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"content": "x"}')
    assert texts(tmp_path, key="content") == ["x"]


@pytest.mark.parametrize(("data", "expected"), [(b"unpacked on the way", ["unpacked on the way"]), (b"", [])])
def test_the_name_of_a_file_does_not_make_it_a_gz(tmp_path: Path, data: bytes, expected: List[str]) -> None:
    (tmp_path / "a.txt.gz").write_bytes(data)
    assert texts(tmp_path) == expected


def test_a_broken_gz_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"some text" * 100, mtime=0)[:-9])
    with pytest.raises(DataError, match=r"a\.txt\.gz: not a whole gzip file"):
        texts(tmp_path)


def test_the_limit_does_not_truncate_the_last_document(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "12345"}\n' * 9)
    assert texts(tmp_path, limit=11) == ["12345"] * 3
    assert texts(tmp_path, limit=1) == ["12345"]


def test_documents_that_are_too_large_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_DOCUMENT", 10)
    monkeypatch.setattr(sources, "_LARGEST_LINE", 30)
    (tmp_path / "a.txt").write_text("x" * 11)
    with pytest.raises(DataError, match=r"a\.txt: more than .* split it"):
        texts(tmp_path / "a.txt")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "x" * 30}))
    with pytest.raises(DataError, match=r"b\.jsonl:1: a line of more than"):
        texts(tmp_path / "b.jsonl")
    (tmp_path / "c.jsonl").write_text('[\n{"text": "a"},\n{"text": "b"}\n]\n')
    with pytest.raises(DataError, match=r"c\.jsonl: more than .* split it, or write it as JSON lines"):
        texts(tmp_path / "c.jsonl")


@pytest.mark.slow
def test_the_standard_library_is_searched_without_tests_and_packages() -> None:
    files = find_files([], True, TEXT_SUFFIXES, 0).files
    names = {file.label for file in files}
    assert {"stdlib/argparse.py", "stdlib/json/decoder.py"} <= names
    assert not any("site-packages" in name or "/test/" in name for name in names)
    assert 5 < sum(file.size for file in files) / 2**20 < 40
