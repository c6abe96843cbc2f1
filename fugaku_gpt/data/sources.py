"""Reads documents from text, JSON, Parquet and Arrow files, folders of them, and the sources of the standard library.

A text file is one document, and so is each object of a JSON file and each row of a table. A file is read as its content
shows, whatever its name. Files are shuffled by a hash of their names and a seed, so that the contiguous train, valid
and test splits of a corpus are fair samples of it. Documents of one file keep their order.
"""

from __future__ import annotations

import hashlib
import io
import os
import sysconfig
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

from fugaku_gpt.data import saved_datasets
from fugaku_gpt.data.duplicates import SeenDocuments
from fugaku_gpt.data.forms import (
    COMPRESSION_SUFFIXES,
    TABLES,
    BadText,
    damage_as_bad_text,
    detect_form,
    open_uncompressed,
)
from fugaku_gpt.data.json_records import (
    OnBad,
    TextKeys,
    is_json,
    is_object,
    json_lines,
    json_values,
    lines_of,
    resembles_json,
)
from fugaku_gpt.data.tables import table_rows
from fugaku_gpt.errors import DataError
from fugaku_gpt.input_files import blocks_of, open_file, resolved
from fugaku_gpt.limits import DOCUMENT

_MARKUP_SUFFIXES = (".md", ".rst", ".tex", ".py", ".c", ".h", ".cc", ".cpp", ".f90")
_JSON_LINES_SUFFIXES = (".jsonl", ".ndjson")
_JSON_SUFFIXES = (*_JSON_LINES_SUFFIXES, ".json")
TEXT_SUFFIXES = (".txt", ".text", *_MARKUP_SUFFIXES, *_JSON_SUFFIXES, ".parquet", saved_datasets.SUFFIX, ".feather")
_SUFFIXES_SHOWN = 8
_BAD_EXAMPLES = 3
_NUL_SEARCHED = 1 << 16  # bytes at the beginning of a text in which a NUL byte shows that it is none
MAX_DOCUMENT = DOCUMENT.value  # bytes of one document, all of which is in memory
_LARGEST_LINE = MAX_DOCUMENT + (1 << 20)
_BLOCK = 2**20  # bytes that are read at once
# Folders that are not part of the standard library, its tests, and tables of numbers or of this machine's paths.
_STDLIB_EXCLUDED = {"site-packages", "dist-packages", "_bundled", "__pycache__"}
_STDLIB_EXCLUDED |= {"test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "encodings"}
_BOM = b"\xef\xbb\xbf"
_UTF_16_BOMS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True)
class SourceFile:
    """One file of text.

    Attributes:
        path: path of the file.
        label: name below its source, without this machine's path; the order and the manifest depend on it.
        size: bytes on disk.
        modified: time of the last change, in nanoseconds since the epoch.
    """

    path: Path
    label: str
    size: int
    modified: int


@dataclass
class SourceCounts:
    """Counts of what was read so far.

    Attributes:
        files: number of files that were read to the end, or to the limit.
        bytes: bytes of text in documents.
        disk_bytes: bytes read of the files on disk, the measure of progress.
        empty: number of documents without text, which are left out.
        duplicates: number of documents that were left out because they are equal to an earlier one.
        keys_never_met: keys under which no record had a text, though others had.
        undecodable: labels of text files that are not UTF-8, or have NUL bytes, which are left out.
        bad: number of damaged records and files that were left out, for ``--skip-bad``.
        bad_examples: messages of the first of them.
    """

    files: int = 0
    bytes: int = 0
    disk_bytes: int = 0
    empty: int = 0
    duplicates: int = 0
    keys_never_met: List[str] = field(default_factory=list)
    undecodable: List[str] = field(default_factory=list)
    bad: int = 0
    bad_examples: List[str] = field(default_factory=list)


class SourceFiles(NamedTuple):
    """The files of the sources, and how many files of each suffix the folders have besides (key "" without suffix)."""

    files: List[SourceFile]
    left_out: Dict[str, int]


def find_files(sources: Sequence[Path], stdlib: bool, suffixes: Sequence[str], seed: int) -> SourceFiles:
    """Find the files of the sources; each is listed once, in shuffled order.

    Args:
        sources: files with any suffix, and folders, which are searched for ``suffixes``, each also compressed
            (:data:`COMPRESSION_SUFFIXES`), and for compressed files without a suffix of their own.
        stdlib: add the Python sources of the running standard library.
        suffixes: ends of file names.
        seed: seed of the order.

    Raises:
        DataError: a source does not exist or has no such file.
    """
    left_out: "Counter[str]" = Counter()
    try:
        files = _shuffled(_labelled_files(sources, stdlib, suffixes, left_out), seed)
        return SourceFiles(files, dict(left_out.most_common()))
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from None


def _labelled_files(
    sources: Sequence[Path], stdlib: bool, suffixes: Sequence[str], left_out: "Counter[str]"
) -> List[Tuple[str, Path]]:
    """The label and path of every file; other files of folders are counted in ``left_out``."""
    labelled_paths: List[Tuple[str, Path]] = []
    for source in sources:
        base = resolved(source).name or "root"
        if source.is_dir():
            matching = [
                (f"{base}/{path.relative_to(source).as_posix()}", path) for path in _walk(source, suffixes, left_out)
            ]
            if not matching:
                others = f"; it has {describe_suffixes(left_out)}" if left_out else ""
                raise DataError(
                    f"{source}: has no file that ends in {', '.join(suffixes)} (or one of these and "
                    f"{', '.join(COMPRESSION_SUFFIXES)}){others}; name others with --suffix"
                )
            labelled_paths += matching
        elif source.is_file():
            labelled_paths.append((base, source))
        else:
            raise DataError(f"{source}: no such file or folder")
    if stdlib:
        root = Path(sysconfig.get_paths()["stdlib"])
        labelled_paths += [(f"stdlib/{path.relative_to(root).as_posix()}", path) for path in _walk_stdlib(root)]
    return labelled_paths


def _shuffled(labelled_paths: Sequence[Tuple[str, Path]], seed: int) -> List[SourceFile]:
    """The files, each once, shuffled by a hash of the seed and the label."""
    files: List[SourceFile] = []
    seen: Set[Path] = set()
    for label, path in sorted(labelled_paths):
        resolved_path = resolved(path)
        if resolved_path not in seen:
            seen.add(resolved_path)
            status = path.stat()
            files.append(SourceFile(path, label, status.st_size, status.st_mtime_ns))
    files.sort(key=lambda file: hashlib.sha256(f"{seed}/{file.label}".encode("utf-8", "surrogateescape")).digest())
    return files


def describe_suffixes(counts: Dict[str, int]) -> str:
    """Numbers of files by suffix in words, the most frequent first."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{count} {suffix or 'without a suffix'}" for suffix, count in ordered[:_SUFFIXES_SHOWN]]
    rest = sum(count for _, count in ordered[_SUFFIXES_SHOWN:])
    return ", ".join(shown) + (f" and {rest} with other suffixes" if rest else "")


class ReadOptions(NamedTuple):
    """How documents are read.

    Attributes:
        text_keys: keys of the texts of a record, which are put together; ``a.b`` is ``b`` within ``a``.
        skip_bad: leave damaged records and files out, and count them.
        deduplicate: leave documents out that are equal to an earlier one, and count them.
    """

    text_keys: Tuple[str, ...] = ("text",)
    skip_bad: bool = False
    deduplicate: bool = False


def read_documents(
    files: Sequence[SourceFile], options: ReadOptions, limit: Optional[int], counts: SourceCounts
) -> Iterator[bytes]:
    """Yield the documents of the files as UTF-8, without empty ones, up to the one that reaches ``limit`` bytes.

    Raises:
        DataError: a file cannot be read, is damaged, holds JSON or a table without a text under the keys, needs a
            library that is not installed, or a document is too large for memory. With ``skip_bad``, damaged records and
            files (:class:`BadText`) are only counted.
    """

    def on_bad(error: BadText) -> None:
        if not options.skip_bad:
            raise error
        counts.bad += 1
        if len(counts.bad_examples) < _BAD_EXAMPLES:
            counts.bad_examples.append(str(error))

    seen, keys = SeenDocuments(), TextKeys(*options.text_keys)
    for file in files:
        earlier_bytes = counts.disk_bytes
        try:
            with open_file(file.path) as raw:
                for text in _documents_of(raw, file, keys, counts, on_bad):
                    if not text or text.isspace():
                        counts.empty += 1
                        continue
                    if options.deduplicate and seen.has_seen(text):
                        counts.duplicates += 1
                        continue
                    counts.bytes += len(text)
                    counts.disk_bytes = earlier_bytes + raw.tell()
                    yield text
                    if limit is not None and counts.bytes >= limit:
                        counts.files += 1
                        counts.keys_never_met = keys.never_met
                        return
        except BadText as error:
            if not options.skip_bad:
                raise BadText(f"{error}; or leave such records and files out with --skip-bad") from None
            on_bad(error)
        except OSError as error:
            raise DataError(f"{file.path}: cannot be read: {error.strerror or error}") from None
        counts.files += 1
        counts.disk_bytes = earlier_bytes + file.size
        counts.keys_never_met = keys.never_met


def _walk(folder: Path, suffixes: Sequence[str], left_out: "Counter[str]") -> Iterator[Path]:
    """Yield files below a folder with one of the suffixes, except hidden ones; count the suffixes of the rest.

    Of a dataset that Hugging Face's library has saved there, it yields the files of its rows.
    """
    endings = tuple(suffixes) + tuple(
        suffix + compression for suffix in suffixes for compression in COMPRESSION_SUFFIXES
    )

    def raise_error(error: OSError) -> None:
        raise error  # os.walk would skip unreadable folders

    for folder_path, folders, names in os.walk(folder, onerror=raise_error):
        folders[:] = [name for name in folders if not name.startswith(".")]
        of_dataset = _files_of_dataset(Path(folder_path), folders, names) if saved_datasets.SUFFIX in suffixes else None
        for name in names:
            path = Path(folder_path, name)
            if of_dataset is not None:
                if name in of_dataset:
                    yield path
                else:
                    left_out[_suffix(path)] += 1
                continue
            if name.startswith(".") or not path.is_file():  # a dangling link is no file
                continue
            if name.endswith(endings) or (path.suffix in COMPRESSION_SUFFIXES and not Path(path.stem).suffix):
                yield path
            else:
                left_out[_suffix(path)] += 1


def _files_of_dataset(folder: Path, folders: List[str], names: List[str]) -> Optional[List[str]]:
    """The files of rows in a folder of a saved dataset, whose only split stays in ``folders``; None if it is none."""
    split = saved_datasets.split_of_dataset(folder, folders, names)
    if split is not None:
        folders[:] = [split]
        return []
    return saved_datasets.files_of_dataset(folder, names)


def _walk_stdlib(root: Path) -> Iterator[Path]:
    for path in _walk(root, (".py",), Counter()):
        components = path.relative_to(root).parts
        if not _STDLIB_EXCLUDED.intersection(components[:-1]) and not components[-1].startswith("_sysconfigdata"):
            yield path


def _suffix(path: Path) -> str:
    """The suffix of a file, with that of its compression, such as ``.tar.gz``."""
    if path.suffix in COMPRESSION_SUFFIXES:
        return Path(path.stem).suffix + path.suffix
    return path.suffix


def _documents_of(
    raw: BinaryIO, file: SourceFile, keys: TextKeys, counts: SourceCounts, on_bad: OnBad
) -> Iterator[bytes]:
    """Yield the documents of one file, by the form of its content.

    Raises:
        BadText: the file is damaged, or is JSON and no documents.
    """
    form = detect_form(raw)
    if form in TABLES:
        yield from table_rows(raw, form, file.path, keys, on_bad)
        return
    with damage_as_bad_text(form, file.path):
        stream = open_uncompressed(raw, form, file.path)
        suffix = file.path.suffix if file.path.suffix not in COMPRESSION_SUFFIXES else Path(file.path.stem).suffix
        lines = list(_first_lines(stream))
        if suffix in _JSON_SUFFIXES and lines and lines[0].startswith(_UTF_16_BOMS):
            raise BadText(f"{file.path}: UTF-16; JSON is UTF-8: convert it with iconv -f UTF-16 -t UTF-8")
        if _has_json_lines(lines, suffix):
            all_lines = chain(lines, lines_of(stream, _LARGEST_LINE))
            yield from json_lines(all_lines, file.path, keys, _LARGEST_LINE, on_bad)
            return
        data = b"".join([*lines, *blocks_of(stream, MAX_DOCUMENT + 1 - sum(map(len, lines)))])
        is_array = _without_bom(data).lstrip().startswith(b"[")
        is_longer = len(data) > MAX_DOCUMENT and not is_array
        if suffix in _JSON_LINES_SUFFIXES and (is_longer or not _has_json_values(data, suffix)):
            data += stream.readline(_LARGEST_LINE)  # the rest of the last line
            all_lines = chain(lines_of(io.BytesIO(data), _LARGEST_LINE), lines_of(stream, _LARGEST_LINE))
            yield from json_lines(all_lines, file.path, keys, _LARGEST_LINE, on_bad)
            return
    if len(data) > MAX_DOCUMENT:
        raise DataError(
            f"{file.path}: more than {MAX_DOCUMENT >> 20} MiB; a text file is one document and is held in memory: "
            'split it, or write it as JSON lines {"text": ...}, one document each'
        )
    if _has_json_values(data, suffix):
        yield from json_values(data, file.path, keys, on_bad)
    else:
        yield from _text_document(data, file, counts)


def _first_lines(stream: BinaryIO) -> Iterator[bytes]:
    """Yield lines until two of them are not blank."""
    filled = 0
    for line in lines_of(stream, _LARGEST_LINE):
        yield line
        filled += not line.isspace()
        if filled == 2:
            return


def _has_json_lines(lines: Sequence[bytes], suffix: str) -> bool:
    """Whether a file has a JSON object on each line, by its first lines and its suffix.

    Of the first two lines one may be damaged; if both are, all of the file decides. A file of prose must begin as JSON
    does; the sources of a program or of a page are JSON only if all of the file is.
    """
    filled = [line for line in lines if not line.isspace()]
    if not filled or suffix in _MARKUP_SUFFIXES:
        return False
    first = _without_bom(filled[0])
    if suffix in _JSON_LINES_SUFFIXES:
        is_candidate = not first.lstrip().startswith(b"[")
    else:
        is_candidate = first.lstrip().startswith(b"{") if suffix in _JSON_SUFFIXES else resembles_json(first)
    return is_candidate and any(is_object(line) for line in filled)


def _has_json_values(data: bytes, suffix: str) -> bool:
    """Whether a file is to be read as JSON objects and arrays, by its name or its content."""
    content = _without_bom(data).lstrip()
    if suffix in _JSON_LINES_SUFFIXES:
        return content.startswith(b"[") or is_json(data)
    if suffix in _JSON_SUFFIXES:
        return True
    if not content.startswith((b"{", b"[")):
        return False
    return is_json(data) or (suffix not in _MARKUP_SUFFIXES and resembles_json(content))


def _text_document(data: bytes, file: SourceFile, counts: SourceCounts) -> Iterator[bytes]:
    """Yield the single document of a text file; a file that is not UTF-8, or has NUL bytes, is only counted."""
    data = _without_bom(data)
    try:
        data.decode("utf-8")
        is_text = b"\0" not in data[:_NUL_SEARCHED]
    except UnicodeDecodeError:
        is_text = False
    if is_text:
        yield data
    else:
        counts.undecodable.append(file.label)


def _without_bom(data: bytes) -> bytes:
    return data[len(_BOM) :] if data.startswith(_BOM) else data
