"""The schedulers by name, and the ids of recorded jobs as their schedulers read and write them.

The module of a scheduler is imported on first use.
"""

from __future__ import annotations

import importlib
import shutil
from typing import Callable, List, Optional, Type, cast

from fugaku_gpt.errors import UsageError
from fugaku_gpt.jobs.schedulers.protocol import JobId, Scheduler
from fugaku_gpt.records.job import SubmittedJob, bulk_numbers

_CLASSES = {"pjm": "PjmScheduler", "slurm": "SlurmScheduler", "local": "LocalScheduler"}
NAMES = tuple(_CLASSES)


def scheduler_named(name: str) -> Scheduler:
    """Return the scheduler that ``job.scheduler`` names.

    Raises:
        UsageError: there is no scheduler with this name.
    """
    return cast(Callable[[], Scheduler], _scheduler_class(name))()


def sub_job_ids(job: SubmittedJob) -> List[str]:
    """Return the ids under which a job's scripts leave their exit records: its own id, or those of its sub-jobs in the
    order of their numbers.

    Raises:
        UsageError: the scheduler of a bulk job does not exist.
    """
    if not job.bulk:
        return [job.job_id]
    scheduler = _scheduler_class(job.scheduler)
    return [scheduler.sub_job_id(job.job_id, index) for index in bulk_numbers(job.bulk)]


def read_job_id(scheduler: str, text: str) -> Optional[JobId]:
    """Parse a recorded id as its scheduler does; None if it is not an id of this scheduler.

    Raises:
        UsageError: there is no scheduler with this name.
    """
    reader = _scheduler_class(scheduler)
    try:
        return reader.parse_job_id(text)
    except UsageError:
        return None


def is_present(name: str) -> bool:
    """Whether this machine has the command by which a scheduler is asked.

    Raises:
        UsageError: there is no scheduler with this name.
    """
    command = _scheduler_class(name).query_command
    return not command or shutil.which(command) is not None


def is_job_id(text: str) -> bool:
    """Whether the text is a job id of any scheduler."""
    return any(read_job_id(name, text) is not None for name in NAMES)


def _scheduler_class(name: str) -> Type[Scheduler]:
    if name not in _CLASSES:
        raise UsageError(f"scheduler {name!r}: not known; valid: {', '.join(NAMES)}")
    module = importlib.import_module(f"fugaku_gpt.jobs.schedulers.{name}")
    return cast(Type[Scheduler], getattr(module, _CLASSES[name]))
