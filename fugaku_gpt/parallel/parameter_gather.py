"""The all-gather of parameters under ZeRO stage 1, waited for bucket by bucket while the next forward pass begins."""

from __future__ import annotations

import functools
import time
from typing import Any, Dict, Iterable, List, Sequence, Tuple, Union

from torch import nn

from fugaku_gpt.comm import Communicator
from fugaku_gpt.comm.hierarchical import ChainedRequest, HierarchicalComm
from fugaku_gpt.comm.pending import Pending
from fugaku_gpt.layout.tensors import OUTPUT_WEIGHTS, TOKEN_EMBEDDING
from fugaku_gpt.parallel.buffers import FlatBuffers
from fugaku_gpt.parallel.overlap import Overlap

# tensors that a chunk reads directly, right after it has called this module; no forward hook of their own runs then
_READ_AFTER = {"token_embedding": ("position_embedding.weight",), "final_norm": (TOKEN_EMBEDDING, OUTPUT_WEIGHTS)}


class ParameterGather:
    """Brings the parameters that other replicas have stepped back to this rank (ZeRO stage 1), while the next forward
    pass begins: each module waits for its own buckets only."""

    def __init__(
        self,
        buffers: FlatBuffers,
        chunks: Iterable[nn.Module],
        replicas: Union[Communicator, HierarchicalComm],
        overlap: Overlap,
    ) -> None:
        assert overlap.gathers is not None
        self._buffers = buffers
        self._replicas = replicas
        self._overlap = overlap
        self._timed = overlap.gathers
        self._pending: Dict[int, Union[Pending, ChainedRequest]] = {}
        buffers.register_all_gather(self)
        spans = {placement.spec.name: placement.span for placement in buffers.placements}
        for chunk in chunks:
            for prefix, module in _modules_in_order(chunk):
                names = [f"{prefix}.{name}" if prefix else name for name, _ in module.named_parameters()]
                names += [name for name in _READ_AFTER.get(prefix, ()) if name in spans]
                buckets = buffers.buckets_of(*(spans[name] for name in names))
                module.register_forward_pre_hook(functools.partial(self._on_forward, buckets))

    def start(self) -> None:
        """Start the all-gather, after the optimiser has stepped this rank's shard. The forward pass uses the last
        bucket first."""
        flat = self._buffers.parameters  # waits for the rest of the previous all-gather
        alone, self._overlap.gather_is_due = self._overlap.gather_is_due, False
        if alone:
            self._overlap.wait_for_replicas()
        before = time.perf_counter()
        for index in reversed(range(len(self._buffers.buckets))):
            self._pending[index] = self._replicas.start_all_gather(flat[self._buffers.buckets[index]])
        if alone:
            self._wait_for(list(self._pending))
            self._timed.record_alone(time.perf_counter() - before)
        else:
            self._timed.exposed_seconds += time.perf_counter() - before
            self._timed.begin_background()

    def finish(self) -> None:
        """Wait for all buckets."""
        self._expose(list(self._pending))

    def _wait_for(self, buckets: Sequence[int]) -> None:
        for index in buckets:
            pending = self._pending.pop(index, None)
            if pending is not None:
                pending.wait()

    def _expose(self, buckets: Sequence[int]) -> None:
        """Wait for some buckets, and let MPI make progress with the others."""
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

    def _on_forward(self, buckets: Sequence[int], *_: Any) -> None:
        """A module's forward pass begins, which reads these buckets."""
        self._expose(buckets)


def _modules_in_order(chunk: nn.Module) -> List[Tuple[str, nn.Module]]:
    """Return (name, module) of a chunk's modules that run one after the other: each block, and the rest."""
    modules: List[Tuple[str, nn.Module]] = []
    for name, child in chunk.named_children():
        if isinstance(child, nn.ModuleDict):
            modules += [(f"{name}.{key}", block) for key, block in child.items()]
        else:
            modules.append((name, child))
    return modules
