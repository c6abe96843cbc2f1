"""What happened to a run: its result, its last line, and what its ranks were doing when they were last heard of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from fugaku_gpt.errors import UsageError
from fugaku_gpt.records.flight import Flight, read_flight
from fugaku_gpt.records.run import OK, REFUSED, RunDirectory
from fugaku_gpt.records.text import spans


@dataclass(frozen=True)
class Position:
    """Ranks that were last heard of at the same place.

    Attributes:
        ranks: in order.
        sequence: number of their last MPI call, counted per rank from 1; 0 before the first.
        inside: whether they were still in that call.
        entered: when the first of them entered it, seconds since the epoch.
    """

    ranks: Tuple[int, ...]
    sequence: int
    communicator: str
    operation: str
    shape: Tuple[int, ...]
    site: str
    inside: bool
    entered: float


@dataclass(frozen=True)
class Diagnosis:
    """What a run directory tells.

    Attributes:
        result: how the run ended, in one line.
        last: the last line of its metrics, in one line.
        positions: where its ranks were, those that had come least far first.
        missing: ranks that left no flight recorder file.
        findings: what follows, for a person.
    """

    result: str
    last: str
    positions: List[Position]
    missing: List[int]
    findings: List[str]


def diagnose(path: Path) -> Diagnosis:
    """Read a run directory, of a run that has ended or is still going.

    Raises:
        UsageError: it is no run directory, or a file in it is damaged.
    """
    if not path.is_dir():
        raise UsageError(f"{path}: no such folder; give a run directory (a folder with config.yaml)")
    directory = RunDirectory(path)
    if not directory.config_file.exists():
        raise UsageError(f"{path}: not a run directory: it has no config.yaml")
    result = directory.result()
    said = "no result: still running, or killed before it could record one"
    if result is not None:
        said = f"{result.status}{': ' + result.reason if result.reason else ''} ({result.iterations} iterations)"
    flights = read_flights(directory.flight_dir)
    positions, missing = positions_of(flights), missing_ranks(flights)
    settled = result is not None and result.status in (OK, REFUSED)  # nothing of its calls is left to explain
    findings = [] if settled else findings_of(positions, missing)
    if not flights and not settled:
        findings.append(
            "no flight recorders: one rank, or node.flight_recorder is off, or no rank came to its first call"
        )
    return Diagnosis(said, last_line(directory), positions, missing, findings)


def last_line(directory: RunDirectory) -> str:
    """The last thing that was measured, in words."""
    lines = directory.metrics("iteration")
    if not lines:
        return "no iteration was finished"
    line = lines[-1]
    loss = "not a number" if line.get("loss") is None else f"{line['loss']:.4f}"
    return f"iteration {line.get('iteration')}, loss {loss}, {line.get('seconds', 0.0):.4g} s per iteration"


def read_flights(directory: Path) -> List[Flight]:
    """The flight recorders of a run, by rank.

    Raises:
        UsageError: a file is not one.
    """
    return sorted((read_flight(path) for path in directory.glob("*/rank-*.flight")), key=lambda flight: flight.rank)


def positions_of(flights: Sequence[Flight]) -> List[Position]:
    """Ranks grouped by their last call: sequence number, communicator, operation, call site, inside or not."""
    groups: Dict[Tuple[Any, ...], List[Tuple[int, float]]] = {}
    for flight in flights:
        waiting = flight.waiting
        call = waiting if waiting is not None else flight.last
        key: Tuple[Any, ...] = (0, "-", "-", (), "-", False)
        if call is not None:
            key = (call.ordinal, call.communicator, call.operation, call.shape, call.site, waiting is not None)
        groups.setdefault(key, []).append((flight.rank, call.entered if call is not None else 0.0))
    positions = []
    for (sequence, communicator, operation, shape, site, inside), members in sorted(groups.items(), key=_place):
        ranks = tuple(rank for rank, _ in members)
        entered = min(time for _, time in members)
        positions.append(Position(ranks, sequence, communicator, operation, shape, site, inside, entered))
    return positions


def missing_ranks(flights: Sequence[Flight]) -> List[int]:
    """Ranks of the run whose file is not there."""
    there = {flight.rank for flight in flights}
    return [rank for rank in range(max((flight.head.ranks for flight in flights), default=0)) if rank not in there]


def findings_of(positions: Sequence[Position], missing: Sequence[int]) -> List[str]:
    """Who waits in which call, and who did not come to it."""
    findings = []
    if missing:
        findings.append(f"{rank_words(missing)} left no record: not started, or on a node whose files are not here")
    furthest = max((position.sequence for position in positions), default=0)
    waiting = [position for position in positions if position.inside]
    for position in waiting:
        findings.append(f"{rank_words(position.ranks)} in {call_words(position)}, not returned")
    for position in positions:
        if position.inside and position.sequence == furthest:
            continue
        behind = furthest - position.sequence
        if behind > 0:
            state = "in it still" if position.inside else "returned from it, and did not come to the next"
            findings.append(
                f"{rank_words(position.ranks)} behind by {behind} calls: last was {call_words(position)}, {state}"
            )
        elif waiting:
            findings.append(
                f"{rank_words(position.ranks)} returned from {call_words(position)}, which others are still in"
            )
    if positions and not waiting:
        findings.append("no rank was inside an MPI call: each was computing, or had ended")
    return findings


def call_words(position: Position) -> str:
    """``all_reduce of [4, 8] on tp at model/tensor.py:12 (call 17)``."""
    if position.sequence == 0:
        return "no call yet"
    return (
        f"{position.operation} of {list(position.shape)} on {position.communicator} at {position.site} "
        f"(call {position.sequence})"
    )


def rank_words(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 0-2, 5``."""
    text = spans(ranks)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def _place(item: Tuple[Tuple[Any, ...], Optional[Any]]) -> Tuple[Any, ...]:
    return item[0]
