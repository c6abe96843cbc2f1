"""What ``plan probe`` times: the trainer's own operations, each as a function without arguments.

The operations are those that a step calls, casts and threads included, so that nothing has to be known of this build.
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

Call = Callable[[], Any]
TINY = ("model.layers=1", "model.hidden=32", "model.heads=2", "model.seq_len=8", "model.vocab_size=64")
_POOL = 2**23  # elements that inputs are taken from in turn: more than caches hold, as weights and gradients are
_TOKENS = (256, 64, 1024)
# inputs and outputs of linear layers, those that tell most first
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
_ROW = 512  # elements of a LayerNorm or a sum; of a softmax the half


class Shape(NamedTuple):
    """Of a product: ``batch`` of [rows, inner][inner, columns]; as of :class:`fugaku_gpt.machine.probed.Product`."""

    kind: str
    batch: int
    rows: int
    inner: int
    columns: int

    @property
    def flops(self) -> float:
        """As of a product that has been measured."""
        return 2.0 * self.batch * self.rows * self.inner * self.columns


class Pool:
    """Normal numbers in tensors of any shape, each time from another place."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._numbers = torch.empty(_POOL, dtype=torch.float32).normal_(std=0.1).to(dtype)
        self._next = 0

    def take(self, *shape: int) -> torch.Tensor:
        """The next elements; all of them again and again where there are too few."""
        count = math.prod(shape)
        if count > len(self._numbers):
            return self._numbers.repeat(-(-count // len(self._numbers)))[:count].view(shape)
        if self._next + count > len(self._numbers):
            self._next = 0
        self._next += -(-count // 64) * 64
        return self._numbers[self._next - -(-count // 64) * 64 :][:count].view(shape)


def shapes(narrow: bool, threads: int, compiled: bool) -> Iterator[Shape]:
    """Products of GPT layers, those that tell most first.

    Args:
        narrow: attention's scores have 16 bits where it is not compiled.
        compiled: there are kernels for attention, which takes heads apart: as many as keep all threads busy.
    """
    linears = [
        shape
        for width_in, width_out in _WIDTHS
        for tokens in _TOKENS
        for shape in (
            Shape(LINEAR, 1, tokens, width_in, width_out),
            Shape(INPUT, 1, tokens, width_out, width_in),
            Shape(WEIGHT, 1, width_out, tokens, width_in),
        )
    ]
    attention = []
    all_heads = head_slots(1, _HEADS, threads)
    for keys, width in _KEYS_AND_WIDTHS:
        cut = attention_tiling(keys, 8, _HEADS, narrow, threads)
        batch, queries = cut.products, cut.queries
        attention += [
            Shape(SCORES, batch, queries, width, keys),
            Shape(VALUES, batch, queries, keys, width),
            Shape(KEYS, batch, keys, queries, width),
        ]
        if compiled:
            attention += [Shape(kind, all_heads, keys, width, keys) for kind in (ATTENTION, ATTENTION_BACKWARD)]
    count = len(_KEYS_AND_WIDTHS)
    of_one, share = len(attention) // count, -(-len(linears) // count)  # of linear layers' products, for each of these
    for place in range(count):
        mine = linears[place * share : (place + 1) * share]
        yield from mine[:3]
        yield from attention[place * of_one : (place + 1) * of_one]
        yield from mine[3:]


def product_call(shape: Shape, pool: Pool, wide: Pool) -> Call:
    """A product as the trainer makes it.

    Args:
        pool: numbers of the type trained in.
        wide: numbers of the type that gradients are summed in.
    """
    kind, batch, rows, inner, columns = shape
    if kind in (LINEAR, INPUT, WEIGHT):
        if kind == LINEAR:
            bias = pool.take(columns).clone()
            return _in_a_function(lambda: ops.linear(pool.take(rows, inner), pool.take(columns, inner), bias))
        if kind == INPUT:
            return _in_a_function(lambda: ops.matmul(pool.take(rows, inner), pool.take(inner, columns)))
        return _in_a_function(
            lambda: ops.add_product(wide.take(rows, columns), pool.take(inner, rows).t(), pool.take(inner, columns))
        )
    if kind in (ATTENTION, ATTENTION_BACKWARD):
        return _attention(pool.take(1, 1, rows, 3, batch, inner), backward=kind == ATTENTION_BACKWARD)
    dtype = ops.attention_dtype(pool.take(1).dtype)  # scores stay in the caches, so nothing is taken anew
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


def _attention(qkv: torch.Tensor, backward: bool) -> Call:
    """By compiled kernels."""
    if not backward:
        return lambda: ops.attention(qkv, None, 1.0)
    y, log_sums = ops.attention(qkv, None, 1.0)
    return lambda: ops.attention_gradient(y, qkv, y, log_sums, None, 1.0)


def pass_calls(dtype: torch.dtype, pool: Pool) -> Iterator[Tuple[str, int, Call]]:
    """(name, elements, operation) of passes over activations."""
    for elements in _ELEMENTS:
        rows = elements // _ROW

        x, y = pool.take(rows, _ROW).clone(), pool.take(rows, _ROW).clone()
        yield "add", elements, _add(x, y)
        yield "copy", elements, _copy(x)
        weight, bias = torch.ones(_ROW), torch.zeros(_ROW)  # float32 beside 16 bits, as a model's

        def normalised(x: torch.Tensor, weight: torch.Tensor = weight, bias: torch.Tensor = bias) -> torch.Tensor:
            return ops.layer_norm(x, weight, bias, 1e-5)

        functions: Dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "layer_norm": normalised,
            "gelu_erf": ops.gelu,
            "gelu_tanh": ops.gelu_tanh,
        }
        for name, function in functions.items():
            yield name, elements, _forward(function, x)
            yield f"{name}_backward", elements, _backward(function, x, y)
        yield "sum_of_rows", elements, _of(ops.sum_of_rows, x)
        scores = pool.take(elements // 256, 256).to(ops.attention_dtype(dtype)).view(-1, 8, 256)
        likely = torch.softmax(scores.float(), -1).to(scores.dtype)
        yield "softmax", elements, _of(ops.softmax_, likely.clone())
        yield "softmax_backward", elements, _softmax_backward(scores.clone(), likely)
        if elements >= 2**16:
            yield "loss", elements, _loss(pool.take(elements // 2048, 2048).clone())
        if elements <= 2**20:
            yield "dropout", elements, _dropout(x)
            yield "flags", elements, _flags(elements)


def _add(x: torch.Tensor, y: torch.Tensor) -> Call:
    return lambda: x + y


def _copy(x: torch.Tensor) -> Call:
    """As attention copies tokens to their heads."""
    apart = x.view(-1, 8, 64)
    out = torch.empty(8, apart.shape[0], 64, dtype=x.dtype)
    return lambda: out.copy_(apart.transpose(0, 1))


def _of(function: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Call:
    return lambda: function(x)


def _forward(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Call:
    leaf = x.detach().requires_grad_()
    return lambda: function(leaf)


def _in_a_function(call: Call) -> Call:
    """As autograd's functions compute, in which our layers are written."""
    without_gradients: Call = torch.no_grad()(call)
    return without_gradients


def _backward(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, grad: torch.Tensor) -> Call:
    leaf = x.detach().requires_grad_()
    y = function(leaf)
    return lambda: torch.autograd.grad(y, leaf, grad, retain_graph=True)


def _softmax_backward(grad: torch.Tensor, result: torch.Tensor) -> Call:
    return lambda: ops.softmax_gradient_(grad, result)


def _loss(logits: torch.Tensor) -> Call:
    targets, alone = torch.arange(len(logits)), Communicator.alone()
    return lambda: losses_of_logits(logits, targets, alone, True, 1.0)


def _dropout(x: torch.Tensor) -> Call:
    return lambda: x * scaled_mask(keep_mask(1, 2, 0, x.numel(), 0.1), 0.1, x).view(x.shape)


def _flags(elements: int) -> Call:
    return lambda: keep_mask(1, 2, 0, elements, 0.1)


def step_calls() -> Iterator[Tuple[str, int, Call]]:
    """(name, elements, operation) of passes over parameters, masters and gradients, which are float32."""
    for elements in (2**20, 2**14, 2**24):
        parameters, gradients = torch.zeros(elements), torch.full((elements,), 1e-3)
        runs = [ParamRange(True, True, 0, parameters, gradients)]
        yield "zero", elements, torch.zeros(elements).zero_
        yield "squares", elements, _squares(runs)
        yield "optimiser", elements, _step(runs)
        yield "round", elements, _round(parameters)


def _squares(runs: List[ParamRange]) -> Call:
    return lambda: squares_of(runs)


def _step(runs: List[ParamRange]) -> Call:
    optimizer = build_optimizer(runs, load_run_config().training)
    return lambda: optimizer.step(1e-9)


def _round(masters: torch.Tensor) -> Call:
    parameters = torch.empty_like(masters, dtype=torch.bfloat16)
    return lambda: parameters.copy_(masters)


def bandwidth_calls(elements: int) -> List[Tuple[str, int, Call]]:
    """(name, bytes, operation) over arrays beyond all caches."""
    x, y, z = torch.ones(elements), torch.ones(elements), torch.ones(elements)
    return [
        ("copy", 8 * elements, lambda: y.copy_(x)),
        ("triad", 12 * elements, lambda: torch.add(x, y, alpha=3.0, out=z)),
    ]


def layer_calls(dtype: str) -> Tuple[int, Call, Call]:
    """Tokens, forward pass, and forward and backward pass, of one of our layers with next to no work in it; as many
    heads as compiled attention wants for the threads."""
    config = load_run_config(overrides=[*TINY, f"training.dtype={dtype}", "training.global_batch=1"])
    trainer = Trainer(config, ProcessGrid.alone(), RandomSamples(config))
    block = trainer.pieces[0].blocks["0"]
    samples = -(-torch.get_num_threads() // config.model.heads)
    x = torch.zeros(samples, config.model.seq_len, config.model.hidden, dtype=getattr(torch, dtype)).requires_grad_()
    grad = torch.ones_like(x)

    def both(trainer: Trainer = trainer) -> None:  # the trainer holds what the layer adds its gradients to
        compat.backward(block(x, 0), grad)

    return samples * config.model.seq_len, lambda: block(x, 0), both
