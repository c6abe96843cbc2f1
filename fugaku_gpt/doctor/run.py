"""Reports what happened to a run, from its result, its metrics, and the flight recorders of its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import List

from fugaku_gpt.doctor.hang import report_of_flights, run_directory
from fugaku_gpt.hang.diagnosis import describe_ranks, read_flights
from fugaku_gpt.records.run import HUNG, OK, REFUSED, RunDirectory


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of a run directory.

    Attributes:
        result: how the run ended, in one line.
        last: its last finished iteration, in one line.
        node: host of the failure that ended it; empty if there is no single one, or if it is unknown.
        last_checkpoint: the checkpoint from which it can be resumed; empty if there is none, or the run ended well.
        findings: lines about the cause; empty for a run that ended well.
    """

    result: str
    last: str
    findings: List[str]
    node: str = ""
    last_checkpoint: str = ""


def diagnose(path: Path) -> Diagnosis:
    """Reads the directory of a run that has ended or is still running.

    The cause is the one in ``result.json``, which the run's ranks or their launcher have written; nothing is decided
    here but who hung. The cause of a job's end is found by :func:`fugaku_gpt.jobs.outcome.job_outcome`.

    Raises:
        UsageError: it is no run directory, or a file in it is damaged.
    """
    directory = run_directory(path)
    result = directory.result()
    result_text = "no result: still running, or killed before it could record one"
    if result is not None:
        result_text = f"{result.status}{': ' + result.reason if result.reason else ''} ({result.iterations} iterations)"
    findings = []
    if result is None or result.status not in (OK, REFUSED):  # otherwise there is nothing to explain
        flights = read_flights(directory.flight_dir)
        if flights:
            report = report_of_flights(directory, flights)
            findings = [report.verdict]
            if report.hang is not None:
                findings.append(f"`fugaku-gpt doctor hang {path}` shows which ranks wait for which")
            if report.hang is not None and report.hang.missing:
                findings.insert(1, f"{describe_ranks(report.hang.missing)} left no record")
        elif result is None or result.status == HUNG:  # only the recorders could explain it
            findings.append("no flight recorders: node.flight_recorder is off, or no rank made a call")
    last = last_iteration_line(directory)
    if result is None:
        return Diagnosis(result_text, last, findings, last_checkpoint=directory.last_checkpoint())
    return Diagnosis(result_text, last, findings, result.node, result.last_checkpoint)


def last_iteration_line(directory: RunDirectory) -> str:
    """The last finished iteration as a line: its number, loss and time."""
    lines = directory.metrics("iteration")
    if not lines:
        return "no iteration was finished"
    line = lines[-1]
    loss = "not a number" if line.get("loss") is None else f"{line['loss']:.4f}"
    return f"iteration {line.get('iteration')}, loss {loss}, {line.get('seconds', 0.0):.4g} s per iteration"
