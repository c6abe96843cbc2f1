"""A pool of memory for large tensors that come and go in every micro-batch.

glibc's heap rarely reuses the memory of a freed tensor for the next one of its size: to align it, PyTorch asks for some
bytes more than the tensor uses, and small objects have been placed in those. The pool reuses a freed block for the next
tensor of its size. Seen: 124M's passes used 470 MiB at most, for which the heap grew by 740; the pool takes 430.

A process turns the pool on (``training/startup.py``) if it runs on glibc's heap: other allocators have means of their
own, and large pages.
"""

from __future__ import annotations

import functools
import itertools
import math
import mmap
import weakref
from typing import Callable, Dict, FrozenSet, List, Optional, Sequence

import torch

_MIN_BYTES = 2**20  # smaller tensors fill gaps, and PyTorch allocates them faster
_REQUESTS_BETWEEN_SWEEPS = 2**10
_UNUSED_REQUESTS = 2**14  # requests: more than those of a micro-batch of a thousand layers


class TensorPool:
    """Blocks by size, each lent to a tensor until nothing uses that tensor's memory any more. There are as many of each
    size as were in use at one time.

    Blocks of sizes that have not been requested for a long time, for example of another sequence length, are freed.
    """

    def __init__(self) -> None:
        self._free: Dict[int, List[mmap.mmap]] = {}
        self._lent: Dict[int, "weakref.ref[memoryview]"] = {}
        self._loan_ids = itertools.count()
        self._requests = 0
        self._last_use: Dict[int, int] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor of this shape, which is no view of another."""
        size = math.prod(shape) * _itemsize(dtype)
        if size < _MIN_BYTES:
            return torch.empty(tuple(shape), dtype=dtype)
        self._requests += 1
        self._last_use[size] = self._requests
        if self._requests % _REQUESTS_BETWEEN_SWEEPS == 0:
            self._release_unused()
        free = self._free.get(size)
        memory = free.pop() if free else private_memory(size)
        loan, loan_id = memoryview(memory), next(self._loan_ids)

        def give_back(_: object) -> None:
            del self._lent[loan_id]
            self._last_use[size] = self._requests
            self._free.setdefault(size, []).append(memory)

        self._lent[loan_id] = weakref.ref(loan, give_back)  # the tensor's storage is who has the loan
        assert _FROM_BUFFER is not None  # or nobody would have asked
        return _FROM_BUFFER(loan, dtype=dtype).resize_(tuple(shape))

    def free_bytes(self) -> int:
        """Bytes of blocks that no tensor uses."""
        return sum(size * len(blocks) for size, blocks in self._free.items())

    def sizes(self) -> FrozenSet[int]:
        """Sizes of the blocks that no tensor uses, in bytes."""
        return frozenset(size for size, blocks in self._free.items() if blocks)

    def release(self, kept: FrozenSet[int] = frozenset()) -> None:
        """Free the blocks that no tensor uses, but for those of the sizes in ``kept``."""
        for size in [size for size in self._free if size not in kept]:
            del self._free[size]

    def _release_unused(self) -> None:
        for size, last in self._last_use.items():
            if last < self._requests - _UNUSED_REQUESTS:
                self._free.pop(size, None)


@functools.lru_cache(maxsize=None)
def _itemsize(dtype: torch.dtype) -> int:
    return torch.empty(0, dtype=dtype).element_size()


def private_memory(size: int) -> mmap.mmap:
    """Allocates ``size`` bytes outside of the heap; a forked process has its own copy."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


_FROM_BUFFER: Optional[Callable[..., torch.Tensor]] = getattr(torch, "frombuffer", None)
_POOL = TensorPool()
_is_enabled = False


def use_tensor_pool(use: bool) -> None:
    """Turn the pool on or off for large tensors; on has no effect if PyTorch cannot use foreign memory."""
    global _is_enabled
    _is_enabled = use


def uses_tensor_pool() -> bool:
    """Whether large tensors get memory from the pool."""
    return _is_enabled and _FROM_BUFFER is not None


def pooled_sizes() -> FrozenSet[int]:
    """Sizes of the blocks of the pool that no tensor uses, in bytes."""
    return _POOL.sizes()


def release_tensor_pool(kept: FrozenSet[int] = frozenset()) -> None:
    """Free the blocks of the pool that no tensor uses, but for those of the sizes in ``kept``.

    Passes over sequences of many lengths need blocks of as many sizes, of which the pool would keep all.
    """
    _POOL.release(kept)


def pooled_empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """``torch.empty``, from the pool if it is on and the tensor is large."""
    return _POOL.empty(shape, dtype) if uses_tensor_pool() else torch.empty(tuple(shape), dtype=dtype)
