"""One group of ranks and the collectives that they call together, in place on torch tensors.

Tensors are passed to MPI as the NumPy view of their own memory: nothing is copied. Every collective of a group of one
is free. One thread per process calls these, in an order that is a function of the configuration alone.
"""

from __future__ import annotations

import json
import time
from typing import Any, ClassVar, List, Optional, Sequence

import numpy as np
import torch

from fugaku_gpt.comm.checks import CallCheck
from fugaku_gpt.comm.flight_recorder import FlightRecorder
from fugaku_gpt.comm.mpi import MPI
from fugaku_gpt.comm.pending import BACKGROUND, MULTI_STEP, Pending
from fugaku_gpt.comm.sums import array_of, operation_for
from fugaku_gpt.layout.operations import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_REDUCES,
    BARRIER,
    BROADCAST,
    GATHER_JSON,
    MAX_ELEMENTS,
    RECEIVE,
    REDUCE_SCATTER,
    SEND,
)
from fugaku_gpt.records.flight import DIRECTIONS

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 2e-5, 1e-3
_ABORT_GRACE_SECONDS = 0.5  # before all ranks are ended
_PAUSES_GROW = 1.125  # so that, but for the first few, a pause is about an eighth of what has been waited before it


class Communicator:
    """A group of ranks. ``rank`` and ``size`` are within the group; ``name`` is how logs and the flight recorder call
    it.

    Attributes:
        waited_seconds: how long this process has waited for others, in all of its groups.
    """

    waited_seconds: ClassVar[float] = 0.0

    def __init__(
        self,
        handle: Optional[MPI.Comm],
        name: str,
        recorder: Optional[FlightRecorder] = None,
        max_elements: int = MAX_ELEMENTS,
        shares_cores: bool = False,
        checks: bool = False,
    ) -> None:
        """``checks``: compare calls between the ranks before they are made (see :mod:`fugaku_gpt.comm.checks`)."""
        self._handle = handle
        self._recorder = recorder
        self._max_elements = max_elements
        self._shares_cores = shares_cores
        self.name = name
        self.rank: int = handle.Get_rank() if handle is not None else 0
        self.size: int = handle.Get_size() if handle is not None else 1
        self._members: Sequence[int] = ()  # world ranks, by rank in the group, where there is a recorder
        self._group = -1
        if recorder is not None and handle is not None and self.size > 1:
            self._members = _world_ranks(handle)
            self._group = recorder.group(name, self._members, self.rank)
        self._checks = checks
        self._check: Optional[CallCheck] = None
        if checks and handle is not None and self.size > 1:
            self._check = CallCheck(handle, name, _world_ranks(handle), self._wait)

    @classmethod
    def alone(cls, name: str = "self") -> "Communicator":
        """A group of this process only, without MPI."""
        return cls(None, name)

    def split(self, color: Optional[int], key: int, name: str) -> "Communicator":
        """The group of all ranks of this one that give the same ``color``, ordered by ``key``; a rank whose colour is
        None is alone. Collective over this group."""
        if self._handle is None:
            return self
        slot = self._enter("split", None)
        group = self._handle.Split(MPI.UNDEFINED if color is None else color, key)
        self._leave(slot)
        if color is None:
            return Communicator(None, name, self._recorder)
        return Communicator(group, name, self._recorder, self._max_elements, self._shares_cores, self._checks)

    def unchecked(self) -> "Communicator":
        """This group without comparison of its calls: ranks may reach them in different orders relative to other
        groups."""
        self._checks, self._check = False, None
        return self

    def on_this_node(self, name: str) -> "Communicator":
        """The ranks of this group that share memory with this one. Collective over this group."""
        if self._handle is None:
            return self
        slot = self._enter("split", None)
        group = self._handle.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank)
        self._leave(slot)
        return Communicator(group, name, self._recorder, self._max_elements, self._shares_cores)

    def all_reduce(self, tensor: torch.Tensor, operation: str = "sum") -> None:
        """Replace ``tensor`` by the sum, max or min over the group, equal on every rank."""
        if self._handle is None or self.size == 1:
            return
        flat, how = _flat(tensor), operation_for(operation, tensor.dtype)
        slot = self._enter(ALL_REDUCES[operation], tensor)
        for start in range(0, flat.size, self._max_elements):
            piece = flat[start : start + self._max_elements]
            self._wait(self._handle.Iallreduce(MPI.IN_PLACE, piece, how))
        self._leave(slot)

    def start_all_reduce(self, tensor: torch.Tensor) -> Pending:
        """As :meth:`all_reduce` with a sum, without waiting for its end."""
        if self._handle is None or self.size == 1:
            return Pending(self, [], -1, None)
        flat, how = _flat(tensor), operation_for("sum", tensor.dtype)
        slot = self._enter(ALL_REDUCE, tensor, blocking=False)
        pieces = [flat[start : start + self._max_elements] for start in range(0, flat.size, self._max_elements)]
        return Pending(self, [self._handle.Iallreduce(MPI.IN_PLACE, piece, how) for piece in pieces], slot, flat)

    def start_reduce_scatter(self, tensor: torch.Tensor) -> Pending:
        """Sum [size * n] elements over the group and leave part ``rank`` of the sum in the first n of them.

        The other elements are undefined afterwards. At most 2^31 - 1 elements.
        """
        if self._handle is None or self.size == 1:
            return Pending(self, [], -1, None)
        flat, how = self._divisible(tensor), operation_for("sum", tensor.dtype)
        slot = self._enter(REDUCE_SCATTER, tensor, blocking=False)
        return Pending(self, [self._handle.Ireduce_scatter_block(MPI.IN_PLACE, flat, how)], slot, flat)

    def start_all_gather(self, tensor: torch.Tensor) -> Pending:
        """Fill [size * n] elements from the group: rank r gives elements [r * n, (r + 1) * n), which it has in place.

        At most 2^31 - 1 elements.
        """
        if self._handle is None or self.size == 1:
            return Pending(self, [], -1, None)
        flat = self._divisible(tensor)
        slot = self._enter(
            ALL_GATHER, tensor.view(-1)[: flat.size // self.size], blocking=False
        )  # what each rank gives
        return Pending(self, [self._handle.Iallgather(MPI.IN_PLACE, flat)], slot, flat)

    def start_send(self, tensor: torch.Tensor, peer: int) -> Pending:
        """Start to send a tensor to a rank of the group; messages between two ranks arrive in the order in which they
        were sent."""
        assert self._handle is not None
        flat = _flat(tensor)
        slot = self._enter(SEND, tensor, blocking=False, peer=peer)
        return Pending(self, [self._handle.Isend(flat, peer)], slot, flat)

    def start_receive(self, tensor: torch.Tensor, peer: int) -> Pending:
        """Start to receive into a tensor what a rank of the group sends."""
        assert self._handle is not None
        flat = _flat(tensor)
        slot = self._enter(RECEIVE, tensor, blocking=False, peer=peer)
        message = self._check.message() if self._check is not None else None
        return Pending(self, [self._handle.Irecv(flat, peer)], slot, flat, message)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The group's tensors stacked by rank: [...] → [size, ...]. All must have one shape."""
        if self._handle is None or self.size == 1:
            return tensor.unsqueeze(0)
        if tensor.numel() * self.size > self._max_elements:
            raise ValueError(
                f"all_gather of {tensor.numel()} elements from {self.size} ranks is past MPI's largest count"
            )
        gathered = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype)
        flat = _flat(tensor)
        slot = self._enter(ALL_GATHER, tensor)
        self._wait(self._handle.Iallgather(flat, _flat(gathered)))
        self._leave(slot)
        return gathered

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Replace ``tensor`` by the root's."""
        if self._handle is None or self.size == 1:
            return
        flat = _flat(tensor)
        slot = self._enter(BROADCAST, tensor, peer=root)
        for start in range(0, flat.size, self._max_elements):
            self._wait(self._handle.Ibcast(flat[start : start + self._max_elements], root))
        self._leave(slot)

    def barrier(self) -> None:
        """Wait for the whole group."""
        if self._handle is None or self.size == 1:
            return
        slot = self._enter(BARRIER, None)
        self._wait(self._handle.Ibarrier())
        self._leave(slot)

    def gather_json(self, value: Any) -> Optional[List[Any]]:
        """Every rank's JSON value, by rank, on rank 0; None elsewhere. For start-up reports, not for the hot path."""
        if self._handle is None or self.size == 1:
            return [value]
        text = np.frombuffer(json.dumps(value).encode("utf-8"), dtype=np.uint8)
        lengths = self.all_gather(torch.tensor([text.size])).reshape(-1).numpy()
        received = np.empty(int(lengths.sum()) if self.rank == 0 else 0, dtype=np.uint8)
        slot = self._enter(GATHER_JSON, None)
        self._wait(self._handle.Igatherv(text, [received, lengths.tolist()] if self.rank == 0 else None, root=0))
        self._leave(slot)
        if self.rank != 0:
            return None
        ends = np.cumsum(lengths)
        return [json.loads(received[end - size : end].tobytes().decode("utf-8")) for end, size in zip(ends, lengths)]

    def broadcast_json(self, value: Any) -> Any:
        """Rank 0's JSON value, on every rank. For start-up and error agreement, not for the hot path."""
        if self._handle is None or self.size == 1:
            return value
        text = json.dumps(value).encode("utf-8") if self.rank == 0 else b""
        length = torch.tensor([len(text)])
        self.broadcast(length)
        data = torch.zeros(int(length), dtype=torch.uint8)
        if self.rank == 0:
            data.numpy()[:] = np.frombuffer(text, dtype=np.uint8)
        self.broadcast(data)
        return json.loads(data.numpy().tobytes().decode("utf-8"))

    def abort(self, code: int) -> None:
        """End every rank of the job; does not return if there are others. A short pause lets this rank's last output
        through: a launcher that is ended may not have forwarded it (seen: MPICH's, on busy cores)."""
        if self._handle is not None:
            time.sleep(_ABORT_GRACE_SECONDS)
            self._handle.Abort(code)

    def _divisible(self, tensor: torch.Tensor) -> "np.ndarray[Any, Any]":
        if tensor.numel() % self.size or tensor.numel() > self._max_elements:
            raise ValueError(f"{tensor.numel()} elements cannot be shared out to {self.size} ranks in one message")
        return _flat(tensor)

    def _wait(self, request: MPI.Request) -> None:
        """Wait for a collective to end.

        MPI libraries wait by spinning, which on a shared core takes time from another rank: two ranks too many made an
        iteration a hundred times slower. So ranks that share cores poll and sleep in between.
        """
        before = time.perf_counter()
        if not self._shares_cores and not MULTI_STEP:
            request.Wait()
        else:
            pause = _FIRST_PAUSE_SECONDS
            while not request.Test():
                for chained in tuple(MULTI_STEP):
                    chained.done()
                if self._shares_cores:
                    time.sleep(pause)
                    pause = min(_PAUSES_GROW * pause, _LONGEST_PAUSE_SECONDS)
        Communicator.waited_seconds += time.perf_counter() - before

    @property
    def recorder(self) -> Optional[FlightRecorder]:
        """Where this rank's calls are recorded."""
        return self._recorder

    def mark_phase(self, phase: int, step: Optional[int] = None, micro_batch: Optional[int] = None) -> None:
        """Record what this rank is about to do (see :meth:`FlightRecorder.mark_phase`)."""
        if self._recorder is not None:
            self._recorder.mark_phase(phase, step, micro_batch)

    def _enter(
        self,
        operation: str,
        tensor: Optional[torch.Tensor],
        blocking: bool = True,
        peer: Optional[int] = None,
    ) -> int:
        BACKGROUND.check()
        dtype = str(tensor.dtype) if tensor is not None else "-"
        shape = tuple(tensor.shape) if tensor is not None else ()
        slot = -1
        if self._recorder is not None and self._group >= 0:
            is_compared = self._check is not None and operation not in DIRECTIONS  # then all are waited for
            world_rank = self._members[peer] if peer is not None else -1
            slot = self._recorder.enter(self._group, operation, dtype, shape, blocking or is_compared, world_rank)
        if self._check is not None:
            # an extra message would pass for the next one of its shape: the iteration distinguishes them
            step = self._recorder.step if self._recorder is not None and operation in DIRECTIONS else -1
            iteration = f" in iteration {step}" if step >= 0 else ""
            self._check.before(operation, f"{dtype} {list(shape)}{iteration}", peer)
        return slot

    def _posted(self, slot: int) -> None:
        if self._recorder is not None and slot >= 0:
            self._recorder.posted(slot)

    def _waits(self, slot: int) -> None:
        if self._recorder is not None and slot >= 0:
            self._recorder.wait(slot)

    def _leave(self, slot: int) -> None:
        if self._recorder is not None and slot >= 0:
            self._recorder.leave(slot)


def _world_ranks(handle: MPI.Comm) -> List[int]:
    """The world's ranks of a group's members; asks nobody."""
    group, world = handle.Get_group(), MPI.COMM_WORLD.Get_group()
    ranks = [int(rank) for rank in MPI.Group.Translate_ranks(group, list(range(group.Get_size())), world)]
    group.Free()
    world.Free()
    return ranks


def _flat(tensor: torch.Tensor) -> "np.ndarray[Any, Any]":
    """The tensor's own memory as a flat array.

    Raises:
        ValueError: the tensor is not contiguous, so that a flat view of it would be a copy.
    """
    if not tensor.is_contiguous():
        raise ValueError(f"MPI needs contiguous memory; got a tensor of shape {tuple(tensor.shape)} with gaps")
    return array_of(tensor.detach().view(-1))
