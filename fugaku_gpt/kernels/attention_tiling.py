"""When compiled kernels compute attention, how it is cut into blocks where they do not (``model/causal_attention.py``),
and what memory it needs while it runs."""

from __future__ import annotations

from dataclasses import dataclass

_MIN_UTILISATION = 0.5  # of the threads' time, at least
# of the kernels: queries and keys of a block; of a product's tile the columns, which are 8 to 32 by processor
_NATIVE_QUERIES, _NATIVE_KEYS, _MAX_TILE_COLUMNS = 96, 64, 32
# by measurement: elements that the scores of one thread may have, and queries of a block
_SCORES_PER_THREAD = {True: 2**20, False: 2**18}  # of 16-bit types, of others
_QUERIES_PER_BLOCK = {True: 128, False: 64}
_MAX_BLOCKS_OF_16_BITS = 8  # gradients of keys are added up over so many blocks at most, each time rounded to 16 bits


@dataclass(frozen=True)
class AttentionTiling:
    """One product's share of the work.

    Attributes:
        queries: of a block.
        samples, heads: of a group, whose products are one.
        narrow: scores have 16 bits.
    """

    queries: int
    samples: int
    heads: int
    narrow: bool

    @property
    def products(self) -> int:
        """Samples times heads of a group."""
        return self.samples * self.heads


def attention_tiling(length: int, samples: int, heads: int, narrow: bool, threads: int) -> AttentionTiling:
    """Sizes by which the scores stay in the caches of all threads.

    Args:
        length: tokens of a sequence.
        samples, heads: of this rank.
        narrow: scores have 16 bits.
    """
    queries = min(length, _QUERIES_PER_BLOCK[narrow])
    if narrow:
        queries = max(queries, -(-length // _MAX_BLOCKS_OF_16_BITS))
    # a cache's worth of scores for each thread, in however many products: more heads would only take memory
    max_products = max(1, _SCORES_PER_THREAD[narrow] * threads // (queries * length))
    return AttentionTiling(
        queries, min(samples, max(1, max_products // heads)), -(-heads // -(-heads // max_products)), narrow
    )


def needs_separate_accumulator(tiling: AttentionTiling, length: int) -> bool:
    """Whether products that are added to gradients are made in memory of their own: of several blocks, and not of 16
    bits, where they would be rounded twice."""
    return not tiling.narrow and tiling.queries < length


def attention_elements(tiling: AttentionTiling, length: int, width: int, has_dropout: bool) -> int:
    """Elements that a backward pass has at one time: of a group the queries, keys, values, the gradient of the output,
    those of the former three and, where sums are made apart, a part of one of these; one block's scores, their
    gradients and, with dropout, flags as numbers; and its rows of the output.

    Args:
        width: of a head.
    """
    groups = (8 if needs_separate_accumulator(tiling, length) else 7) * tiling.products * length * width
    scores = (3 if has_dropout else 2) * tiling.products * tiling.queries * length
    return groups + scores + tiling.products * tiling.queries * width


def enough_heads_for_threads(samples: int, heads: int, threads: int) -> bool:
    """Whether the compiled kernels, whose threads take one head of a sample at a time, keep the threads busy. With far
    fewer of them than threads, products that all threads share are faster."""
    return samples * heads >= _MIN_UTILISATION * head_slots(samples, heads, threads)


def head_slots(samples: int, heads: int, threads: int) -> int:
    """How many heads the threads could take in the time that they need for these."""
    return threads * -(-samples * heads // threads)


def native_workspace_floats(length: int, width: int) -> int:
    """float32 numbers that each thread of the compiled kernels needs at most: copies of a head's keys and values, or in
    the backward pass of its queries, their gradients and the output's; and those of blocks of queries and of keys.
    Where products are of 16 bits, two numbers take the place of one, but more is copied in two layouts.

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
