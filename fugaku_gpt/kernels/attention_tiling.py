"""Decides when native kernels compute attention, how it is tiled when they do not (``model/attention_core.py``), and
how much memory it needs while it runs."""

from __future__ import annotations

from dataclasses import dataclass

_MIN_UTILISATION = 0.5  # least share of the threads' time
# the native kernels' queries and keys per block, and the most columns of a micro-kernel (8 to 32, by processor)
_NATIVE_QUERIES, _NATIVE_KEYS, _MAX_TILE_COLUMNS = 96, 64, 32
# by measurement: the most elements of one thread's scores, and queries per block; as many where heads share keys (fewer
# queries, 64 by that number of heads, took 0.95 to 1.15 times as long: 3 to 8 heads, 256 to 2048 tokens, float32)
_SCORES_PER_THREAD = {True: 2**20, False: 2**18}  # of 16-bit types, of others
_QUERIES_PER_BLOCK = {True: 128, False: 64}
_MAX_BLOCKS_OF_16_BITS = 8  # most blocks over which gradients of keys are added up, rounded to 16 bits each time


@dataclass(frozen=True)
class AttentionTiling:
    """The tiling of attention: which queries, samples and heads one batched product computes.

    Attributes:
        queries: queries per block.
        samples, heads: samples and heads of keys of a group, which one batched product computes.
        narrow: scores have 16 bits.
        sharing: heads of queries that share a head of keys.
    """

    queries: int
    samples: int
    heads: int
    narrow: bool
    sharing: int

    @property
    def products(self) -> int:
        """Samples times heads of a group."""
        return self.samples * self.heads


def attention_tiling(
    length: int, samples: int, heads: int, narrow: bool, threads: int, sharing: int = 1
) -> AttentionTiling:
    """Chooses sizes for which the scores stay in the caches of all threads.

    Args:
        length: tokens of a sequence.
        samples, heads: samples, and heads of keys, of this rank.
        narrow: scores have 16 bits.
        sharing: heads of queries that share a head of keys.
    """
    queries = min(length, _QUERIES_PER_BLOCK[narrow])
    if narrow:
        queries = max(queries, -(-length // _MAX_BLOCKS_OF_16_BITS))
    # a cache's worth of scores for each thread, in however many products: more heads would only take memory
    max_products = max(1, _SCORES_PER_THREAD[narrow] * threads // (queries * sharing * length))
    samples = min(samples, max(1, max_products // heads))
    return AttentionTiling(queries, samples, -(-heads // -(-heads // max_products)), narrow, sharing)


def needs_separate_accumulator(tiling: AttentionTiling, length: int) -> bool:
    """Whether products that are added to gradients need memory of their own: with several blocks, except in 16 bits,
    where they would be rounded twice."""
    return not tiling.narrow and tiling.queries < length


def attention_elements(tiling: AttentionTiling, length: int, width: int, has_dropout: bool) -> int:
    """Elements that a backward pass holds at a time: a group's queries, keys, values, output gradient, the gradients of
    the former three and, with a separate accumulator, another of these; one block's scores, their gradients and, with
    dropout, its mask as numbers; and the block's rows of the output.

    Args:
        width: of a head.
    """
    rows = tiling.products * tiling.queries * tiling.sharing
    tensors = 3 * tiling.sharing + (5 if needs_separate_accumulator(tiling, length) else 4)
    scores = (3 if has_dropout else 2) * rows * length
    return tensors * tiling.products * length * width + scores + rows * width


def enough_heads_for_threads(samples: int, heads: int, threads: int) -> bool:
    """Whether the native kernels, whose threads each take one head of a sample at a time, keep the threads busy. With
    far fewer heads than threads, products that all threads share are faster."""
    return samples * heads >= _MIN_UTILISATION * head_slots(samples, heads, threads)


def head_slots(samples: int, heads: int, threads: int) -> int:
    """Number of heads that the threads could compute in the time that they need for these."""
    return threads * -(-samples * heads // threads)


def partial_grad_floats(samples: int, heads: int, keys: int, width: int) -> int:
    """float32 numbers in which the native kernels' heads leave their gradients of keys and values, where they share
    these: nothing else makes the sum over heads the same for any number of threads."""
    return 2 * samples * heads * keys * width


def native_workspace_floats(length: int, width: int) -> int:
    """The most float32 numbers of workspace that each thread of the native kernels needs: copies of a head's keys and
    values, or in the backward pass of its queries and of the gradients of queries and output; and those of blocks of
    queries and keys. With 16-bit products two numbers take the space of one, but more is copied, in two layouts.

    Args:
        length: tokens of a sequence.
        width: of a head.
    """
    queries, keys = _NATIVE_QUERIES, _NATIVE_KEYS
    padded_width = -(-width // _MAX_TILE_COLUMNS) * _MAX_TILE_COLUMNS
    padded_length = -(-length // keys) * keys
    forward = padded_width * (2 * padded_length + 2 * queries + keys) + queries * (keys + 2)
    backward = padded_width * (3 * length + 7 * keys) + length + 2 * queries * keys
    even_length = length + length % 2
    bfloat16_backward = padded_width // 2 * (4 * even_length + 2 * length + 8 * keys) + length + 7 * queries * keys // 2
    return -(-max(forward, backward, bfloat16_backward) // 16) * 16
