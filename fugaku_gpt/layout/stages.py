"""Which layers each pipeline stage holds: uneven splits by work, and the chunks (virtual stages) of interleaving.

The model is cut into ``stages * chunks`` consecutive chunks. Chunk number ``g`` belongs to stage ``g % stages``, so
that chunk ``c`` of stage ``s`` is number ``c * stages + s`` (Narayanan et al. 2021, "Efficient Large-Scale Language
Model Training on GPU Clusters Using Megatron-LM", section 2.2). A chunk is always meant by that number.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import accumulate
from typing import List, Optional, Sequence, Tuple

from fugaku_gpt.config.schema import ModelConfig, RunConfig
from fugaku_gpt.layout.tensors import TensorSpec, model_tensors, position_tables

RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Chunk:
    """A run of layers that one stage holds.

    Attributes:
        index: number in the order of the forward pass; see the head of this file.
        stage: the pipeline stage that holds it.
        layers: numbers of its transformer layers.
        has_embedding: it starts with the embeddings: the first chunk.
        has_head: it ends with the last LayerNorm, the logits and the loss: the last chunk.
    """

    index: int
    stage: int
    layers: range
    has_embedding: bool
    has_head: bool


@dataclass(frozen=True)
class Work:
    """The work of the model's ends, in units of one transformer layer's work."""

    embedding: float = 0.0
    head: float = 0.0


def work_of(model: ModelConfig, padded_vocab: int, recompute: str = "none", tp: int = 1) -> Work:
    """The ends of the model against one layer, by operations of a training step (forward and backward) per token.

    A multiply and an add count as one here; the layer and the logits are those of ``formulas.flops.EXACT_FORMULA``
    (Narayanan et al. 2021, appendix), where a backward pass costs two forward passes:

    * layer: a = its weights (4 h² + 2 h ffn of a GPT-2) + 2 s q with the width q of all query heads, times 3; times 4
      where it is recomputed in full. Weights of heads of keys that several of ``tp`` ranks hold count for each of them.
      ``selective`` makes flags of dropout again, which is no product, and every backward pass the scores of attention,
      which no formula counts;
    * logits and loss: V h, times 3, and never recomputed; the classes of a grid have one row of logits for all of its s
      cells;
    * embedding: no product. Forward adds the position to the token's row, backward adds one row to each of two tables:
      3 h additions, counted as 1.5 h. (On a real machine it costs the reading of memory, still little.)

    Args:
        padded_vocab: rows of the output weights (V).
        recompute: ``none``, ``selective`` or ``full``, of most layers.
    """
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute {recompute!r}: valid: {', '.join(RECOMPUTE)}")
    h = model.hidden
    forward = float(model.computed_layer_weights(tp)) + 2.0 * model.seq_len * model.query_width
    layer = (4.0 if recompute == "full" else 3.0) * forward
    rows = padded_vocab / model.seq_len if model.is_grid_classifier else padded_vocab
    return Work(embedding=1.5 * h / layer, head=3.0 * rows * h / layer)


def split_layers(
    layers: int, stages: int, chunks: int = 1, work: Work = Work(), split: Optional[Sequence[int]] = None
) -> Tuple[Chunk, ...]:
    """The chunks of a model in the order of the forward pass; each has one layer at least, but for the last, with the
    logits, where ``split`` says so.

    Without ``split`` the work of the busiest stage is as small as it can be, then that of the next, and so on; and
    within each stage the same of its chunks. Layers are alike, so handing them out one by one, each to the stage that
    has least with it, is optimal: were the busiest stage of another split below the last layer's place here, that split
    would hold fewer layers. Where stages would be equal, the later gets the layer: it holds fewer micro-batches.

    Args:
        layers: transformer layers of the model.
        chunks: chunks of each stage; more than 1 only where the schedule interleaves.
        work: cost of the ends, in layers (see :func:`work_of`).
        split: layers of each chunk in the order of the forward pass, such as [3, 4, 4, 1], in place of all that.

    Raises:
        ValueError: there are more chunks than layers, or ``split`` does not fit; the message names what would be valid.
    """
    if stages < 1 or chunks < 1:
        raise ValueError(f"{stages} stages of {chunks} chunks: valid: 1 or more of each")
    total = stages * chunks
    if total > layers:
        raise ValueError(
            f"{layers} layers do not fill {stages} stages * {chunks} chunks = {total}, one layer each; "
            f"valid: stages * chunks up to {layers}"
        )
    counts = _balanced(layers, stages, chunks, work) if split is None else _checked_split(split, layers, stages, chunks)
    starts = [0, *accumulate(counts)]
    return tuple(
        Chunk(
            index=index,
            stage=index % stages,
            layers=range(starts[index], starts[index] + counts[index]),
            has_embedding=index == 0,
            has_head=index == total - 1,
        )
        for index in range(total)
    )


def chunks_of(config: RunConfig) -> Tuple[Chunk, ...]:
    """The chunks of a run's pipeline, in the order of the forward pass.

    Raises:
        ValueError: as :func:`split_layers`.
    """
    layout, training = config.layout, config.training
    everywhere = training.recompute_layers is None and training.recompute_budget_mib is None
    work = work_of(config.model, config.padded_outputs, training.recompute if everywhere else "none", layout.tp)
    return split_layers(config.model.layers, layout.pp, layout.chunks, work, layout.split or None)


def chunks_by_stage(chunks: Sequence[Chunk], stages: int) -> List[List[Chunk]]:
    """The chunks of each stage, in order."""
    chunks_of_stage: List[List[Chunk]] = [[] for _ in range(stages)]
    for chunk in chunks:
        chunks_of_stage[chunk.stage].append(chunk)
    return chunks_of_stage


def chunk_tensors(model: ModelConfig, tp: int, chunk: Chunk) -> List[TensorSpec]:
    """The tensors of one chunk, in order of first use.

    A tied token embedding is in the first chunk and in the last: where two stages hold it, each has a whole copy of its
    slice and their gradients are summed (``grid.embedding_group``).
    """
    prefixes = tuple(f"blocks.{layer}." for layer in chunk.layers)
    if chunk.has_embedding:
        prefixes += ("token_embedding.", *(f"{name}." for name in position_tables(model)), "embedding_norm.")
    if chunk.has_head:
        prefixes += ("token_embedding." if model.tied_embeddings else "output.", "final_norm.")
    return [spec for spec in model_tensors(model, tp) if spec.name.startswith(prefixes)]


def stage_tensors(model: ModelConfig, tp: int, chunks: Sequence[Chunk], stage: int) -> List[TensorSpec]:
    """The tensors of one stage, each once, in order of first use."""
    specs = {spec.name: spec for chunk in chunks if chunk.stage == stage for spec in chunk_tensors(model, tp, chunk)}
    return list(specs.values())


def _balanced(layers: int, stages: int, chunks: int, work: Work) -> List[int]:
    ends = [0.0] * stages
    ends[0] += work.embedding
    ends[-1] += work.head
    of_stage = _distribute(layers, ends, at_least=chunks)
    counts = [0] * (stages * chunks)
    for stage in range(stages):
        ends = [0.0] * chunks
        if stage == 0:
            ends[0] += work.embedding
        if stage == stages - 1:
            ends[-1] += work.head
        counts[stage::stages] = _distribute(of_stage[stage], ends, at_least=1)
    return counts


def _distribute(layers: int, before: Sequence[float], at_least: int) -> List[int]:
    """Distribute ``layers`` over holders that already have the work ``before``, with the least work for the busiest."""
    counts = [at_least] * len(before)
    waiting = [(at_least + more, -index) for index, more in enumerate(before)]
    heapq.heapify(waiting)
    for _ in range(layers - at_least * len(before)):
        index = -waiting[0][1]
        counts[index] += 1
        heapq.heapreplace(waiting, (counts[index] + before[index], -index))
    return counts


def _checked_split(split: Sequence[int], layers: int, stages: int, chunks: int) -> List[int]:
    counts = list(split)
    if len(counts) != stages * chunks:
        raise ValueError(
            f"split {counts} has {len(counts)} numbers; valid: {stages * chunks}, one for each chunk "
            f"({stages} stages * {chunks} chunks) in the order of the forward pass"
        )
    if min(counts[:-1], default=1) < 1 or counts[-1] < 0 or sum(counts) != layers:
        raise ValueError(
            f"split {counts}: valid: numbers of 1 or more (the last 0 or more) that add up to {layers} layers, "
            f"not {sum(counts)}"
        )
    return counts
