"""Which rank has left the plan of a training step: each rank's calls against those that ``layout.sequence`` has for it.

This needs no witness: of two ranks that wait for each other, the one whose calls are not as planned is the cause.
Other steps and other ranks of the same stage only lend what a plan does not know: lines of code and micro-batches.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from fugaku_gpt.config.load import load_run_config
from fugaku_gpt.config.schema import RunConfig
from fugaku_gpt.errors import UsageError
from fugaku_gpt.hang.history import DISAGREE, LEFT_OUT, ONE_MORE, ORDER, Deviation
from fugaku_gpt.layout.grid import coordinates_of
from fugaku_gpt.layout.nodes import node_groups
from fugaku_gpt.layout.operations import ALL_GATHER, RECEIVE, SEND
from fugaku_gpt.layout.sequence import Collective, SequencePlan, plan_of, program
from fugaku_gpt.records.flight import FORWARD, OPTIMISER, Call, Flight

_MOST_RANKS = 256  # that are looked at
_UNKNOWN_LINE = "a line that is not known"


class _Due(NamedTuple):
    """One call of a plan; ``place``: among all calls of the step."""

    operation: str
    elements: int
    place: int


Plan = Dict[str, List[_Due]]  # by communicator
Made = Dict[str, List[Call]]


class _Parting(NamedTuple):
    """Where a rank left its plan."""

    rank: int
    step: int
    when: float
    deviation: Deviation


def config_of(path: Path) -> Optional[RunConfig]:
    """The configuration of a run, None where it cannot be read: a hang is explained without it too."""
    try:
        return load_run_config(path)
    except UsageError:
        return None


def off_plan(flights: Mapping[int, Flight], config: RunConfig, first: Sequence[int] = ()) -> Optional[Deviation]:
    """The first call by which a rank left its plan; None where all keep to it, or no plan is known.

    Args:
        flights: by rank.
        first: ranks to look at first, where there are too many for all.
    """
    training = config.training
    if training.ramp_start is not None or training.seq_ramp_start is not None:
        return None  # the sizes of a step follow from what was consumed, which recorders do not know
    if any(flight.head.ranks != config.layout.ranks for flight in flights.values()):
        return None  # another run's
    try:
        plan = plan_of(config)
    except ValueError:
        return None
    ranks = list(dict.fromkeys([*first, *sorted(flights)]))
    book = _Book(plan, {rank: flights[rank] for rank in ranks[:_MOST_RANKS] if rank in flights})
    found = [parting for parting in map(book.parting, book.flights) if parting is not None]
    if not found:
        return None
    earliest = min(found, key=lambda one: (one.step, one.when))
    stage = [rank for rank in book.flights if book.stage(rank) == book.stage(earliest.rank)]
    alike = [one for one in found if one.rank in stage and _place(one) == _place(earliest)]
    if len(alike) == len(stage) > 1:
        return None  # none of them did otherwise: the plan is not this run's
    return earliest.deviation


def _place(parting: _Parting) -> Tuple[object, ...]:
    call, actual = parting.deviation.call, parting.deviation.actual
    return parting.step, parting.deviation.kind, call.communicator, call.site, actual.site if actual else ""


class _Book:
    """Calls of each rank by step, beside its plan."""

    def __init__(self, plan: SequencePlan, flights: Mapping[int, Flight]) -> None:
        self._plan = plan
        self.flights = dict(flights)
        self._made = {rank: _by_step(flight) for rank, flight in self.flights.items()}
        self._programs: Dict[Tuple[int, int], List[Plan]] = {}

    def stage(self, rank: int) -> int:
        """Of the pipeline."""
        return coordinates_of(rank, self._plan.layout, self._plan.order).pp

    def parting(self, rank: int) -> Optional[_Parting]:
        """Where a rank has left its plan; None also where it does so in more than one step, so that it is not its
        plan."""
        found = []
        for step in self._made[rank]:
            parted = self._in_step(rank, step)
            if parted is not None:
                found.append(parted)
        return found[0] if len(found) == 1 else None

    def _in_step(self, rank: int, step: int) -> Optional[_Parting]:
        made, passed = self._made[rank][step], _passed(self.flights[rank], step)
        plans = self._plans(rank)
        for plan in plans[1:]:
            if not _misfits(plan, made, passed):
                return None
        plan = plans[0]
        model = self._model(rank, plan)
        misfits = _misfits(plan, made, passed, model)
        if not misfits:
            return None
        wrong = [(made[name][at].ordinal, name, at) for name, at in misfits if at < len(made.get(name, ()))]
        if wrong:
            _, name, at = min(wrong)
        else:  # all are left out: the first of them
            _, name, at = min((_order(plan, model, name, at), name, at) for name, at in misfits)
        return self._parting(rank, step, name, at, plan, model)

    def _parting(self, rank: int, step: int, name: str, at: int, plan: Plan, model: Optional[Made]) -> _Parting:
        made = self._made[rank][step].get(name, [])
        planned = plan.get(name, [])
        came = made[at] if at < len(made) else None
        due = self._due(rank, step, name, at, plan, model) if at < len(planned) else None
        if came is None:
            assert due is not None
            return _Parting(rank, step, _end(self.flights[rank], step), Deviation((rank,), LEFT_OUT, due, None, ()))
        labels: Sequence[Optional[Call]] = model[name] if model is not None else [None] * len(planned)

        def agree(calls: int, plans: int) -> int:
            """How many calls from one place on are those that are planned from another place on."""
            pairs = zip(made[calls:], planned[plans:], labels[plans:])
            return sum(1 for _ in takewhile(lambda pair: _fits(pair[1], pair[0], pair[2]), pairs))

        instead = self._next(rank, step, came, plan, model)
        repeated = at > 0 and _fits(planned[at - 1], came, labels[at - 1])
        if due is None and instead is not None and instead.site == came.site:
            found = Deviation((rank,), ORDER, instead, came, ())  # one line, another communicator
        elif due is None or (repeated and agree(at + 1, at) >= agree(at, at + 1)):
            found = Deviation((rank,), ONE_MORE, came, None, ())
        elif agree(at, at + 1):
            found = Deviation((rank,), LEFT_OUT, due, None, ())
        elif (came.operation, came.site, came.micro_batch) == (due.operation, due.site, due.micro_batch):
            found = Deviation((rank,), DISAGREE, due, came, ())
        else:
            found = Deviation((rank,), ORDER, instead or due, came, ())
        return _Parting(rank, step, came.entered, found)

    def _next(self, rank: int, step: int, before: Call, plan: Plan, model: Optional[Made]) -> Optional[Call]:
        """What was due when a rank made some other call."""
        made = self._made[rank][step]
        counts = {name: sum(call.ordinal < before.ordinal for call in made.get(name, ())) for name in plan}
        left = [(name, count) for name, count in counts.items() if count < len(plan[name])]
        if not left:
            return None
        _, name, at = min((_order(plan, model, name, at), name, at) for name, at in left)
        return self._due(rank, step, name, at, plan, model)

    def _due(self, rank: int, step: int, name: str, at: int, plan: Plan, model: Optional[Made]) -> Call:
        """A planned call as it should have been made, with its line where one is known."""
        if model is not None:
            return replace(model[name][at], step=step, sequence=0)
        planned = plan[name][at]
        for other, steps in self._made.items():  # another rank that made it
            calls = steps.get(step, {}).get(name, []) if self.stage(other) == self.stage(rank) else []
            if other != rank and at < len(calls) and _fits(planned, calls[at]):
                return replace(calls[at], sequence=0)
        head, shape = self.flights[rank].head, (planned.elements,)
        return Call(
            0, 0, 0, name, planned.operation, "", shape, -1, _UNKNOWN_LINE, "", step, -1, head.phase, 0, 0.0, 0.0, 0.0
        )

    def _model(self, rank: int, plan: Plan) -> Optional[Made]:
        """A step that went as planned, of this rank or of another of its stage: it knows the lines."""
        stage = self.stage(rank)
        for other in [rank, *(one for one in self.flights if one != rank and self.stage(one) == stage)]:
            for step, made in reversed(list(self._made[other].items())):
                if _passed(self.flights[other], step) and not _misfits(plan, made, True):
                    return made
        return None

    def _plans(self, rank: int) -> List[Plan]:
        """What a step of this rank may be, the usual first: some time the sums of replicas, in some nothing is
        updated, so that nothing is gathered."""
        place = coordinates_of(rank, self._plan.layout, self._plan.order)
        on_node = 1
        if self._plan.nodes is not None:
            on_node = len(node_groups(place, self._plan.layout, self._plan.order, self._plan.nodes)[0])
        if (place.pp, on_node) not in self._programs:
            usual, alone = (_by_communicator(self._plan, place.pp, on_node, alone) for alone in (False, True))
            plans = [usual, alone]
            if self._plan.zero and self._plan.layout.dp > 1:
                plans += [_without_gathers(usual), _without_gathers(alone)]
            self._programs[place.pp, on_node] = plans
        return self._programs[place.pp, on_node]


def _by_communicator(plan: SequencePlan, stage: int, on_node: int, alone: bool) -> Plan:
    found: Plan = {}
    place = 0
    for part in program(plan, stage, on_node, alone):
        if isinstance(part, Collective):
            calls = [(part.communicator, part.operation, part.elements)]
        else:
            calls = [("pp", RECEIVE, part.elements) for _ in part.exchange.receives]
            calls += [("pp", SEND, part.elements) for _ in part.exchange.sends]
        for name, operation, elements in calls:
            found.setdefault(name, []).append(_Due(operation, elements, place))
            place += 1
    return found


def _without_gathers(plan: Plan) -> Plan:
    return {name: [due for due in calls if name == "tp" or due.operation != ALL_GATHER] for name, calls in plan.items()}


def _by_step(flight: Flight) -> Dict[int, Made]:
    """A rank's calls by step and communicator, of steps of which the beginning is known."""
    cut, before = 0, 0
    for call in flight.calls:  # calls that were long outstanding stand alone before the rest
        if call.ordinal != before + 1:
            cut = max(cut, call.step)
        before = call.ordinal
    calls = [call for call in flight.calls if call.step > cut and FORWARD <= call.phase <= OPTIMISER]
    first = min((call.step for call in calls), default=flight.head.step if cut < flight.head.step else 0)
    if cut:
        first = cut + 1
    found: Dict[int, Made] = {step: {} for step in range(max(first, 1), flight.head.step + 1)}
    for call in calls:
        found.setdefault(call.step, {}).setdefault(call.communicator, []).append(call)
    return found


def _passed(flight: Flight, step: int) -> bool:
    """Whether the rank is past a step's work."""
    return flight.head.step > step or (flight.head.step == step and flight.head.phase > OPTIMISER)


def _misfits(plan: Plan, made: Made, passed: bool, model: Optional[Made] = None) -> List[Tuple[str, int]]:
    """By communicator, the first call that is not as planned."""
    found = []
    for name in {**plan, **made}:
        planned, calls = plan.get(name, []), made.get(name, [])
        labels: Iterable[Optional[Call]] = model[name] if model is not None and name in model else [None] * len(planned)
        at = next(
            (n for n, (due, call, label) in enumerate(zip(planned, calls, labels)) if not _fits(due, call, label)),
            min(len(planned), len(calls)),
        )
        if at < len(calls) or (passed and at < len(planned)):
            found.append((name, at))
    return found


def _fits(due: _Due, call: Call, label: Optional[Call] = None) -> bool:
    elements = 1
    for size in call.shape:
        elements *= size
    if call.operation == "barrier":
        elements = 0
    if (call.operation, elements) != (due.operation, due.elements):
        return False
    return label is None or (call.site, call.phase, call.micro_batch) == (label.site, label.phase, label.micro_batch)


def _order(plan: Plan, model: Optional[Made], name: str, at: int) -> int:
    """A planned call's place in a step: as it was made, where that is known, since sums overlap with computation."""
    return model[name][at].ordinal if model is not None else plan[name][at].place


def _end(flight: Flight, step: int) -> float:
    """When a rank went on to what comes after a step."""
    later = [
        call.entered for call in flight.calls if call.step > step or (call.step == step and call.phase > OPTIMISER)
    ]
    return min(later, default=flight.head.progressed)
