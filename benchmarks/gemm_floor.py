"""The GEMM floor is the time of a step's matrix products and nothing else, each run alone at its best on this machine.

It counts, for each micro-batch of T = b * s tokens:

* of each linear layer (QKV h → 3h, attention's output, MLP up and down, in every transformer layer, and the logits
  h → padded vocabulary once): forward [T, in] x [in, out], gradient of the input [T, out] x [out, in], gradient of the
  weight [out, T] x [T, in];
* of attention, in every layer: q kᵀ and its twin dP = dy vᵀ; P v and its twin dS k; Pᵀ dy and its twin dSᵀ q; for each
  of b * heads heads, [s, d] and [s, s] with d = h / heads.

It counts nothing else: no bias, softmax, GELU, LayerNorm, loss, optimizer, no sum of gradients over micro-batches, and
no recomputation. So no step that computes these products can be faster.

A product's time is that of the fastest of several ways to compute the same numbers: every memory layout of its operands
and its result, with the result written into allocated memory; ``F.linear``; the functions that our layers call
(``ops``: our own kernels or oneDNN, where these are better; the gradient of a weight is added to sums in float32, as in
a step); the result a few hundred rows at a time; for attention, products of all heads at once or one head at a time,
complete or in blocks of rows that leave out what the causal mask would throw away, each block in separate memory. The
first turn tries all of them; later turns time those within ``CLOSE_RATIO`` of the best. Over several turns each product
has a single way (``step.products_by_best_way``): of ten ways that are equally fast, the one that is fastest in a turn
is the luckiest of ten draws on a noisy machine. Operands change from call to call: there are as many sets as products
in a micro-batch, but no more than fill ``FRESH_BYTES``, so that none is still in a cache from the previous call. A
way's time is the mean over these sets.
"""

from __future__ import annotations

import math
import time
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import torch
import torch.nn.functional as F
from contestants import threads

from fugaku_gpt import ops
from fugaku_gpt.config import RunConfig
from fugaku_gpt.training.startup import prepare_process

FRESH_BYTES = 2**28
CLOSE_RATIO = 1.08
TRIED_SETS = 3
ROWS = (256, 512)
BLOCKS = (64, 128, 256, 512)

Call = Callable[[], Any]
# (memory for operands, memory for the result) → a call that computes the product once
Way = Callable[[torch.Tensor, torch.Tensor], Call]


class Product(NamedTuple):
    """One kind of product of a step.

    Attributes:
        count: number of such products in a micro-batch.
        flops: FLOP of one product, including what a causal mask would throw away.
        inputs, outputs: elements of the operands and of the result of one product.
        ways: name → way.
    """

    name: str
    count: int
    flops: float
    inputs: int
    outputs: int
    ways: Dict[str, Way]


def linear_product(name: str, count: int, m: int, n: int, k: int) -> Product:
    """The product [m, k] x [k, n] of a linear layer."""

    def laid(a_by_rows: bool, b_by_rows: bool, c_by_rows: bool, rows: int = 0) -> Way:
        def way(memory: torch.Tensor, result: torch.Tensor) -> Call:
            a = memory[: m * k].view(m, k) if a_by_rows else memory[: m * k].view(k, m).t()
            b = memory[m * k : m * k + k * n].view(k, n) if b_by_rows else memory[m * k : m * k + k * n].view(n, k).t()
            if not c_by_rows:  # cᵀ = bᵀ aᵀ
                c = result[: m * n].view(n, m)
                return lambda: torch.mm(b.t(), a.t(), out=c)
            c = result[: m * n].view(m, n)
            if not rows:
                return lambda: torch.mm(a, b, out=c)
            row_blocks = [(a[first : first + rows], c[first : first + rows]) for first in range(0, m, rows)]

            def by_row_blocks() -> None:
                for a_block, c_block in row_blocks:
                    torch.mm(a_block, b, out=c_block)

            return by_row_blocks

        return way

    def linear(memory: torch.Tensor, _: torch.Tensor) -> Call:
        a, b = memory[: m * k].view(m, k), memory[m * k : m * k + k * n].view(n, k)
        return lambda: F.linear(a, b)

    def ours(b_by_rows: bool) -> Way:
        def way(memory: torch.Tensor, _: torch.Tensor) -> Call:
            a, b = memory[: m * k].view(m, k), memory[m * k : m * k + k * n]
            if b_by_rows:
                return lambda: ops.matmul(a, b.view(k, n))
            return lambda: ops.linear(a, b.view(n, k))

        return way

    def added(memory: torch.Tensor, result: torch.Tensor) -> Call:
        """Adds the product to sums in float32, as gradients of weights are added."""
        a, b = memory[: m * k].view(k, m).t(), memory[m * k : m * k + k * n].view(k, n)
        sums = result[: m * n].view(m, n) if result.dtype == torch.float32 else torch.zeros(m, n)
        return lambda: ops.add_product(sums, a, b)

    ways: Dict[str, Way] = {"linear": linear, "nn, ours": ours(True), "nt, ours": ours(False)}
    if name.endswith("weight's gradient"):
        ways["tn, ours"] = added
    for a_by_rows in (True, False):
        for b_by_rows in (True, False):
            letters = ("n" if a_by_rows else "t") + ("n" if b_by_rows else "t")
            ways[letters] = laid(a_by_rows, b_by_rows, True)
            ways[letters + ", result transposed"] = laid(a_by_rows, b_by_rows, False)
            for rows in ROWS:
                if rows < m:
                    ways[f"{letters}, {rows} rows"] = laid(a_by_rows, b_by_rows, True, rows)
    return Product(name, count, 2.0 * m * n * k, m * k + k * n, m * n, ways)


def attention_product(kind: str, count: int, heads: int, s: int, d: int) -> Product:
    """A product of attention in all ``heads`` heads: ``scores`` is [s, d] x [d, s], ``values`` [s, s] x [s, d], and
    ``keys`` [s, s]ᵀ x [s, d]."""
    square, thin = heads * s * s, heads * s * d

    def operands(memory: torch.Tensor, result: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if kind == "scores":
            a, b = memory[:thin].view(heads, s, d), memory[thin : 2 * thin].view(heads, s, d).transpose(1, 2)
            return a, b, result[:square].view(heads, s, s)
        a = memory[:square].view(heads, s, s)
        b = memory[square : square + thin].view(heads, s, d)
        return (a if kind == "values" else a.transpose(1, 2)), b, result[:thin].view(heads, s, d)

    def batched(memory: torch.Tensor, result: torch.Tensor) -> Call:
        a, b, c = operands(memory, result)
        return lambda: torch.bmm(a, b, out=c)

    def by_head(memory: torch.Tensor, result: torch.Tensor) -> Call:
        operands_by_head = list(zip(*operands(memory, result)))

        def run() -> None:
            for a, b, c in operands_by_head:
                torch.mm(a, b, out=c)

        return run

    def blocked(block: int) -> Way:
        """Rows [first, last) of the scores need columns [0, last) only; of their transpose, columns from first on."""

        def way(memory: torch.Tensor, result: torch.Tensor) -> Call:
            blocks: List[Tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
            used = made = 0
            tall = memory[square : square + thin].view(heads, s, d) if kind != "scores" else None
            for first in range(0, s, block):
                last = min(first + block, s)
                rows, columns = last - first, last if kind != "keys" else s - first
                if tall is None:
                    q = memory[:thin].view(heads, s, d)[:, first:last]
                    k = memory[thin : 2 * thin].view(heads, s, d)[:, :last]
                    into = result[made : made + heads * rows * columns].view(heads, rows, columns)
                    blocks.append((q, k.transpose(1, 2), into))
                else:
                    scores = memory[used : used + heads * rows * columns]
                    if kind == "values":
                        a, b = scores.view(heads, rows, columns), tall[:, :last]
                    else:
                        a, b = scores.view(heads, columns, rows).transpose(1, 2), tall[:, first:]
                    blocks.append((a, b, result[made : made + heads * rows * d].view(heads, rows, d)))
                used += heads * rows * columns
                made += heads * rows * (columns if tall is None else d)

            def run() -> None:
                for a, b, c in blocks:
                    torch.bmm(a, b, out=c)

            return run

        return way

    ways: Dict[str, Way] = {"batched": batched, "one head at a time": by_head}
    ways.update({f"blocks of {block}": blocked(block) for block in BLOCKS if block < s})
    inputs, outputs = (2 * thin, square) if kind == "scores" else (square + thin, thin)
    return Product(f"attention {kind}", count, 2.0 * heads * s * s * d, inputs, outputs, ways)


def products_of(config: RunConfig) -> List[Product]:
    """All products of one micro-batch."""
    shape, b = config.model, config.training.micro_batch
    tokens, h, layers = b * shape.seq_len, shape.hidden, shape.layers
    linears = [
        ("qkv", layers, h, shape.qkv_width),
        ("out", layers, shape.query_width, h),
        ("up", layers, h, shape.up_width),
        ("down", layers, shape.ffn_size, h),
        ("logits", 1, h, config.padded_vocab),
    ]
    products = []
    for name, count, inner, outer in linears:
        products.append(linear_product(f"{name} forward", count, tokens, outer, inner))
        products.append(linear_product(f"{name} input's gradient", count, tokens, inner, outer))
        products.append(linear_product(f"{name} weight's gradient", count, outer, inner, tokens))
    heads = b * shape.heads
    for kind in ("scores", "values", "keys"):
        products.append(attention_product(kind, 2 * layers, heads, shape.seq_len, shape.head_size))
    return products


class Floor:
    """The floor of a step of ``config``, in the data type of its training."""

    def __init__(self, config: RunConfig) -> None:
        prepare_process(threads())  # `F.linear` gets its memory as cheaply as in a step of ours
        self._passes = config.micro_batches
        self._products = products_of(config)
        dtype = getattr(torch, config.training.dtype)
        item = torch.empty(0, dtype=dtype).element_size()
        self._sets: List[int] = []
        for product in self._products:
            fill = math.ceil(FRESH_BYTES / item / (product.inputs + product.outputs))
            self._sets.append(max(1, min(product.count, fill)))
        sizes = [(_aligned(p.inputs) * n, _aligned(p.outputs) * n) for p, n in zip(self._products, self._sets)]
        self._inputs = torch.empty(max(size for size, _ in sizes), dtype=dtype).normal_()
        self._outputs = torch.zeros(max(size for _, size in sizes), dtype=dtype)
        self._close_ways: Dict[str, List[str]] = {}

    def measure(self) -> Dict[str, Any]:
        """Times the products. Returns ``seconds`` of a step's products; ``peak``, FLOP/s of the fastest product of a
        linear layer; ``products``, for each kind [count in a step, seconds of one, FLOP/s, name of its best way]; and
        ``ways``, for each kind way → seconds."""
        rows: Dict[str, List[Any]] = {}
        ways: Dict[str, Dict[str, float]] = {}
        for product, sets in zip(self._products, self._sets):
            tries = product.name not in self._close_ways
            names = list(product.ways) if tries else self._close_ways[product.name]
            times = {name: self._time(product, name, min(sets, TRIED_SETS) if tries else sets) for name in names}
            best = min(times, key=lambda name: times[name])
            if tries:
                self._close_ways[product.name] = [name for name in names if times[name] <= CLOSE_RATIO * times[best]]
            rows[product.name] = [product.count * self._passes, times[best], product.flops / times[best], best]
            ways[product.name] = times
        return {
            "seconds": sum(count * seconds for count, seconds, _, _ in rows.values()),
            "peak": max(row[2] for name, row in rows.items() if not name.startswith("attention")),
            "products": rows,
            "ways": ways,
        }

    def _time(self, product: Product, name: str, sets: int) -> float:
        """Mean seconds of one call, after one warm-up call."""
        inputs, outputs = _aligned(product.inputs), _aligned(product.outputs)
        calls = [
            product.ways[name](self._inputs[i * inputs : (i + 1) * inputs], self._outputs[i * outputs :])
            for i in range(sets)
        ]
        with torch.no_grad():  # as in autograd's functions, where our layers compute
            calls[-1]()
            before = time.perf_counter()
            for call in calls:
                call()
            return (time.perf_counter() - before) / sets


def _aligned(elements: int) -> int:
    return -(-elements // 64) * 64
