"""Proof that the ranks of a whole grid fit together, for ten thousand of them on a laptop.

1. Every rank's own view of its groups is made from its number; all members of a group must have the same view, and sit
   where such a group's members sit (``group_check.py``).
2. Every rank's program is looked at: on each communicator its members do the same operations with the same sizes, in
   the same order; and on each ordered pair of ranks, what one sends is what the other receives.
3. Nothing gets stuck under the strictest message passing (``rendezvous.py``), where every operation waits for all. If
   all ranks of a stage have one program (found in 2, not assumed), it is enough to run one rank per stage, and to let
   every rank of the grid do what its stage's does: a tp or dp group lies within a stage, so its members come to each
   operation together; partners in the pipeline, both ends of the embedding and the world come from the same stages as
   the few do. So a run of the few that comes to its end is a run of all that does. The same holds where the programs
   of a stage differ only in how replicas talk among each other, and all replicas of a rank do that alike: they come to
   it together, and leave it together. Where programs differ otherwise, or on demand, all ranks are run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Dict, Hashable, Iterator, List, Mapping, Optional, Sequence, Set, Tuple

from fugaku_gpt.layout.communications import Collective, Communication, CommunicationPlan, Transfer, program
from fugaku_gpt.layout.grid import Coordinates, coordinates_of, rank_of
from fugaku_gpt.layout.group_check import (
    REPLICA_COMMUNICATORS,
    GridError,
    GroupOf,
    abbreviated,
    checked_groups,
    groups_of,
)
from fugaku_gpt.layout.nodes import NODE
from fugaku_gpt.layout.rendezvous import PeerMessage, Rendezvous

Programs = Callable[[int], Sequence[Communication]]


@dataclass(frozen=True)
class GridReport:
    """The extent of a check.

    Attributes:
        groups: by kind of communicator, how many of two ranks or more.
        programs: different ones among the ranks.
        communications: of all ranks, one by one.
        of_stage: of the first rank of each stage.
        ran: how many ranks were run for the proof that nothing gets stuck.
    """

    ranks: int
    groups: Mapping[str, int]
    programs: int
    communications: int
    of_stage: Tuple[int, ...]
    ran: int


def check_grid(
    plan: CommunicationPlan,
    programs: Optional[Programs] = None,
    groups: Optional[Mapping[str, GroupOf]] = None,
    run_all: bool = False,
) -> GridReport:
    """Check one plan, as :class:`GridCheck` does."""
    return GridCheck(plan, groups).check(plan, programs, run_all)


class GridCheck:
    """Proves that all ranks of a layout make fitting sequences of communications that cannot get stuck."""

    def __init__(
        self,
        plan: CommunicationPlan,
        groups: Optional[Mapping[str, GroupOf]] = None,
        on_kind: Callable[[], None] = lambda: None,
    ) -> None:
        """Find every rank's groups.

        Args:
            groups: from a kind of communicator to the function by which a rank finds its group; default:
                :func:`group_check.groups_of`.
            on_kind: is called when the groups of all ranks of a kind are known, and when all ranks have been compared
                on a kind of communicator: time for each grows with the ranks.

        Raises:
            GridError: a group does not fit.
        """
        self._layout, self._order = plan.layout, plan.order
        self._coordinates = [coordinates_of(rank, plan.layout, plan.order) for rank in range(plan.layout.ranks)]
        self._members = checked_groups(
            self._coordinates, plan, groups if groups is not None else groups_of(plan), on_kind
        )
        self._on_kind = on_kind

    def check(self, plan: CommunicationPlan, programs: Optional[Programs] = None, run_all: bool = False) -> GridReport:
        """Check a step of a plan, which must have the same layout but may have any batch size.

        Args:
            programs: from a rank to its communications; default: :func:`sequence.program` of its place.
            run_all: run every rank, whatever is known about them: slower by a factor of ten or so.

        Raises:
            GridError: the first thing that does not fit.
        """
        layout, coordinates = self._layout, self._coordinates
        grid = _Grid(coordinates, self._members)
        for steps in map(programs, range(layout.ranks)) if programs is not None else self._programs(plan):
            grid.add(steps)
        for kind in grid.collectives:
            grid.check_collectives(kind)
            self._on_kind()
        grid.check_pipelines()
        stage_ranks = [rank_of(Coordinates(0, stage, 0), layout, self._order) for stage in range(layout.pp)]
        stage_programs = [grid.classes[grid.class_of[rank]] for rank in stage_ranks]
        if run_all or not grid.has_uniform_stages(layout.pp):
            ran = layout.ranks
            _run([grid.classes[number] for number in grid.class_of], grid.group_of, grid.peer_of, list(range(ran)))
        else:
            ran = layout.pp
            _run(stage_programs, _group_among_stages(ran), lambda stage, peer: peer, stage_ranks)
        return GridReport(
            ranks=layout.ranks,
            groups={kind: sum(len(group) > 1 for group in groups) for kind, groups in grid.groups.items()},
            programs=len(grid.classes),
            communications=sum(len(grid.classes[number]) for number in grid.class_of),
            of_stage=tuple(map(len, stage_programs)),
            ran=ran,
        )

    def _programs(self, plan: CommunicationPlan) -> Iterator[Sequence[Communication]]:
        """Every rank's program, by its stage and by how many of its replicas share its node."""
        on_node = (
            [len(group) for group in self._members[NODE]] if NODE in self._members else [1] * len(self._coordinates)
        )
        program_of_key: Dict[Tuple[int, int], Sequence[Communication]] = {}
        for coordinates, replicas in zip(self._coordinates, on_node):
            key = (coordinates.pp, replicas)
            if key not in program_of_key:
                program_of_key[key] = program(plan, *key, has_checksums=plan.checksum_interval is not None)
            yield program_of_key[key]


def _group_among_stages(stages: int) -> Callable[[int, str], Tuple[Hashable, int]]:
    """A name and a size for the group of a kind that one rank of each stage is in, when there is one rank of each."""

    def group_of(stage: int, kind: str) -> Tuple[Hashable, int]:
        if kind == "world":
            return kind, stages
        if kind == "embedding" and stage in (0, stages - 1):
            return kind, min(2, stages)
        return (kind, stage), 1

    return group_of


class _Grid:
    """The ranks, each with its groups and its program; equal programs are kept once."""

    def __init__(self, coordinates: Sequence[Coordinates], members: Mapping[str, List[Sequence[int]]]) -> None:
        self.classes: List[Sequence[Communication]] = []
        self.class_of: List[int] = []
        world: Sequence[int] = range(len(coordinates))
        self.members = {**members, "world": [world] * len(coordinates)}
        self.groups = {kind: list(dict.fromkeys(views)) for kind, views in members.items()}
        self.groups["world"] = [world]
        self.collectives = [kind for kind in self.groups if kind != "pp"]
        self._coordinates = coordinates
        self._by_identity: Dict[int, int] = {}
        self._by_value: Dict[Tuple[Communication, ...], int] = {}
        self._projections: Dict[Tuple[int, str], List[Tuple[str, int]]] = {}

    def add(self, steps: Sequence[Communication]) -> None:
        """Add the program of the next rank."""
        number = self._by_identity.get(id(steps))
        if number is None:
            number = self._by_value.setdefault(tuple(steps), len(self.classes))
            if number == len(self.classes):
                for position, step in enumerate(steps):
                    if isinstance(step, Collective) and step.communicator not in self.collectives:
                        problem = f"there is no such communicator; valid: {', '.join(self.collectives)}"
                        raise GridError(len(self.class_of), step.communicator, position, problem)
                self.classes.append(steps)  # kept, so that its id stays its own
                self._by_identity[id(steps)] = number
        self.class_of.append(number)

    def group_of(self, rank: int, kind: str) -> Tuple[Hashable, int]:
        """A name for the rank's group, and its size."""
        group = self.members[kind][rank]
        return (kind, group[0]), len(group)

    def peer_of(self, rank: int, stage: int) -> int:
        """The rank of another stage that this one exchanges with."""
        return self.members["pp"][rank][stage]

    def has_uniform_stages(self, stages: int) -> bool:
        """Whether the ranks of each stage have the same program, except for communication among replicas, which must be
        the same for all replicas of a rank."""
        without_replicas = [
            tuple(
                step
                for step in steps
                if not isinstance(step, Collective) or step.communicator not in REPLICA_COMMUNICATORS
            )
            for steps in self.classes
        ]
        of_stage: List[Set[int]] = [set() for _ in range(stages)]
        for coordinates, number in zip(self._coordinates, self.class_of):
            of_stage[coordinates.pp].add(number)
        if any(len({without_replicas[number] for number in numbers}) > 1 for numbers in of_stage):
            return False
        return all(len({self.class_of[rank] for rank in group}) == 1 for group in self.groups["dp"])

    def check_collectives(self, kind: str) -> None:
        """Check that all members do the same on every communicator of a kind.

        Raises:
            GridError: one does not.
        """
        for group in self.groups[kind]:
            first = group[0]
            expected = self._projection(self.class_of[first], kind)
            for rank in group[1:]:
                if self.class_of[rank] == self.class_of[first]:
                    continue
                steps = self._projection(self.class_of[rank], kind)
                if steps != expected:
                    position = _first_difference(steps, expected)
                    actual, required = (_operation_at(each, position) for each in (steps, expected))
                    problem = f"{actual}, where rank {first} of the same group ({abbreviated(group)}) has {required}"
                    raise GridError(rank, kind, position, problem)

    def check_pipelines(self) -> None:
        """Check that every message is sent and received alike, in one order for each ordered pair of ranks.

        Raises:
            GridError: one is not.
        """
        checked = set()
        for stages in self.groups["pp"]:
            classes = tuple(self.class_of[rank] for rank in stages)
            if classes in checked:
                continue
            sent, received = (
                [self._messages(number, True) for number in classes],
                [self._messages(number, False) for number in classes],
            )
            for stage, rank in enumerate(stages):
                for peer in sorted({*sent[stage], *(p for p in range(len(stages)) if stage in received[p])}):
                    if not 0 <= peer < len(stages) or peer == stage:
                        raise GridError(rank, "pp", 0, f"sends to stage {peer}; valid: another one below {len(stages)}")
                    ours, theirs = sent[stage].get(peer, []), received[peer].get(stage, [])
                    if ours != theirs:
                        position = _first_difference(ours, theirs)
                        sent_message, received_message = (_message_at(each, position) for each in (ours, theirs))
                        raise GridError(
                            rank,
                            "pp",
                            position,
                            f"sends {sent_message}, where rank {stages[peer]} receives {received_message}",
                        )
                for peer in received[stage]:
                    if not 0 <= peer < len(stages) or peer == stage:
                        raise GridError(
                            rank, "pp", 0, f"receives from stage {peer}; valid: another one below {len(stages)}"
                        )
            checked.add(classes)

    def _projection(self, number: int, kind: str) -> List[Tuple[str, int]]:
        key = (number, kind)
        if key not in self._projections:
            self._projections[key] = [
                (step.operation, step.elements)
                for step in self.classes[number]
                if isinstance(step, Collective) and step.communicator == kind
            ]
        return self._projections[key]

    def _messages(self, number: int, sends: bool) -> Dict[int, List[Hashable]]:
        """The messages sent to, or received from, each other stage, in order."""
        messages: Dict[int, List[Hashable]] = {}
        for step in self.classes[number]:
            if isinstance(step, Transfer):
                for message in step.exchange.sends if sends else step.exchange.receives:
                    messages.setdefault(message.peer, []).append((*message.key, step.elements))
        return messages


def _run(
    programs: Sequence[Sequence[Communication]],
    group_of: Callable[[int, str], Tuple[Hashable, int]],
    peer_of: Callable[[int, int], int],
    ranks: Sequence[int],
) -> None:
    """Run participants, whose rank numbers are ``ranks``, to their end."""
    done = [0] * len(programs)
    rendezvous = Rendezvous(len(programs))
    while rendezvous.runnable:
        participant = rendezvous.runnable.popleft()
        steps, position, is_runnable = programs[participant], done[participant], True
        while is_runnable and position < len(steps):  # that both ends of everything say the same is known already
            step = steps[position]
            position += 1
            if isinstance(step, Collective):
                group, size = group_of(participant, step.communicator)
                if size > 1:
                    is_runnable = rendezvous.collective(participant, 0.0, group, size, step)
            else:
                is_runnable = rendezvous.exchange(participant, 0.0, *_peer_messages(participant, step, peer_of))
        done[participant] = position
    stuck = [participant for participant, position in enumerate(done) if rendezvous.waiting[participant]]
    if stuck:
        steps, position = programs[stuck[0]], done[stuck[0]] - 1
        other_ranks = [
            f"rank {ranks[other]} at {done[other] - 1}: {_describe(programs[other][done[other] - 1])}"
            for other in stuck[1:5]
        ]
        also = "; ".join(other_ranks) or "no other"
        problem = f"deadlock: it waits for ever in {_describe(steps[position])}; so does {also}"
        raise GridError(ranks[stuck[0]], _communicator(steps[position]), position, problem)


def _peer_messages(
    participant: int, step: Transfer, peer_of: Callable[[int, int], int]
) -> Tuple[List[PeerMessage], List[PeerMessage]]:
    sends, receives = step.exchange.peer_messages()
    return (
        [(peer_of(participant, peer), (key, step.elements)) for peer, key in sends],
        [(peer_of(participant, peer), (key, step.elements)) for peer, key in receives],
    )


def _first_difference(ours: Sequence[object], theirs: Sequence[object]) -> int:
    same = (position for position, (a, b) in enumerate(zip(ours, theirs)) if a != b)
    return next(same, min(len(ours), len(theirs)))


def _operation_at(operations: Sequence[Tuple[str, int]], position: int) -> str:
    if position >= len(operations):
        return f"no more than {len(operations)} operations"
    return f"{operations[position][0]} of {operations[position][1]} elements"


def _message_at(messages: Sequence[Hashable], position: int) -> str:
    return str(messages[position]) if position < len(messages) else f"no more than {len(messages)} messages"


def _describe(step: Communication) -> str:
    if isinstance(step, Collective):
        return f"{step.operation} of {step.elements} elements on {step.communicator}"
    sends = [f"{m.key} to stage {m.peer}" for m in step.exchange.sends]
    receives = [f"{m.key} from stage {m.peer}" for m in step.exchange.receives]
    return "an exchange: " + ", ".join(sends + receives)


def _communicator(step: Communication) -> str:
    return step.communicator if isinstance(step, Collective) else "pp"
