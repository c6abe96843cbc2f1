"""The vocabulary of a run that does not state one: that of the checkpoint it resumes from, or of its corpora."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Optional

from fugaku_gpt.config import RunConfig
from fugaku_gpt.config.source import RunSource
from fugaku_gpt.errors import CheckpointError

if TYPE_CHECKING:
    from fugaku_gpt.data.vocabulary import Vocabulary


def vocabulary_of_run(source: RunSource, config: RunConfig, resume_from: Optional[Path]) -> "Optional[Vocabulary]":
    """The vocabulary that a run is to have in place of ``model.vocab_size``; None if that one stays.

    A size in the run file or on the command line stays, and so does that of a preset if the corpora fit into it.

    Args:
        source: where the run's configuration comes from.
        config: the run.
        resume_from: run directory or checkpoint that the run resumes from, or None.

    Raises:
        DataError: a corpus is damaged.
    """
    from fugaku_gpt.data.vocabulary import is_vocabulary_stated, vocabulary_of_corpora

    written = source.written_keys()
    if resume_from is not None and not is_vocabulary_stated(written):
        resumed = _vocabulary_of_checkpoint(resume_from)
        if resumed is not None:
            return resumed if resumed.size != config.model.vocab_size else None
    return vocabulary_of_corpora(config, written)


def _vocabulary_of_checkpoint(path: Path) -> "Optional[Vocabulary]":
    """The vocabulary of the newest checkpoint at a path; None if there is none."""
    from fugaku_gpt.checkpoint.manifest import read_manifest
    from fugaku_gpt.checkpoint.recorded_model import recorded_model
    from fugaku_gpt.checkpoint.retention import checkpoints_at
    from fugaku_gpt.data.vocabulary import Vocabulary

    try:
        checkpoint = checkpoints_at(path)[0]
        size = recorded_model(checkpoint, read_manifest(checkpoint)).vocab_size
    except (CheckpointError, FileNotFoundError):  # the ranks report it
        return None
    return Vocabulary(size, f"the checkpoint {checkpoint}")
