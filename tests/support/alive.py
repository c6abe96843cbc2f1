"""Counts the bytes of living tensors that operators make: the reference for ``planner.trainer.run_memory``."""

from __future__ import annotations

import weakref
from typing import Any, Dict, Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode  # PyTorch 2


class AliveBytes(TorchDispatchMode):
    """Counts each storage that an operator makes within the context, until nothing refers to it any more."""

    def __init__(self) -> None:
        super().__init__()
        self.current_bytes = 0
        self.peak_bytes = 0
        self._sizes: Dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
        for x in _tensors(made):
            storage = x.untyped_storage()
            key = storage._cdata
            if key not in given and key not in self._sizes:
                self._sizes[key] = storage.nbytes()
                self.current_bytes += storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, self.current_bytes)
                weakref.finalize(storage, self._release, key)
        return made

    def _release(self, key: int) -> None:
        self.current_bytes -= self._sizes.pop(key)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))
