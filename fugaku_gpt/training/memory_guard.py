"""Ends a run whose node is about to run out of memory, and says what has taken it, before the kernel kills a rank.

A thread of each rank looks at the node's use. It does not call MPI, and needs no memory worth the name. Where a limit
comes near, the node's largest rank ends as ``oom``; the launcher ends the others.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Callable, Dict, List, Mapping, Optional

from fugaku_gpt.comm import Communicator
from fugaku_gpt.config.schema import NodeConfig
from fugaku_gpt.config.values import size_bytes
from fugaku_gpt.errors import EXIT_RUN_FAILED
from fugaku_gpt.machine.local import resident_bytes
from fugaku_gpt.machine.memory import MemoryUse, NodeMemory, guard_margin
from fugaku_gpt.records.run import OUT_OF_MEMORY, Result, RunDirectory, failure_lines

_MIB = 2**20
_NEAR = 0.7  # of the limit: from there on it is looked at often, since threads fill gigabytes in a second
_SECONDS, _NEAR_SECONDS = 0.2, 0.02
_TURN_SECONDS = 0.3  # that smaller ranks leave to the largest


class MemoryGuard:
    """Watches while it is entered. Made and entered before the model is there, so that what is resident then is known.

    Args:
        processes: the ranks of this node, by process number.
        leave: ends this process with an exit code, from whatever thread.
    """

    def __init__(
        self,
        directory: RunDirectory,
        rank: int,
        processes: List[int],
        node: NodeConfig,
        leave: Callable[[int], None] = os._exit,
    ) -> None:
        self._directory = directory
        self._rank = rank
        self._memory = NodeMemory(processes, size_bytes(node.memory_limit) if node.memory_limit else None)
        self._leave = leave
        self._started = time.time()
        self._base = resident_bytes()
        self._held: Callable[[], Mapping[str, int]] = dict
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory guard", daemon=True)

    def tell(self, held: Callable[[], Mapping[str, int]]) -> None:
        """What the trainer holds, by category in bytes, from now on."""
        self._held = held

    def __enter__(self) -> MemoryGuard:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        seconds = _SECONDS
        turn: Optional[float] = None  # when the largest rank has had its time to speak
        while not self._over.wait(seconds):
            use = self._memory.uses()[0]
            seconds = _NEAR_SECONDS if use.used > _NEAR * use.limit else _SECONDS
            if use.limit - use.used > guard_margin(use.limit):
                turn = None
                continue
            if turn is None:
                turn = time.monotonic() + (0.0 if self._memory.largest_process() == os.getpid() else _TURN_SECONDS)
            if time.monotonic() >= turn:
                self._end(use)
                return

    def _end(self, use: MemoryUse) -> None:
        try:
            node = socket.gethostname()
            reason = (
                f"rank {self._rank}: out of memory soon: {use.used // _MIB} of {use.limit // _MIB} MiB in use on "
                f"{node} (limit: {use.source}); {self._words()}"
            )
            result = Result(
                OUT_OF_MEMORY,
                reason,
                self._started,
                time.time(),
                self._directory.last_iteration(),
                rank=self._rank,
                node=node,
                exception="memory guard",
                last_checkpoint=self._directory.last_checkpoint(),
            )
            print("\n".join(failure_lines(result)), file=sys.stderr, flush=True)
            self._directory.write_result(result, replace=False)
        finally:  # whatever else happens, the memory must be free before the kernel acts
            self._leave(EXIT_RUN_FAILED)

    def _words(self) -> str:
        """``this rank's largest was 410 MiB: weights 100, ..., the rest (activations first of all) 60``."""
        largest = max(high_water(), resident_bytes())
        parts = {**self._held(), "before the model was there": self._base}
        rest = max(0, largest - sum(parts.values()))
        listed = [f"{name} {size // _MIB}" for name, size in parts.items() if size >= _MIB]
        return f"this rank had {largest // _MIB} MiB at most: " + ", ".join(
            [*listed, f"activations and the rest {rest // _MIB}"]
        )


def high_water() -> int:
    """The most resident memory that this process has had, in bytes; 0 where the system does not tell."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def processes_of_node(world: Communicator) -> Dict[int, int]:
    """The ranks of this node, each with its process number. Collective."""
    node = world.on_this_node("node")
    return dict(node.broadcast_json(node.gather_json([world.rank, os.getpid()])))
