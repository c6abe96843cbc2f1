"""The all-gather of parameters under ZeRO stage 1, waited for bucket by bucket while the next forward pass begins."""

from __future__ import annotations

import time
from typing import Any, Dict, List, Sequence, Union

from torch import nn

from fugaku_gpt.comm import Communicator
from fugaku_gpt.comm.node_first import Chain, NodeFirst
from fugaku_gpt.comm.pending import Pending
from fugaku_gpt.layout.tensors import TOKEN_EMBEDDING
from fugaku_gpt.parallel.buffers import FlatBuffers
from fugaku_gpt.parallel.overlap import Overlap

# tensors that a piece reads itself, right after it has called this part: no call of their own shows it
_READ_AFTER = {"token_embedding": "position_embedding.weight", "final_norm": TOKEN_EMBEDDING}


class ParameterGather:
    """Brings the parameters that other replicas have stepped back to this rank (ZeRO stage 1), while the next forward
    pass begins: each module waits for its own buckets only."""

    def __init__(
        self,
        buffers: FlatBuffers,
        pieces: Sequence[nn.Module],
        replicas: Union[Communicator, NodeFirst],
        overlap: Overlap,
    ) -> None:
        assert overlap.gathers is not None
        self._buffers = buffers
        self._replicas = replicas
        self._overlap = overlap
        self._timed = overlap.gathers
        self._pending: Dict[int, Union[Pending, Chain]] = {}
        buffers.settle = self.finish
        places = {placement.spec.name: placement.span for placement in buffers.placements}
        for piece in pieces:
            for prefix, module in _parts_of(piece):
                names = [f"{prefix}.{name}" if prefix else name for name, _ in module.named_parameters()]
                names += [name for part, name in _READ_AFTER.items() if part == prefix and name in places]
                self._wait_before(module, [places[name] for name in names])

    def start(self) -> None:
        """The optimiser has stepped this rank's share; the forward pass uses the last bucket first."""
        flat = self._buffers.parameters  # waits for what is left of the time before
        alone, self._overlap.gather_is_due = self._overlap.gather_is_due, False
        if alone:
            self._overlap.meet()
        before = time.perf_counter()
        for index in reversed(range(len(self._buffers.buckets))):
            self._pending[index] = self._replicas.start_all_gather(flat[self._buffers.buckets[index]])
        if alone:
            self._wait_for(list(self._pending))
            self._timed.took_alone(time.perf_counter() - before)
        else:
            self._timed.exposed_seconds += time.perf_counter() - before
            self._timed.begin_background()

    def finish(self) -> None:
        """Wait for all of them."""
        self._expose(list(self._pending))

    def _wait_for(self, buckets: Sequence[int]) -> None:
        for index in buckets:
            pending = self._pending.pop(index, None)
            if pending is not None:
                pending.wait()

    def _expose(self, buckets: Sequence[int]) -> None:
        """Wait for some of them, and let MPI get on with the others."""
        if not self._pending:
            return
        self._timed.count_background()
        before = time.perf_counter()
        self._wait_for(buckets)
        for pending in self._pending.values():
            pending.done()
        self._timed.exposed_seconds += time.perf_counter() - before
        if not self._pending:
            self._timed.steps += 1

    def _wait_before(self, module: nn.Module, parts: Sequence[slice]) -> None:
        wanted = [
            index
            for index, bucket in enumerate(self._buffers.buckets)
            if any(part.start < bucket.stop and bucket.start < part.stop for part in parts)
        ]

        module.register_forward_pre_hook(lambda *_: self._expose(wanted))


def _parts_of(piece: nn.Module) -> List[Any]:
    """(name, module) of the parts of a piece that run one after the other: each block, and the rest."""
    parts: List[Any] = []
    for name, child in piece.named_children():
        if isinstance(child, nn.ModuleDict):
            parts += [(f"{name}.{key}", block) for key, block in child.items()]
        else:
            parts.append((name, child))
    return parts
