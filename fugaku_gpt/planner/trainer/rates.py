"""Seconds of an operation of any size, interpolated between the sizes that ``plan probe`` has measured.

Rates of products are weighted means of the nearest measured shapes in logarithms of rows, inner and columns; passes and
messages lie on straight lines between measured sizes in double logarithms. Beyond the measured sizes the last rate is
used, and the size is reported as extrapolated.
"""

from __future__ import annotations

import math
from typing import Dict, List, Sequence, Tuple

import numpy as np

from fugaku_gpt.errors import UsageError
from fugaku_gpt.layout.operations import SEND
from fugaku_gpt.machine.probed import COMPILED_ATTENTION, OPTIMISER_PASSES, STAND_INS, ProbeResults
from fugaku_gpt.planner.extrapolation import ExtrapolatedInput, extrapolation_distance

_NEAREST = 6
_BEYOND_CACHES = 2**20  # elements or bytes above which time is proportional to size
_STAND_IN_DISTANCE = math.log(1.5)  # distance of a pass for which the times of a similar one stand
_SLACK_FACTOR = 2.0  # a size within this factor of the measured ones is as good as measured


class ProbeRates:
    """Rates for runs with a number of ranks and threads.

    Attributes:
        ranks: number of ranks that measured the operations at once, which is at most those that have their own cores.
    """

    def __init__(self, probed: ProbeResults, ranks: int, threads: int) -> None:
        self._probed = probed
        # by (operation or setting, what was measured)
        self._extrapolated: Dict[Tuple[str, str], List[ExtrapolatedInput]] = {}
        self.threads = threads
        measured_ranks = sorted({product.ranks for product in probed.products})
        if not measured_ranks:
            raise UsageError(_missing_message("products"))
        at_once = max(1, min(ranks, probed.cores // threads))
        candidates = [count for count in measured_ranks if probed.threads[count] == threads] or measured_ranks
        self.ranks = min(candidates, key=lambda count: (abs(math.log(count / at_once)), -count))
        if probed.threads[self.ranks] != threads:
            measured_threads = ", ".join(
                str(number) for number in sorted({probed.threads[count] for count in measured_ranks})
            )
            distance = abs(math.log(threads / probed.threads[self.ranks]))
            self._note("node.threads_per_rank", str(threads), measured_threads, distance)
        self._world = ranks
        self._products: Dict[Tuple[str, str], Tuple["np.ndarray", "np.ndarray"]] = {}
        self._lines: Dict[Tuple[str, ...], Tuple["np.ndarray", "np.ndarray"]] = {}
        self._product_seconds: Dict[Tuple[object, ...], float] = {}

    @property
    def extrapolated(self) -> Tuple[str, ...]:
        """Descriptions of the sizes and settings beyond the measured ones, one line for each kind."""
        lines = []
        for (subject, measured), inputs in self._extrapolated.items():
            texts = list(dict.fromkeys(extrapolated.text for extrapolated in inputs))
            more = f" and {len(texts) - 1} more" if len(texts) > 1 else ""
            lines.append(f"{subject} {texts[0]}{more}: measured {measured}")
        return tuple(dict.fromkeys(lines))

    @property
    def distance(self) -> float:
        """Distance of these sizes and settings from the measured ones; see :mod:`fugaku_gpt.planner.extrapolation`."""
        return extrapolation_distance(
            [max(inputs, key=lambda extrapolated: extrapolated.distance) for inputs in self._extrapolated.values()]
        )

    def product(self, dtype: str, kind: str, batch: int, rows: int, inner: int, columns: int) -> float:
        """Seconds of a product, or of a batch of them."""
        key = (dtype, kind, batch, rows, inner, columns)
        if key not in self._product_seconds:
            shapes, rates = self._measured_products(kind, dtype)
            shape = np.log2([rows, inner, columns])
            least, most = shapes.min(axis=0), shapes.max(axis=0)
            reach = math.log2(_SLACK_FACTOR)
            if np.any(shape < least - reach) or np.any(shape > most + reach):
                low, high = (" x ".join(str(round(2**exponent)) for exponent in ends) for ends in (least, most))
                distance = math.log(2) * float(np.linalg.norm(shape - np.clip(shape, least, most)))
                self._note(f"{kind} products in {dtype}", f"{rows} x {inner} x {columns}", f"{low} to {high}", distance)
            squared_distances = np.sum((shapes - np.clip(shape, least, most)) ** 2, axis=1)
            nearest = np.argsort(squared_distances, kind="stable")[:_NEAREST]
            weight = 1.0 / (squared_distances[nearest] + 0.02) ** 1.5
            rate = math.exp(float(np.sum(weight * rates[nearest]) / np.sum(weight)))
            self._product_seconds[key] = 2.0 * batch * rows * inner * columns / rate
        return self._product_seconds[key]

    def has_compiled(self, dtype: str) -> bool:
        """True if attention by compiled kernels was measured, that is, if the build has them."""
        measured = {
            timing.kind for timing in self._probed.products if timing.dtype == dtype and timing.ranks == self.ranks
        }
        return measured.issuperset(COMPILED_ATTENTION)

    def elementwise(self, dtype: str, name: str, elements: int) -> float:
        """Seconds of an elementwise pass over this number of elements."""
        if elements <= 0:
            return 0.0
        pass_dtype = "float32" if name in OPTIMISER_PASSES else dtype
        name = self._measured_pass(pass_dtype, name)
        key = ("pass", name, pass_dtype)
        if key not in self._lines:
            points = self._points(pass_dtype, name)
            self._lines[key] = _log_line(points, f"pass {name} ({pass_dtype})")
        return self._interpolate(key, elements, f"elements of {name} in {pass_dtype}")

    def message(self, operation: str, group: int, size: int) -> float:
        """Seconds of a communication in groups of ``group`` ranks; ``size`` in bytes."""
        if group == 1 or size <= 0:
            return 0.0
        timings = [timing for timing in self._probed.messages if timing.operation == operation]
        if not timings:
            raise UsageError(
                f"the machine file has no {operation} between ranks: probe with `plan probe --ranks {self._world}`"
            )
        world, measured = min(
            {(timing.ranks, timing.group) for timing in timings},
            key=lambda pair: (
                abs(math.log(pair[0] / self._world)) + (0 if operation == SEND else 2 * abs(math.log(pair[1] / group))),
                pair,
            ),
        )
        if world != self._world:
            measured_ranks = ", ".join(str(count) for count in sorted(self._probed.threads))
            self._note("ranks", str(self._world), measured_ranks, abs(math.log(self._world / world)))
        key = ("message", operation, str(world), str(measured))
        if key not in self._lines:
            rows = [timing for timing in timings if (timing.ranks, timing.group) == (world, measured)]
            self._lines[key] = _log_line([(timing.bytes, timing.seconds) for timing in rows], operation)
        seconds = self._interpolate(key, size, f"bytes of {operation}")
        if operation == SEND or measured == group:
            return seconds
        self._note("ranks of a group", str(group), str(measured), abs(math.log(group / measured)))
        return seconds * math.log2(2 * group) / math.log2(2 * measured)  # trees grow with the logarithm

    def overhead(self, dtype: str, backward: bool) -> float:
        """Seconds of one pass through a layer with next to no work, including its operations of the smallest size."""
        name = "layer_backward" if backward else "layer"
        for timing in self._probed.passes:
            if (timing.name, timing.dtype, timing.ranks) == (name, dtype, self.ranks):
                return timing.seconds
        raise UsageError(_missing_message(f"{name} in {dtype}"))

    def _points(self, dtype: str, name: str) -> List[Tuple[int, float]]:
        """Elements and seconds of the measured passes of a name."""
        key = (name, dtype, self.ranks)
        timings = [timing for timing in self._probed.passes if (timing.name, timing.dtype, timing.ranks) == key]
        return [(timing.elements, timing.seconds) for timing in timings]

    def _measured_pass(self, dtype: str, name: str) -> str:
        """The name of a pass, or where an older probe has not measured it, that of a similar one."""
        stand_in = STAND_INS.get(name)
        if stand_in is None or self._points(dtype, name):
            return name
        self._note(f"passes in {dtype}", name, f"{stand_in}, which stands for it", _STAND_IN_DISTANCE)
        return stand_in

    def _measured_products(self, kind: str, dtype: str) -> Tuple["np.ndarray", "np.ndarray"]:
        """Shapes [N, 3] in binary logarithms and rates [N] in natural logarithms of one kind of product."""
        if (kind, dtype) not in self._products:
            rows = [
                timing
                for timing in self._probed.products
                if timing.kind == kind and timing.dtype == dtype and timing.ranks == self.ranks
            ]
            if not rows:
                raise UsageError(_missing_message(f"{kind} products in {dtype}"))
            self._products[kind, dtype] = (
                np.log2([[timing.rows, timing.inner, timing.columns] for timing in rows]),
                np.log([timing.flops / timing.seconds for timing in rows]),
            )
        return self._products[kind, dtype]

    def _interpolate(self, key: Tuple[str, ...], size: int, subject: str) -> float:
        sizes, seconds = self._lines[key]
        log_size = math.log(size)
        if log_size > sizes[-1]:
            if log_size > sizes[-1] + math.log(_SLACK_FACTOR) and sizes[-1] < math.log(_BEYOND_CACHES):
                self._note(
                    subject, str(size), str(round(math.exp(sizes[-1]))) + " at most", float(log_size - sizes[-1])
                )
            return math.exp(seconds[-1] + log_size - sizes[-1])
        return math.exp(float(np.interp(log_size, sizes, seconds)))

    def _note(self, subject: str, text: str, measured: str, distance: float) -> None:
        self._extrapolated.setdefault((subject, measured), []).append(ExtrapolatedInput(text, distance))


def _missing_message(missing: str) -> str:
    return (
        f"the machine file has no {missing}: its probe was too short, or without that type; give `plan probe` more "
        "--seconds, or the --dtype"
    )


def _log_line(points: Sequence[Tuple[int, float]], subject: str) -> Tuple["np.ndarray", "np.ndarray"]:
    """Logarithms of the sizes, ascending, and of their seconds."""
    if not points:
        raise UsageError(_missing_message(subject))
    ordered: List[Tuple[int, float]] = sorted(points)
    return np.log([size for size, _ in ordered]), np.log([seconds for _, seconds in ordered])
