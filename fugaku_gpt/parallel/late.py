"""Gradients of weights that backward passes leave out, until the pipeline's schedule has time for them.

Another stage waits for the gradient of a layer's input, nobody for that of its weights but the optimiser at the end of
the step (Qi et al. 2023, "Zero Bubble Pipeline Parallelism"). What a product needs, the layer's input and its output's
gradient, is kept until then.
"""

from __future__ import annotations

import contextlib
from typing import Callable, Dict, Iterator, List, Optional, Tuple

import torch

Key = Tuple[int, int]  # micro-batch, chunk
Product = Callable[[], None]


class DeferredWeightGrads:
    """The products of one rank that are put off.

    Attributes:
        finished: is told a parameter (by id) whose last product so far is made.
    """

    def __init__(self) -> None:
        self.finished: Optional[Callable[[int], None]] = None
        self._products: Dict[Key, List[Tuple[int, Product]]] = {}
        self._open: Optional[List[Tuple[int, Product]]] = None
        self._waiting: Dict[int, int] = {}

    @contextlib.contextmanager
    def putting_off(self, key: Key) -> Iterator[None]:
        """Whatever backward pass runs in here leaves its products to :meth:`make` of the same key."""
        self._open = self._products[key] = []
        try:
            yield
        finally:
            self._open = None

    def add(self, parameter: int, product: Product) -> None:
        """A product that adds to the gradient of a parameter (by id): made now, or later."""
        if self._open is None:
            product()
            return
        self._open.append((parameter, product))
        self._waiting[parameter] = self._waiting.get(parameter, 0) + 1

    def waits(self, parameter: int) -> bool:
        """Whether a product of a parameter is still to be made."""
        return self._waiting.get(parameter, 0) > 0

    @torch.no_grad()
    def make(self, key: Key) -> None:
        """Make the products of one backward pass; each lets go of what it needed."""
        products = self._products.pop(key)
        for index, (parameter, product) in enumerate(products):
            product()
            del product
            products[index] = (parameter, _nothing)
            self._waiting[parameter] -= 1
            if self.finished is not None and not self._waiting[parameter]:
                self.finished(parameter)


def _nothing() -> None:
    pass
