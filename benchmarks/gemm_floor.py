"""The GEMM floor: the time of exactly a step's matrix products, each run alone at its best on this machine.

What is counted, for each micro-batch of T = b * s tokens:

* of each linear layer (QKV h → 3h, attention's output, MLP up and down, in every transformer layer, and the logits
  h → padded vocabulary once): forward [T, in] x [in, out], gradient of the input [T, out] x [out, in], gradient of the
  weight [out, T] x [T, in];
* of attention, in every layer: q kᵀ and its twin dP = dy vᵀ; P v and its twin dS k; Pᵀ dy and its twin dSᵀ q; for each
  of b * heads heads, [s, d] and [s, s] with d = h / heads.

Nothing else: no bias, softmax, GELU, LayerNorm, loss, optimiser, no sum of gradients over micro-batches, nothing that
is computed a second time. So no step that computes these products can be faster.

A product's time is that of the fastest of several ways to the same numbers: every way in which its operands and its
result may lie in memory, with the result written into memory that is there; ``F.linear``; what layers of ours call
(``compat``: our own kernels or oneDNN, where these are better; the gradient of a weight is added
to sums in float32, as in a step); the result a few hundred rows at a time; for attention products of all
heads at once or one head at a time, whole or in blocks of rows that leave out what the causal mask would throw away,
each block in memory of its own. The first turn tries all of them; later turns time those that came within ``NEAR`` of
the best. Over several turns it is one way for each product (``step.by_one_way``): of ten ways that are equally fast,
the one that is fastest in a turn is the luckiest of ten draws on a noisy machine. Operands change from call to call:
as many sets as there are layers, or as fill ``FRESH_BYTES``, so that none is in a cache because the call before left
it there. A way's time is the mean over these sets.
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
NEAR = 1.08
TRIED_SETS = 3
ROWS = (256, 512)
BLOCKS = (64, 128, 256, 512)

Call = Callable[[], Any]
# (its own memory for operands, for the result) → a call that computes the product once
Way = Callable[[torch.Tensor, torch.Tensor], Call]


class Product(NamedTuple):
    """One kind of product of a step.

    Attributes:
        count: how often in a micro-batch.
        flops: of one, with what a causal mask would throw away.
        inputs, outputs: elements of one's operands and result.
        ways: name → way.
    """

    name: str
    count: int
    flops: float
    inputs: int
    outputs: int
    ways: Dict[str, Way]


def linear_product(name: str, count: int, m: int, n: int, k: int) -> Product:
    """[m, k] x [k, n]."""

    def laid(a_whole: bool, b_whole: bool, c_whole: bool, rows: int = 0) -> Way:
        def way(memory: torch.Tensor, result: torch.Tensor) -> Call:
            a = memory[: m * k].view(m, k) if a_whole else memory[: m * k].view(k, m).t()
            b = memory[m * k : m * k + k * n].view(k, n) if b_whole else memory[m * k : m * k + k * n].view(n, k).t()
            if not c_whole:  # cᵀ = bᵀ aᵀ
                c = result[: m * n].view(n, m)
                return lambda: torch.mm(b.t(), a.t(), out=c)
            c = result[: m * n].view(m, n)
            if not rows:
                return lambda: torch.mm(a, b, out=c)
            parts = [(a[first : first + rows], c[first : first + rows]) for first in range(0, m, rows)]

            def in_parts() -> None:
                for one, into in parts:
                    torch.mm(one, b, out=into)

            return in_parts

        return way

    def linear(memory: torch.Tensor, _: torch.Tensor) -> Call:
        a, b = memory[: m * k].view(m, k), memory[m * k : m * k + k * n].view(n, k)
        return lambda: F.linear(a, b)

    def ours(b_whole: bool) -> Way:
        def way(memory: torch.Tensor, _: torch.Tensor) -> Call:
            a, b = memory[: m * k].view(m, k), memory[m * k : m * k + k * n]
            if b_whole:
                return lambda: ops.matmul(a, b.view(k, n))
            return lambda: ops.linear(a, b.view(n, k))

        return way

    def added(memory: torch.Tensor, result: torch.Tensor) -> Call:
        """To sums in float32, as gradients of weights are."""
        a, b = memory[: m * k].view(k, m).t(), memory[m * k : m * k + k * n].view(k, n)
        sums = result[: m * n].view(m, n) if result.dtype == torch.float32 else torch.zeros(m, n)
        return lambda: ops.add_product(sums, a, b)

    ways: Dict[str, Way] = {"linear": linear, "nn, ours": ours(True), "nt, ours": ours(False)}
    if name.endswith("weight's gradient"):
        ways["tn, ours"] = added
    for a_whole in (True, False):
        for b_whole in (True, False):
            letters = ("n" if a_whole else "t") + ("n" if b_whole else "t")
            ways[letters] = laid(a_whole, b_whole, True)
            ways[letters + ", result transposed"] = laid(a_whole, b_whole, False)
            for rows in ROWS:
                if rows < m:
                    ways[f"{letters}, {rows} rows"] = laid(a_whole, b_whole, True, rows)
    return Product(name, count, 2.0 * m * n * k, m * k + k * n, m * n, ways)


def attention_product(kind: str, count: int, heads: int, s: int, d: int) -> Product:
    """``scores``: [s, d] x [d, s]; ``values``: [s, s] x [s, d]; ``keys``: [s, s]ᵀ x [s, d], all of ``heads`` heads."""
    square, thin = heads * s * s, heads * s * d

    def whole(memory: torch.Tensor, result: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if kind == "scores":
            a, b = memory[:thin].view(heads, s, d), memory[thin : 2 * thin].view(heads, s, d).transpose(1, 2)
            return a, b, result[:square].view(heads, s, s)
        a = memory[:square].view(heads, s, s)
        b = memory[square : square + thin].view(heads, s, d)
        return (a if kind == "values" else a.transpose(1, 2)), b, result[:thin].view(heads, s, d)

    def batched(memory: torch.Tensor, result: torch.Tensor) -> Call:
        a, b, c = whole(memory, result)
        return lambda: torch.bmm(a, b, out=c)

    def by_head(memory: torch.Tensor, result: torch.Tensor) -> Call:
        parts = list(zip(*whole(memory, result)))

        def run() -> None:
            for a, b, c in parts:
                torch.mm(a, b, out=c)

        return run

    def blocked(block: int) -> Way:
        """Rows [first, last) of the scores need columns [0, last) only; of their transpose, columns from first on."""

        def way(memory: torch.Tensor, result: torch.Tensor) -> Call:
            parts: List[Tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
            used = made = 0
            tall = memory[square : square + thin].view(heads, s, d) if kind != "scores" else None
            for first in range(0, s, block):
                last = min(first + block, s)
                rows, columns = last - first, last if kind != "keys" else s - first
                if tall is None:
                    q = memory[:thin].view(heads, s, d)[:, first:last]
                    k = memory[thin : 2 * thin].view(heads, s, d)[:, :last]
                    into = result[made : made + heads * rows * columns].view(heads, rows, columns)
                    parts.append((q, k.transpose(1, 2), into))
                else:
                    scores = memory[used : used + heads * rows * columns]
                    if kind == "values":
                        a, b = scores.view(heads, rows, columns), tall[:, :last]
                    else:
                        a, b = scores.view(heads, columns, rows).transpose(1, 2), tall[:, first:]
                    parts.append((a, b, result[made : made + heads * rows * d].view(heads, rows, d)))
                used += heads * rows * columns
                made += heads * rows * (columns if tall is None else d)

            def run() -> None:
                for a, b, c in parts:
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
        ("qkv", layers, h, 3 * h),
        ("out", layers, h, h),
        ("up", layers, h, shape.ffn_size),
        ("down", layers, shape.ffn_size, h),
        ("logits", 1, h, config.padded_vocab),
    ]
    found = []
    for name, count, inner, outer in linears:
        found.append(linear_product(f"{name} forward", count, tokens, outer, inner))
        found.append(linear_product(f"{name} input's gradient", count, tokens, inner, outer))
        found.append(linear_product(f"{name} weight's gradient", count, outer, inner, tokens))
    heads = b * shape.heads
    for kind in ("scores", "values", "keys"):
        found.append(attention_product(kind, 2 * layers, heads, shape.seq_len, shape.head_size))
    return found


class Floor:
    """The floor of a step of ``config``, in its type."""

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
        self._near: Dict[str, List[str]] = {}

    def measure(self) -> Dict[str, Any]:
        """``seconds`` of a step's products; ``peak``: FLOP/s of the fastest linear layer's; ``products``: of each kind
        [count in a step, seconds of one, FLOP/s, name of its best way]; ``ways``: of each kind, way → seconds."""
        rows: Dict[str, List[Any]] = {}
        ways: Dict[str, Dict[str, float]] = {}
        for product, sets in zip(self._products, self._sets):
            tries = product.name not in self._near
            names = list(product.ways) if tries else self._near[product.name]
            times = {name: self._time(product, name, min(sets, TRIED_SETS) if tries else sets) for name in names}
            best = min(times, key=lambda name: times[name])
            if tries:
                self._near[product.name] = [name for name in names if times[name] <= NEAR * times[best]]
            rows[product.name] = [product.count * self._passes, times[best], product.flops / times[best], best]
            ways[product.name] = times
        return {
            "seconds": sum(count * seconds for count, seconds, _, _ in rows.values()),
            "peak": max(row[2] for name, row in rows.items() if not name.startswith("attention")),
            "products": rows,
            "ways": ways,
        }

    def _time(self, product: Product, name: str, sets: int) -> float:
        """Mean seconds of one call, after one that is not counted."""
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
