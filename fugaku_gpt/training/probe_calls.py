"""The operations that ``plan probe`` times: the trainer's own, each as a function without arguments.

They are called as a step calls them, casts and threads included, so the probe needs no knowledge of this build.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Tuple

import torch

from fugaku_gpt import compat, ops
from fugaku_gpt.comm import Communicator, ProcessGrid
from fugaku_gpt.config import load_run_config
from fugaku_gpt.data.random_samples import RandomSamples
from fugaku_gpt.kernels.attention_tiling import attention_tiling, head_slots
from fugaku_gpt.machine.probed import ATTENTION, ATTENTION_BACKWARD, INPUT, KEYS, LINEAR, SCORES, VALUES, WEIGHT
from fugaku_gpt.model.dropout import keep_mask, scaled_mask
from fugaku_gpt.parallel.buffers import ParamRange
from fugaku_gpt.parallel.cross_entropy import losses_of_logits
from fugaku_gpt.training.health import squares_of
from fugaku_gpt.training.optimizer import build_optimizer
from fugaku_gpt.training.trainer import Trainer

Operation = Callable[[], Any]
TINY = ("model.layers=1", "model.hidden=32", "model.heads=2", "model.seq_len=8", "model.vocab_size=64")
_POOL = 2**23  # elements from which inputs are taken in turn: more than caches hold, like weights and gradients
_TOKENS = (256, 64, 1024)
# inputs and outputs of linear layers, the most informative first
_WIDTHS = (
    (256, 1024),
    (1024, 256),
    (256, 256),
    (512, 2048),
    (1024, 1024),
    (64, 256),
    (256, 64),
    (128, 512),
    (256, 8192),
    (64, 64),
    (1024, 4096),
    (4096, 1024),
    (2048, 2048),
    (512, 32768),
    (4096, 4096),
)
_KEYS_AND_WIDTHS = ((256, 64), (128, 32), (64, 64), (512, 64), (128, 64), (256, 128), (1024, 64), (64, 16), (2048, 128))
_HEADS = 16
_ELEMENTS = (2**16, 2**20, 2**13, 2**18, 2**22)
_ROW = 512  # elements of a LayerNorm or a sum; a softmax has half of it


class ProductShape(NamedTuple):
    """The shape of a product: ``batch`` times [rows, inner][inner, columns]; see
    :class:`fugaku_gpt.machine.probed.ProductTiming`."""

    kind: str
    batch: int
    rows: int
    inner: int
    columns: int

    @property
    def flops(self) -> float:
        """Floating-point operations of the product."""
        return 2.0 * self.batch * self.rows * self.inner * self.columns


class NumberPool:
    """Normally distributed numbers for tensors of any shape, taken from memory that the caches do not hold."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._numbers = torch.empty(_POOL, dtype=torch.float32).normal_(std=0.1).to(dtype)
        self._next = 0

    def take(self, *shape: int) -> torch.Tensor:
        """Return the next elements as a tensor of this shape; a larger tensor repeats the whole pool."""
        count = math.prod(shape)
        if count > len(self._numbers):
            return self._numbers.repeat(-(-count // len(self._numbers)))[:count].view(shape)
        if self._next + count > len(self._numbers):
            self._next = 0
        self._next += -(-count // 64) * 64
        return self._numbers[self._next - -(-count // 64) * 64 :][:count].view(shape)


def product_shapes(narrow: bool, threads: int, compiled: bool) -> Iterator[ProductShape]:
    """Iterate over products of GPT layers, the most informative first.

    Args:
        narrow: without compiled kernels, attention's scores have 16 bits.
        compiled: attention runs in compiled kernels, each head by itself; timed with enough heads for all threads.
    """
    linears = [
        shape
        for width_in, width_out in _WIDTHS
        for tokens in _TOKENS
        for shape in (
            ProductShape(LINEAR, 1, tokens, width_in, width_out),
            ProductShape(INPUT, 1, tokens, width_out, width_in),
            ProductShape(WEIGHT, 1, width_out, tokens, width_in),
        )
    ]
    attention = []
    all_heads = head_slots(1, _HEADS, threads)
    for keys, width in _KEYS_AND_WIDTHS:
        tiling = attention_tiling(keys, 8, _HEADS, narrow, threads)
        batch, queries = tiling.products, tiling.queries
        attention += [
            ProductShape(SCORES, batch, queries, width, keys),
            ProductShape(VALUES, batch, queries, keys, width),
            ProductShape(KEYS, batch, keys, queries, width),
        ]
        if compiled:
            attention += [ProductShape(kind, all_heads, keys, width, keys) for kind in (ATTENTION, ATTENTION_BACKWARD)]
    count = len(_KEYS_AND_WIDTHS)
    attention_share, linear_share = len(attention) // count, -(-len(linears) // count)  # per attention width
    for index in range(count):
        linear_shapes = linears[index * linear_share : (index + 1) * linear_share]
        yield from linear_shapes[:3]
        yield from attention[index * attention_share : (index + 1) * attention_share]
        yield from linear_shapes[3:]


def product_call(shape: ProductShape, pool: NumberPool, wide: NumberPool) -> Operation:
    """Return a product as the trainer computes it.

    Args:
        pool: numbers of the training type.
        wide: numbers of the type in which gradients are summed.
    """
    kind, batch, rows, inner, columns = shape
    if kind in (LINEAR, INPUT, WEIGHT):
        if kind == LINEAR:
            bias = pool.take(columns).clone()
            return _without_grad(lambda: ops.linear(pool.take(rows, inner), pool.take(columns, inner), bias))
        if kind == INPUT:
            return _without_grad(lambda: ops.matmul(pool.take(rows, inner), pool.take(inner, columns)))
        return _without_grad(
            lambda: ops.add_product(wide.take(rows, columns), pool.take(inner, rows).t(), pool.take(inner, columns))
        )
    if kind in (ATTENTION, ATTENTION_BACKWARD):
        return _attention(pool.take(1, 1, rows, 3 * batch, inner), backward=kind == ATTENTION_BACKWARD)
    dtype = ops.attention_dtype(pool.take(1).dtype)  # scores stay in the caches, so each call reuses them
    first = pool.take(batch, rows, inner).to(dtype)
    if kind == SCORES:
        keys, scores = pool.take(batch, columns, inner).to(dtype), torch.empty(batch, rows, columns, dtype=dtype)
        return lambda: torch.bmm(first, keys.transpose(1, 2), out=scores)
    second = pool.take(batch, inner, columns).to(dtype)
    if kind == VALUES:
        out = torch.empty(batch, rows, columns, dtype=dtype)
        return lambda: torch.bmm(first, second, out=out)
    sums, scores = torch.zeros(batch, rows, columns, dtype=dtype), first.transpose(1, 2).contiguous()
    return lambda: sums.baddbmm_(scores.transpose(1, 2), second)


def _attention(qkv: torch.Tensor, backward: bool) -> Operation:
    """Return causal attention, or its backward pass, by compiled kernels. ``qkv``: [1, 1, rows, 3 heads, head size]."""
    ranges, heads = ops.KeyRanges.causal(qkv.shape[2]), qkv.shape[3] // 3
    if not backward:
        return lambda: ops.attention(qkv, heads, ranges, None, 1.0)
    y, log_sums = ops.attention(qkv, heads, ranges, None, 1.0)
    return lambda: ops.attention_gradient(y, qkv, y, log_sums, ranges, None, 1.0)


def pass_calls(dtype: torch.dtype, pool: NumberPool) -> Iterator[Tuple[str, int, Operation]]:
    """Iterate over (name, elements, operation) of passes over activations."""
    for elements in _ELEMENTS:
        rows = elements // _ROW

        x, y = pool.take(rows, _ROW).clone(), pool.take(rows, _ROW).clone()
        yield "add", elements, _add(x, y)
        yield "copy", elements, _copy(x)
        weight, bias = torch.ones(_ROW), torch.zeros(_ROW)  # float32 beside 16 bits, as in a model

        def layer_norm(x: torch.Tensor, weight: torch.Tensor = weight, bias: torch.Tensor = bias) -> torch.Tensor:
            return ops.layer_norm(x, weight, bias, 1e-5)

        def rms_norm(x: torch.Tensor, weight: torch.Tensor = weight) -> torch.Tensor:
            return ops.rms_norm(x, weight, 1e-5)

        functions: Dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "layer_norm": layer_norm,
            "gelu_erf": ops.gelu,
            "gelu_tanh": ops.gelu_tanh,
            "rms_norm": rms_norm,
            "swiglu": ops.swiglu,
            "rotary": _rotation(rows, dtype),
        }
        for name, function in functions.items():
            grad = y.view(-1)[: elements // 2].view(rows, -1) if name == "swiglu" else y
            yield name, elements, _forward(function, x)
            yield f"{name}_backward", elements, _backward(function, x, grad)
        yield "sum_of_rows", elements, _call_on(ops.sum_of_rows, x)
        scores = pool.take(elements // 256, 256).to(ops.attention_dtype(dtype)).view(-1, 8, 256)
        probabilities = torch.softmax(scores.float(), -1).to(scores.dtype)
        yield "softmax", elements, _call_on(ops.softmax_, probabilities.clone())
        yield "softmax_backward", elements, _softmax_backward(scores.clone(), probabilities)
        if elements >= 2**16:
            yield "loss", elements, _loss(pool.take(elements // 2048, 2048).clone())
        if elements <= 2**20:
            yield "dropout", elements, _dropout(x)
            yield "flags", elements, _flags(elements)


def _rotation(tokens: int, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that rotates and packs heads [tokens, 512]: four of queries, two of keys, two of values."""
    model = load_run_config(overrides=["model.hidden=512", "model.heads=8", "model.positions=rope"]).model
    rotation = ops.rotation(model, 1, tokens, dtype)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        q, k, v = x.view(1, 1, tokens, 8, 64).split([4, 2, 2], 3)
        return ops.pack_heads(q, k, v, rotation).view(x.shape)

    return rotated


def _add(x: torch.Tensor, y: torch.Tensor) -> Operation:
    return lambda: x + y


def _copy(x: torch.Tensor) -> Operation:
    """Return a copy like the one by which attention moves tokens to their heads."""
    by_head = x.view(-1, 8, 64)
    out = torch.empty(8, by_head.shape[0], 64, dtype=x.dtype)
    return lambda: out.copy_(by_head.transpose(0, 1))


def _call_on(function: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Operation:
    return lambda: function(x)


def _forward(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Operation:
    leaf = x.detach().requires_grad_()
    return lambda: function(leaf)


def _without_grad(call: Operation) -> Operation:
    """Return the call without gradient recording, like the inside of the autograd functions that our layers are."""
    without_gradients: Operation = torch.no_grad()(call)
    return without_gradients


def _backward(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, grad: torch.Tensor) -> Operation:
    leaf = x.detach().requires_grad_()
    y = function(leaf)
    return lambda: torch.autograd.grad(y, leaf, grad, retain_graph=True)


def _softmax_backward(grad: torch.Tensor, result: torch.Tensor) -> Operation:
    return lambda: ops.softmax_gradient_(grad, result)


def _loss(logits: torch.Tensor) -> Operation:
    targets, alone = torch.arange(len(logits)), Communicator.alone()
    return lambda: losses_of_logits(logits, targets, alone, True, 1.0)


def _dropout(x: torch.Tensor) -> Operation:
    return lambda: x * scaled_mask(keep_mask(1, 2, 0, x.numel(), 0.1), 0.1, x).view(x.shape)


def _flags(elements: int) -> Operation:
    return lambda: keep_mask(1, 2, 0, elements, 0.1)


def step_calls() -> Iterator[Tuple[str, int, Operation]]:
    """Iterate over (name, elements, operation) of passes over parameters, masters and gradients, all float32."""
    for elements in (2**20, 2**14, 2**24):
        parameters, gradients = torch.zeros(elements), torch.full((elements,), 1e-3)
        param_ranges = [ParamRange(True, True, 0, parameters, gradients)]
        yield "zero", elements, torch.zeros(elements).zero_
        yield "squares", elements, _squares(param_ranges)
        yield "optimiser", elements, _step(param_ranges)
        yield "round", elements, _round(parameters)


def _squares(param_ranges: List[ParamRange]) -> Operation:
    return lambda: squares_of(param_ranges)


def _step(param_ranges: List[ParamRange]) -> Operation:
    optimizer = build_optimizer(param_ranges, load_run_config().training)
    return lambda: optimizer.step(1e-9)


def _round(masters: torch.Tensor) -> Operation:
    parameters = torch.empty_like(masters, dtype=torch.bfloat16)
    return lambda: parameters.copy_(masters)


def bandwidth_calls(elements: int) -> List[Tuple[str, int, Operation]]:
    """Return (name, bytes, operation) of passes over arrays larger than all caches."""
    x, y, z = torch.ones(elements), torch.ones(elements), torch.ones(elements)
    return [
        ("copy", 8 * elements, lambda: y.copy_(x)),
        ("triad", 12 * elements, lambda: torch.add(x, y, alpha=3.0, out=z)),
    ]


def layer_calls(dtype: str) -> Tuple[int, Operation, Operation]:
    """Return the tokens, the forward pass, and the forward and backward pass of one of our layers with next to no work
    in it, with enough heads to keep all threads of compiled attention busy."""
    config = load_run_config(overrides=[*TINY, f"training.dtype={dtype}", "training.global_batch=1"])
    trainer = Trainer(config, ProcessGrid.alone(), RandomSamples(config))
    block = trainer.model_chunks[0].blocks["0"]
    samples = -(-torch.get_num_threads() // config.model.heads)
    x = torch.zeros(samples, config.model.seq_len, config.model.hidden, dtype=getattr(torch, dtype)).requires_grad_()
    grad = torch.ones_like(x)

    def both(trainer: Trainer = trainer) -> None:  # the trainer holds what the layer adds its gradients to
        compat.backward(block(x, 0), grad)

    return samples * config.model.seq_len, lambda: block(x, 0), both
