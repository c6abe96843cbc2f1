"""Finds the rank that has left the plan of a training step: compares its calls with ``layout.communications``.

This needs no other rank as a witness: of two ranks that wait for each other, the one whose calls differ from the plan
is the cause. Other steps and other ranks of the same stage only supply what the plan does not contain: lines of code
and micro-batches.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from fugaku_gpt.config.load import load_run_config
from fugaku_gpt.config.schema import RunConfig
from fugaku_gpt.errors import UsageError
from fugaku_gpt.hang.checkpoint_plan import UNKNOWN_LINE, checkpoint_deviation
from fugaku_gpt.hang.history import DISAGREE, EXTRA_CALL, LEFT_OUT, ORDER, Deviation
from fugaku_gpt.layout.communications import Collective, CommunicationPlan, plan_of, program
from fugaku_gpt.layout.grid import coordinates_of
from fugaku_gpt.layout.nodes import node_groups
from fugaku_gpt.layout.operations import ALL_GATHER, RECEIVE, SEND
from fugaku_gpt.layout.replica_checks import is_checksum_step
from fugaku_gpt.records.flight import FORWARD, OPTIMISER, Flight, RecordedCall

_MAX_RANKS = 256  # number of ranks that are compared


class _PlannedCall(NamedTuple):
    """One call of a plan; ``position`` is its index among all calls of the step."""

    operation: str
    elements: int
    position: int


Plan = Dict[str, List[_PlannedCall]]  # by communicator
CallsByCommunicator = Dict[str, List[RecordedCall]]


class _PlanDeviation(NamedTuple):
    """The step and time at which a rank left its plan, and how."""

    rank: int
    step: int
    when: float
    deviation: Deviation


class AgainstPlan(NamedTuple):
    """The result of comparing a run with its plan.

    Attributes:
        deviation: the first call by which a rank left its plan; None if no rank is seen to have left it.
        not_compared: why ranks were not compared, in one line; empty if all were.
    """

    deviation: Optional[Deviation]
    not_compared: str = ""


def config_or_problem(path: Path) -> Union[RunConfig, str]:
    """The configuration of a run, or why it cannot be read, in one line: a hang can be diagnosed without it."""
    try:
        return load_run_config(path)
    except UsageError as error:
        return str(error).splitlines()[0]


def compare_with_plan(
    flights: Mapping[int, Flight], config: Union[RunConfig, str], first: Sequence[int] = ()
) -> AgainstPlan:
    """Find the first call by which a rank left its plan, or say why that cannot be known.

    Args:
        flights: rank → flight record.
        config: see :func:`config_or_problem`.
        first: ranks to compare first, in case there are too many to compare all.
    """
    if isinstance(config, str):
        return AgainstPlan(None, config)
    training = config.training
    if training.ramp_start is not None or training.seq_ramp_start is not None:
        growing = "batch" if training.ramp_start is not None else "sequence length"
        return AgainstPlan(
            None, f"the {growing} grows, and its size in a step depends on samples that recorders do not count"
        )
    if config.model.is_grid_classifier and len(config.data.buckets) > 1:
        return AgainstPlan(None, "batches take turns in size, which depends on samples that recorders do not count")
    recorded_ranks = sorted({flight.head.ranks for flight in flights.values()} - {config.layout.ranks})
    if recorded_ranks:
        return AgainstPlan(
            None, f"config.yaml is another run's: it has {config.layout.ranks} ranks, the recorders {recorded_ranks[0]}"
        )
    try:
        plan = plan_of(config)
    except ValueError as error:
        return AgainstPlan(None, f"there is no plan: {str(error).splitlines()[0]}")
    ranks = [rank for rank in dict.fromkeys([*first, *sorted(flights)]) if rank in flights]
    reasons = [f"only {_MAX_RANKS} of {len(ranks)} ranks are compared"] if len(ranks) > _MAX_RANKS else []
    comparison = _PlanComparison(plan, {rank: flights[rank] for rank in ranks[:_MAX_RANKS]})
    deviations = [deviation for deviation in map(comparison.deviation_of, comparison.flights) if deviation is not None]
    if comparison.foreign_ranks:
        count = len(comparison.foreign_ranks)
        reasons.append(f"the plan is not that of {count} ranks, whose calls differ from it in more than one step")
    if not deviations:
        return AgainstPlan(None, "; ".join(reasons))
    earliest = min(deviations, key=lambda deviation: (deviation.step, deviation.when))
    stage = [rank for rank in comparison.flights if comparison.stage(rank) == comparison.stage(earliest.rank)]
    same_deviations = [
        deviation for deviation in deviations if deviation.rank in stage and _location(deviation) == _location(earliest)
    ]
    if len(same_deviations) == len(stage) > 1:
        return AgainstPlan(None, "the plan is not this run's: all ranks of a pipeline stage leave it by the same call")
    return AgainstPlan(earliest.deviation, "; ".join(reasons))


def _location(plan_deviation: _PlanDeviation) -> Tuple[object, ...]:
    call, actual = plan_deviation.deviation.call, plan_deviation.deviation.actual
    return (
        plan_deviation.step,
        plan_deviation.deviation.kind,
        call.communicator,
        call.site,
        actual.site if actual else "",
    )


class _PlanComparison:
    """Compares the calls of each rank, by step, with its plan.

    Attributes:
        foreign_ranks: ranks that :meth:`deviation_of` has found to differ from their plan in more than one step.
    """

    def __init__(self, plan: CommunicationPlan, flights: Mapping[int, Flight]) -> None:
        self._plan = plan
        self.flights = dict(flights)
        self.foreign_ranks: List[int] = []
        self._made = {rank: _by_step(flight) for rank, flight in self.flights.items()}
        self._programs: Dict[Tuple[int, int, bool], List[Plan]] = {}

    def stage(self, rank: int) -> int:
        """Pipeline stage of a rank."""
        return coordinates_of(rank, self._plan.layout, self._plan.order).pp

    def deviation_of(self, rank: int) -> Optional[_PlanDeviation]:
        """How a rank has left its plan; None also if it does so in more than one step: then the plan is not its own."""
        deviations = []
        for step in self._made[rank]:
            deviation = self._deviation_in_step(rank, step) or self._deviation_in_checkpoint(rank, step)
            if deviation is not None:
                deviations.append(deviation)
        if len(deviations) > 1:
            self.foreign_ranks.append(rank)
        return deviations[0] if len(deviations) == 1 else None

    def _deviation_in_checkpoint(self, rank: int, step: int) -> Optional[_PlanDeviation]:
        deviation = checkpoint_deviation(self.flights, rank, step)
        if deviation is None:
            return None
        when = deviation.actual.entered if deviation.actual is not None else _end_of_step(self.flights[rank], step)
        return _PlanDeviation(rank, step, when, deviation)

    def _deviation_in_step(self, rank: int, step: int) -> Optional[_PlanDeviation]:
        made, passed = self._made[rank][step], _has_passed(self.flights[rank], step)
        plans = self._possible_plans(rank, step)
        for plan in plans[1:]:
            if not _misfits(plan, made, passed):
                return None
        plan = plans[0]
        reference = self._reference_step(rank, plan)
        misfits = _misfits(plan, made, passed, reference)
        if not misfits:
            return None
        wrong = [(made[name][index].ordinal, name, index) for name, index in misfits if index < len(made.get(name, ()))]
        if wrong:
            _, name, index = min(wrong)
        else:  # all are left out: the first of them
            _, name, index = min((_due_order(plan, reference, name, index), name, index) for name, index in misfits)
        return self._deviation_at(rank, step, name, index, plan, reference)

    def _deviation_at(
        self, rank: int, step: int, name: str, index: int, plan: Plan, reference: Optional[CallsByCommunicator]
    ) -> _PlanDeviation:
        made = self._made[rank][step].get(name, [])
        planned_calls = plan.get(name, [])
        actual = made[index] if index < len(made) else None
        due = self._due_call(rank, step, name, index, plan, reference) if index < len(planned_calls) else None
        if actual is None:
            assert due is not None
            return _PlanDeviation(
                rank, step, _end_of_step(self.flights[rank], step), Deviation((rank,), LEFT_OUT, due, None, ())
            )
        labels: Sequence[Optional[RecordedCall]] = (
            reference[name] if reference is not None else [None] * len(planned_calls)
        )

        def count_matching(calls: int, plans: int) -> int:
            """Count the calls from index ``calls`` on that match those planned from index ``plans`` on."""
            pairs = zip(made[calls:], planned_calls[plans:], labels[plans:])
            return sum(1 for _ in takewhile(lambda pair: _matches(pair[1], pair[0], pair[2]), pairs))

        expected = self._next_due(rank, step, actual, plan, reference)
        repeated = index > 0 and _matches(planned_calls[index - 1], actual, labels[index - 1])
        if due is None and expected is not None and expected.site == actual.site:
            deviation = Deviation((rank,), ORDER, expected, actual, ())  # one line, another communicator
        elif due is None or (repeated and count_matching(index + 1, index) >= count_matching(index, index + 1)):
            deviation = Deviation((rank,), EXTRA_CALL, actual, None, ())
        elif count_matching(index, index + 1):
            deviation = Deviation((rank,), LEFT_OUT, due, None, ())
        elif (actual.operation, actual.site, actual.micro_batch) == (due.operation, due.site, due.micro_batch):
            deviation = Deviation((rank,), DISAGREE, due, actual, ())
        else:
            deviation = Deviation((rank,), ORDER, expected or due, actual, ())
        return _PlanDeviation(rank, step, actual.entered, deviation)

    def _next_due(
        self, rank: int, step: int, before: RecordedCall, plan: Plan, reference: Optional[CallsByCommunicator]
    ) -> Optional[RecordedCall]:
        """The call that was due when a rank made some other call."""
        made = self._made[rank][step]
        counts = {name: sum(call.ordinal < before.ordinal for call in made.get(name, ())) for name in plan}
        left = [(name, count) for name, count in counts.items() if count < len(plan[name])]
        if not left:
            return None
        _, name, index = min((_due_order(plan, reference, name, index), name, index) for name, index in left)
        return self._due_call(rank, step, name, index, plan, reference)

    def _due_call(
        self, rank: int, step: int, name: str, index: int, plan: Plan, reference: Optional[CallsByCommunicator]
    ) -> RecordedCall:
        """A planned call as it should have been made, with its line of code if some rank has recorded it."""
        if reference is not None:
            return replace(reference[name][index], step=step, sequence=0)
        planned = plan[name][index]
        for other, steps in self._made.items():  # another rank that made it
            calls = steps.get(step, {}).get(name, []) if self.stage(other) == self.stage(rank) else []
            if other != rank and index < len(calls) and _matches(planned, calls[index]):
                return replace(calls[index], sequence=0)
        head, shape = self.flights[rank].head, (planned.elements,)
        return RecordedCall(
            0, 0, 0, name, planned.operation, "", shape, -1, UNKNOWN_LINE, "", step, -1, head.phase, 0, 0.0, 0.0, 0.0
        )

    def _reference_step(self, rank: int, plan: Plan) -> Optional[CallsByCommunicator]:
        """A step that went as planned, of this rank or of another of its stage: it has the lines of code."""
        stage = self.stage(rank)
        for other in [
            rank,
            *(candidate for candidate in self.flights if candidate != rank and self.stage(candidate) == stage),
        ]:
            for step, made in reversed(list(self._made[other].items())):
                if _has_passed(self.flights[other], step) and not _misfits(plan, made, True):
                    return made
        return None

    def _possible_plans(self, rank: int, step: int) -> List[Plan]:
        """Plans that a step of this rank may follow, the usual one first: calibration steps time the replicas' sums,
        and steps without an update gather nothing. Whether it compares checksums is certain."""
        coordinates = coordinates_of(rank, self._plan.layout, self._plan.order)
        ranks_on_node = 1
        if self._plan.nodes is not None:
            ranks_on_node = len(node_groups(coordinates, self._plan.layout, self._plan.order, self._plan.nodes)[0])
        has_checksums = is_checksum_step(self._plan.checksum_interval, step)
        key = coordinates.pp, ranks_on_node, has_checksums
        if key not in self._programs:
            usual, calibration = (
                _by_communicator(self._plan, coordinates.pp, ranks_on_node, is_calibration, has_checksums)
                for is_calibration in (False, True)
            )
            plans = [usual, calibration]
            if self._plan.zero and self._plan.layout.dp > 1:
                plans += [_without_gathers(usual), _without_gathers(calibration)]
            self._programs[key] = plans
        return self._programs[key]


def _by_communicator(
    plan: CommunicationPlan, stage: int, ranks_on_node: int, is_calibration: bool, has_checksums: bool
) -> Plan:
    planned_calls: Plan = {}
    position = 0
    for action in program(plan, stage, ranks_on_node, is_calibration, has_checksums):
        if isinstance(action, Collective):
            calls = [(action.communicator, action.operation, action.elements)]
        else:
            calls = [("pp", RECEIVE, action.elements) for _ in action.exchange.receives]
            calls += [("pp", SEND, action.elements) for _ in action.exchange.sends]
        for name, operation, elements in calls:
            planned_calls.setdefault(name, []).append(_PlannedCall(operation, elements, position))
            position += 1
    return planned_calls


def _without_gathers(plan: Plan) -> Plan:
    return {name: [due for due in calls if name == "tp" or due.operation != ALL_GATHER] for name, calls in plan.items()}


def _by_step(flight: Flight) -> Dict[int, CallsByCommunicator]:
    """A rank's calls by step and communicator, for steps whose beginning is recorded."""
    cut, before = 0, 0
    for call in flight.calls:  # calls that were long outstanding stand alone before the rest
        if call.ordinal != before + 1:
            cut = max(cut, call.step)
        before = call.ordinal
    calls = [call for call in flight.calls if call.step > cut and FORWARD <= call.phase <= OPTIMISER]
    first = min((call.step for call in calls), default=flight.head.step if cut < flight.head.step else 0)
    if cut:
        first = cut + 1
    calls_by_step: Dict[int, CallsByCommunicator] = {step: {} for step in range(max(first, 1), flight.head.step + 1)}
    for call in calls:
        calls_by_step.setdefault(call.step, {}).setdefault(call.communicator, []).append(call)
    return calls_by_step


def _has_passed(flight: Flight, step: int) -> bool:
    """True if the rank has finished the work of a step."""
    return flight.head.step > step or (flight.head.step == step and flight.head.phase > OPTIMISER)


def _misfits(
    plan: Plan, made: CallsByCommunicator, passed: bool, reference: Optional[CallsByCommunicator] = None
) -> List[Tuple[str, int]]:
    """Return (communicator, index) of the first call that is not as planned, for each communicator that has one."""
    misfits = []
    for name in {**plan, **made}:
        planned, calls = plan.get(name, []), made.get(name, [])
        labels: Iterable[Optional[RecordedCall]] = (
            reference[name] if reference is not None and name in reference else [None] * len(planned)
        )
        index = next(
            (
                position
                for position, (due, call, label) in enumerate(zip(planned, calls, labels))
                if not _matches(due, call, label)
            ),
            min(len(planned), len(calls)),
        )
        if index < len(calls) or (passed and index < len(planned)):
            misfits.append((name, index))
    return misfits


def _matches(due: _PlannedCall, call: RecordedCall, label: Optional[RecordedCall] = None) -> bool:
    elements = 1
    for size in call.shape:
        elements *= size
    if call.operation == "barrier":
        elements = 0
    if (call.operation, elements) != (due.operation, due.elements):
        return False
    return label is None or (call.site, call.phase, call.micro_batch) == (label.site, label.phase, label.micro_batch)


def _due_order(plan: Plan, reference: Optional[CallsByCommunicator], name: str, index: int) -> int:
    """Position of a planned call in a step: as recorded in the reference step, if any, since sums overlap with
    computation."""
    return reference[name][index].ordinal if reference is not None else plan[name][index].position


def _end_of_step(flight: Flight, step: int) -> float:
    """Time at which a rank made its first call after a step."""
    later = [
        call.entered for call in flight.calls if call.step > step or (call.step == step and call.phase > OPTIMISER)
    ]
    return min(later, default=flight.head.progressed)
