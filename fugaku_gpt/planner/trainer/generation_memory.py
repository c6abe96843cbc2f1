"""Memory of `generate` and `eval` on a rank of each pipeline stage, by category, in bytes.

* ``weights``: this rank's parameters in the type of the computation. Nothing else of training is kept.
* ``cache``: keys and values of the rank's layers and heads, for every text that grows at the same time. In 16 bits it
  is counted as float32, in which attention computes where PyTorch lacks a kernel.
* ``workspace``: what a layer makes of the prompts that are read at once, or of the longest one: the residual, queries,
  keys, values and the attention's output, and the MLP's inner activations before and after GELU or SwiGLU.
* ``logits``: of all texts, on the last stage: in the type of the computation, gathered over the tensor-parallel ranks,
  and in float64, from which tokens are chosen.
* ``loading``: what reading the weights needs beyond cache, workspace and logits, which come later: the largest tensor
  in float32 before it is rounded to 16 bits; where ranks cut it or compute in float64, the piece of a file in float32
  from which a rank takes its part, which may be the entire tensor.
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
from fugaku_gpt.layout.memory import ITEM_BYTES, PREFILL_TOKENS
from fugaku_gpt.layout.stages import Chunk, chunk_tensors, chunks_of
from fugaku_gpt.machine.framework import Framework

GENERATION_CATEGORIES = ("weights", "cache", "workspace", "logits", "loading", "base")


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
    at_once = max(size.tokens, min(size.texts * size.tokens, PREFILL_TOKENS))
    later = {
        "cache": cache_bytes(config, chunk.layers, size),
        "workspace": at_once * (3 * model.hidden + inner) * item,
        "logits": logits,
    }
    return {
        "weights": weights,
        **later,
        "loading": max(0, loading_bytes(config, chunk) - sum(later.values())),
        "base": base.private_bytes + base.shared_bytes + narrow,
    }


def loading_bytes(config: RunConfig, chunk: Chunk) -> int:
    """Peak temporary bytes in which a rank reads the weights of a checkpoint in float32."""
    tp = config.layout.tp
    is_narrow = config.training.dtype in SIXTEEN_BIT_DTYPES
    sizes = []
    for spec in chunk_tensors(config.model, tp, chunk):
        widened = math.prod(spec.local_shape(tp)) if is_narrow else 0
        has_piece = config.training.dtype == "float64" or (tp > 1 and spec.tp_dim is not None)
        sizes.append(4 * (widened + (math.prod(spec.shape) if has_piece else 0)))
    return max(sizes)
