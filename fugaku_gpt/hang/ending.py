"""Explains how a run ended, or why it makes no progress: by its result, then by who waited for whom, and how long.

A rank is accused if the run's result names it, if its process is seen to be gone or stopped while others live, or if
the ranks had stood still for long (:mod:`fugaku_gpt.hang.standstill`). Otherwise the run was ended from outside, or it
has only just paused, and no rank is the cause.
"""

from __future__ import annotations

import time
from dataclasses import replace
from signal import SIGKILL
from typing import Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from fugaku_gpt.config.schema import RunConfig
from fugaku_gpt.hang.against_plan import compare_with_plan
from fugaku_gpt.hang.diagnosis import (
    DISAGREE,
    NO_HANG,
    Hang,
    describe_call,
    describe_progress,
    diagnose_hang,
    living_ranks,
    process_states,
)
from fugaku_gpt.hang.recorders import GONE, STOPPED, Recorders
from fugaku_gpt.hang.standstill import Standstill, measure_standstill
from fugaku_gpt.records.flight import FINISHED, PHASES, Flight
from fugaku_gpt.records.run import FAILED, HUNG, OK, OUT_OF_MEMORY, Result

FROM_OUTSIDE, PAUSED, UNDECIDED = "ended from outside", "paused", "undecided"  # kinds of a `Hang` without a culprit


class Observed(NamedTuple):
    """Facts about a run that its flight recorders do not have.

    Attributes:
        host: name of this machine, on which processes of ranks can be looked at.
        moment: the present time, seconds since the epoch.
        result: how the run ended; None if nothing was recorded.
        config: as in :func:`diagnose_hang`.
    """

    host: str
    moment: float
    result: Optional[Result]
    config: Union[RunConfig, str, None]


def explain_end(flights: Sequence[Flight], observed: Observed) -> Hang:
    """Determine which rank is the cause of a run's end or hang, if any is.

    Args:
        flights: in the order of their ranks, not empty.
    """
    result, heads = observed.result, [flight.head for flight in flights]
    processes = process_states(heads, observed.host)
    if result is not None and result.status == HUNG:
        # Ranks are gone because the watchdog has ended them, while the cause may resist its end a little longer. One
        # that was gone before had a watchdog that fell silent first.
        stopped = {rank: state for rank, state in processes.items() if state == STOPPED}
        return diagnose_hang(flights, stopped, observed.config)
    if result is not None and result.status == OK:
        return _without_culprit(flights, processes, NO_HANG, "no hang: the run has ended well")
    if result is not None and _names_a_rank(result, heads[0].ranks):
        return _hang_by_result(flights, processes, result, observed.config)
    living = living_ranks(heads, observed.host)
    standstill = measure_standstill(flights, living, observed.moment)
    if processes or standstill.is_hang:
        return diagnose_hang(flights, processes, observed.config)
    kind, verdict = _verdict(flights, observed, standstill, bool(living))
    return _without_culprit(flights, processes, kind, verdict)


def _names_a_rank(result: Result, ranks: int) -> bool:
    """True if a rank has ended by itself, or was killed while others lived. Without an exception or signal, the rank of
    a result is only the one that has noticed an end, such as that of its launcher."""
    is_only_rank = ranks == 1 and result.signal == SIGKILL  # which no program sends to itself
    return (
        result.status in (FAILED, OUT_OF_MEMORY)
        and result.rank is not None
        and bool(result.exception)
        and not is_only_rank
    )


def _hang_by_result(
    flights: Sequence[Flight], processes: Mapping[int, str], result: Result, config: Union[RunConfig, str, None]
) -> Hang:
    """Explain the end of a run whose result names the rank that ended first."""
    assert result.rank is not None
    rank = result.rank
    if result.signal is None:  # MPI may report on one rank what another has done otherwise
        hang = diagnose_hang(flights, processes, config)
        if hang.kind == DISAGREE:
            return hang
    states = {**processes, rank: GONE}
    recorders = Recorders(flights, states)
    deviates = config is not None and compare_with_plan(recorders.flights, config, [rank]).deviation is not None
    hang = diagnose_hang(flights, states, config if deviates else None)
    if deviates or hang.culprits == (rank,):
        return hang
    verdict, call = f"rank {rank} is the cause: {result.reason}", None
    if rank in recorders.flights:
        flight = recorders.flights[rank]
        call = flight.last
        verdict += f"; it was last seen in {_progress(flight)}"
        verdict += f" after {describe_call(call)}" if call is not None else ""
    return replace(hang, verdict=verdict, culprits=(rank,), kind=GONE, call=call, chain=[], other_suspects=())


def _verdict(flights: Sequence[Flight], observed: Observed, standstill: Standstill, are_alive: bool) -> Tuple[str, str]:
    """Return (kind, verdict) where nothing shows that the run hung."""
    result = observed.result
    last = max(flights, key=lambda flight: flight.head.progressed)
    clock = time.strftime("%H:%M:%S", time.gmtime(standstill.moved))
    moved = f"rank {last.rank} moved last, at {clock} UTC in {_progress(last)}"
    if are_alive and result is None:
        return PAUSED, (
            f"no hang yet: {moved}, {standstill.seconds:.1f} s ago; from {standstill.limit:.0f} s on that is one here"
        )
    if all(flight.head.phase == FINISHED for flight in flights):
        return NO_HANG, "no rank waits: all have finished"
    if result is not None and result.exception and result.signal is None and result.status == FAILED:
        return NO_HANG, f"no hang: all ranks ended for one failure, which the result names; {moved}"
    if result is None and not standstill.is_timed:
        return UNDECIDED, (
            f"undecided: {moved}, and nothing shows how long the ranks waited afterwards: without a watchdog "
            "(node.hang_timeout) a hang and an end from outside leave the same records"
        )
    verdict = f"ended from outside, by no rank of its own: {moved}"
    if standstill.seconds >= 0.1:
        verdict += (
            f"; all stood still for {standstill.seconds:.1f} s then, and a hang takes {standstill.limit:.0f} s here"
        )
    if result is None and any(flight.head.host != observed.host for flight in flights):
        verdict += "; or it still runs: what ranks on other machines do is seen here with a delay"
    return FROM_OUTSIDE, verdict


def _progress(flight: Flight) -> str:
    head = flight.head
    return describe_progress(head.step, PHASES[head.phase], head.micro_batch)


def _without_culprit(flights: Sequence[Flight], processes: Mapping[int, str], kind: str, verdict: str) -> Hang:
    recorders = Recorders(flights, processes)
    return Hang(verdict, (), kind, None, [], recorders.positions(), tuple(recorders.missing))
