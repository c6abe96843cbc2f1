"""Finds silent corruption: compares checksums of what ranks hold alike, bit for bit (``layout/replica_checks.py``).

A bit that flips in the memory or in a register of one rank goes unnoticed otherwise: the loss hardly changes, and each
later checkpoint has it. Weights that only one rank holds have nothing to be compared with, nor do the moments and
masters that ZeRO shares out: a wrong bit there reaches all replicas alike.
"""

from __future__ import annotations

import socket
from collections import defaultdict
from typing import Any, DefaultDict, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np
import torch

from fugaku_gpt.comm import Communicator, ProcessGrid
from fugaku_gpt.comm.sums import array_of
from fugaku_gpt.config import LayoutConfig
from fugaku_gpt.errors import ReplicasDiffer
from fugaku_gpt.layout.flat import PlacedTensor
from fugaku_gpt.layout.grid import Coordinates, coordinates_of, dp_group, embedding_group, kv_group, tp_group
from fugaku_gpt.layout.replica_checks import comparisons
from fugaku_gpt.parallel.buffers import FlatBuffers
from fugaku_gpt.records.flight import FINISHED

_MOST_NAMED_RANKS = 8


class Difference(NamedTuple):
    """A tensor of which the ranks of a group hold different bits.

    Attributes:
        tensor: its name.
        ranks: checksum → the ranks, in the world, that hold the tensor with it; two checksums at least.
    """

    tensor: str
    ranks: Mapping[int, Tuple[int, ...]]


class ReplicaCheck:
    """Compares checksums of one rank's parameters with those of others.

    Args:
        buffers: the parameters, in which every tensor begins at a multiple of 64 bytes and gaps hold zeros.
    """

    def __init__(self, buffers: FlatBuffers, grid: ProcessGrid, layout: LayoutConfig, kv_copies: int) -> None:
        self._buffers = buffers
        self._grid = grid
        self._layout = layout
        self._comparisons = comparisons(buffers.layout, layout, layout.sequence_parallel)
        self._communicators: Dict[str, Communicator] = {
            "dp": grid.dp, "tp": grid.tp, "kv": grid.kv, "embedding": grid.embedding
        }  # fmt: skip
        self._kv_copies = kv_copies
        self._last_good: Optional[int] = None

    def check(self, iteration: int) -> None:
        """Compare what an iteration has computed with, before its update; collective over all ranks.

        By ZeRO, and where parameters are rounded from masters, the update itself replaces a wrong bit.

        Raises:
            ReplicasDiffer: ranks differ in what they must hold alike; raised on every rank, whichever differ.
        """
        sums = self._checksums()
        mismatches = [
            (comparison.communicator, placed.spec.name, sums[placed.start])
            for comparison in self._comparisons
            for placed in self._unequal(comparison.communicator, comparison.tensors, sums)
        ]
        count = torch.tensor([float(bool(mismatches))], dtype=torch.float64)
        self._grid.world.all_reduce(count)
        if float(count) > 0:
            self._end_run(iteration, mismatches)
        self._last_good = iteration

    def _checksums(self) -> Dict[int, int]:
        """Checksum of each tensor by its first element: the sum of its 64-bit words, modulo 2^64, so that one wrong bit
        always changes it. Waits for parameters that are still arriving."""
        parameters = self._buffers.parameters
        words_per_element = 8 // parameters.element_size()
        words = torch.from_numpy(array_of(parameters).view(np.int64))
        placements = self._buffers.placements
        ends = [placed.start for placed in placements[1:]] + [parameters.numel()]
        return {
            placed.start: int(words[placed.start // words_per_element : end // words_per_element].sum())
            for placed, end in zip(placements, ends)
        }

    def _unequal(self, name: str, tensors: Sequence[PlacedTensor], sums: Mapping[int, int]) -> Iterable[PlacedTensor]:
        """The tensors of which the ranks of a communicator have different checksums."""
        own = torch.tensor([sums[placed.start] for placed in tensors], dtype=torch.int64)
        extremes = torch.stack([own, ~own])  # the largest complement is that of the smallest
        self._communicators[name].all_reduce(extremes, "max")
        differs = (extremes[0] != ~extremes[1]).tolist()
        return [placed for placed, is_different in zip(tensors, differs) if is_different]

    def _end_run(self, iteration: int, mismatches: Sequence[Tuple[str, str, int]]) -> None:
        """Gather what differs, and raise the error that says so on every rank; collective.

        Raises:
            ReplicasDiffer: always.
        """
        world = self._grid.world
        world.mark_phase(FINISHED)  # the calls from here on are no part of a step
        reports = world.gather_json({"host": socket.gethostname(), "mismatches": list(mismatches)})
        answer = None
        if reports is not None:
            hosts = [str(report["host"]) for report in reports]
            differences = self._differences([report["mismatches"] for report in reports])
            answer = _describe(iteration, differences, hosts, self._last_good)
        message, rank, node = world.broadcast_json(answer)
        raise ReplicasDiffer(message, rank, node)

    def _differences(self, mismatches: Sequence[Sequence[Sequence[Any]]]) -> List[Difference]:
        """The differences of all groups, from what each rank has reported."""
        by_group: Dict[Tuple[str, str, Tuple[int, ...]], DefaultDict[int, List[int]]] = {}
        order = self._layout.order
        for rank, reported in enumerate(mismatches):
            coordinates = coordinates_of(rank, self._layout, order)
            for communicator, tensor, checksum in reported:
                group = tuple(_members(communicator, coordinates, self._layout, order, self._kv_copies))
                by_sum = by_group.setdefault((tensor, communicator, group), defaultdict(list))
                by_sum[int(checksum)].append(rank)
        return [
            Difference(tensor, {checksum: tuple(ranks) for checksum, ranks in by_sum.items()})
            for (tensor, _, _), by_sum in by_group.items()
        ]


def _members(
    communicator: str, coordinates: Coordinates, layout: LayoutConfig, order: str, kv_copies: int
) -> Sequence[int]:
    """The ranks of a communicator that the rank at some coordinates is in."""
    if communicator == "kv":
        return kv_group(coordinates, layout, order, copies=kv_copies)
    groups = {"dp": dp_group, "tp": tp_group, "embedding": embedding_group}
    return groups[communicator](coordinates, layout, order)


def suspects_of(differences: Sequence[Difference]) -> Tuple[List[int], List[int]]:
    """Return the ranks that must have wrong bits, and the ranks that agree with one another on the right ones.

    In each group, those are suspected who differ from a majority; where there is none, all. Ranks that every group
    with a difference suspects are the culprits, if there are such: of two replicas with two tensor-parallel ranks each,
    one rank is in both groups that differ.

    Args:
        differences: of one tensor.
    """
    suspected: List[Set[int]] = []
    agreeing: Set[int] = set()
    for difference in differences:
        ranks = [set(holders) for holders in difference.ranks.values()]
        everyone = set().union(*ranks)
        largest = max(ranks, key=len)
        has_majority = 2 * len(largest) > len(everyone)
        suspected.append(everyone - largest if has_majority else everyone)
        agreeing |= largest if has_majority else set()
    common = set.intersection(*suspected)
    culprits = common or set().union(*suspected)
    everyone = set().union(*(holders for difference in differences for holders in difference.ranks.values()))
    return sorted(culprits), sorted((agreeing or (everyone if common else set())) - culprits)


def _describe(
    iteration: int, differences: Sequence[Difference], hosts: Sequence[str], last_good: Optional[int]
) -> Tuple[str, Optional[int], str]:
    """The message of an error, its rank and its host; of several suspects, neither rank nor host."""
    names = list(dict.fromkeys(difference.tensor for difference in differences))
    suspects, others = suspects_of([difference for difference in differences if difference.tensor == names[0]])
    more = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
    if last_good is None:
        advice = "this is the first comparison: resume from a checkpoint of an earlier run, or begin anew"
    else:
        advice = f"no rank differed in iteration {last_good}: resume from a checkpoint of then or before"
    whose = _named_ranks(suspects, hosts)
    if others:
        verdict = f"{whose} held other bits of {names[0]}{more} than {_named_ranks(others, None)}"
    else:
        verdict = f"{whose} held different bits of {names[0]}{more}, and no majority shows which are right"
    message = f"iteration {iteration}: silent corruption: {verdict}; {advice}, without that host"
    rank = suspects[0] if len(suspects) == 1 else None
    return message, rank, hosts[rank] if rank is not None else ""


def _named_ranks(ranks: Sequence[int], hosts: Optional[Sequence[str]]) -> str:
    named = [f"{rank} on {hosts[rank]}" if hosts is not None else str(rank) for rank in ranks[:_MOST_NAMED_RANKS]]
    if len(ranks) > _MOST_NAMED_RANKS:
        named.append(f"{len(ranks) - _MOST_NAMED_RANKS} more")
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(named)}"
