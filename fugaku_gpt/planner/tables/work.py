"""Counts the work and the memory of a rank for each of N configurations, independent of any machine.

Symbols: b sequences of s tokens in a micro-batch, h hidden, a heads, V vocabulary, l layers, t tensor-parallel ranks, p
stages, m micro-batches. A forward pass of a layer is the unit of work: a backward pass counts as two, recomputing as
one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Callable, Dict, Mapping, Sequence, Tuple

import numpy as np

from fugaku_gpt.planner.tables.rows import ConfigRow

FACTS = ("peak_flops", "base_clock_ghz", "devices_per_node", "item_bytes", "tile_units")  # needed of every machine
GPU_TILES = ((256, 128), (128, 256))  # of a product's result on a GPU: cuBLAS's largest, which large products use


@dataclass(frozen=True)
class Work:
    """Arrays [N] with one entry per configuration, for one rank and one micro-batch unless a comment says otherwise.

    ``layer_`` counts one layer: forward, backward and, if the run recomputes, recomputing. FLOPs include the tiles of a
    product that do no useful work. Elements have the type that is trained in.
    """

    layers_per_stage: "np.ndarray"
    stages: "np.ndarray"
    chunks: "np.ndarray"  # virtual stages of each stage
    micro_batches: "np.ndarray"
    ranks: "np.ndarray"
    ranks_per_node: "np.ndarray"
    replicas: "np.ndarray"
    tensor_ranks: "np.ndarray"
    stage_stride: "np.ndarray"  # ranks from a stage to its neighbour
    recompute: "np.ndarray"
    sharded: "np.ndarray"  # 1 if ZeRO shards the optimiser's state over the replicas, else 0
    clock_ghz: "np.ndarray"  # 0: the machine's base clock
    tcmalloc: "np.ndarray"
    retention_off: "np.ndarray"
    builds: Tuple[str, ...]
    passes: "np.ndarray"  # work of a layer, in forward passes
    layer_flops: "np.ndarray"  # dense products
    layer_attention_flops: "np.ndarray"
    pass_elements: "np.ndarray"  # one pass: read and written outside of products and softmax
    pass_scores: "np.ndarray"  # one pass: elements of the attention scores
    unaligned: "np.ndarray"  # the scores if a head's width is not a multiple of 8, else 0
    layer_weights: "np.ndarray"
    embedding_weights: "np.ndarray"
    head_flops: "np.ndarray"
    logits: "np.ndarray"  # elements
    hidden_elements: "np.ndarray"  # message between stages: b s h, or a share of it with sequence parallelism
    reduced_elements: "np.ndarray"  # sent by a rank in all tensor-parallel sums of a layer
    reductions: "np.ndarray"  # of a layer, each weighed by log2 t
    gradient_elements: "np.ndarray"  # sent by a rank in the sum over replicas, per iteration
    saved_elements: "np.ndarray"  # saved by a layer for its backward pass, without the scores
    saved_scores: "np.ndarray"
    fullness: "np.ndarray"  # share of its memory that the fullest rank or node uses; 0 if it was not computed

    def select(self, mask: "np.ndarray") -> "Work":
        """The configurations for which ``mask`` [N] is true."""
        columns: Dict[str, Any] = {}
        for column in fields(self):
            value = getattr(self, column.name)
            if column.name == "builds":
                columns[column.name] = tuple(build for build, is_selected in zip(value, mask) if is_selected)
            else:
                columns[column.name] = value[mask]
        return Work(**columns)


def count_work(rows: Sequence[ConfigRow], facts: Mapping[str, float]) -> Work:
    """Counts the work of each row.

    Args:
        facts: the machine's facts; see :class:`fugaku_gpt.machine.constants.Machine`.
    """

    def column(name: str) -> "np.ndarray":
        if name == "retention_off":
            return np.array([float(row.retention == 0) for row in rows])
        return np.array([float(getattr(row, name)) for row in rows])

    return count_work_of_columns(column, tuple(row.torch for row in rows), facts)


def count_work_of_columns(
    column: Callable[[str], "np.ndarray"], builds: Tuple[str, ...], facts: Mapping[str, float]
) -> Work:
    """Counts the work of rows that are given as columns.

    Args:
        column: returns floats [N] for a field of :class:`ConfigRow`, or for ``retention_off``.
        builds: PyTorch series of the rows: one for each row, or one for all.
        facts: the machine's facts.
    """
    h, a, b, s, t, p, vocab = map(column, ("hidden", "heads", "micro_batch", "seq_len", "tp", "pp", "vocab"))
    layers, d, recompute = column("layers") / p, column("dp"), column("recompute")
    # shares of the activations between tensor-parallel layers
    shares = np.where(column("sequence_parallel") > 0, t, 1.0)
    passes = 3 + recompute
    units, tokens, head_width = int(facts["tile_units"]), b * s, h / a
    scores = b * a * s * s / t
    # products without tensor cores: the sum and the write of each score
    unaligned_elements = scores * (1 + head_width / GPU_TILES[0][1]) / 2
    sums = 2 * (passes - 1) * (t > 1)  # two in each pass, one pass forward and one back; recomputing sums again
    wide = facts["item_bytes"] >= 4
    return Work(
        layers_per_stage=layers,
        stages=p,
        chunks=column("chunks"),
        micro_batches=column("micro_batches"),
        ranks=column("processes"),
        ranks_per_node=column("ranks_per_node"),
        replicas=d,
        tensor_ranks=t,
        stage_stride=column("stage_stride"),
        recompute=recompute,
        sharded=(column("zero") > 0).astype(float),
        clock_ghz=column("freq_ghz"),
        tcmalloc=column("tcmalloc"),
        retention_off=column("retention_off"),
        builds=builds,
        passes=passes,
        layer_flops=_layer_flops(tokens, h, t, passes, units),
        layer_attention_flops=passes * 4 * b * s * s * h / t,
        pass_elements=b * s * h * (10 / shares + 24 / t),
        pass_scores=scores,
        unaligned=np.where(head_width % 8 != 0, unaligned_elements, 0.0),
        layer_weights=12 * h * h / t,
        embedding_weights=vocab * h / t,
        head_flops=_product_flops(tokens, vocab / t, h, units)
        + _product_flops(tokens, h, vocab / t, units)
        + _product_flops(vocab / t, h, tokens, units),
        logits=b * s * vocab / t,
        hidden_elements=b * s * h / shares,
        reduced_elements=sums * 2 * (t - 1) / t * b * s * h,
        reductions=sums * np.log2(t),
        gradient_elements=2 * (d - 1) / d * (12 * h * h * layers + vocab * h) / t,
        # Korthikanti et al. 2022 in elements; on CPUs dropout keeps factors of the trained type, not flags
        saved_elements=b * s * h * ((6 if wide else 5) / shares + 12 / t),
        saved_scores=scores * (3.0 if wide else 2.5),
        fullness=np.zeros_like(scores),
    )


def _layer_flops(
    tokens: "np.ndarray", h: "np.ndarray", t: "np.ndarray", passes: "np.ndarray", units: int
) -> "np.ndarray":
    """FLOPs of the four weight matrices of a layer, (inner, outer) below: forward, recomputing, and twice backward."""
    total = np.zeros_like(h)
    for inner, outer in ((h, 3 * h / t), (h / t, h), (h, 4 * h / t), (4 * h / t, h)):
        total += (passes - 2) * _product_flops(tokens, outer, inner, units)
        total += _product_flops(tokens, inner, outer, units) + _product_flops(inner, outer, tokens, units)
    return total


def _product_flops(rows: "np.ndarray", columns: "np.ndarray", inner: "np.ndarray", units: int) -> "np.ndarray":
    """FLOPs of a product with a result of rows x columns, rounded up to full waves of tiles over the units.

    A GPU cuts the result into tiles and schedules them in waves: 448 tiles on 108 units take as long as 540.
    """
    useful: "np.ndarray" = 2 * rows * columns * inner
    if not units:
        return useful
    stretched: "np.ndarray" = np.full_like(useful, np.inf)
    for height, width in GPU_TILES:
        tiles = np.ceil(rows / height) * np.ceil(columns / width)
        area = np.ceil(tiles / units) * units * height * width
        stretched = np.minimum(stretched, useful * area / (rows * columns))
    return stretched
