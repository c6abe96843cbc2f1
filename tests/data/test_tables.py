"""Tests of documents from Arrow files and from folders that Hugging Face's library datasets has saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, Optional

import numpy as np
import pytest

from fugaku_gpt.data.sources import TEXT_SUFFIXES, ReadOptions, SourceCounts, find_files, read_documents
from fugaku_gpt.errors import DataError

pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: make dev")
ipc = pytest.importorskip("pyarrow.ipc")

FORMS = ("file", "stream")
EXPECTED = ["one", "two\nthree", "caf\u00e9"]


def arrow_file(path: Path, form: str, columns: Any, rows_of_batch: int = 2, **options: Any) -> Path:
    """Writes a table in Arrow's file or streaming format."""
    table = pyarrow.table(columns)
    write = ipc.new_file if form == "file" else ipc.new_stream
    with open(path, "wb") as stream, write(stream, table.schema, options=ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows_of_batch)
    return path


def saved_dataset(folder: Path, texts: List[str], files: int = 2, **state: Any) -> Path:
    """Writes a folder as ``save_to_disk`` does: streams of Arrow, and the list of them."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{files:05d}.arrow" for number in range(files)]
    for number, name in enumerate(names):
        arrow_file(folder / name, "stream", {"text": texts[number::files]}, 1000)
    (folder / "dataset_info.json").write_text(json.dumps({"features": {"text": {"_type": "Value"}}}))
    listed = {"_data_files": [{"filename": name} for name in names], "_split": None, **state}
    (folder / "state.json").write_text(json.dumps(listed))
    return folder


def texts(path: Path, key: str = "text", counts: Optional[SourceCounts] = None, skip_bad: bool = False) -> List[str]:
    files = find_files([path], False, TEXT_SUFFIXES, 0).files
    return [
        text.decode("utf-8")
        for text in read_documents(files, ReadOptions((key,), skip_bad), None, counts or SourceCounts())
    ]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", [{}, {"compression": "zstd"}])
def test_arrow_is_read_by_row(tmp_path: Path, form: str, options: Dict[str, Any]) -> None:
    columns = {"n": [1, 2, 3], "text": EXPECTED, "meta": [{"body": str(row)} for row in range(3)]}
    path = arrow_file(tmp_path / "a.txt", form, columns, **options)
    assert texts(path) == EXPECTED
    assert texts(path, "meta.body") == ["0", "1", "2"]
    with pytest.raises(DataError, match=r"a\.txt: no column 'body'; columns: n, text, meta; name one with --text-key"):
        texts(path, "body")
    path = arrow_file(tmp_path / "b.arrow", form, {"text": ["a", None, "b"]})
    counts = SourceCounts()
    assert texts(path, counts=counts, skip_bad=True) == ["a", "b"] and counts.bad == 1
    with pytest.raises(DataError, match=r"b\.arrow: row 2: no text under the key 'text'"):
        texts(path)


@pytest.mark.parametrize("form", FORMS)
def test_an_arrow_file_that_is_cut_anywhere_is_not_complete(tmp_path: Path, form: str) -> None:
    path = arrow_file(tmp_path / "a.arrow", form, {"text": EXPECTED})
    content = path.read_bytes()
    for size in range(8, len(content), 8):  # messages are multiples of 8 bytes
        path.write_bytes(content[:size])
        counts = SourceCounts()
        read = texts(path, counts=counts, skip_bad=True)
        assert read == EXPECTED[: len(read)] and counts.bad == 1, size
        assert f"a.arrow: not a complete Arrow {form}: " in counts.bad_examples[0]


@pytest.mark.parametrize("form", FORMS)
def test_rows_that_pyarrow_would_read_outside_their_data_are_bad(tmp_path: Path, form: str) -> None:
    offsets = np.array([0, 1, 3, 2**30, 4], dtype=np.int32)
    buffers = [None, pyarrow.py_buffer(offsets.tobytes()), pyarrow.py_buffer(b"a\xff\xfeb")]
    column = pyarrow.Array.from_buffers(pyarrow.string(), 4, buffers)
    path = arrow_file(tmp_path / "a.arrow", form, {"text": column}, 4)
    counts = SourceCounts()
    assert texts(path, counts=counts, skip_bad=True) == ["a"] and counts.bad == 3
    with pytest.raises(DataError, match=r"a\.arrow: row 2: damaged: .*UTF"):
        texts(path)


@pytest.mark.parametrize("form", FORMS)
def test_damage_that_pyarrow_reports_by_other_errors_is_a_bad_file(tmp_path: Path, form: str) -> None:
    path = arrow_file(tmp_path / "a.arrow", form, {"text": ["x" * 3001], "name": ["n"]}, compression="zstd")
    content = path.read_bytes()
    size, magic = (3001).to_bytes(8, "little"), b"\x28\xb5\x2f\xfd"
    assert content.count(size + magic) == 1
    path.write_bytes(content.replace(size + magic, (2**60).to_bytes(8, "little") + magic))
    with pytest.raises(DataError, match=r"a\.arrow: after row 0 a batch needs more memory than there is; copy"):
        texts(path)
    path.write_bytes(content.replace(b"name", b"na\xff\xff"))
    with pytest.raises(DataError, match=f"a\\.arrow: not a complete Arrow {form}: .*codec can't decode"):
        texts(path)


def test_a_saved_dataset_is_read_by_its_own_list(tmp_path: Path) -> None:
    folder = saved_dataset(tmp_path / "wiki", EXPECTED)
    arrow_file(folder / "cache-0123456789abcdef.arrow", "stream", {"text": ["of a map"]})
    (folder / "notes.txt").write_text("no row")
    found = find_files([folder], False, TEXT_SUFFIXES, 0)
    labels = [f"wiki/data-0000{number}-of-00002.arrow" for number in range(2)]
    assert sorted(file.label for file in found.files) == labels
    assert found.left_out == {".json": 2, ".arrow": 1, ".txt": 1}
    assert sorted(texts(folder)) == sorted(EXPECTED)
    assert texts(folder / "notes.txt") == ["no row"]
    assert len(find_files([folder], False, (".txt",), 0).files) == 1, "what --suffix names"


def test_of_several_splits_the_user_names_some(tmp_path: Path) -> None:
    for split in ("train", "test"):
        saved_dataset(tmp_path / "wiki" / split, [f"of {split}"], 1)
    (tmp_path / "wiki" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    for source in (tmp_path, tmp_path / "wiki"):
        with pytest.raises(
            DataError, match=r"wiki: a dataset with the splits train, test; name those .* as .*wiki/train"
        ):
            texts(source)
    assert texts(tmp_path / "wiki" / "train") == ["of train"]
    (tmp_path / "wiki" / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
    assert texts(tmp_path) == ["of train"]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("wiki/state.json", b"{", r"state\.json: not JSON: .*; save the dataset again"),
        ("wiki/state.json", b"[]", r"state\.json: not a JSON object; save the dataset again"),
        ("wiki/state.json", b"{}", r"state\.json: has no list _data_files; save the dataset again"),
        ("wiki/state.json", b'{"_data_files": [{"filename": "../a.arrow"}]}', r"names the file '\.\./a\.arrow', which"),
        ("wiki/state.json", b'{"_data_files": ["data"]}', "names the file None, which is not in the folder"),
        (
            "wiki/state.json",
            b'{"_indices_data_files": ["x"]}',
            r"wiki: a dataset whose rows are a selection .*flatten_",
        ),
        ("dataset_dict.json", b'{"splits": []}', r"dataset_dict\.json: has no list of splits; save the dataset again"),
        *(
            (
                "dataset_dict.json",
                b'{"splits": ["wiki", "%s"]}' % name,
                r"dataset_dict\.json: '.*' is no name of a split",
            )
            for name in (b".", b"..", b"/tmp", b"a/b", b"", b"a\\u0000b", b"a\\u001b[2J")
        ),
        (
            "dataset_dict.json",
            b'{"splits": ["."]}',
            r"dataset_dict\.json: '\.' is no name of a split; .*save the dataset",
        ),
        (
            "dataset_dict.json",
            b'{"splits": ["other"]}',
            r"names the split 'other', which is not in the folder; copy it",
        ),
    ],
)
def test_a_saved_dataset_that_is_not_as_it_was_written_is_refused(
    tmp_path: Path, file: str, content: bytes, message: str
) -> None:
    saved_dataset(tmp_path / "wiki", EXPECTED)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(DataError, match=message):
        texts(tmp_path)


@pytest.mark.parametrize("form", FORMS)
def test_columns_of_several_keys_are_joined(tmp_path: Path, form: str) -> None:
    arrow_file(tmp_path / "a.arrow", form, {"n": [1, 2], "title": ["T", "U"], "text": ["a", None]}, 1)
    files = find_files([tmp_path / "a.arrow"], False, TEXT_SUFFIXES, 0).files
    options = ReadOptions(("title", "text", "absent"))
    assert list(read_documents(files, options, None, SourceCounts())) == [b"T\n\na", b"U"]
