"""Carries out one stage's part of a pipeline schedule (``layout/schedules.py``): who computes what, and who is told."""

from __future__ import annotations

import contextlib
import time
from typing import Callable, Dict, List, Optional, Sequence, Tuple

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
from fugaku_gpt.parallel.late import DeferredWeightGrads, Key
from fugaku_gpt.records.flight import BACKWARD, FORWARD, VALIDATION

Held = Tuple[str, int, int]  # kind of message, micro-batch, the chunk that gets it


class Pipeline:
    """One stage of a pipeline.

    What a chunk gets from the one before it is a leaf of its own autograd graph: the gradient that this leaf gathers is
    what goes back. Receives are waited for where they are used, sends at the end.

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
        self._last_backward = {}
        self._puts_off = set()  # backward passes whose gradients of weights are made later
        for action in self._actions:
            if isinstance(action, BackwardInput):
                self._last_backward[action.chunk] = action.micro_batch
            elif isinstance(action, BackwardWeight) and action.chunk > 0:  # behind the first chunk nobody waits
                self._puts_off.add((action.micro_batch, action.chunk))
        self._arriving: Dict[Held, Tuple[Pending, torch.Tensor]] = {}
        self.waited_seconds = 0.0

    def run(
        self,
        forward: Callable[[int, int, Optional[torch.Tensor]], torch.Tensor],
        before_last_backward: Optional[Callable[[int], None]] = None,
        late: Optional[DeferredWeightGrads] = None,
    ) -> None:
        """Run the schedule once; without gradients (validation), only its forward half.

        Args:
            forward: (micro-batch, chunk, input or None for the first chunk) → the chunk's output; of the last chunk,
                the loss.
            before_last_backward: is told a chunk before its last backward pass.
            late: takes the products that the schedule puts off; default: none is put off.
        """
        inputs: Dict[Key, torch.Tensor] = {}
        outputs: Dict[Key, torch.Tensor] = {}
        held: Dict[Held, torch.Tensor] = {}  # by what kind, micro-batch, and the chunk that gets it
        leaving: List[Pending] = []
        learns = torch.is_grad_enabled()
        self.waited_seconds = 0.0
        for action in self._actions:
            if isinstance(action, Forward):
                micro_batch, chunk = action.micro_batch, action.chunk
                self._pp.progress(FORWARD if learns else VALIDATION, micro_batch=micro_batch)
                x = self._take((ACTIVATION, micro_batch, chunk), learns, held)
                y = forward(micro_batch, chunk, x)
                if learns:
                    outputs[micro_batch, chunk] = y
                    if x is not None:
                        inputs[micro_batch, chunk] = x
                if chunk != self._last_chunk:
                    handed_on = y.detach()
                    if self._pp.size == 1:
                        handed_on.requires_grad_(learns)
                    held[ACTIVATION, micro_batch, chunk + 1] = handed_on
            elif isinstance(action, BackwardInput):
                if not learns:
                    continue
                micro_batch, chunk = action.micro_batch, action.chunk
                self._pp.progress(BACKWARD, micro_batch=micro_batch)
                if before_last_backward is not None and self._last_backward[chunk] == micro_batch:
                    before_last_backward(chunk)
                y = outputs.pop((micro_batch, chunk))
                gradient = self._take((GRADIENT, micro_batch, chunk), learns, held)
                puts_off = late is not None and (micro_batch, chunk) in self._puts_off
                with late.putting_off((micro_batch, chunk)) if late and puts_off else contextlib.nullcontext():
                    compat.backward(y, gradient)
                if chunk != 0:
                    gradient = inputs.pop((micro_batch, chunk)).grad
                    assert gradient is not None
                    held[GRADIENT, micro_batch, chunk - 1] = gradient
            elif isinstance(action, BackwardWeight):
                if learns and late is not None and (action.micro_batch, action.chunk) in self._puts_off:
                    self._pp.progress(BACKWARD, micro_batch=action.micro_batch)
                    late.make((action.micro_batch, action.chunk))
            else:
                # what has arrived need not be kept: as many messages live as stages lag, not as there are micro-batches
                leaving = [pending for pending in leaving if not pending.done()]
                leaving += self._exchange(action, learns, held)
        self._wait(leaving)

    def _exchange(self, exchange: Exchange, learns: bool, held: Dict[Held, torch.Tensor]) -> List[Pending]:
        """Post receives and sends; returns the sends. Receives are waited for where they are used: leaving an exchange
        open cannot make a new circle of waits."""
        for message in exchange.receives:
            if learns or message.kind == ACTIVATION:
                buffer = torch.empty(self._shape, dtype=self._dtype)
                self._arriving[_key(message)] = (self._pp.start_receive(buffer, message.peer), buffer)
        return [
            self._pp.start_send(held.pop(_key(message)).contiguous(), message.peer)
            for message in exchange.sends
            if learns or message.kind == ACTIVATION
        ]

    def _take(self, key: Held, learns: bool, held: Dict[Held, torch.Tensor]) -> Optional[torch.Tensor]:
        """What another chunk hands to this one; None for the ends of the model."""
        if key not in self._arriving:
            return held.pop(key, None)
        pending, buffer = self._arriving.pop(key)
        self._wait([pending])
        return buffer.requires_grad_(learns and key[0] == ACTIVATION)

    def _wait(self, pending: Sequence[Pending]) -> None:
        before = time.perf_counter()
        for one in pending:
            one.wait()
        self.waited_seconds += time.perf_counter() - before


def _key(message: Message) -> Held:
    return message.kind, message.micro_batch, message.chunk
