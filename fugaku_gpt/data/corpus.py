"""One corpus as ``data.paths`` names it: a folder made by ``data prepare``, or the prefix of a Megatron pair."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Optional, Sequence

from fugaku_gpt.checkpoint.hugging_face_tokenizer import CorpusTokenizer
from fugaku_gpt.data import indexed
from fugaku_gpt.data.indexed import IndexedCorpus
from fugaku_gpt.errors import DataError
from fugaku_gpt.input_files import open_file
from fugaku_gpt.versioned_json import read_versioned_json

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
CORPUS = "corpus"  # prefix of the pair inside a prepared folder
TOKENIZER = "tokenizer.json"
# samples of a foreign pair's files for its fingerprint: reading all of them would take minutes on every rank
_SAMPLED_BLOCKS, _SAMPLED_BYTES = 16, 4096
_LARGE_INDEX = 2**30  # bytes; a smaller index is read as a whole


@dataclass(frozen=True)
class Corpus:
    """An opened corpus.

    Attributes:
        path: path as it was given.
        index: the tokens.
        manifest: the manifest that ``data prepare`` wrote; None for a foreign pair.
        fingerprint: SHA-256 that changes with the tokens; for a foreign pair, over its index, the size of its tokens,
            and some of them. Of an index above 1 GiB its size and some of its bytes count.
    """

    path: str
    index: IndexedCorpus
    manifest: Optional[Dict[str, Any]]
    fingerprint: str

    @property
    def vocab_size(self) -> Optional[int]:
        """Number of tokens of its tokenizer; None if it is unknown."""
        return int(self.manifest["vocab_size"]) if self.manifest is not None else None

    def older_fingerprint(self) -> str:
        """The fingerprint by versions that read an index as a whole whatever its size, in blocks; it takes seconds for
        each GiB of an index above 1 GiB, and is the fingerprint of today otherwise."""
        if self.manifest is not None or not _is_large(self.index):
            return self.fingerprint
        return _fingerprint_of_pair(self.index, is_sampled=False)

    def damaged_lengths(self, first: int, last: int, problem: str) -> DataError:
        """The error of lengths in the index that cannot be those of the sequences [first, last)."""
        return DataError(
            f"{self.index.idx_path}: damaged: of the lengths of sequences {first} to {last - 1} {problem}; "
            f"`fugaku-gpt data verify {self.path}` names the entry"
        )


def is_corpus(path: str) -> bool:
    """Whether a path names a folder with a manifest, or the prefix of a pair of which at least one file is there; their
    content is not looked at."""
    folder = prepared_folder(path)
    return _has_file_of_pair(_prefix(path)) if folder is None else (folder / MANIFEST).exists()


def prepared_folder(path: str) -> Optional[Path]:
    """The prepared folder that a path names; None if it is the prefix of a pair. A folder beside the files of a pair
    that has its name is Megatron's cache for it."""
    folder = Path(path)
    if not folder.is_dir() or (not (folder / MANIFEST).exists() and _has_file_of_pair(folder)):
        return None
    return folder


def _prefix(path: str) -> Path:
    """The prefix of a pair, which may be written with the suffix of one of its files."""
    prefix = Path(path)
    return prefix.with_suffix("") if prefix.suffix in (".bin", ".idx") and not prefix.is_dir() else prefix


def _has_file_of_pair(prefix: Path) -> bool:
    """Whether a file of a pair is there; "." and "/" have no name, and are the prefix of none."""
    return prefix.name != "" and any(path.exists() for path in (indexed.idx_file(prefix), indexed.bin_file(prefix)))


def open_corpus(path: str) -> Corpus:
    """Open a prepared folder or a Megatron prefix (with or without ``.bin`` or ``.idx``).

    Raises:
        DataError: there is no corpus, or it is damaged.
    """
    folder = prepared_folder(path)
    if folder is not None:
        manifest = read_manifest(folder)
        index = IndexedCorpus(folder / CORPUS)
        if index.tokens != manifest["tokens"] or index.documents != manifest["documents"]:
            raise DataError(
                f"{folder}: {MANIFEST} counts {manifest['tokens']} tokens in {manifest['documents']} documents, "
                f"but the corpus has {index.tokens} in {index.documents}; prepare it again with --force"
            )
        return Corpus(path, index, manifest, str(manifest["fingerprint"]))
    if not is_corpus(path):
        raise DataError(
            f"{path}: neither a folder made by `fugaku-gpt data prepare` nor the prefix of a .bin/.idx pair; "
            "make one with `fugaku-gpt data prepare --stdlib --out DIR`"
        )
    index = IndexedCorpus(_prefix(path))
    return Corpus(path, index, None, _fingerprint_of_pair(index, is_sampled=_is_large(index)))


def _is_large(index: IndexedCorpus) -> bool:
    return index.idx_path.stat().st_size > _LARGE_INDEX


def _fingerprint_of_pair(index: IndexedCorpus, is_sampled: bool) -> str:
    """The fingerprint of a foreign pair; of its index a few bytes count if that is sampled, or else all."""
    digest = hashlib.sha256()
    if is_sampled:
        _add_samples(digest, index.idx_path)
    else:
        with open_file(index.idx_path) as stream:
            for block in iter(lambda: stream.read(1 << 20), b""):
                digest.update(block)
    _add_samples(digest, index.bin_path)
    return digest.hexdigest()


def _add_samples(digest: Any, path: Path) -> None:
    """Add the size of a file and evenly spaced blocks of it to a digest."""
    size = path.stat().st_size
    digest.update(str(size).encode())
    with open_file(path) as stream:
        for number in range(_SAMPLED_BLOCKS):
            stream.seek(max(0, size - _SAMPLED_BYTES) * number // (_SAMPLED_BLOCKS - 1))
            digest.update(stream.read(_SAMPLED_BYTES))


def count_of_sequences(path: str) -> int:
    """Number of sequences of a corpus by one small read, for what every rank asks; 0 if it cannot be read."""
    folder = prepared_folder(path)
    return indexed.count_of_sequences(_prefix(path) if folder is None else folder / CORPUS)


def read_manifest(folder: Path) -> Dict[str, Any]:
    """Read the manifest of a prepared folder.

    Raises:
        DataError: it is missing, or has another version of the format.
    """
    manifest = read_versioned_json(
        folder / MANIFEST,
        "the manifest of a corpus",
        (MANIFEST_VERSION,),
        _checked_manifest,
        mend="prepare again with --force",
        error=DataError,
    )
    if manifest is None:
        raise DataError(
            f"{folder}: has no {MANIFEST}; it is not a folder made by `fugaku-gpt data prepare`: name such a folder, "
            "or the prefix of a .bin/.idx pair"
        )
    return manifest


def tokenizer_of_corpora(paths: Sequence[str]) -> CorpusTokenizer:
    """The tokenizer that all corpora have in common.

    Raises:
        DataError: a corpus is a Megatron pair, which has none, or is missing or damaged; or they have several.
    """
    digests: Dict[str, CorpusTokenizer] = {}
    for path in paths:
        folder = prepared_folder(path)
        if folder is None:
            reason = "a Megatron pair has no tokenizer" if is_corpus(path) else "is not there"
            raise DataError(f"{path}: {reason}")
        manifest = read_manifest(folder)
        end = manifest["end_of_document"]
        digests[str(manifest["tokenizer_sha256"])] = CorpusTokenizer(
            folder / TOKENIZER, int(manifest["vocab_size"]), int(end["id"]), str(end["token"])
        )
    if len(digests) != 1:
        raise DataError(f"{', '.join(paths) or 'no corpus'}: {len(digests)} tokenizers; an exported folder has one")
    return next(iter(digests.values()))


def _checked_manifest(values: Dict[str, Any]) -> Dict[str, Any]:
    """Check the types of the values that readers of a corpus use; return all values.

    Raises:
        ValueError: a value has another type.
    """
    for key, kind in (("tokens", int), ("documents", int), ("vocab_size", int), ("fingerprint", str)):
        if not isinstance(values[key], kind):
            raise ValueError(f"{key} {values[key]!r} is not {'a number' if kind is int else 'a text'}")
    return values
