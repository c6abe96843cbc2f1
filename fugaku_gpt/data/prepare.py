"""``data prepare``: makes a folder of tokens from text, completely or not at all.

The folder is built under a hidden name beside its final one and renamed at the end. It has
``corpus.bin`` and ``corpus.idx`` (Megatron's format), ``tokenizer.json`` and ``manifest.json``.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, Optional, Sequence, Tuple

from fugaku_gpt.data.corpus import CORPUS, MANIFEST, MANIFEST_VERSION, TOKENIZER, open_corpus, read_manifest
from fugaku_gpt.data.corpus_folder import CORPUS_FILES, publish, sha256_of, temporary_folder
from fugaku_gpt.data.indexed import IndexedWriter, bin_file, idx_file
from fugaku_gpt.data.progress import Advance, show_progress
from fugaku_gpt.data.sources import ReadOptions, SourceCounts, SourceFile, SourceFiles, find_files, read_documents
from fugaku_gpt.data.tokenizer import END_OF_DOCUMENT, SMALLEST_VOCABULARY, Encoder, train_tokenizer
from fugaku_gpt.data.workers import encode_documents
from fugaku_gpt.errors import DataError
from fugaku_gpt.input_files import resolved
from fugaku_gpt.records.files import write_json_atomically

TOKENIZER_MIB = 256  # text in the shuffled order that suffices to train a tokenizer


@dataclass(frozen=True)
class CorpusRequest:
    """The corpus to prepare, and the options of the preparation.

    Attributes:
        out: folder of the corpus.
        sources, stdlib, suffixes: sources of the text (see :mod:`fugaku_gpt.data.sources`).
        text_keys: keys of the texts of a record, which are put together with a blank line between.
        tokenizer: tokenizer.json to use; None: train one.
        vocab_size: vocabulary size of a tokenizer that is trained.
        seed: seed of the order of files.
        limit_mib: MiB of text after which to stop; None: no limit.
        workers: number of processes that encode, without effect on the result.
        force: replace an existing corpus.
        end_token: token of ``tokenizer`` that ends documents; None: see :mod:`fugaku_gpt.data.end_token`.
        skip_bad: leave damaged records and files out, and count them.
        deduplicate: leave documents out that are equal to an earlier one, byte for byte, and count them.
    """

    out: Path
    sources: Tuple[Path, ...]
    stdlib: bool
    suffixes: Tuple[str, ...]
    text_keys: Tuple[str, ...]
    tokenizer: Optional[Path]
    vocab_size: int
    seed: int
    limit_mib: Optional[float]
    workers: int
    force: bool
    end_token: Optional[str] = None
    skip_bad: bool = False
    deduplicate: bool = False

    @property
    def reading(self) -> ReadOptions:
        """How its documents are read."""
        return ReadOptions(self.text_keys, self.skip_bad, self.deduplicate)


def prepare(request: CorpusRequest) -> Tuple[Dict[str, Any], bool]:
    """Prepare a corpus unless the same one exists; return its manifest, and whether it existed.

    Raises:
        DataError: a source or the tokenizer cannot be used, the text is empty, or ``out`` has other contents.
    """
    if not request.sources and not request.stdlib:
        raise DataError("nothing to prepare: name files or folders, or --stdlib")
    if request.tokenizer is None and request.vocab_size < SMALLEST_VOCABULARY:
        raise DataError(
            f"--vocab-size {request.vocab_size}: a byte-level vocabulary has at least {SMALLEST_VOCABULARY} tokens, "
            "the bytes and the end of a document"
        )
    if request.tokenizer is None and request.end_token is not None:
        raise DataError(
            f"--end-token {request.end_token}: is a token of --tokenizer; documents end in {END_OF_DOCUMENT} where a "
            "tokenizer is trained"
        )
    if len(set(request.text_keys)) < len(request.text_keys):
        raise DataError(f"--text-key {' --text-key '.join(request.text_keys)}: a key is given twice")
    end_name = END_OF_DOCUMENT
    if request.tokenizer is not None:  # an invalid one is refused before any other work
        end_name = Encoder(request.tokenizer, request.end_token).end_name
    sources = find_files(request.sources, request.stdlib, request.suffixes, request.seed)
    made_from = {"options": _options(request), "sources": _summary(request, sources.files)}
    existing_manifest = _existing_manifest(request, made_from, end_name)
    if existing_manifest is not None:
        return existing_manifest, True
    out_folder = Path(os.path.realpath(request.out))  # so that the temporary folder is beside "." or a link, not in it
    with temporary_folder(out_folder) as folder:
        manifest = _build(request, sources, made_from, end_name, folder)
        publish(folder, out_folder)
    return manifest, False


def _options(request: CorpusRequest) -> Dict[str, Any]:
    """The options that change the tokens."""
    tokenizer = request.tokenizer
    return {
        "tokenizer": None if tokenizer is None else {"name": tokenizer.name, "sha256": sha256_of([tokenizer])},
        "vocab_size": request.vocab_size if tokenizer is None else None,
        "text_key": request.text_keys[0] if len(request.text_keys) == 1 else list(request.text_keys),
        "suffixes": list(request.suffixes),
        "seed": request.seed,
        "limit_mib": request.limit_mib,
        # None stands for the absence of the key in older manifests
        "end_token": request.end_token,
        "skip_bad": request.skip_bad or None,
        "deduplicate": request.deduplicate or None,
    }


def _summary(request: CorpusRequest, files: Sequence[SourceFile]) -> Dict[str, Any]:
    """The sources without this machine's paths, with a digest that changes when a file does."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.label}\0{file.size}\0{file.modified}\n".encode("utf-8", "surrogateescape"))
    return {
        "names": [resolved(source).name for source in request.sources],
        "stdlib": f"Python {platform.python_version()}" if request.stdlib else None,
        "files": len(files),
        "disk_bytes": sum(file.size for file in files),
        "state_sha256": digest.hexdigest(),
    }


def _existing_manifest(request: CorpusRequest, made_from: Dict[str, Any], end_name: str) -> Optional[Dict[str, Any]]:
    """The manifest of an existing corpus at ``out`` that equals the requested one; None if ``out`` can be written.

    Raises:
        DataError: ``out`` has other contents, and ``force`` is off or must not remove them.
    """
    out = request.out
    if not os.path.lexists(out):
        return None
    if not out.is_dir() or not CORPUS_FILES.issuperset(os.listdir(out)):
        raise DataError(f"{out}: is there and is not a prepared corpus, so it is left alone; choose another --out")
    if request.force or not os.listdir(out):
        return None
    open_corpus(str(out))  # refuses a damaged corpus with its own message
    manifest = read_manifest(out)
    has_other_files = manifest.get("sources") != made_from["sources"]
    differences = [
        f"{key} {stored!r}, not {requested!r}"
        for key, requested in made_from["options"].items()
        for stored in [(manifest.get("options") or {}).get(key)]
        if stored != requested and (key != "suffixes" or has_other_files)
    ]
    stored_end = (manifest.get("end_of_document") or {}).get("token")
    if stored_end != end_name:
        differences.append(f"the end of documents {stored_end!r}, not {end_name!r}")
    if has_other_files:
        differences.append("other sources, or files that have changed since")
    if differences:
        differing = "; ".join(differences)
        raise DataError(
            f"{out}: holds a corpus prepared with {differing}; choose another --out, or replace it with --force"
        )
    return manifest


def _build(
    request: CorpusRequest, sources: SourceFiles, made_from: Dict[str, Any], end_name: str, folder: Path
) -> Dict[str, Any]:
    files = sources.files
    limit = None if request.limit_mib is None else int(request.limit_mib * 2**20)
    total = sum(file.size for file in files)
    tokenizer = folder / TOKENIZER
    if request.tokenizer is not None:
        shutil.copyfile(request.tokenizer, tokenizer)
    else:
        counts = SourceCounts()
        tokenizer_bytes = TOKENIZER_MIB << 20 if limit is None else min(limit, TOKENIZER_MIB << 20)
        with show_progress("tokenizer", min(total, tokenizer_bytes)) as advance:
            documents = read_documents(files, request.reading, tokenizer_bytes, counts)
            train_tokenizer(_with_progress(documents, counts, advance), request.vocab_size, tokenizer)
        _refuse_no_text(counts, files)
    encoder = Encoder(tokenizer, end_name)
    counts = SourceCounts()
    totals = {"documents": 0, "tokens": 0}
    with show_progress("tokens", total if limit is None else min(total, limit)) as advance:
        documents = _with_progress(read_documents(files, request.reading, limit, counts), counts, advance)
        with IndexedWriter(folder / CORPUS, encoder.dtype) as writer:
            for ids in encode_documents(documents, tokenizer, request.workers, end_name):
                writer.add_document(ids)
                totals["documents"] += 1
                totals["tokens"] += len(ids)
            _refuse_no_text(counts, files)
    manifest = {
        "version": MANIFEST_VERSION,
        **totals,
        "text_bytes": counts.bytes,
        "files": counts.files,
        "empty_documents": counts.empty,
        "duplicate_documents": counts.duplicates,
        "text_keys_never_met": counts.keys_never_met,
        "undecodable_files": len(counts.undecodable),
        "undecodable_examples": counts.undecodable[:5],
        "bad_records": counts.bad,
        "bad_examples": counts.bad_examples,
        "left_out": sources.left_out,
        "vocab_size": encoder.vocab_size,
        "end_of_document": {"id": encoder.end, "token": encoder.end_name},
        "dtype": encoder.dtype.name,
        "tokenizer_sha256": sha256_of([tokenizer]),
        "fingerprint": sha256_of([bin_file(folder / CORPUS), idx_file(folder / CORPUS)]),
        **made_from,
    }
    write_json_atomically(folder / MANIFEST, manifest)
    return manifest


def _refuse_no_text(counts: SourceCounts, files: Sequence[SourceFile]) -> None:
    if counts.bytes == 0:
        undecodable = (
            f", {len(counts.undecodable)} of them not UTF-8 text, or with NUL bytes" if counts.undecodable else ""
        )
        names = ", ".join(str(file.path) for file in files[:3]) + (", ..." if len(files) > 3 else "")
        bad = f"; {counts.bad} bad ones were left out, such as {counts.bad_examples[0]}" if counts.bad else ""
        raise DataError(f"no text in {len(files)} file(s){undecodable}: {names}{bad}")


def _with_progress(documents: Iterable[bytes], counts: SourceCounts, advance: Advance) -> Iterator[bytes]:
    for document in documents:
        yield document
        advance(counts.disk_bytes)
