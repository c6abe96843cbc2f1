"""Tries each kernel of a library on a few numbers: compilers, processors and OpenMP runtimes can go wrong.

The trials take milliseconds and need NumPy alone, so that a library can be tried before PyTorch is imported, under an
emulator, or for another Python. bfloat16 numbers are the upper 16 bits of float32 numbers, as ``uint16`` arrays.
"""

from __future__ import annotations

import math
from typing import Iterator, List, NamedTuple, Sequence, Tuple

import numpy as np

from fugaku_gpt.kernels.library import BFLOAT16, FLOAT32, AttentionShape, Library

_EPSILON = {FLOAT32: 2.0**-23, BFLOAT16: 2.0**-7}  # distance of 1 from the next number
_NAMES = {FLOAT32: "float32", BFLOAT16: "bfloat16"}
_ROUNDINGS = 16.0  # by which a result may be off, of numbers as large as the largest expected one
_COLUMNS = 203  # several vectors of any processor, and a rest
_COLLIDING_STRIDE = 2**14  # elements between rows that map to the same sets of a cache: such rows are not read in place
_erf = np.vectorize(math.erf)


class Trial(NamedTuple):
    """One result of a kernel.

    Attributes:
        kernel: name of the kernel and of the type of its elements.
        actual: what the kernel computed.
        expected: what it should have computed, in float64, of the same shape.
        epsilon: relative distance of neighbouring numbers of the result's type.
    """

    kernel: str
    actual: np.ndarray
    expected: np.ndarray
    epsilon: float

    def failure(self) -> str:
        """Describe what is wrong with the result, in one line; empty if it is right up to some roundings."""
        allowed = _ROUNDINGS * self.epsilon * max(1.0, float(np.abs(self.expected).max()))
        errors = np.abs(self.actual - self.expected)
        is_wrong = ~(errors <= allowed)  # true for NaN
        if not is_wrong.any():
            return ""
        worst = int(np.where(np.isfinite(errors), errors, np.inf).argmax())
        return (
            f"{self.kernel}: {self.actual.flat[worst]:.6g} instead of {self.expected.flat[worst]:.6g} "
            f"({int(is_wrong.sum())} of {errors.size} numbers are wrong)"
        )


def failures(library: Library, threads: int) -> List[str]:
    """Describe what is wrong with the kernels of a library, a line for each trial that failed; empty if none is."""
    return [text for text in (trial.failure() for trial in trials(library, threads)) if text]


def trials(library: Library, threads: int) -> Iterator[Trial]:
    """Try each kernel with a number of threads, in float32 and bfloat16."""
    for kind in (FLOAT32, BFLOAT16):
        for kernel in (_attention, _loss, _layer_norm, _rms_norm, _gelu, _swiglu, _rotation, _gemm):
            yield from kernel(library, kind, threads)
        yield from _gemv(library, kind, threads)
        yield from _decode_attention(library, kind, threads)
    yield from _reductions(library, threads)
    yield from _adamw(library, threads)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Round float32 numbers to bfloat16, ties to even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16(x: np.ndarray) -> np.ndarray:
    """The float32 numbers that bfloat16 numbers stand for."""
    return (x.astype(np.uint32) << 16).view(np.float32)


def _wave(*shape: int) -> np.ndarray:
    """Numbers between -1 and 1."""
    return np.sin(np.arange(math.prod(shape), dtype=np.float32)).reshape(shape)


def _stored(x: np.ndarray, kind: int) -> np.ndarray:
    """Float32 numbers as a kernel gets them."""
    return to_bfloat16(x) if kind == BFLOAT16 else np.ascontiguousarray(x, dtype=np.float32)


def _wide(x: np.ndarray) -> np.ndarray:
    """The numbers of a kernel's array in float64."""
    return (from_bfloat16(x) if x.dtype == np.uint16 else x).astype(np.float64)


def _address(x: np.ndarray) -> int:
    return int(x.ctypes.data)


def _trial(kernel: str, kind: int, actual: np.ndarray, expected: np.ndarray) -> Trial:
    """The trial of an array that a kernel has written; its tolerance is that of the array's type."""
    epsilon = _EPSILON[BFLOAT16 if actual.dtype == np.uint16 else FLOAT32]
    return Trial(f"{kernel} of {_NAMES[kind]}", _wide(actual), expected, epsilon)


def _attention(library: Library, kind: int, threads: int) -> Iterator[Trial]:
    """Causal attention; and documents and padding, with heads that share keys and values. Of queries there are two
    blocks, of keys three, the last of each with a rest."""
    length = 170
    positions = np.arange(length)
    causal = np.zeros((1, length), np.int32), positions[np.newaxis].astype(np.int32) + 1
    starts = np.array([0, 40, 140, length])  # two documents, padding
    document = np.searchsorted(starts, positions, "right") - 1
    ends = np.where(document < 2, starts[document + 1], starts[document])
    shared = tuple(np.stack([sides[0], side]).astype(np.int32) for sides, side in zip(causal, (starts[document], ends)))
    yield from _attention_of(library, kind, threads, "attention", (2, 2), causal)
    yield from _attention_of(library, kind, threads, "attention with shared keys", (4, 2), (shared[0], shared[1]))


def _attention_of(
    library: Library,
    kind: int,
    threads: int,
    name: str,
    heads: Tuple[int, int],
    ranges: Tuple[np.ndarray, np.ndarray],
) -> Iterator[Trial]:
    """Trials of attention of two samples.

    Args:
        heads: numbers of heads of queries, and of keys.
        ranges: the first key and the end of the keys that each query sees, int32 [1 or 2, queries].
    """
    (query_heads, kv_heads), (samples, length), batch, width = heads, ranges[0].shape, 2, 8
    slots = query_heads + 2 * kv_heads
    packed = _stored(_wave(batch, length, slots, width), kind)
    y, log_sums = (
        np.zeros((batch, length, query_heads, width), packed.dtype),
        np.zeros((batch, query_heads, length), np.float32),
    )
    y_grad, grad = _stored(np.cos(_wave(*y.shape)), kind), np.zeros_like(packed)
    partial_grads = np.zeros(2 * batch * query_heads * length * width, np.float32)
    work = np.zeros(threads * library.attention_workspace_floats(length, width), np.float32)
    row = slots * width
    shape = AttentionShape(
        batch, query_heads, kv_heads, width, length, length, length, length, row, row, length * (samples > 1), kind
    )
    split = query_heads, query_heads + kv_heads
    inputs = (*_packed_addresses(packed, split), *map(_address, ranges), None, 1.0)
    library.attention_forward(shape, *inputs, _address(y), _address(log_sums), _address(work), threads)
    operands = [_address(x) for x in (y, y_grad, log_sums)]
    shared = _address(partial_grads) if query_heads != kv_heads else None
    library.attention_backward(
        shape, *inputs, *operands, *_packed_addresses(grad, split), shared, _address(work), threads
    )
    q, k, v = (_heads(x) for x in np.split(_wide(packed), split, 2))
    expected, *expected_grads = _reference_attention((q, k, v), _heads(_wide(y_grad)), ranges)
    yield _trial(name, kind, y, expected)
    for part, of, expected in zip(np.split(grad, split, 2), ("queries", "keys", "values"), expected_grads):
        yield _trial(f"{name}'s gradient by its {of}", kind, part, expected)


def _packed_addresses(packed: np.ndarray, split: Tuple[int, int]) -> Tuple[int, int, int]:
    """Addresses of queries, keys and values of [b, s, heads, d], split along the heads."""
    queries, keys, values = np.split(packed, split, 2)
    return _address(queries), _address(keys), _address(values)


def _heads(x: np.ndarray) -> np.ndarray:
    """[b, s, heads, d] → [b, heads, s, d], and back."""
    exchanged: np.ndarray = x.transpose(0, 2, 1, 3)
    return exchanged


def _reference_attention(
    inputs: Tuple[np.ndarray, np.ndarray, np.ndarray], out_grad: np.ndarray, ranges: Tuple[np.ndarray, np.ndarray]
) -> List[np.ndarray]:
    """Attention of [b, heads, s, d] by its definition, and its gradients by queries, keys and values; all [b, s, heads,
    d]."""
    q, few_k, few_v = inputs
    sharing, (length, width) = q.shape[1] // few_k.shape[1], q.shape[2:]
    k, v = (np.repeat(x, sharing, 1) for x in (few_k, few_v))
    first, end = (x[:, np.newaxis, :, np.newaxis] for x in ranges)
    is_seen = (np.arange(length) >= first) & (np.arange(length) < end)
    exponentials = np.exp(q @ k.transpose(0, 1, 3, 2) / math.sqrt(width)) * is_seen
    weights = exponentials / np.maximum(exponentials.sum(-1, keepdims=True), np.finfo(np.float64).tiny)
    weights_grad = out_grad @ v.transpose(0, 1, 3, 2)
    scores_grad = weights * (weights_grad - (weights_grad * weights).sum(-1, keepdims=True)) / math.sqrt(width)
    grads = [scores_grad.transpose(0, 1, 3, 2) @ q, weights.transpose(0, 1, 3, 2) @ out_grad]
    summed = [x.reshape(len(x), -1, sharing, length, width).sum(2) for x in grads]
    return [_heads(x) for x in (weights @ v, scores_grad @ k, *summed)]


def _loss(library: Library, kind: int, threads: int) -> Iterator[Trial]:
    rows = 3
    logits = _stored(_wave(rows, _COLUMNS), kind)
    wide = _wide(logits)
    largest, sums, log_sums = (np.zeros(rows, np.float32) for _ in range(3))
    shape = (rows, _COLUMNS, _COLUMNS, kind)
    library.loss_sums(_address(logits), *shape, _address(largest), _address(sums), threads)
    yield _trial("largest logit", kind, largest, wide.max(1))
    yield _trial("sum of exponentials", kind, sums, np.exp(wide - largest.astype(np.float64)[:, np.newaxis]).sum(1))
    expected = np.log(np.exp(wide).sum(1))
    gradient = logits.copy()
    library.loss_full_rows(_address(logits), *shape, _address(log_sums), 2.0, 1, threads)
    yield _trial("loss", kind, log_sums, expected)
    probabilities = np.exp(wide - expected[:, np.newaxis])
    yield _trial("loss's probabilities", kind, logits, 2.0 * probabilities)
    library.loss_gradient(_address(gradient), *shape, _address(log_sums), 0.5, threads)
    yield _trial("loss's gradient", kind, gradient, 0.5 * probabilities)


def _layer_norm(library: Library, kind: int, threads: int) -> Iterator[Trial]:
    rows, width = 5, 187  # more than eight vectors, two, one and a rest
    x, weight, bias = _stored(_wave(rows, width), kind), _wave(width), np.cos(_wave(width))
    y, statistics = np.zeros_like(x), np.zeros((2, rows), np.float32)
    work = np.zeros(threads * 6 * width, np.float32)
    numbers = (rows, width, kind)
    addresses = [_address(part) for part in (x, weight, bias, y, statistics[0], statistics[1])]
    library.layer_norm(*addresses, *numbers, 1e-5, _address(work), threads)
    wide, factor = _wide(x), weight.astype(np.float64)
    deviation = np.sqrt(wide.var(1, keepdims=True) + 1e-5)
    normal = (wide - wide.mean(1, keepdims=True)) / deviation
    yield _trial("LayerNorm", kind, y, normal * factor + bias)
    y_grad, x_grad = _stored(np.ones((rows, width)), kind), np.zeros_like(x)
    weight_grad, bias_grad = np.zeros(width, np.float32), np.zeros(width, np.float32)
    parts = (x, weight, statistics[0], statistics[1], y_grad, x_grad, weight_grad, bias_grad)
    library.layer_norm_gradient(*(_address(part) for part in parts), *numbers, _address(work), threads)
    centred = factor - factor.mean() - normal * (normal * factor).mean(1, keepdims=True)
    yield _trial("LayerNorm's gradient", kind, x_grad, centred / deviation)
    yield _trial("LayerNorm's gradient by its weight", kind, weight_grad, normal.sum(0))
    yield _trial("LayerNorm's gradient by its bias", kind, bias_grad, np.full(width, float(rows)))


def _rms_norm(library: Library, kind: int, threads: int) -> Iterator[Trial]:
    """Rows in groups of three with gaps between the groups; of each thread four rows together, and single ones."""
    rows, width, group = 6 * threads, 187, 3
    spaced, weight = _stored(_wave(rows // group, group + 1, width), kind), _wave(width)
    y = np.zeros((rows, width), spaced.dtype)
    scales, work = np.zeros(rows, np.float32), np.zeros(threads * 10 * width, np.float32)
    x, numbers = (_address(spaced), group, (group + 1) * width, width), (rows, width, kind)
    library.rms_norm(*x, *map(_address, (weight, y, scales)), *numbers, 1e-5, _address(work), threads)
    wide, factor = _wide(spaced[:, :group]).reshape(rows, width), weight.astype(np.float64)
    size = np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5)
    normal = wide / size
    yield _trial("RMSNorm", kind, y, normal * factor)
    y_grad, x_grad, weight_grad = _stored(np.cos(_wave(rows, width)), kind), np.zeros_like(y), np.zeros_like(weight)
    addresses = map(_address, (weight, scales, y_grad, x_grad, weight_grad))
    library.rms_norm_gradient(*x, *addresses, *numbers, _address(work), threads)
    grad = _wide(y_grad) * factor
    along = normal * (normal * grad).mean(1, keepdims=True)
    yield _trial("RMSNorm's gradient", kind, x_grad, (grad - along) / size)
    yield _trial("RMSNorm's gradient by its weight", kind, weight_grad, (_wide(y_grad) * normal).sum(0))


def _gelu(library: Library, kind: int, threads: int) -> Iterator[Trial]:
    x = _stored(8.0 * _wave(3, 70), kind)
    wide = _wide(x)
    y_grad = _stored(np.cos(wide), kind)
    by_erf = 0.5 * (1.0 + _erf(wide * math.sqrt(0.5)))
    density = np.exp(-0.5 * wide**2) / math.sqrt(2.0 * math.pi)
    root = math.sqrt(8.0 / math.pi)
    by_tanh = 1.0 / (1.0 + np.exp(-root * (wide + 0.044715 * wide**3)))
    slope = root * (1.0 + 3.0 * 0.044715 * wide**2)
    for is_tanh, cumulative, derivative in (
        (0, by_erf, by_erf + wide * density),
        (1, by_tanh, by_tanh + wide * by_tanh * (1.0 - by_tanh) * slope),
    ):
        name, y = "GELU by tanh" if is_tanh else "GELU", np.zeros_like(x)
        library.gelu(_address(x), _address(y), x.size, kind, is_tanh, threads)
        yield _trial(name, kind, y, wide * cumulative)
        library.gelu_gradient(_address(x), _address(y_grad), _address(y), x.size, kind, is_tanh, threads)
        yield _trial(f"gradient of {name}", kind, y, _wide(y_grad) * derivative)


def _swiglu(library: Library, kind: int, threads: int) -> Iterator[Trial]:
    rows, width = 2, 1024 + _COLUMNS  # more than a block of a row
    x = _stored(8.0 * _wave(rows, 2, width), kind)
    y_grad = _stored(np.cos(_wave(rows, width)), kind)
    gate, up, grad = _wide(x)[:, 0], _wide(x)[:, 1], _wide(y_grad)
    logistic = 1.0 / (1.0 + np.exp(-gate))
    y, x_grad = np.zeros_like(y_grad), np.zeros_like(x)
    library.swiglu(_address(x), _address(y), rows, width, kind, threads)
    yield _trial("SwiGLU", kind, y, gate * logistic * up)
    library.swiglu_gradient(_address(x), _address(y_grad), _address(x_grad), rows, width, kind, threads)
    slope = logistic * (1.0 + gate * (1.0 - logistic))
    expected = np.stack([slope * up * grad, gate * logistic * grad], 1)
    yield _trial("SwiGLU's gradient", kind, x_grad, expected)


def _rotation(library: Library, kind: int, threads: int) -> Iterator[Trial]:
    """Rotates the second half of each token's heads into the first half of another tensor's, and back."""
    shards, samples, tokens, heads, half = 2, 2, 3, 2, 37  # more than two vectors of any processor, and a rest
    x = _stored(_wave(shards, samples, tokens, 2, heads, 2, half), kind)
    y, back = np.zeros_like(x), np.zeros_like(x)
    angles = np.arange(shards * tokens * half, dtype=np.float64).reshape(shards, tokens, half)
    cosines, sines = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    strides, sizes = (4 * heads * half, 2 * half), (shards, samples, tokens, heads, 2 * half)
    for inverse, source, result in ((0, x[:, :, :, 1:], y[:, :, :, :1]), (1, y[:, :, :, :1], back[:, :, :, 1:])):
        sides = (_address(source), *strides, _address(result), *strides)
        library.rotate(*sides, _address(cosines), _address(sines), *sizes, kind, inverse, threads)
        left, right = _wide(source[..., 0, :]), _wide(source[..., 1, :])
        turned = (left + 1j * right) * np.exp((1 - 2 * inverse) * 1j * angles)[:, np.newaxis, :, np.newaxis, np.newaxis]
        name = "rotation back" if inverse else "rotation"
        yield _trial(name, kind, result, np.stack([turned.real, turned.imag], -2))
    untouched = np.concatenate([y[:, :, :, 1:], back[:, :, :, :1]])
    yield _trial("rotation beside its heads", kind, untouched, np.zeros(untouched.shape))


def _gemm(library: Library, kind: int, threads: int) -> Iterator[Trial]:
    """Products with each side as it lies, and turned; more than one pass of any type, an odd number of elements, and an
    even one; more than a strip; of whole numbers, whose sums are not rounded."""
    if not library.supports_gemm(kind):
        return
    rows, columns, inner = 20, 110, 1601
    x, y = (_stored(np.round(4.0 * _wave(n, inner)), kind) for n in (rows, columns))
    bias = np.round(4.0 * _wave(columns))
    expected = _wide(x) @ _wide(y).T

    def product(sides: Sequence[np.ndarray], out: np.ndarray, bias_address: object, accumulate: int) -> np.ndarray:
        out_kind = BFLOAT16 if out.dtype == np.uint16 else FLOAT32
        floats = library.gemm_workspace_floats(rows, columns, sides[0].shape[1], kind, out_kind, threads)
        work = np.zeros(floats, np.float32)
        arguments: List[int] = []
        for side in sides:
            arguments += [_address(side), *(stride // side.itemsize for stride in side.strides)]
        result = (bias_address, _address(out), columns, out_kind, accumulate)
        library.gemm(*arguments, kind, *result, rows, columns, sides[0].shape[1], _address(work), threads)
        return out

    for left_name, left in (("", x), (" turned", np.ascontiguousarray(x.T).T)):
        for right_name, right in (("", np.ascontiguousarray(y.T)), (" turned", y.T)):
            name = f"product (left{left_name}, right{right_name})"
            for dtype in dict.fromkeys((x.dtype, np.dtype(np.float32))):
                out = product((left, right), np.zeros((rows, columns), dtype), _address(bias), 0)
                yield _trial(name, kind, out, expected + bias)
            out = product((left, right), np.ones((rows, columns), np.float32), None, 1)
            yield _trial(f"accumulated {name}", kind, out, expected + 1.0)
    spaced = np.zeros((rows, _COLLIDING_STRIDE), x.dtype)
    spaced[:, :inner] = x
    out = product((spaced[:, : inner - 1], y.T[: inner - 1]), np.zeros((rows, columns), np.float32), None, 0)
    yield _trial("product (left with gaps between its rows)", kind, out, _wide(x[:, :-1]) @ _wide(y[:, :-1]).T)


def _gemv(library: Library, kind: int, threads: int) -> Iterator[Trial]:
    """Vectors of whole numbers, whose sums are not rounded: as many as are taken together, and a rest; by a weight with
    an odd number of rows, and with more numbers in a row than two steps of any processor, and a rest."""
    vectors, outputs, inputs = 7, 4 * 3 * threads + 1, 75
    x, weight = (_stored(np.round(4.0 * _wave(n, inputs)), kind) for n in (vectors, outputs))
    bias, work = _stored(np.round(4.0 * _wave(outputs)), kind), np.zeros(vectors * inputs, np.float32)
    expected = _wide(x) @ _wide(weight).T
    for name, bias_address, more in (("", None, 0.0), (" and a bias", _address(bias), _wide(bias))):
        y = np.zeros((vectors, outputs), x.dtype)
        for first, count in ((0, vectors - 1), (vectors - 1, 1)):
            addresses = _address(x[first:]), _address(weight), bias_address, _address(y[first:])
            library.gemv(*addresses, count, outputs, inputs, kind, _address(work), threads)
        yield _trial(f"product of few vectors{name}", kind, y, expected + more)


def _decode_attention(library: Library, kind: int, threads: int) -> Iterator[Trial]:
    """Attention of two tokens of each of two texts, one of which has keys in several chunks."""
    samples, tokens, heads, kv_heads, width, capacity = 2, 2, 6, 2, 21, 600
    positions = np.array([[0, 1], [597, 598]], np.int64)
    spaced = _stored(4.0 * _wave(samples, tokens, heads + 1, width), kind)  # another head follows those of a token
    keys, values = (_stored(wave(_wave(samples, kv_heads, capacity, width)), kind) for wave in (np.cos, np.sin))
    y, length = np.zeros((samples, tokens, heads, width), spaced.dtype), int(positions.max()) + 1
    sizes = (samples, tokens, heads, kv_heads, width)
    work = np.zeros(library.decode_attention_workspace_floats(*sizes, length, threads), np.float32)
    addresses = (_address(keys), _address(values), _address(positions), _address(y))
    row = (heads + 1) * width
    library.decode_attention(_address(spaced), row, *addresses, *sizes, capacity, length, kind, _address(work), threads)
    q = _heads(_wide(spaced[:, :, :heads]))
    k, v = (np.repeat(_wide(x), heads // kv_heads, 1) for x in (keys, values))
    is_seen = np.arange(capacity) <= positions[:, np.newaxis, :, np.newaxis]
    scores = np.where(is_seen, q @ k.swapaxes(2, 3) / math.sqrt(width), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    yield _trial("attention over a cache", kind, y, _heads(weights / weights.sum(-1, keepdims=True) @ v))


def _reductions(library: Library, threads: int) -> Iterator[Trial]:
    rows, columns = 70, 150
    x, sums = to_bfloat16(_wave(rows, columns)), np.cos(_wave(rows, columns))
    before = sums.astype(np.float64)
    library.accumulate(_address(sums), _address(x), x.size, threads)
    yield _trial("accumulate", BFLOAT16, sums, before + _wide(x))
    of_rows = np.zeros(columns, np.float32)
    library.sum_of_rows(_address(x), rows, columns, _address(of_rows), threads)
    yield _trial("sum of rows", BFLOAT16, of_rows, _wide(x).sum(0))
    numbers = np.cos(_wave(rows * columns + 3))
    squares = np.array([library.sum_of_squares(_address(numbers), numbers.size, threads)])
    expected = np.array([(numbers.astype(np.float64) ** 2).sum()])
    yield Trial("sum of squares of float32", squares, expected, _EPSILON[FLOAT32])


def _adamw(library: Library, threads: int) -> Iterator[Trial]:
    n = _COLUMNS
    parameters, gradients, rounded = _wave(n), np.cos(_wave(n)), np.zeros(n, np.uint16)
    first, second, before = np.zeros(n, np.float32), np.ones(n, np.float32), parameters.astype(np.float64)
    addresses = [_address(x) for x in (parameters, gradients, first, second, rounded)]
    # factor of the gradients, of the parameters, beta1, 1 - beta1, beta2, 1 - beta2, step size, epsilon
    library.adamw(*addresses, n, 0.5, 0.5, 0.5, 0.5, 0.75, 0.25, 0.25, 0.125, threads)
    gradient = 0.5 * gradients.astype(np.float64)
    expected_first, expected_second = 0.5 * gradient, 0.75 + 0.25 * gradient**2
    yield _trial("AdamW's first moment", FLOAT32, first, expected_first)
    yield _trial("AdamW's second moment", FLOAT32, second, expected_second)
    expected = 0.5 * before - 0.25 * expected_first / (np.sqrt(expected_second) + 0.125)
    yield _trial("AdamW", FLOAT32, parameters, expected)
    yield _trial("AdamW's rounded parameters", FLOAT32, rounded, parameters.astype(np.float64))
