"""Seconds of single operations of a rank of our own trainer, from counted cycles and bytes.

An operation has a time of its cores and a time of its memory:

* cores: the cycles of the thread with the most work, at the node's clock. Tiles of a product's result count in full
  where its edge cuts them, and threads wait for the one with the most tiles; likewise heads of attention. With one
  floating-point pipe, cycles double.
* memory: the bytes that cross between L2 cache and memory, at the bandwidth of the rank's core-memory groups. Each
  operand crosses once, a result twice, since A64FX reads a line before it writes to it. Nothing that an operation
  leaves in the cache is there for the next one.

An operation takes the longer of both if they overlap perfectly, and their sum if they do not at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Mapping, Optional, Tuple

from fugaku_gpt.errors import UsageError
from fugaku_gpt.layout.operations import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, SEND
from fugaku_gpt.machine.counted import LOSS_OF_COLUMNS, CountedCycles
from fugaku_gpt.machine.fugaku import PIPES
from fugaku_gpt.machine.probed import ATTENTION, ATTENTION_BACKWARD

_ITEM = 4  # bytes of a float32 number
# numbers that an element of a pass reads besides its results, and its results, by the operands of kernels/source, and
# for the last five of PyTorch's operators
TRAFFIC: Mapping[str, Tuple[float, float]] = {
    "layer_norm": (1, 1),
    "layer_norm_backward": (2, 1),
    "gelu_erf": (1, 1),
    "gelu_erf_backward": (2, 1),
    "gelu_tanh": (1, 1),
    "gelu_tanh_backward": (2, 1),
    "loss": (0, 1),
    LOSS_OF_COLUMNS: (1, 1),  # read for the sums, then read and written
    "squares": (1, 0),
    "optimiser": (1, 3),
    "zero": (0, 1),
    "add": (2, 1),
    "copy": (1, 1),
    "sum_of_rows": (1, 0),
    "dropout": (1, 1.25),  # with a byte of the mask
    "flags": (0, 0.25),
}
# products [s, s][s, d] of a head of attention, or as large, and tensors [s, d] that it reads and writes
_ATTENTION = {ATTENTION: (2, 3, 1), ATTENTION_BACKWARD: (5, 5, 3)}


@dataclass(frozen=True)
class Work:
    """Seconds of operations by their cores and by their memory.

    Attributes:
        overlapped: the sum of the longer of both over the operations, and of waits for other ranks between them.
        idle: waits for other ranks where cores and memory of no rank work at the same time.
    """

    cores: float = 0.0
    memory: float = 0.0
    overlapped: float = 0.0
    idle: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.cores + other.cores,
            self.memory + other.memory,
            self.overlapped + other.overlapped,
            self.idle + other.idle,
        )

    def times(self, count: float) -> "Work":
        """The work done ``count`` times."""
        return Work(count * self.cores, count * self.memory, count * self.overlapped, count * self.idle)

    @property
    def not_overlapped(self) -> float:
        """Seconds if cores and memory never work at the same time."""
        return self.cores + self.memory + self.idle

    @property
    def bound_by(self) -> Optional[str]:
        """The side that takes the most time: ``cores`` or ``memory``; None where neither works."""
        if not self.cores and not self.memory:
            return None
        return "cores" if self.cores >= self.memory else "memory"


def busiest_thread_tiles(rows: int, columns: int, threads: int) -> int:
    """Tiles of the thread with the most of them, where threads share rows and columns as in ``kernels/source/gemm.c``.

    Args:
        rows, columns: of a product's result, in tiles.
    """
    return min(
        -(-rows // by_rows) * -(-columns // (threads // by_rows))
        for by_rows in range(1, threads + 1)
        if threads % by_rows == 0
    )


class OperationTimes:
    """Times of single operations of a rank."""

    def __init__(self, counted: CountedCycles, hertz: float, pipes: int, threads: int) -> None:
        self._counted, self._cycles, self._threads = counted, counted.cycles(), threads
        self._cycle_seconds = PIPES / pipes / hertz
        self._bandwidth = counted.bandwidth * threads / counted.cores_of_group

    def product(self, kind: str, rows: int, inner: int, columns: int) -> Work:
        """A product [rows, inner][inner, columns] of a layer, or of one of its gradients."""
        counted = self._counted
        tiles = busiest_thread_tiles(-(-rows // counted.tile_rows), -(-columns // counted.tile_columns), self._threads)
        multiply_adds = tiles * counted.tile_rows * counted.tile_columns * inner
        return self._work(self._core_seconds(kind, multiply_adds), self._product_bytes(rows, inner, columns))

    def attention(self, kind: str, slots: int, heads: int, length: int, width: int) -> Work:
        """Attention of ``heads`` heads on threads that could compute ``slots`` of them in the same time."""
        products, reads, writes = _ATTENTION[kind]
        causal = length * (length + 1) // 2 * width
        cores = self._core_seconds(kind, slots // self._threads * products * causal)
        return self._work(cores, (reads + 2 * writes) * self._lines(_ITEM * heads * length * width))

    def elementwise(self, name: str, elements: int) -> Work:
        """A pass over elements; operators of PyTorch, which are not counted, take the time of their memory."""
        reads, writes = TRAFFIC[name]
        cores = self._core_seconds(name, -(-elements // self._threads)) if name in self._cycles else 0.0
        return self._work(cores, (reads + 2 * writes) * self._lines(_ITEM * elements))

    def message(self, operation: str, group: int, size: int) -> Work:
        """A communication of ``group`` ranks of the node, each of which reads the others' memory with one copy.

        Args:
            size: bytes of the full tensor.
        """
        if group == 1:
            return Work()
        share = 1.0 / group
        crossings = {
            SEND: 1 + 2,
            REDUCE_SCATTER: 1 + 2 * share,
            ALL_GATHER: (1 - share) + 2 * (1 - share),
            ALL_REDUCE: 1 + 2 * share + 3 * (1 - share),
        }[operation]
        return self._work(0.0, crossings * self._lines(size))

    def is_counted(self, name: str) -> bool:
        """Whether the cycles of an operation are counted."""
        return name in self._cycles

    def _core_seconds(self, operation: str, units: float) -> float:
        if operation not in self._cycles:
            raise UsageError(f"the machine file has no counted cycles of {operation}; make it again with its table")
        return self._cycles[operation] * units * self._cycle_seconds

    def _product_bytes(self, rows: int, inner: int, columns: int) -> float:
        """Bytes of a product's operands between L2 cache and memory.

        An operand that is read again comes from the cache if it takes at most half of it; the packed panels, which are
        read most often, if they take at most four fifths.
        """
        counted = self._counted
        cache = counted.l2_bytes * self._threads / counted.cores_of_group
        half = cache / 2
        left, right, result = (_ITEM * size for size in (rows * inner, inner * columns, rows * columns))
        at_once = min(self._threads * counted.packed_columns, columns)
        left_reads = 1 if left <= half else math.ceil(columns / at_once)
        packed = _ITEM * at_once * min(inner, counted.depth)
        right_crossings = 1 if packed <= 0.8 * cache else 1 + 2 + math.ceil(rows / counted.group_rows)
        result_writes = 1 if result <= half else math.ceil(inner / counted.depth)
        return left * left_reads + right * right_crossings + 2 * result * result_writes

    def _lines(self, size: float) -> float:
        """Bytes of the cache lines of a tensor."""
        line = self._counted.line_bytes
        return math.ceil(size / line) * line

    def _work(self, cores: float, traffic: float) -> Work:
        memory = traffic / self._bandwidth
        return Work(cores, memory, max(cores, memory))
