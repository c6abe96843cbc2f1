"""The vocabulary of a run that does not state one: that of the checkpoint it resumes from, or of its corpora."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Optional

from fugaku_gpt.cli.options import RunSource
from fugaku_gpt.config import RunConfig
from fugaku_gpt.errors import CheckpointError

_KEY = "model.vocab_size"


class Vocabulary(NamedTuple):
    """A vocabulary for ``model.vocab_size``, and where it is from."""

    size: int
    origin: str


def vocabulary_of_run(source: RunSource, config: RunConfig, resume_from: Optional[Path]) -> Optional[Vocabulary]:
    """The vocabulary that a run is to have in place of ``model.vocab_size``; None if that one stays.

    A size in the run file or on the command line stays, and so does that of a preset if the corpora fit into it.

    Args:
        source: where the run's configuration comes from.
        config: the run.
        resume_from: run directory or checkpoint that the run resumes from, or None.

    Raises:
        DataError: a corpus is damaged.
    """
    written = source.written_keys()
    if _KEY in written or "model.padded_vocab_size" in written:
        return None
    size = config.model.vocab_size
    if resume_from is not None:
        resumed = _vocabulary_of_checkpoint(resume_from)
        if resumed is not None:
            return resumed if resumed.size != size else None
    largest = _largest_vocabulary(config)
    if largest is None or largest.size == size or ("preset" in written and largest.size < size):
        return None
    return largest


def _largest_vocabulary(config: RunConfig) -> Optional[Vocabulary]:
    """The largest vocabulary of the corpora's tokenizers; None if they are Megatron pairs, or missing."""
    from fugaku_gpt.data.corpus import read_manifest

    sizes = [
        Vocabulary(int(read_manifest(Path(path))["vocab_size"]), f"the corpus {path}")
        for path in config.data.paths
        if Path(path).is_dir()
    ]
    return max(sizes, default=None)


def _vocabulary_of_checkpoint(path: Path) -> Optional[Vocabulary]:
    """The vocabulary of the newest checkpoint at a path; None if there is none."""
    from fugaku_gpt.checkpoint.manifest import read_manifest
    from fugaku_gpt.checkpoint.retention import checkpoints_at

    try:
        checkpoint = checkpoints_at(path)[0]
        size = read_manifest(checkpoint).config.get("model", {}).get("vocab_size")
    except (CheckpointError, FileNotFoundError):  # the ranks report it
        return None
    return Vocabulary(int(size), f"the checkpoint {checkpoint}") if size is not None else None
