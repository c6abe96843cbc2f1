"""Documents out of text files, folders, ``.gz``, JSON lines and the standard library's own sources.

A text file is one document, a line of a ``.jsonl`` file is one document. Files come in an order that depends only on
their names and a seed, as a hash would shuffle them, so that the contiguous train, valid and test splits of a corpus
are fair samples of it. Documents of one JSON-lines file keep their order.
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
MAX_DOCUMENT = 1 << 30  # bytes of one document, which is held in memory whole
_LARGEST_LINE = MAX_DOCUMENT + (1 << 20)
# Of the standard library: what is not part of it, what only tests it, and tables of numbers or of this machine's paths.
_STDLIB_EXCLUDED = {"site-packages", "dist-packages", "_bundled", "__pycache__"}
_STDLIB_EXCLUDED |= {"test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "encodings"}
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class SourceFile:
    """One file of text.

    Attributes:
        path: where it is.
        label: its name below its source, without the machine's own path: the order and the manifest depend on it.
        size: bytes on disk.
        modified: time of its last change, in nanoseconds.
    """

    path: Path
    label: str
    size: int
    modified: int


@dataclass
class SourceCounts:
    """What was read, counted as documents are drawn.

    Attributes:
        files: read to the end, or to where the limit fell.
        bytes: of text in documents.
        disk_bytes: of the files, as they lie on disk: what progress is measured in.
        empty: documents without text, left out.
        undecodable: labels of text files that are not UTF-8, left out.
    """

    files: int = 0
    bytes: int = 0
    disk_bytes: int = 0
    empty: int = 0
    undecodable: List[str] = field(default_factory=list)


def find_files(sources: Sequence[Path], stdlib: bool, suffixes: Sequence[str], seed: int) -> List[SourceFile]:
    """The files of the sources, each once, in their shuffled order.

    Args:
        sources: files, taken whatever their suffix, and folders, searched for ``suffixes`` (``.gz`` after one counts).
        stdlib: take the Python sources of the running standard library too.

    Raises:
        DataError: a source does not exist or holds no such file.
    """
    try:
        return _in_order(_named(sources, stdlib, suffixes), seed)
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from None


def _named(sources: Sequence[Path], stdlib: bool, suffixes: Sequence[str]) -> List[Tuple[str, Path]]:
    """(label, path) of every file."""
    found: List[Tuple[str, Path]] = []
    for source in sources:
        base = source.resolve().name or "root"
        if source.is_dir():
            below = [(f"{base}/{path.relative_to(source).as_posix()}", path) for path in _walk(source, suffixes)]
            if not below:
                raise DataError(
                    f"{source}: has no file that ends in {', '.join(suffixes)} (or one of these and .gz); "
                    "name others with --suffix"
                )
            found += below
        elif source.is_file():
            found.append((base, source))
        else:
            raise DataError(f"{source}: no such file or folder")
    if stdlib:
        root = Path(sysconfig.get_paths()["stdlib"])
        found += [(f"stdlib/{path.relative_to(root).as_posix()}", path) for path in _walk_stdlib(root)]
    return found


def _in_order(found: Sequence[Tuple[str, Path]], seed: int) -> List[SourceFile]:
    """The files, each once, shuffled by a hash of the seed and the label."""
    files: List[SourceFile] = []
    seen: Set[Path] = set()
    for label, path in sorted(found):
        real = path.resolve()
        if real not in seen:
            seen.add(real)
            status = path.stat()
            files.append(SourceFile(path, label, status.st_size, status.st_mtime_ns))
    files.sort(key=lambda file: hashlib.sha256(f"{seed}/{file.label}".encode("utf-8", "surrogateescape")).digest())
    return files


def read_documents(files: Sequence[SourceFile], text_key: str, limit: Optional[int], counts: SourceCounts) -> Iterator[bytes]:
    """The documents of the files as UTF-8, without the empty ones, until ``limit`` bytes are reached (the last whole).

    Raises:
        DataError: a file cannot be read, is a broken ``.gz``, a line is not JSON or lacks ``text_key``, or a document
            is larger than memory should hold.
    """
    for file in files:
        before = counts.disk_bytes
        try:
            with open(file.path, "rb") as raw:
                stream: BinaryIO = gzip.GzipFile(fileobj=raw) if file.path.suffix == ".gz" else raw  # type: ignore[assignment]
                texts = _json_lines(stream, file, text_key) if _is_json(file.path) else _whole(stream, file, counts)
                for text in texts:
                    if not text or text.isspace():
                        counts.empty += 1
                        continue
                    counts.bytes += len(text)
                    counts.disk_bytes = before + raw.tell()
                    yield text
                    if limit is not None and counts.bytes >= limit:
                        counts.files += 1
                        return
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{file.path}: not a whole gzip file: {error}; copy it again") from None
        except OSError as error:
            raise DataError(f"{file.path}: cannot be read: {error.strerror or error}") from None
        counts.files += 1
        counts.disk_bytes = before + file.size


def _walk(folder: Path, suffixes: Sequence[str]) -> Iterator[Path]:
    """Files below a folder with one of the suffixes, hidden ones left out."""
    endings = tuple(suffixes) + tuple(suffix + ".gz" for suffix in suffixes)

    def refuse(error: OSError) -> None:
        raise error  # os.walk would pass over what it may not read

    for here, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if name.endswith(endings) and not name.startswith("."):
                path = Path(here, name)
                if path.is_file():  # not a dangling link
                    yield path


def _walk_stdlib(root: Path) -> Iterator[Path]:
    for path in _walk(root, (".py",)):
        parts = path.relative_to(root).parts
        if not _STDLIB_EXCLUDED.intersection(parts[:-1]) and not parts[-1].startswith("_sysconfigdata"):
            yield path


def _is_json(path: Path) -> bool:
    return path.name.endswith((".jsonl", ".jsonl.gz"))


def _whole(stream: BinaryIO, file: SourceFile, tally: SourceCounts) -> Iterator[bytes]:
    """The one document of a text file; none, but a mark in the tally, if it is not UTF-8."""
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
        tally.undecodable.append(file.label)
        return
    yield data


def _json_lines(stream: BinaryIO, file: SourceFile, text_key: str) -> Iterator[bytes]:
    """The text of each line; blank lines are passed over."""
    number = 0
    while True:
        line = stream.readline(_LARGEST_LINE)
        if not line:
            return
        number += 1
        if line.isspace():
            continue
        at = f"{file.path}:{number}"
        if len(line) >= _LARGEST_LINE:
            raise DataError(f"{at}: a line of more than {MAX_DOCUMENT >> 20} MiB; one document takes one line")
        try:
            value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{at}: not JSON: {error}; each line must be one JSON object") from None
        if not isinstance(value, dict):
            raise DataError(f"{at}: expected a JSON object such as {{{json.dumps(text_key)}: ...}} on each line")
        text = value.get(text_key)
        if not isinstance(text, str):
            texts = [key for key, item in value.items() if isinstance(item, str)]
            hint = f"texts of this line: {', '.join(texts)}; name one with --text-key" if texts else "it has no text"
            raise DataError(f"{at}: no text under the key {text_key!r}; {hint}")
        try:
            yield text.encode("utf-8")
        except UnicodeEncodeError:  # "\ud83d\ude00" is one character in two halves; a lone half is none
            yield text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode("utf-8")
