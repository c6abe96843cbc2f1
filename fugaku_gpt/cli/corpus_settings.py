"""The run that a command plans, with the vocabulary of its corpora."""

from __future__ import annotations

from fugaku_gpt.cli.output import echo
from fugaku_gpt.config import RunConfig
from fugaku_gpt.config.source import RunSource


def load_with_vocabulary(source: RunSource, *, check: bool = False) -> RunConfig:
    """Load the run that a plan is made for, as :func:`fugaku_gpt.data.corpus_settings.load_for_plan`; prints its notes.

    Raises:
        ConfigError: the file, the preset or an override is not valid.
    """
    from fugaku_gpt.data.corpus_settings import load_for_plan

    config, notes = load_for_plan(source, check=check)
    for note in notes:
        echo(f"note: {note}", err=True)
    return config
