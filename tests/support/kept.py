"""How many bytes PyTorch keeps for backward passes, now and at most: the judge of ``layout.memory``."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterator, Sequence

import torch
from torch import nn

HAS_HOOKS = hasattr(getattr(torch.autograd, "graph", None), "saved_tensors_hooks")  # from PyTorch 1.10 on


class KeptBytes:
    """Counts each storage that some saved tensor needs once, while any of them lives; not parameters and buffers."""

    def __init__(self, pieces: Sequence[nn.Module]) -> None:
        constants = [x for piece in pieces for x in (*piece.parameters(), *piece.buffers())]
        self._constants = {_storage(x).data_ptr() for x in constants}
        self._users: Dict[int, int] = {}
        self._sizes: Dict[int, int] = {}
        self.now = 0
        self.most = 0

    def add(self, x: torch.Tensor) -> Callable[[], None]:
        """Count a tensor; returns what to call when it is let go."""
        storage = _storage(x)
        key = storage.data_ptr()
        if key in self._constants:
            return lambda: None
        if self._users.setdefault(key, 0) == 0:
            self._sizes[key] = storage.size() * _size_of_one(storage, x)
            self.now += self._sizes[key]
            self.most = max(self.most, self.now)
        self._users[key] += 1

        def let_go() -> None:
            self._users[key] -= 1
            if self._users[key] == 0:
                self.now -= self._sizes[key]

        return let_go


class _Saved:
    """One saved tensor; lives as long as the graph needs it."""

    def __init__(self, x: torch.Tensor, kept: KeptBytes) -> None:
        self.x = x
        self._let_go = kept.add(x)

    def __del__(self) -> None:
        self._let_go()


@contextlib.contextmanager
def counting(pieces: Sequence[nn.Module]) -> Iterator[KeptBytes]:
    """Count what autograd saves within."""
    kept = KeptBytes(pieces)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: _Saved(x, kept), lambda saved: saved.x):
        yield kept


def _storage(x: torch.Tensor) -> Any:
    return x.untyped_storage() if hasattr(x, "untyped_storage") else x.storage()


def _size_of_one(storage: Any, x: torch.Tensor) -> int:
    return 1 if hasattr(x, "untyped_storage") else x.element_size()
