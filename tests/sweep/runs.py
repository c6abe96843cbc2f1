"""Questions that tests ask about the runs of a sweep."""

from __future__ import annotations

from typing import List

from fugaku_gpt.sweep.expand import Sweep


def names(sweep: Sweep) -> List[str]:
    """The names of a sweep's runs, in order."""
    return [run.name for run in sweep.runs]
