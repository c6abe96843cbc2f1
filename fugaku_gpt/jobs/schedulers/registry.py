"""The schedulers by name. A scheduler's module is imported when it is asked for."""

from __future__ import annotations

import importlib
from typing import cast

from fugaku_gpt.errors import UsageError
from fugaku_gpt.jobs.schedulers.protocol import Scheduler

_PLACES = {"pjm": "PjmScheduler", "slurm": "SlurmScheduler", "local": "LocalScheduler"}
NAMES = tuple(_PLACES)


def scheduler_named(name: str) -> Scheduler:
    """The scheduler of ``job.scheduler``.

    Raises:
        UsageError: there is none of this name.
    """
    if name not in _PLACES:
        raise UsageError(f"scheduler {name!r}: not known; valid: {', '.join(NAMES)}")
    module = importlib.import_module(f"fugaku_gpt.jobs.schedulers.{name}")
    return cast(Scheduler, getattr(module, _PLACES[name])())
