"""The output of ``sweep submit --dry-run``: a table of the jobs, and their notes once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List, Sequence

from fugaku_gpt.cli.output import echo, echo_script, render_rows
from fugaku_gpt.cli.sweep_runs import total_text
from fugaku_gpt.config.values import format_duration
from fugaku_gpt.sweep.expand import Sweep

if TYPE_CHECKING:
    from fugaku_gpt.sweep.expand import Run
    from fugaku_gpt.sweep.submit import PlannedJob, RunStanding

_COLUMNS = ("run", "scheduler", "nodes", "billed", "elapse", "jobs", "node_hours", "refused")


def print_jobs(
    expanded: Sweep, standings: Sequence["RunStanding"], planned: Sequence["PlannedJob"], scripts: bool
) -> None:
    """Print one row for each job that would be submitted, and for each row that no job can be made of.

    Args:
        scripts: whether the scripts are printed after the table.
    """
    refused = [run for run in expanded.runs if run.config is None]
    rows = [_row(planned_run) for planned_run in planned]
    rows += [{"run": run.name, "refused": run.refusal} for run in refused]
    if rows:
        echo(render_rows(_COLUMNS, rows, "table"))
    for note, count in _counted_notes(planned).items():
        share = "" if count == len(planned) else f" ({count} of {len(planned)} jobs)"
        echo(f"note{share}: {note}")
    for planned_run in planned if scripts else ():
        if planned_run.job is not None:
            echo(f"{planned_run.job.directory}/{planned_run.job.script}:")
            echo_script(planned_run.job.text)
            echo()
    skipped = len(standings) - len(planned) - len(refused)
    skipped_text = f"; {skipped} with a result or a job stay as they are" if skipped else ""
    echo(f"total: {total_text(planned)}, {len(refused)} refused{skipped_text}; nothing was written")


def print_notes(runs: Sequence["Run"]) -> None:
    """Print once, on standard error, what the runs were given that their rows do not state."""
    for note in dict.fromkeys(note for run in runs for note in run.notes):
        echo(f"note: {note}", err=True)


def _row(planned: "PlannedJob") -> Dict[str, Any]:
    from fugaku_gpt.jobs.billing import billed_nodes

    if planned.job is None:
        return {"run": planned.run.name, "refused": planned.refusal}
    job, hours = planned.job.config.job, planned.job.node_hours
    return {
        "run": planned.run.name,
        "scheduler": job.scheduler,
        "nodes": job.nodes,
        "billed": billed_nodes(job),
        "elapse": format_duration(job.elapse) if job.elapse is not None else None,
        "jobs": f"{job.chain} links" if job.chain > 1 else f"sub-jobs {job.bulk}" if job.bulk else 1,
        "node_hours": f"{hours:.4g}" if hours is not None else None,
    }


def _counted_notes(planned: Sequence["PlannedJob"]) -> Dict[str, int]:
    """Each note with the number of jobs that have it, in the order of their first appearance."""
    notes: List[str] = [note for run in planned if run.job is not None for note in run.job.notes]
    counts: Dict[str, int] = {}
    for note in notes:
        counts[note] = counts.get(note, 0) + 1
    return counts
