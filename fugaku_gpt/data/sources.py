"""Reads documents from text files, folders, ``.gz`` files, JSON lines and the sources of the standard library.

A text file is one document, and so is a line of a ``.jsonl`` file. Files are shuffled by a hash of their names and a
seed, so that the contiguous train, valid and test splits of a corpus are fair samples of it. Documents of one
JSON-lines file keep their order.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import sysconfig
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Iterator, List, Optional, Sequence, Set, Tuple

from fugaku_gpt.errors import DataError

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".tex", ".py", ".c", ".h", ".cc", ".cpp", ".f90", ".jsonl")
MAX_DOCUMENT = 1 << 30  # bytes of one document, all of which is in memory
_LARGEST_LINE = MAX_DOCUMENT + (1 << 20)
# Folders that are not part of the standard library, its tests, and tables of numbers or of this machine's paths.
_STDLIB_EXCLUDED = {"site-packages", "dist-packages", "_bundled", "__pycache__"}
_STDLIB_EXCLUDED |= {"test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "encodings"}
_BOM = b"\xef\xbb\xbf"


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
        undecodable: labels of text files that are not UTF-8, which are left out.
    """

    files: int = 0
    bytes: int = 0
    disk_bytes: int = 0
    empty: int = 0
    undecodable: List[str] = field(default_factory=list)


def find_files(sources: Sequence[Path], stdlib: bool, suffixes: Sequence[str], seed: int) -> List[SourceFile]:
    """Find the files of the sources; each is listed once, in shuffled order.

    Args:
        sources: files with any suffix, and folders, which are searched for ``suffixes``, with or without ``.gz``.
        stdlib: add the Python sources of the running standard library.
        suffixes: ends of file names.
        seed: seed of the order.

    Raises:
        DataError: a source does not exist or has no such file.
    """
    try:
        return _shuffled(_labelled_files(sources, stdlib, suffixes), seed)
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from None


def _labelled_files(sources: Sequence[Path], stdlib: bool, suffixes: Sequence[str]) -> List[Tuple[str, Path]]:
    """The label and path of every file."""
    labelled_paths: List[Tuple[str, Path]] = []
    for source in sources:
        base = source.resolve().name or "root"
        if source.is_dir():
            matching = [(f"{base}/{path.relative_to(source).as_posix()}", path) for path in _walk(source, suffixes)]
            if not matching:
                raise DataError(
                    f"{source}: has no file that ends in {', '.join(suffixes)} (or one of these and .gz); "
                    "name others with --suffix"
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
        resolved_path = path.resolve()
        if resolved_path not in seen:
            seen.add(resolved_path)
            status = path.stat()
            files.append(SourceFile(path, label, status.st_size, status.st_mtime_ns))
    files.sort(key=lambda file: hashlib.sha256(f"{seed}/{file.label}".encode("utf-8", "surrogateescape")).digest())
    return files


def read_documents(
    files: Sequence[SourceFile], text_key: str, limit: Optional[int], counts: SourceCounts
) -> Iterator[bytes]:
    """Yield the documents of the files as UTF-8, without empty ones, up to the one that reaches ``limit`` bytes.

    Raises:
        DataError: a file cannot be read, is a broken ``.gz``, a line is not JSON or lacks ``text_key``, or a document
            is too large for memory.
    """
    for file in files:
        earlier_bytes = counts.disk_bytes
        try:
            with open(file.path, "rb") as raw:
                stream: BinaryIO = gzip.GzipFile(fileobj=raw) if file.path.suffix == ".gz" else raw  # type: ignore[assignment]
                texts = (
                    _json_lines(stream, file, text_key) if _is_json(file.path) else _text_document(stream, file, counts)
                )
                for text in texts:
                    if not text or text.isspace():
                        counts.empty += 1
                        continue
                    counts.bytes += len(text)
                    counts.disk_bytes = earlier_bytes + raw.tell()
                    yield text
                    if limit is not None and counts.bytes >= limit:
                        counts.files += 1
                        return
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{file.path}: not a whole gzip file: {error}; copy it again") from None
        except OSError as error:
            raise DataError(f"{file.path}: cannot be read: {error.strerror or error}") from None
        counts.files += 1
        counts.disk_bytes = earlier_bytes + file.size


def _walk(folder: Path, suffixes: Sequence[str]) -> Iterator[Path]:
    """Yield files below a folder with one of the suffixes, except hidden ones."""
    endings = tuple(suffixes) + tuple(suffix + ".gz" for suffix in suffixes)

    def raise_error(error: OSError) -> None:
        raise error  # os.walk would skip unreadable folders

    for folder_path, folders, names in os.walk(folder, onerror=raise_error):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if name.endswith(endings) and not name.startswith("."):
                path = Path(folder_path, name)
                if path.is_file():  # not a dangling link
                    yield path


def _walk_stdlib(root: Path) -> Iterator[Path]:
    for path in _walk(root, (".py",)):
        components = path.relative_to(root).parts
        if not _STDLIB_EXCLUDED.intersection(components[:-1]) and not components[-1].startswith("_sysconfigdata"):
            yield path


def _is_json(path: Path) -> bool:
    return path.name.endswith((".jsonl", ".jsonl.gz"))


def _text_document(stream: BinaryIO, file: SourceFile, counts: SourceCounts) -> Iterator[bytes]:
    """Yield the single document of a text file; a file that is not UTF-8 is only counted."""
    data = stream.read(MAX_DOCUMENT + 1)
    if len(data) > MAX_DOCUMENT:
        raise DataError(
            f"{file.path}: more than {MAX_DOCUMENT >> 20} MiB; a text file is one document and is held in memory: "
            'split it, or write it as JSON lines {"text": ...}, one document each'
        )
    if data.startswith(_BOM):
        data = data[len(_BOM) :]
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        counts.undecodable.append(file.label)
        return
    yield data


def _json_lines(stream: BinaryIO, file: SourceFile, text_key: str) -> Iterator[bytes]:
    """Yield the text of each line; blank lines are skipped."""
    number = 0
    while True:
        line = stream.readline(_LARGEST_LINE)
        if not line:
            return
        number += 1
        if line.isspace():
            continue
        location = f"{file.path}:{number}"
        if len(line) >= _LARGEST_LINE:
            raise DataError(f"{location}: a line of more than {MAX_DOCUMENT >> 20} MiB; one document takes one line")
        try:
            value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{location}: not JSON: {error}; each line must be one JSON object") from None
        if not isinstance(value, dict):
            raise DataError(f"{location}: expected a JSON object such as {{{json.dumps(text_key)}: ...}} on each line")
        text = value.get(text_key)
        if not isinstance(text, str):
            texts = [key for key, field_value in value.items() if isinstance(field_value, str)]
            hint = f"texts of this line: {', '.join(texts)}; name one with --text-key" if texts else "it has no text"
            raise DataError(f"{location}: no text under the key {text_key!r}; {hint}")
        try:
            yield text.encode("utf-8")
        except UnicodeEncodeError:  # surrogates: a pair such as "\ud83d\ude00" is one character, a lone one is none
            yield text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode("utf-8")
