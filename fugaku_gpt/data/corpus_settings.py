"""The vocabulary and the validation of a run that states none: those of its corpora."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import List, Optional, Sequence, Tuple

from fugaku_gpt.config import RunConfig
from fugaku_gpt.config.source import RunSource
from fugaku_gpt.data.run_validation import validation_of_run
from fugaku_gpt.data.run_vocabulary import vocabulary_of_run
from fugaku_gpt.errors import DataError


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
        notes.append(vocabulary.note)
        config = source.load(*chosen)
    validation, note = validation_of_run(source, config)
    return source.load(*chosen, *validation) if validation else config, [*notes, *filter(None, [note])]


def load_for_plan(source: RunSource, *, check: bool = False) -> Tuple[RunConfig, List[str]]:
    """Load the run that a plan is made for, with the vocabulary of its corpora where it states none, and a note on it.

    A corpus that cannot be read here decides nothing: a plan needs none.

    Raises:
        ConfigError: the file, the preset or an override is not valid.
    """
    config = source.load(check=check)
    with contextlib.suppress(DataError):
        vocabulary = vocabulary_of_run(source, config, None)
        if vocabulary is not None:
            return source.load(f"model.vocab_size={vocabulary.size}", check=check), [vocabulary.note]
    return config, []
