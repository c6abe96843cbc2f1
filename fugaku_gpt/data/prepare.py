"""``data prepare``: text in, a folder of tokens out, whole or not at all.

The folder is built under a hidden name beside its place and moved there at the end:
``corpus.bin`` and ``corpus.idx`` (Megatron's format), ``tokenizer.json`` and ``manifest.json``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

from fugaku_gpt.data.corpus import CORPUS, MANIFEST, MANIFEST_VERSION, TOKENIZER, open_corpus, read_manifest
from fugaku_gpt.data.indexed import IndexedWriter, bin_file, idx_file
from fugaku_gpt.data.progress import Advance, show_progress
from fugaku_gpt.data.sources import SourceFile, SourceCounts, find_files, read_documents
from fugaku_gpt.data.tokenizer import SMALLEST_VOCABULARY, Encoder, train_tokenizer
from fugaku_gpt.data.workers import encode_documents
from fugaku_gpt.errors import DataError
from fugaku_gpt.records.files import write_json_atomically

_OURS = frozenset((bin_file(Path(CORPUS)).name, idx_file(Path(CORPUS)).name, TOKENIZER, MANIFEST))
TOKENIZER_MIB = 256  # of text, in the shuffled order, is enough to train a tokenizer


@dataclass(frozen=True)
class CorpusRequest:
    """What to prepare, and how.

    Attributes:
        out: the folder to make.
        sources, stdlib, suffixes, text_key: where the text is (see :mod:`fugaku_gpt.data.sources`).
        tokenizer: a tokenizer.json to use; None trains one.
        vocab_size: of a tokenizer that is trained.
        seed: of the order of files.
        limit_mib: stop after this much text; None takes all.
        workers: processes that encode; they do not change the result.
        force: replace a corpus that is there.
    """

    out: Path
    sources: Tuple[Path, ...]
    stdlib: bool
    suffixes: Tuple[str, ...]
    text_key: str
    tokenizer: Optional[Path]
    vocab_size: int
    seed: int
    limit_mib: Optional[float]
    workers: int
    force: bool


def prepare(request: CorpusRequest) -> Tuple[Dict[str, Any], bool]:
    """Make the folder, or find that it is there: (its manifest, whether it was there).

    Raises:
        DataError: a source or the tokenizer cannot be used, the text is empty, or something else is at ``out``.
    """
    if not request.sources and not request.stdlib:
        raise DataError("nothing to prepare: name files or folders, or --stdlib")
    if request.tokenizer is None and request.vocab_size < SMALLEST_VOCABULARY:
        raise DataError(
            f"--vocab-size {request.vocab_size}: a byte-level vocabulary has at least {SMALLEST_VOCABULARY} tokens, "
            "the bytes and the end of a document"
        )
    if request.tokenizer is not None:
        Encoder(request.tokenizer)  # refuse a bad one before anything else
    files = find_files(request.sources, request.stdlib, request.suffixes, request.seed)
    made_from = {"options": _options(request), "sources": _summary(request, files)}
    present = _present(request, made_from)
    if present is not None:
        return present, True
    place = Path(os.path.realpath(request.out))  # beside "." or a link, not in it
    with _folder_in_the_making(place) as folder:
        manifest = _build(request, files, made_from, folder)
        _move(folder, place)
    return manifest, False


def _options(request: CorpusRequest) -> Dict[str, Any]:
    """What changes the tokens, besides the text."""
    given = request.tokenizer
    return {
        "tokenizer": None if given is None else {"name": given.name, "sha256": _sha256([given])},
        "vocab_size": request.vocab_size if given is None else None,
        "text_key": request.text_key,
        "suffixes": list(request.suffixes),
        "seed": request.seed,
        "limit_mib": request.limit_mib,
    }


def _summary(request: CorpusRequest, files: Sequence[SourceFile]) -> Dict[str, Any]:
    """The sources without this machine's paths, and a digest that changes when a file does."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.label}\0{file.size}\0{file.modified}\n".encode("utf-8", "surrogateescape"))
    return {
        "names": [source.resolve().name for source in request.sources],
        "stdlib": f"Python {platform.python_version()}" if request.stdlib else None,
        "files": len(files),
        "disk_bytes": sum(file.size for file in files),
        "state_sha256": digest.hexdigest(),
    }


def _present(request: CorpusRequest, made_from: Dict[str, Any]) -> Optional[Dict[str, Any]]:
    """The manifest of what is at ``out`` if it is just what was asked for; None if the way is free.

    Raises:
        DataError: something else is there, and ``force`` is off or must not remove it.
    """
    out = request.out
    if not os.path.lexists(out):
        return None
    if not out.is_dir() or not _OURS.issuperset(os.listdir(out)):
        raise DataError(f"{out}: is there and is not a prepared corpus, so it is left alone; choose another --out")
    if request.force or not os.listdir(out):
        return None
    open_corpus(str(out))  # a damaged one is refused with its own message
    manifest = read_manifest(out)
    changed = [
        f"{key} {there!r}, not {here!r}"
        for key, here in made_from["options"].items()
        for there in [(manifest.get("options") or {}).get(key)]
        if there != here
    ]
    if manifest.get("sources") != made_from["sources"]:
        changed.append("other sources, or files that have changed since")
    if changed:
        differing = "; ".join(changed)
        raise DataError(
            f"{out}: holds a corpus prepared with {differing}; choose another --out, or replace it with --force"
        )
    return manifest


def _build(request: CorpusRequest, files: Sequence[SourceFile], made_from: Dict[str, Any], folder: Path) -> Dict[str, Any]:
    limit = None if request.limit_mib is None else int(request.limit_mib * 2**20)
    total = sum(file.size for file in files)
    tokenizer = folder / TOKENIZER
    if request.tokenizer is not None:
        shutil.copyfile(request.tokenizer, tokenizer)
    else:
        tally = SourceCounts()
        cap = TOKENIZER_MIB << 20 if limit is None else min(limit, TOKENIZER_MIB << 20)
        with show_progress("tokenizer", min(total, cap)) as advance:
            documents = read_documents(files, request.text_key, cap, tally)
            train_tokenizer(_watched(documents, tally, advance), request.vocab_size, tokenizer)
        _refuse_no_text(tally, files)
    encoder = Encoder(tokenizer)
    tally = SourceCounts()
    counts = {"documents": 0, "tokens": 0}
    with show_progress("tokens", total if limit is None else min(total, limit)) as advance:
        documents = _watched(read_documents(files, request.text_key, limit, tally), tally, advance)
        with IndexedWriter(folder / CORPUS, encoder.dtype) as writer:
            for ids in encode_documents(documents, tokenizer, request.workers):
                writer.add_document(ids)
                counts["documents"] += 1
                counts["tokens"] += len(ids)
            _refuse_no_text(tally, files)
    manifest = {
        "version": MANIFEST_VERSION,
        **counts,
        "text_bytes": tally.bytes,
        "files": tally.files,
        "empty_documents": tally.empty,
        "undecodable_files": len(tally.undecodable),
        "undecodable_examples": tally.undecodable[:5],
        "vocab_size": encoder.vocab_size,
        "end_of_document": {"id": encoder.end, "token": encoder.end_name},
        "dtype": encoder.dtype.name,
        "tokenizer_sha256": _sha256([tokenizer]),
        "fingerprint": _sha256([bin_file(folder / CORPUS), idx_file(folder / CORPUS)]),
        **made_from,
    }
    write_json_atomically(folder / MANIFEST, manifest)
    return manifest


def _refuse_no_text(tally: SourceCounts, files: Sequence[SourceFile]) -> None:
    if tally.bytes == 0:
        undecodable = f", {len(tally.undecodable)} of them not UTF-8 text" if tally.undecodable else ""
        names = ", ".join(str(file.path) for file in files[:3]) + (", ..." if len(files) > 3 else "")
        raise DataError(f"no text in {len(files)} file(s){undecodable}: {names}")


def _watched(documents: Iterable[bytes], tally: SourceCounts, advance: Advance) -> Iterator[bytes]:
    for document in documents:
        yield document
        advance(tally.disk_bytes)


def _sha256(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as stream:
            for block in iter(lambda: stream.read(1 << 20), b""):
                digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def _folder_in_the_making(out: Path) -> Iterator[Path]:
    """A hidden folder beside ``out``, removed however the block ends; what SIGKILL leaves is removed the next time."""
    host = socket.gethostname()
    folder = out.with_name(f".{out.name}.{host}.{os.getpid()}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for left in _left_over(out, host):
            shutil.rmtree(left, ignore_errors=True)
        folder.mkdir()
    except OSError as error:
        raise DataError(f"{out}: cannot be made: {error.strerror}: {error.filename}") from None
    try:
        with _termination_as_interrupt():
            yield folder
    except OSError as error:
        raise DataError(f"{out}: cannot be written: {error.strerror or error}; nothing was left behind") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _left_over(out: Path, host: str) -> List[Path]:
    """Folders in the making whose process, of this machine, is gone."""
    left = []
    for path in out.parent.iterdir():
        head, tail = f".{out.name}.{host}.", ".tmp"
        if path.name.startswith(head) and path.name.endswith(tail):
            pid = path.name[len(head) : -len(tail)]
            if pid.isdigit() and not _alive(int(pid)):
                left.append(path)
    return left


def _alive(pid: int) -> bool:
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


@contextlib.contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, so that what is half-written is removed before the process ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _move(folder: Path, out: Path) -> None:
    """Put the finished folder in its place; what was there before is looked at by :func:`_present`."""
    old = folder.with_name(folder.name + ".old")
    try:
        if out.exists():
            os.rename(out, old)
        os.rename(folder, out)
    except OSError as error:
        raise DataError(f"{out}: cannot be put in its place: {error.strerror}") from None
    finally:  # whatever came between the two renames, an interrupt too
        if old.exists() and out.exists():
            shutil.rmtree(old, ignore_errors=True)
        elif old.exists():
            os.rename(old, out)
    if hasattr(os, "O_DIRECTORY"):
        directory = os.open(out.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)  # the rename itself survives a crash
        except OSError as error:  # some network file systems cannot
            print(f"fugaku-gpt: {out.parent}: not flushed: {error.strerror}", file=sys.stderr)
        finally:
            os.close(directory)
