"""How many bytes of tensors are alive, now and at most, that operators make: the judge of ``planner.run_memory``."""

from __future__ import annotations

import weakref
from typing import Any, Dict, Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode  # PyTorch 2


class AliveBytes(TorchDispatchMode):
    """Counts each storage that an operator makes within, until nothing holds it any more."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.most = 0
        self._sizes: Dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
        for x in _tensors(made):
            storage = x.untyped_storage()
            key = storage._cdata
            if key not in given and key not in self._sizes:
                self._sizes[key] = storage.nbytes()
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._let_go, key)
        return made

    def _let_go(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))
