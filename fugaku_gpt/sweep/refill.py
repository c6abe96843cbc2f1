"""Submits a sweep to its end: whenever jobs have ended, the next ones are submitted, up to the limit in flight."""

from __future__ import annotations

from dataclasses import replace
from typing import Callable, Dict, Iterator, List, Set

from fugaku_gpt.sweep.submit import RunStanding, SubmittedSweep, is_due

# submits the runs for which its argument is True, as far as the limit in flight allows
SubmitChosen = Callable[[Callable[[RunStanding], bool]], SubmittedSweep]


def submit_to_the_end(
    submit: SubmitChosen, resume: bool, pauses: Iterator[float], sleep: Callable[[float], None]
) -> SubmittedSweep:
    """Submit runs until none is left and all jobs have ended; return what was submitted altogether, with the last
    states of the runs.

    Each run is submitted once: one that fails meanwhile, or that its scheduler refuses, is left to the next command.
    Stopping this has no effect on the jobs, and the same command continues.

    Args:
        submit: submits the chosen runs as far as the limit allows, and returns.
        resume: whether runs that had failed before are submitted again.
        pauses: seconds between two queries.
        sleep: is called with each pause.
    """
    tried: Set[str] = set()
    job_ids: Dict[str, List[str]] = {}
    refused: Dict[str, str] = {}

    def is_chosen(standing: RunStanding) -> bool:
        return standing.run.name not in tried and is_due(standing, resume)

    while True:
        submission = submit(is_chosen)
        job_ids.update(submission.job_ids)
        refused.update(submission.refused)
        tried |= {*submission.job_ids, *submission.refused}
        total = replace(submission, job_ids=job_ids, refused=refused)
        is_waiting = submission.job_ids or any(standing.in_flight for standing in submission.standings)
        if submission.stop_reason or not (is_waiting or (submission.remaining and submission.refused)):
            return total
        sleep(next(pauses))
