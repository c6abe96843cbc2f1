"""Explains why a run hangs, from the files that its ranks leave, even after all of them were killed."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional, Sequence

from fugaku_gpt.errors import UsageError
from fugaku_gpt.hang.against_plan import config_or_problem
from fugaku_gpt.hang.diagnosis import (
    Hang,
    describe_call,
    describe_progress,
    describe_ranks,
    read_flights,
)
from fugaku_gpt.hang.ending import Observed, explain_end
from fugaku_gpt.hang.recorders import IN_WAIT, Position
from fugaku_gpt.records.flight import Flight
from fugaku_gpt.records.run import RunDirectory

_RECENT_SECONDS = 60.0  # a run whose files changed within this time may be running
_OBSERVATION_SECONDS = 1.0


@dataclass(frozen=True)
class HangReport:
    """The diagnosis of a hanging run.

    Attributes:
        verdict: the diagnosis in one line.
        hang: the explanation of the hang; None where ranks still make progress.
        moving: ranks that made progress during the examination.
        hosts: rank of a culprit → host and process.
        stacks: rank of a culprit → file of its Python stacks, where it wrote one.
    """

    verdict: str
    hang: Optional[Hang]
    moving: List[int]
    hosts: Dict[int, str]
    stacks: Dict[int, str]


def hang_report(path: Path) -> HangReport:
    """Reads a run directory and reports which ranks wait for which.

    Raises:
        UsageError: it is no run directory, it holds no flight recorders, or a file in it is damaged.
    """
    directory = run_directory(path)
    flights = read_flights(directory.flight_dir)
    if not flights:
        raise UsageError(
            f"{directory.flight_dir}: no flight recorders: no rank made a call, or node.flight_recorder is off"
        )
    return report_of_flights(directory, flights)


def report_of_flights(directory: RunDirectory, flights: Sequence[Flight]) -> HangReport:
    """Report which ranks wait for which, by the flight recorders of a run, which are not empty.

    Raises:
        UsageError: a file of the run is damaged.
    """
    result = directory.result()
    moving = _moving_ranks(directory, flights) if result is None else []
    if moving:
        return HangReport(f"no hang: {describe_ranks(moving)} moved just now", None, moving, {}, {})
    heads = [flight.head for flight in flights]
    observed = Observed(socket.gethostname(), time.time(), result, config_or_problem(directory.config_file))
    hang = explain_end(flights, observed)
    head_of_rank = {head.rank: head for head in heads}
    stacks = {rank: directory.stacks_dir / f"rank-{rank:06d}.txt" for rank in hang.culprits}
    return HangReport(
        hang.verdict,
        hang,
        [],
        {
            rank: f"{head_of_rank[rank].host}, process {head_of_rank[rank].process}"
            for rank in hang.culprits
            if rank in head_of_rank
        },
        {rank: str(file) for rank, file in stacks.items() if file.exists()},
    )


def run_directory(path: Path) -> RunDirectory:
    """Opens an existing run directory.

    Raises:
        UsageError: there is no such folder, or it is no run directory.
    """
    if not path.is_dir():
        raise UsageError(f"{path}: no such folder; give a run directory (a folder with config.yaml)")
    directory = RunDirectory(path)
    if not directory.config_file.exists():
        raise UsageError(f"{path}: not a run directory: it has no config.yaml")
    return directory


def report_lines(report: HangReport) -> List[str]:
    """The report as lines of text, the verdict first."""
    lines = [report.verdict]
    if report.hang is None:
        return lines
    hang = report.hang
    for rank, location in report.hosts.items():
        stacks = f"; its Python stacks: {report.stacks[rank]}" if rank in report.stacks else ""
        lines.append(f"rank {rank} ran on {location}{stacks}")
    if hang.chain:
        lines += ["", "ranks that wait for others:", *(f"  {line}" for line in hang.chain)]
    lines += ["", "positions of the ranks, the least advanced first:"]
    newest = max(position.since for position in hang.positions)
    lines += [f"  {_position_line(position, newest)}" for position in hang.positions]
    if hang.missing:
        lines.append(
            f"  {describe_ranks(hang.missing)} left no record: not started, or on a node whose files are not here"
        )
    if hang.not_compared:
        lines += ["", f"not compared with the plan of a step: {hang.not_compared}"]
    return lines


def _position_line(position: Position, newest: float) -> str:
    progress = describe_progress(position.step, position.phase, position.micro_batch)
    clock = time.strftime("%H:%M:%S", time.gmtime(position.since))
    lag = newest - position.since
    lag_text = f", {lag:.1f} s before the last that moved" if lag >= 0.1 else ""
    prefix = f"{describe_ranks(position.ranks)}: {progress}; moved last at {clock} UTC{lag_text}; "
    if position.call is None:
        return prefix + f"{position.state}, before its first call"
    if position.state == IN_WAIT:
        absent_text = (
            f", for {describe_ranks(position.absent)}" if position.absent else ", which all of its ranks have begun"
        )
        return prefix + f"waits in {describe_call(position.call)}{absent_text}"
    return prefix + f"{position.state}; last call: {describe_call(position.call)}"


def _moving_ranks(directory: RunDirectory, flights: Sequence[Flight]) -> List[int]:
    """Ranks that make progress within a second; empty without waiting if the run has been quiet for a minute."""
    if max(flight.head.progressed for flight in flights) < time.time() - _RECENT_SECONDS:
        return []
    time.sleep(_OBSERVATION_SECONDS)
    later_heartbeats = {flight.rank: flight.head.heartbeat for flight in read_flights(directory.flight_dir)}
    return [flight.rank for flight in flights if later_heartbeats.get(flight.rank, 0) != flight.head.heartbeat]
