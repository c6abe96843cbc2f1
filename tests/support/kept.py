"""Counts the bytes that PyTorch saves for backward passes: the reference for ``layout.memory``."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterator, Sequence

import torch
from torch import nn

HAS_HOOKS = hasattr(getattr(torch.autograd, "graph", None), "saved_tensors_hooks")  # from PyTorch 1.10 on


class SavedBytes:
    """Counts each storage of saved tensors once, while any of them lives; parameters and buffers are excluded."""

    def __init__(self, pieces: Sequence[nn.Module]) -> None:
        constants = [x for piece in pieces for x in (*piece.parameters(), *piece.buffers())]
        self._constants = {_storage(x).data_ptr() for x in constants}
        self._users: Dict[int, int] = {}
        self._sizes: Dict[int, int] = {}
        self.current_bytes = 0
        self.peak_bytes = 0

    def add(self, x: torch.Tensor) -> Callable[[], None]:
        """Counts a tensor; returns a function to call when it is released."""
        storage = _storage(x)
        key = storage.data_ptr()
        if key in self._constants:
            return lambda: None
        if self._users.setdefault(key, 0) == 0:
            self._sizes[key] = storage.size() * _element_size(storage, x)
            self.current_bytes += self._sizes[key]
            self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        self._users[key] += 1

        def release() -> None:
            self._users[key] -= 1
            if self._users[key] == 0:
                self.current_bytes -= self._sizes[key]

        return release


class _Saved:
    """One saved tensor; lives as long as the graph needs it."""

    def __init__(self, x: torch.Tensor, saved_bytes: SavedBytes) -> None:
        self.x = x
        self._release = saved_bytes.add(x)

    def __del__(self) -> None:
        self._release()


@contextlib.contextmanager
def counting(pieces: Sequence[nn.Module]) -> Iterator[SavedBytes]:
    """Counts the tensors that autograd saves within the context."""
    saved_bytes = SavedBytes(pieces)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: _Saved(x, saved_bytes), lambda saved: saved.x):
        yield saved_bytes


def _storage(x: torch.Tensor) -> Any:
    return x.untyped_storage() if hasattr(x, "untyped_storage") else x.storage()


def _element_size(storage: Any, x: torch.Tensor) -> int:
    return 1 if hasattr(x, "untyped_storage") else x.element_size()
