"""Executes one stage's actions of a pipeline schedule (``layout/schedules.py``): computations and messages."""

from __future__ import annotations

import time
from typing import Callable, Dict, List, Optional, Protocol, Sequence, Tuple

import torch

from fugaku_gpt import compat
from fugaku_gpt.comm import Communicator
from fugaku_gpt.comm.pending import Pending
from fugaku_gpt.layout.schedules import (
    ACTIVATION,
    GRADIENT,
    Action,
    BackwardInput,
    BackwardWeight,
    Exchange,
    Forward,
    Message,
)
from fugaku_gpt.parallel.gradient_path import PassKey
from fugaku_gpt.records.flight import BACKWARD, FORWARD, VALIDATION

MessageKey = Tuple[str, int, int]  # kind of message, micro-batch, the chunk that gets it
_SENDS_PER_STAGE = 2  # under way at most, of one stage, for each stage of the pipeline


class Reducer(Protocol):
    """The interface through which the pipeline announces backward passes to a
    :class:`~fugaku_gpt.parallel.gradient_path.GradientReducer`."""

    def begin_backward(self, micro_batch: int, chunk: int, is_last: bool, is_deferring: bool = False) -> None:
        """Begin a backward pass, which may be its chunk's last one and may defer its gradients of weights."""

    def end_backward(self) -> None:
        """End the backward pass."""

    def make_deferred(self, micro_batch: int, chunk: int) -> None:
        """Make the gradients of weights that a backward pass has deferred."""


class Pipeline:
    """One stage of a pipeline.

    The input that a chunk gets from the chunk before it is a leaf of its own autograd graph; the gradient of this leaf
    is sent back. Receives are waited for when they are used, sends at the end, or before a later one if as many are
    under way as two for each stage. A stage can get ahead of the next one in GPipe and in validation, whose first half
    has no backward passes to wait for; its messages must not fill the memory. That makes no new deadlock: schedules
    have none where each send waits for its receive at once (``layout/schedule_check.py``).

    Attributes:
        waited_seconds: how long the last run has waited for other stages.
    """

    def __init__(
        self, actions: Sequence[Action], pp: Communicator, last_chunk: int, shape: Sequence[int], dtype: torch.dtype
    ) -> None:
        """``shape`` and ``dtype`` are those of the hidden states between chunks; chunks that follow each other on one
        stage pass them on without a message."""
        self._actions = list(actions)
        self._pp = pp
        self._last_chunk = last_chunk
        self._shape = tuple(shape)
        self._dtype = dtype
        self._last_micro_batch = {}  # by chunk, of its backward passes
        self._deferring = set()  # backward passes whose gradients of weights are made later
        for action in self._actions:
            if isinstance(action, BackwardInput):
                self._last_micro_batch[action.chunk] = action.micro_batch
            elif (
                isinstance(action, BackwardWeight) and action.chunk > 0
            ):  # no stage waits for the first chunk's input gradient
                self._deferring.add((action.micro_batch, action.chunk))
        self._arriving: Dict[MessageKey, Tuple[Pending, torch.Tensor]] = {}
        self.waited_seconds = 0.0

    def run(
        self,
        forward: Callable[[int, int, Optional[torch.Tensor]], torch.Tensor],
        reducer: Optional[Reducer] = None,
    ) -> None:
        """Run the schedule once; without gradients (validation), only its forward half.

        Args:
            forward: (micro-batch, chunk, input or None for the first chunk) → the chunk's output; of the last chunk,
                the loss.
            reducer: begins and ends backward passes, and makes what they defer; default: nothing is deferred.
        """
        inputs: Dict[PassKey, torch.Tensor] = {}
        outputs: Dict[PassKey, torch.Tensor] = {}
        outgoing: Dict[MessageKey, torch.Tensor] = {}
        sends: List[Pending] = []
        with_gradients = torch.is_grad_enabled()
        self.waited_seconds = 0.0
        for action in self._actions:
            if isinstance(action, Forward):
                micro_batch, chunk = action.micro_batch, action.chunk
                self._pp.mark_phase(FORWARD if with_gradients else VALIDATION, micro_batch=micro_batch)
                x = self._take_input((ACTIVATION, micro_batch, chunk), with_gradients, outgoing)
                y = forward(micro_batch, chunk, x)
                if with_gradients:
                    outputs[micro_batch, chunk] = y
                    if x is not None:
                        inputs[micro_batch, chunk] = x
                if chunk != self._last_chunk:
                    hidden = y.detach()
                    if self._pp.size == 1:
                        hidden.requires_grad_(with_gradients)
                    outgoing[ACTIVATION, micro_batch, chunk + 1] = hidden
            elif isinstance(action, BackwardInput):
                if not with_gradients:
                    continue
                micro_batch, chunk = action.micro_batch, action.chunk
                self._pp.mark_phase(BACKWARD, micro_batch=micro_batch)
                y = outputs.pop((micro_batch, chunk))
                gradient = self._take_input((GRADIENT, micro_batch, chunk), with_gradients, outgoing)
                if reducer is None:
                    compat.backward(y, gradient)
                else:
                    is_last = self._last_micro_batch[chunk] == micro_batch
                    reducer.begin_backward(micro_batch, chunk, is_last, (micro_batch, chunk) in self._deferring)
                    try:
                        compat.backward(y, gradient)
                    finally:
                        reducer.end_backward()
                if chunk != 0:
                    gradient = inputs.pop((micro_batch, chunk)).grad
                    assert gradient is not None
                    outgoing[GRADIENT, micro_batch, chunk - 1] = gradient
            elif isinstance(action, BackwardWeight):
                if with_gradients and reducer is not None and (action.micro_batch, action.chunk) in self._deferring:
                    self._pp.mark_phase(BACKWARD, micro_batch=action.micro_batch)
                    reducer.make_deferred(action.micro_batch, action.chunk)
            else:
                # dropping finished sends frees their memory
                sends = [pending for pending in sends if not pending.done()]
                while sends and len(sends) + len(action.sends) > _SENDS_PER_STAGE * self._pp.size:
                    self._wait([sends.pop(0)])
                sends += self._exchange(action, with_gradients, outgoing)
        self._wait(sends)

    def _exchange(
        self, exchange: Exchange, with_gradients: bool, outgoing: Dict[MessageKey, torch.Tensor]
    ) -> List[Pending]:
        """Post receives and sends; returns the sends. Receives are waited for where they are used: leaving an exchange
        open cannot make a new circle of waits."""
        for message in exchange.receives:
            if with_gradients or message.kind == ACTIVATION:
                buffer = torch.empty(self._shape, dtype=self._dtype)
                self._arriving[_key(message)] = (self._pp.start_receive(buffer, message.peer), buffer)
        return [
            self._pp.start_send(outgoing.pop(_key(message)).contiguous(), message.peer)
            for message in exchange.sends
            if with_gradients or message.kind == ACTIVATION
        ]

    def _take_input(
        self, key: MessageKey, with_gradients: bool, outgoing: Dict[MessageKey, torch.Tensor]
    ) -> Optional[torch.Tensor]:
        """Return the tensor that another chunk passes to this one; None at the ends of the model."""
        if key not in self._arriving:
            return outgoing.pop(key, None)
        pending, buffer = self._arriving.pop(key)
        self._wait([pending])
        return buffer.requires_grad_(with_gradients and key[0] == ACTIVATION)

    def _wait(self, pendings: Sequence[Pending]) -> None:
        before = time.perf_counter()
        for pending in pendings:
            pending.wait()
        self.waited_seconds += time.perf_counter() - before


def _key(message: Message) -> MessageKey:
    return message.kind, message.micro_batch, message.chunk
