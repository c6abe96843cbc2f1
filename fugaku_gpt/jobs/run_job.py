"""The job of a run file: its run as a job starts it, and the directory that it gets where none is named."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import List, Sequence, Tuple

from fugaku_gpt.config import RunConfig
from fugaku_gpt.config.source import RunSource
from fugaku_gpt.data.corpus_settings import with_corpus_settings
from fugaku_gpt.environments.registry import with_profile_file
from fugaku_gpt.errors import DataError

STORE = Path("runs")


def job_of_run(source: RunSource, overrides: Sequence[str] = ()) -> Tuple[RunConfig, List[str]]:
    """Load a run for a job, with its profile as the path of a file that exists, and notes on what was chosen for it.

    Vocabulary and validation are those of its corpora where it states none, as with `train`; notes say so. A corpus
    that cannot be read here decides nothing.

    Args:
        overrides: ``key=value`` texts over the source.

    Raises:
        ConfigError: the file, the preset or an override is not valid.
    """
    config = source.load(*overrides)
    notes: List[str] = []
    with contextlib.suppress(DataError):  # the job's notes name it, and it is not submitted
        config, notes = with_corpus_settings(source, config, overrides)
    return with_profile_file(config, source.run_file), notes


def default_directory(name: str) -> Path:
    """The run directory of a job with this name, where none is given: a new one in the folder ``runs``."""
    return STORE / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
