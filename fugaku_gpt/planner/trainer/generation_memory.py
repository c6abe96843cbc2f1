"""Memory of `generate` and `eval` on a rank of each pipeline stage, by category, in bytes.

* ``weights``: this rank's parameters in the type of the computation. Nothing else of training is kept.
* ``cache``: keys and values of the rank's layers and heads, for every text that grows at the same time. In 16 bits it
  is counted as float32, in which attention computes where PyTorch lacks a kernel.
* ``workspace``: what a layer makes of the longest prompt, which is read at once: the residual, queries, keys, values
  and the attention's output, and the MLP's inner activations before and after GELU or SwiGLU.
* ``logits``: of all texts, on the last stage: in the type of the computation, gathered over the tensor-parallel ranks,
  and in float64, from which tokens are chosen.
* ``base``: as in ``run_memory.py``.

`eval` has no cache; its workspace is that of all windows of a batch, and its logits are made in pieces of some tokens.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Dict, List, NamedTuple, Sequence

from fugaku_gpt.config.grid_checks import require_decoder
from fugaku_gpt.config.schema import SIXTEEN_BIT_DTYPES, LayoutConfig, RunConfig
from fugaku_gpt.layout.communications import CHUNK_TOKENS
from fugaku_gpt.layout.memory import ITEM_BYTES
from fugaku_gpt.layout.stages import Chunk, chunk_tensors, chunks_of
from fugaku_gpt.machine.framework import Framework

GENERATION_CATEGORIES = ("weights", "cache", "workspace", "logits", "base")


class GenerationSize(NamedTuple):
    """Number of texts that grow at the same time, and tokens of each, its prompt included."""

    texts: int
    tokens: int


def generation_memory(config: RunConfig, size: GenerationSize, base: Framework) -> List[Dict[str, int]]:
    """Return category → bytes of a rank of each stage. Stages have one chunk each, as `generate` cuts the model; the
    type is that of training.

    Raises:
        UsageError: the model is no decoder.
    """
    require_decoder(config, "the memory of `generate`")
    layout = replace(config.layout, chunks=1, schedule=LayoutConfig().schedule, split=())
    return [_of_stage(config, chunk, size, base) for chunk in chunks_of(replace(config, layout=layout))]


def evaluation_memory(config: RunConfig, windows: int, base: Framework) -> List[Dict[str, int]]:
    """Return category → bytes of a rank of each stage of `eval` with ``windows`` computed together."""
    tokens, item = windows * config.model.seq_len, ITEM_BYTES[config.training.dtype]
    rows = min(CHUNK_TOKENS, tokens) * config.padded_vocab // config.layout.tp
    return [
        {**sizes, "cache": 0, "logits": rows * (item + 4) if sizes["logits"] else 0}
        for sizes in generation_memory(config, GenerationSize(1, tokens), base)
    ]


def bytes_of_node(stages: Sequence[Dict[str, int]], of_ranks: Sequence[int], base: Framework) -> int:
    """Return the bytes of one node, whose ranks share the pages of libraries.

    Args:
        stages: category → bytes of a rank of each stage.
        of_ranks: the stage of each rank of the node.
    """
    sums = [sum(sizes.values()) for sizes in stages]
    return sum(sums[stage] - base.shared_bytes for stage in of_ranks) + base.shared_bytes


def cache_bytes(config: RunConfig, layers: Sequence[int], size: GenerationSize) -> int:
    """Bytes of the keys and values of some layers."""
    model, item = config.model, max(4, ITEM_BYTES[config.training.dtype])
    of_token = 2 * model.local_kv_heads(config.layout.tp) * model.head_size * item
    return len(layers) * size.texts * size.tokens * of_token


def _of_stage(config: RunConfig, chunk: Chunk, size: GenerationSize, base: Framework) -> Dict[str, int]:
    model, tp, item = config.model, config.layout.tp, ITEM_BYTES[config.training.dtype]
    weights = sum(math.prod(spec.local_shape(tp)) for spec in chunk_tensors(model, tp, chunk)) * item
    inner = (4 * model.query_width + 2 * model.up_width) // tp
    logits = size.texts * config.padded_vocab * (2 * item + 8) if chunk.has_head else 0
    narrow = base.sixteen_bit_bytes if config.training.dtype in SIXTEEN_BIT_DTYPES else 0
    return {
        "weights": weights,
        "cache": cache_bytes(config, chunk.layers, size),
        "workspace": size.tokens * (3 * model.hidden + inner) * item,
        "logits": logits,
        "base": base.private_bytes + base.shared_bytes + narrow,
    }
