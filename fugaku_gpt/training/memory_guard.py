"""Ends a run whose node is about to run out of memory, and reports what has used it, before the kernel kills a rank.

A thread of each rank polls the node's memory use. It never calls MPI and needs next to no memory. When use comes close
to a limit, the node's largest rank ends as ``oom``; the launcher ends the other ranks.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from typing import Callable, Dict, List, Mapping, Optional

from fugaku_gpt.comm import Communicator
from fugaku_gpt.config.schema import NodeConfig
from fugaku_gpt.config.values import size_bytes
from fugaku_gpt.errors import EXIT_RUN_FAILED
from fugaku_gpt.machine.clock import steady_time
from fugaku_gpt.machine.local import resident_bytes
from fugaku_gpt.machine.memory import MemoryUse, NodeMemory, guard_margin, hugetlb_bytes
from fugaku_gpt.machine.system import this_system
from fugaku_gpt.records.run import OUT_OF_MEMORY, Result, RunDirectory, failure_lines

_MIB = 2**20
_FAST_POLL_SHARE = 0.7  # of the limit: above it memory is polled often, since threads fill gigabytes in a second
_POLL_SECONDS, _FAST_POLL_SECONDS = 0.2, 0.02
_LARGEST_FIRST_SECONDS = 0.3  # by which smaller ranks wait for the largest to end first


class MemoryGuard:
    """Watches the node's memory while its context is open. It is created before the model, to measure what is resident
    by then.

    Args:
        processes: process ids of this node's ranks.
        exit_process: ends this process with an exit code, from any thread.
    """

    def __init__(
        self,
        directory: RunDirectory,
        rank: int,
        processes: List[int],
        node: NodeConfig,
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        self._directory = directory
        self._rank = rank
        self._memory = NodeMemory(processes, size_bytes(node.memory_limit) if node.memory_limit else None)
        self._exit_process = exit_process
        self._started = steady_time()
        self._bytes_before_model = resident_bytes()
        self._memory_by_category: Callable[[], Mapping[str, int]] = dict
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory guard", daemon=True)

    def set_memory_by_category(self, memory_by_category: Callable[[], Mapping[str, int]]) -> None:
        """Set the function that returns the trainer's memory in bytes by category, for the report."""
        self._memory_by_category = memory_by_category

    def __enter__(self) -> MemoryGuard:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        seconds = _POLL_SECONDS
        end_at: Optional[float] = None  # when this rank ends the run, unless a larger one has
        while not self._stopped.wait(seconds):
            use = self._memory.uses()[0]
            seconds = _FAST_POLL_SECONDS if use.used > _FAST_POLL_SHARE * use.limit else _POLL_SECONDS
            if use.limit - use.used > guard_margin(use.limit):
                end_at = None
                continue
            if end_at is None:
                # where this rank's own NUMA nodes are full, the largest rank of the node may be bound to other ones
                ends_first = not use.is_node_wide or self._memory.largest_process() == os.getpid()
                end_at = time.monotonic() + (0.0 if ends_first else _LARGEST_FIRST_SECONDS)
            if time.monotonic() >= end_at:
                self._end_run(use)
                return

    def _end_run(self, use: MemoryUse) -> None:
        try:
            node = socket.gethostname()
            reason = (
                f"rank {self._rank}: out of memory soon: {use.used // _MIB} of {use.limit // _MIB} MiB in use on "
                f"{node} (limit: {use.source}); {self._describe_largest()}"
            )
            result = Result(
                OUT_OF_MEMORY,
                reason,
                self._started,
                steady_time(),
                self._directory.last_iteration(),
                rank=self._rank,
                node=node,
                exception="memory guard",
                last_checkpoint=self._directory.last_checkpoint(),
            )
            print("\n".join(failure_lines(result)), file=sys.stderr, flush=True)
            self._directory.write_result(result, replace=False)
        finally:  # whatever else happens, the memory must be freed before the kernel acts
            self._exit_process(EXIT_RUN_FAILED)

    def _describe_largest(self) -> str:
        """Return this rank's peak by category: ``this rank had 410 MiB at most: weights 100, ..., activations and the
        rest 60``."""
        largest = max(peak_resident_bytes(), resident_bytes())
        bytes_by_category = {**self._memory_by_category(), "before the model was there": self._bytes_before_model}
        rest = max(0, largest - sum(bytes_by_category.values()))
        listed = [f"{name} {size // _MIB}" for name, size in bytes_by_category.items() if size >= _MIB]
        return f"this rank had {largest // _MIB} MiB at most: " + ", ".join(
            [*listed, f"activations and the rest {rest // _MIB}"]
        )


def peak_resident_bytes() -> int:
    """Return the peak resident memory of this process in bytes; 0 if the system does not report it."""
    for line in (this_system().read("proc/self/status") or "").splitlines():
        if line.startswith("VmHWM:"):  # without large pages, of which no peak is reported
            return int(line.split()[1]) * 1024 + hugetlb_bytes(os.getpid())
    return 0


def processes_of_node(world: Communicator) -> Dict[int, int]:
    """Return the process id of each rank of this node. Collective."""
    node = world.on_this_node("node")
    return dict(node.broadcast_json(node.gather_json([world.rank, os.getpid()])))
