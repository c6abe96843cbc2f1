"""The vocabulary and the validation of a run that states none: those of its corpora."""

from __future__ import annotations

from pathlib import Path
from typing import List, Optional, Sequence, Tuple

from fugaku_gpt.cli.options import RunSource
from fugaku_gpt.cli.validation import validation_of_run
from fugaku_gpt.cli.vocabulary import vocabulary_of_run
from fugaku_gpt.config import RunConfig


def with_corpus_settings(
    source: RunSource, config: RunConfig, overrides: Sequence[str] = (), resume_from: Optional[Path] = None
) -> Tuple[RunConfig, List[str]]:
    """The run with the vocabulary and the validation that its corpora have where it states none, and notes on both.

    Args:
        source: where the run's configuration comes from.
        config: the run, as ``source`` and ``overrides`` make it.
        overrides: ``key=value`` texts over ``source``.
        resume_from: run directory or checkpoint that the run resumes from, or None.

    Raises:
        DataError: a corpus is damaged.
    """
    chosen, notes = list(overrides), []
    vocabulary = vocabulary_of_run(source, config, resume_from)
    if vocabulary is not None:
        chosen.append(f"model.vocab_size={vocabulary.size}")
        notes.append(f"model.vocab_size is {vocabulary.size}, that of {vocabulary.origin}")
        config = source.load(*chosen)
    validation, note = validation_of_run(source, config)
    return source.load(*chosen, *validation) if validation else config, [*notes, *filter(None, [note])]
