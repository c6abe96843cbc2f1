"""Seconds of an operation of any size from those that ``plan probe`` has measured.

Rates of products are means of the nearest measured shapes in logarithms of rows, inner and columns, nearer ones
counting more; passes and messages lie on straight lines between measured sizes in double logarithms. Beyond the
measured sizes the last rate is kept, and the size is named as extrapolated.
"""

from __future__ import annotations

import math
from typing import Dict, List, Sequence, Tuple

import numpy as np

from fugaku_gpt.errors import UsageError
from fugaku_gpt.layout.operations import SEND
from fugaku_gpt.machine.probed import COMPILED, OF_STEPS, Probed
from fugaku_gpt.planner.extrapolation import Outside, distance

_NEAREST = 6
_BEYOND_CACHES = 2**20  # elements or bytes from which on time grows as the size does
_BEYOND = 2.0  # a size within this factor of the measured ones is as good as measured


class Rates:
    """Of runs of so many ranks and threads.

    Attributes:
        ranks: that the operations were measured on at once: as many as have cores of their own.
    """

    def __init__(self, probed: Probed, ranks: int, threads: int) -> None:
        self._probed = probed
        self._beyond: Dict[Tuple[str, str], List[Outside]] = {}  # by what it is of, and what was measured
        self.threads = threads
        with_cores = sorted({product.ranks for product in probed.products})
        if not with_cores:
            raise UsageError(_too_short("products"))
        at_once = max(1, min(ranks, probed.cores // threads))
        alike = [count for count in with_cores if probed.threads[count] == threads] or with_cores
        self.ranks = min(alike, key=lambda count: (abs(math.log(count / at_once)), -count))
        if probed.threads[self.ranks] != threads:
            known = ", ".join(str(one) for one in sorted({probed.threads[count] for count in with_cores}))
            far = abs(math.log(threads / probed.threads[self.ranks]))
            self._note("node.threads_per_rank", str(threads), known, far)
        self._world = ranks
        self._products: Dict[Tuple[str, str], Tuple["np.ndarray", "np.ndarray"]] = {}
        self._lines: Dict[Tuple[str, ...], Tuple["np.ndarray", "np.ndarray"]] = {}
        self._known: Dict[Tuple[object, ...], float] = {}

    @property
    def extrapolated(self) -> Tuple[str, ...]:
        """What was looked up beyond what was measured, in words: one line for each kind."""
        lines = []
        for (of, known), asked in self._beyond.items():
            once = list(dict.fromkeys(one.text for one in asked))
            more = f" and {len(once) - 1} more" if len(once) > 1 else ""
            lines.append(f"{of} {once[0]}{more}: measured {known}")
        return tuple(dict.fromkeys(lines))

    @property
    def distance(self) -> float:
        """How far beyond the measurements this is; see :mod:`fugaku_gpt.planner.extrapolation`."""
        return distance([max(asked, key=lambda one: one.distance) for asked in self._beyond.values()])

    def product(self, dtype: str, kind: str, batch: int, rows: int, inner: int, columns: int) -> float:
        """Seconds of a product, or of a batch of them."""
        key = (dtype, kind, batch, rows, inner, columns)
        if key not in self._known:
            places, rates = self._measured_products(kind, dtype)
            here = np.log2([rows, inner, columns])
            least, most = places.min(axis=0), places.max(axis=0)
            reach = math.log2(_BEYOND)
            if np.any(here < least - reach) or np.any(here > most + reach):
                low, high = (" x ".join(str(round(2**one)) for one in ends) for ends in (least, most))
                far = math.log(2) * float(np.linalg.norm(here - np.clip(here, least, most)))
                self._note(f"{kind} products in {dtype}", f"{rows} x {inner} x {columns}", f"{low} to {high}", far)
            apart = np.sum((places - np.clip(here, least, most)) ** 2, axis=1)
            near = np.argsort(apart, kind="stable")[:_NEAREST]
            weight = 1.0 / (apart[near] + 0.02) ** 1.5
            rate = math.exp(float(np.sum(weight * rates[near]) / np.sum(weight)))
            self._known[key] = 2.0 * batch * rows * inner * columns / rate
        return self._known[key]

    def has_compiled(self, dtype: str) -> bool:
        """Whether attention by compiled kernels was measured: the build has them."""
        measured = {one.kind for one in self._probed.products if one.dtype == dtype and one.ranks == self.ranks}
        return measured.issuperset(COMPILED)

    def over(self, dtype: str, name: str, elements: int) -> float:
        """Seconds of a pass over so many elements."""
        if elements <= 0:
            return 0.0
        of = "float32" if name in OF_STEPS else dtype
        key = ("pass", name, of)
        if key not in self._lines:
            rows = [
                one for one in self._probed.passes if one.name == name and one.dtype == of and one.ranks == self.ranks
            ]
            self._lines[key] = _line([(one.elements, one.seconds) for one in rows], f"pass {name} ({of})")
        return self._on(key, elements, f"elements of {name} in {of}")

    def message(self, operation: str, group: int, size: int) -> float:
        """Seconds of a communication in groups of so many ranks; ``size`` in bytes."""
        if group == 1 or size <= 0:
            return 0.0
        found = [one for one in self._probed.messages if one.operation == operation]
        if not found:
            raise UsageError(
                f"the machine file tells no {operation} between ranks: probe with `plan probe --ranks {self._world}`"
            )
        world, measured = min(
            {(one.ranks, one.group) for one in found},
            key=lambda pair: (
                abs(math.log(pair[0] / self._world)) + (0 if operation == SEND else 2 * abs(math.log(pair[1] / group))),
                pair,
            ),
        )
        if world != self._world:
            known = ", ".join(str(count) for count in sorted(self._probed.threads))
            self._note("ranks", str(self._world), known, abs(math.log(self._world / world)))
        key = ("message", operation, str(world), str(measured))
        if key not in self._lines:
            rows = [one for one in found if (one.ranks, one.group) == (world, measured)]
            self._lines[key] = _line([(one.bytes, one.seconds) for one in rows], operation)
        seconds = self._on(key, size, f"bytes of {operation}")
        if operation == SEND or measured == group:
            return seconds
        self._note("ranks of a group", str(group), str(measured), abs(math.log(group / measured)))
        return seconds * math.log2(2 * group) / math.log2(2 * measured)  # as trees grow

    def overhead(self, dtype: str, backward: bool) -> float:
        """Seconds of one pass through a layer that has next to no work, operations of the smallest size included."""
        name = "layer_backward" if backward else "layer"
        for one in self._probed.passes:
            if (one.name, one.dtype, one.ranks) == (name, dtype, self.ranks):
                return one.seconds
        raise UsageError(_too_short(f"{name} in {dtype}"))

    def _measured_products(self, kind: str, dtype: str) -> Tuple["np.ndarray", "np.ndarray"]:
        """Shapes [N, 3] and rates [N] of one kind, in logarithms."""
        if (kind, dtype) not in self._products:
            rows = [
                one
                for one in self._probed.products
                if one.kind == kind and one.dtype == dtype and one.ranks == self.ranks
            ]
            if not rows:
                raise UsageError(_too_short(f"{kind} products in {dtype}"))
            self._products[kind, dtype] = (
                np.log2([[one.rows, one.inner, one.columns] for one in rows]),
                np.log([one.flops / one.seconds for one in rows]),
            )
        return self._products[kind, dtype]

    def _on(self, key: Tuple[str, ...], size: int, what: str) -> float:
        sizes, seconds = self._lines[key]
        here = math.log(size)
        if here > sizes[-1]:
            if here > sizes[-1] + math.log(_BEYOND) and sizes[-1] < math.log(_BEYOND_CACHES):
                self._note(what, str(size), str(round(math.exp(sizes[-1]))) + " at most", float(here - sizes[-1]))
            return math.exp(seconds[-1] + here - sizes[-1])
        return math.exp(float(np.interp(here, sizes, seconds)))

    def _note(self, of: str, what: str, known: str, far: float) -> None:
        self._beyond.setdefault((of, known), []).append(Outside(what, far))


def _too_short(what: str) -> str:
    return (
        f"the machine file has no {what}: its probe was too short, or without that type; give `plan probe` more "
        "--seconds, or the --dtype"
    )


def _line(points: Sequence[Tuple[int, float]], what: str) -> Tuple["np.ndarray", "np.ndarray"]:
    """Logarithms of sizes, ascending, and of seconds."""
    if not points:
        raise UsageError(_too_short(what))
    ordered: List[Tuple[int, float]] = sorted(points)
    return np.log([size for size, _ in ordered]), np.log([seconds for _, seconds in ordered])
