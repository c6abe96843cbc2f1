"""Probe results of a machine with round figures."""

from __future__ import annotations

from typing import Dict, List

from fugaku_gpt.layout.operations import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, SEND
from fugaku_gpt.machine.probed import (
    COMPILED_ATTENTION,
    NARROW_ALL_REDUCE,
    OPTIMISER_PASSES,
    PASSES,
    PRODUCTS,
    MessageTiming,
    PassTiming,
    ProbeResults,
    ProductTiming,
)

FLOPS = 1e9  # per second, of any product
PASS_SECONDS = 1e-9  # per element, of any pass
LAYER_SECONDS = 1e-3  # of a layer with next to no work; backward twice that
MESSAGE_SECONDS = 1e-9  # per byte, of any message


def even_machine(cores: int = 2, ranks: int = 4, compiled: bool = False) -> ProbeResults:
    """Probe results with one thread per rank, where ranks with cores of their own do not slow each other.

    Args:
        compiled: attention by compiled kernels was measured too, and is twice as fast.
    """
    products: List[ProductTiming] = []
    passes: List[PassTiming] = []
    messages: List[MessageTiming] = []
    threads: Dict[int, int] = {}
    for count in (1, 2, 4):
        if count > ranks:
            continue
        threads[count] = 1
        for operation in (ALL_REDUCE, NARROW_ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, SEND):
            for group in range(2, count + 1, 2):
                for size in (1, 2**20):
                    messages.append(MessageTiming(operation, count, group, size, MESSAGE_SECONDS * size, 0.01))
        if count > cores:
            continue
        for width in (64, 512):
            for kind in (*PRODUCTS, *(COMPILED_ATTENTION if compiled else ())):
                seconds = 2.0 * width**3 / FLOPS / (1.0 if kind in PRODUCTS else 2.0)
                products.append(ProductTiming(kind, "float32", count, 1, width, width, width, seconds, 0.01))
        for elements in (1, 2**22):
            for name in (*PASSES, *OPTIMISER_PASSES):
                seconds = {"layer": LAYER_SECONDS, "layer_backward": 2 * LAYER_SECONDS}.get(
                    name, PASS_SECONDS * elements
                )
                passes.append(PassTiming(name, "float32", count, elements, seconds, 0.01))
    return ProbeResults(
        cores, threads, {"processor": "even"}, {"copy 1": 1e10}, tuple(products), tuple(passes), tuple(messages)
    )
