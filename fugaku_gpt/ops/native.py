"""Calls the native kernels (``kernels/``), where they are compiled and compute correct results."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Callable, NamedTuple, Optional, Tuple

import torch

from fugaku_gpt.compat.kernel_choices import RANK_CONSENSUS
from fugaku_gpt.kernels import Library, load_library
from fugaku_gpt.kernels.attention_tiling import enough_heads_for_threads, partial_grad_floats
from fugaku_gpt.kernels.check import problem_of
from fugaku_gpt.kernels.library import BFLOAT16, FLOAT32, AttentionShape
from fugaku_gpt.kernels.matmul_tiling import MIN_DIMENSION, MIN_MULTIPLY_ADDS
from fugaku_gpt.ops.key_ranges import KeyRanges
from fugaku_gpt.ops.product_choice import recorded_verdict
from fugaku_gpt.ops.tensor_pool import pooled_empty, private_memory

_NATIVE_TYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
# Less work is done by the thread that has it: others may have gone to sleep, and are awake after tens of microseconds.
_MIN_SHARED_NUMBERS = 2**14  # of a pass over a tensor
_MIN_SHARED_BYTES = 2**16  # of a weight that few rows are multiplied with, or of a cache of keys and values
MAX_GEMV_ROWS = 8  # of more rows, the products of libraries are as fast
_MAX_DECODED_TOKENS = 8  # of a text at a time; attention of more is one of tiles


def has_native_kernels() -> bool:
    """Whether there are kernels for this processor that compute correct results."""
    return not native_kernels_problem()


def uses_native_kernels() -> bool:
    """Whether the kernels are used: as the ranks agreed, or before that, whether there are any."""
    return RANK_CONSENSUS.compiled is not False and has_native_kernels()


def choose_native_kernels(use: bool) -> None:
    """Choose whether native kernels are used, where there are any; see :class:`KernelChoices`."""
    RANK_CONSENSUS.compiled = use


def set_progress_callback(function: Optional[Callable[[], None]], seconds: float) -> None:
    """Have long kernels (attention, a layer's product) call a function at most every ``seconds``; None: stop."""
    if uses_native_kernels():
        _library().set_progress_callback(function, seconds)


def has_native_attention(packed: torch.Tensor, heads: int) -> bool:
    """True if the native kernels compute attention of [shards, b, s / shards, heads + 2 kv heads, d]."""
    if packed.dtype not in _NATIVE_TYPES or not uses_native_kernels():
        return False
    return enough_heads_for_threads(packed.shape[1], heads, torch.get_num_threads())


def attention(
    packed: torch.Tensor, heads: int, ranges: KeyRanges, flags: Optional[torch.Tensor], factor: float
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Attention of [shards, b, s / shards, heads + 2 kv heads, d], within the ranges of keys. ``flags`` [b, heads, s,
    s] are 0 for probabilities that dropout drops; the others are scaled by ``factor``. Returns [shards, b, s / shards,
    heads, d], and the logarithms of sums that the gradient needs."""
    packed = packed.contiguous()
    y = pooled_empty((*packed.shape[:3], heads, packed.shape[4]), packed.dtype)
    shape = _packed_shape(packed, heads, ranges)
    return y, _attention_into(y, shape, _packed_addresses(packed, heads), ranges, flags, factor)


def attention_gradient(
    y_grad: torch.Tensor,
    packed: torch.Tensor,
    y: torch.Tensor,
    log_sums: torch.Tensor,
    ranges: KeyRanges,
    flags: Optional[torch.Tensor],
    factor: float,
) -> torch.Tensor:
    """The gradient of :func:`attention`'s ``packed``. Gradients of keys and values that heads share are summed in
    float32, and rounded once."""
    packed, y_grad, heads = packed.contiguous(), y_grad.contiguous(), y.shape[3]
    shape, grad = _packed_shape(packed, heads, ranges), pooled_empty(packed.shape, packed.dtype)
    partial_grads = None
    if shape.heads != shape.kv_heads:
        floats = partial_grad_floats(shape.samples, shape.heads, shape.keys, shape.width)
        partial_grads = pooled_empty((floats,), torch.float32)
    inputs = (*_packed_addresses(packed, heads), *_range_addresses(ranges), _address(flags), factor)
    tensors = (y.data_ptr(), y_grad.data_ptr(), log_sums.data_ptr())
    work = _attention_workspace(shape)
    grads = (*_packed_addresses(grad, heads), _address(partial_grads))
    _library().attention_backward(shape, *inputs, *tensors, *grads, work.data_ptr(), torch.get_num_threads())
    return grad


def _attention_into(
    y: torch.Tensor,
    shape: AttentionShape,
    addresses: Tuple[int, int, int],
    ranges: KeyRanges,
    flags: Optional[torch.Tensor],
    factor: float,
) -> torch.Tensor:
    """Write attention into y, and return the logarithms of its sums [b, heads, queries]."""
    log_sums = torch.empty(shape.samples, shape.heads, shape.queries, dtype=torch.float32)
    inputs = (*addresses, *_range_addresses(ranges), _address(flags), factor)
    outputs, work = (y.data_ptr(), log_sums.data_ptr()), _attention_workspace(shape)
    _library().attention_forward(shape, *inputs, *outputs, work.data_ptr(), torch.get_num_threads())
    return log_sums


def _packed_shape(packed: torch.Tensor, heads: int, ranges: KeyRanges) -> AttentionShape:
    shards, samples, tokens, slots, width = packed.shape
    length, row = shards * tokens, slots * width
    if not ranges.suits(samples, length, length):
        raise ValueError(f"these ranges of keys are not those of {samples} samples of {length} tokens")
    return AttentionShape(
        samples, heads, (slots - heads) // 2, width, length, length, tokens, tokens, row, row,
        _ranges_row(ranges), _NATIVE_TYPES[packed.dtype],
    )  # fmt: skip


def _packed_addresses(packed: torch.Tensor, heads: int) -> Tuple[int, int, int]:
    """The addresses of queries, keys and values."""
    slots, width = packed.shape[3:]
    first, row = packed.data_ptr(), width * packed.element_size()
    return first, first + heads * row, first + (heads + slots) // 2 * row


def _range_addresses(ranges: KeyRanges) -> Tuple[int, int]:
    return ranges.first.data_ptr(), ranges.end.data_ptr()


def _ranges_row(ranges: KeyRanges) -> int:
    return ranges.queries if ranges.first.shape[0] > 1 else 0


def _attention_workspace(shape: AttentionShape) -> torch.Tensor:
    floats = _library().attention_workspace_floats(max(shape.queries, shape.keys), shape.width)
    return _floats(torch.get_num_threads() * floats)


def has_native_loss(logits: torch.Tensor) -> bool:
    """True if the native kernels compute the loss of logits [n, columns]."""
    return logits.dtype in _NATIVE_TYPES and logits.stride(1) == 1 and uses_native_kernels()


def loss_sums(logits: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """The maximum of each row of logits and the sum of exp(logit - maximum), both float32."""
    largest, sums = (logits.new_empty(logits.shape[0], dtype=torch.float32) for _ in range(2))
    _library().loss_sums(*_rows(logits), largest.data_ptr(), sums.data_ptr(), torch.get_num_threads())
    return largest, sums


def loss_gradient_(logits: torch.Tensor, log_sums: torch.Tensor, scale: float) -> None:
    """Replace logits by ``scale`` exp(logit - log_sum), with one float32 ``log_sum`` per row."""
    _library().loss_gradient(*_rows(logits), log_sums.data_ptr(), scale, torch.get_num_threads())


def loss_full_rows_(logits: torch.Tensor, scale: float, wants_gradient: bool) -> torch.Tensor:
    """The log-sum-exp of rows that no other rank shares, float32; with ``wants_gradient`` the logits become ``scale``
    times the probabilities."""
    log_sums = logits.new_empty(logits.shape[0], dtype=torch.float32)
    threads = torch.get_num_threads()
    _library().loss_full_rows(*_rows(logits), log_sums.data_ptr(), scale, int(wants_gradient), threads)
    return log_sums


def _rows(logits: torch.Tensor) -> Tuple[int, int, int, int, int]:
    return logits.data_ptr(), logits.shape[0], logits.shape[1], logits.stride(0), _NATIVE_TYPES[logits.dtype]


def has_native_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> bool:
    """True if the native kernels compute LayerNorm of x [..., width] with weight and bias [width]."""
    return x.dtype in _NATIVE_TYPES and weight.dtype == bias.dtype == torch.float32 and uses_native_kernels()


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> Tuple[torch.Tensor, torch.Tensor]:
    """LayerNorm of contiguous x [..., width], and the statistics [2, rows] that its gradient needs."""
    width, threads = x.shape[-1], _threads_for(x.numel())
    rows = x.numel() // width
    y, statistics = pooled_empty(x.shape, x.dtype), x.new_empty(2, rows, dtype=torch.float32)
    tensors = (x, weight.contiguous(), bias.contiguous(), y, statistics[0], statistics[1])
    numbers = (rows, width, _NATIVE_TYPES[x.dtype], eps, _workspace_address(threads * width), threads)
    _library().layer_norm(*(tensor.data_ptr() for tensor in tensors), *numbers)
    return y, statistics


def layer_norm_gradient(
    y_grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, statistics: torch.Tensor
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of :func:`layer_norm`'s x, and in float32 of its weight and bias."""
    width, threads = x.shape[-1], torch.get_num_threads()
    x_grad, weight_grad, bias_grad = pooled_empty(x.shape, x.dtype), _floats(width), _floats(width)
    tensors = (
        x,
        weight.contiguous(),
        statistics[0],
        statistics[1],
        y_grad.contiguous(),
        x_grad,
        weight_grad,
        bias_grad,
    )
    numbers = (x.numel() // width, width, _NATIVE_TYPES[x.dtype], _workspace_address(threads * 6 * width), threads)
    _library().layer_norm_gradient(*(tensor.data_ptr() for tensor in tensors), *numbers)
    return x_grad, weight_grad, bias_grad


def has_native_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """True if the native kernels compute RMSNorm of x [..., width] with weight [width]."""
    return x.dtype in _NATIVE_TYPES and weight.dtype == torch.float32 and uses_native_kernels()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of x [..., width], whose rows have even steps, and the scales [rows] that its gradient needs."""
    width, threads = x.shape[-1], _threads_for(x.numel())
    rows = x.numel() // width
    y, scales = pooled_empty(x.shape, x.dtype), x.new_empty(rows, dtype=torch.float32)
    tensors = (weight.contiguous(), y, scales)
    numbers = (rows, width, _NATIVE_TYPES[x.dtype], eps, _workspace_address(threads * width), threads)
    _library().rms_norm(x.data_ptr(), *_groups(x), *(tensor.data_ptr() for tensor in tensors), *numbers)
    return y, scales


def rms_norm_gradient(
    y_grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Gradients of :func:`rms_norm`'s x, and in float32 of its weight."""
    width, threads = x.shape[-1], torch.get_num_threads()
    x_grad, weight_grad = pooled_empty(x.shape, x.dtype), _floats(width)
    tensors = (weight.contiguous(), scales, y_grad.contiguous(), x_grad, weight_grad)
    numbers = (x.numel() // width, width, _NATIVE_TYPES[x.dtype], _workspace_address(threads * 10 * width), threads)
    _library().rms_norm_gradient(x.data_ptr(), *_groups(x), *(tensor.data_ptr() for tensor in tensors), *numbers)
    return x_grad, weight_grad


def has_even_steps(x: torch.Tensor) -> bool:
    """Whether rows [..., n, width] have no gaps inside, and groups of n rows follow each other in equal steps."""
    return _steps(x) is not None


def _steps(x: torch.Tensor) -> Optional[Tuple[int, int]]:
    """Elements from a group of rows [..., n, width] to the next, and from a row to the next; None if they differ."""
    if x.dim() < 2 or (x.shape[-1] > 1 and x.stride(-1) != 1):
        return None
    if x.is_contiguous():
        return x.shape[-2] * x.shape[-1], x.shape[-1]
    step, groups = 0, 1
    for length, stride in zip(reversed(x.shape[:-2]), reversed(x.stride()[:-2])):
        if length > 1:
            if groups > 1 and stride != step * groups:
                return None
            step, groups = stride if groups == 1 else step, groups * length
    return step, x.stride(-2)


def _groups(x: torch.Tensor) -> Tuple[int, int, int]:
    """The number of rows of a group, and what :func:`_steps` returns."""
    if x.is_contiguous():  # one group
        return x.numel() // x.shape[-1], 0, x.shape[-1]
    steps = _steps(x)
    assert steps is not None  # callers have checked it
    return (x.shape[-2], *steps)


def has_native_gelu(x: torch.Tensor) -> bool:
    """True if the native kernels compute GELU of x."""
    return supports_gelu(x.dtype) and uses_native_kernels()


def supports_gelu(dtype: torch.dtype) -> bool:
    """Whether the native GELU supports a type, on any machine that has kernels."""
    return dtype in _NATIVE_TYPES


def gelu(x: torch.Tensor, by_tanh: bool) -> torch.Tensor:
    """GELU of contiguous x, exact or by its tanh approximation."""
    y, threads = pooled_empty(x.shape, x.dtype), _threads_for(x.numel())
    _library().gelu(x.data_ptr(), y.data_ptr(), x.numel(), _NATIVE_TYPES[x.dtype], int(by_tanh), threads)
    return y


def gelu_gradient(y_grad: torch.Tensor, x: torch.Tensor, by_tanh: bool) -> torch.Tensor:
    """The gradient of :func:`gelu`'s x."""
    y_grad, x_grad, threads = y_grad.contiguous(), pooled_empty(x.shape, x.dtype), torch.get_num_threads()
    tensors = (x.data_ptr(), y_grad.data_ptr(), x_grad.data_ptr())
    _library().gelu_gradient(*tensors, x.numel(), _NATIVE_TYPES[x.dtype], int(by_tanh), threads)
    return x_grad


def has_native_swiglu(x: torch.Tensor) -> bool:
    """True if the native kernels compute SwiGLU of x [..., 2 f]."""
    return x.dtype in _NATIVE_TYPES and uses_native_kernels()


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """SwiGLU of contiguous x [..., 2 f], the gate first: [..., f]."""
    width, threads = x.shape[-1] // 2, _threads_for(x.numel())
    y, rows = pooled_empty((*x.shape[:-1], width), x.dtype), x.numel() // x.shape[-1]
    _library().swiglu(x.data_ptr(), y.data_ptr(), rows, width, _NATIVE_TYPES[x.dtype], threads)
    return y


def swiglu_gradient(y_grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of :func:`swiglu`'s x."""
    y_grad, x_grad, threads = y_grad.contiguous(), pooled_empty(x.shape, x.dtype), torch.get_num_threads()
    tensors = (x.data_ptr(), y_grad.data_ptr(), x_grad.data_ptr())
    rows, width = x.numel() // x.shape[-1], x.shape[-1] // 2
    _library().swiglu_gradient(*tensors, rows, width, _NATIVE_TYPES[x.dtype], threads)
    return x_grad


def has_native_rotation(out: torch.Tensor, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> bool:
    """True if the native kernels rotate x [shards, b, tokens, n, d] into ``out`` by cosines and sines
    [shards, 1, tokens, 1, d / 2]."""
    if x.dtype not in _NATIVE_TYPES or out.dtype != x.dtype or cosines.dtype != torch.float32:
        return False
    if not (cosines.is_contiguous() and sines.is_contiguous() and uses_native_kernels()):
        return False
    return has_even_steps(x) and has_even_steps(out)


def rotate_into(
    out: torch.Tensor, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, backwards: bool
) -> None:
    """Write x [shards, b, tokens, n, d], rotated by each position's angles, or back by them."""
    steps, out_steps, threads = _steps(x), _steps(out), _threads_for(x.numel())
    assert steps is not None and out_steps is not None  # callers have checked it
    sides = (x.data_ptr(), *steps, out.data_ptr(), *out_steps)
    numbers = (*x.shape, _NATIVE_TYPES[x.dtype], int(backwards), threads)
    _library().rotate(*sides, cosines.data_ptr(), sines.data_ptr(), *numbers)


def has_native_accumulate(x: torch.Tensor, sums: Optional[torch.Tensor] = None) -> bool:
    """True if the native kernels sum the rows of x, or add x to ``sums`` of the same shape."""
    if sums is not None and not (sums.dtype == torch.float32 and sums.is_contiguous() and sums.shape == x.shape):
        return False
    return x.dtype == torch.bfloat16 and x.is_contiguous() and uses_native_kernels()


def accumulate_(sums: torch.Tensor, x: torch.Tensor) -> None:
    """Add bfloat16 x to contiguous float32 sums of its shape."""
    _library().accumulate(sums.data_ptr(), x.data_ptr(), x.numel(), torch.get_num_threads())


def sum_of_rows(x: torch.Tensor) -> torch.Tensor:
    """[n, width] in bfloat16 → [width], float32."""
    sums = _floats(x.shape[1])
    _library().sum_of_rows(x.data_ptr(), *x.shape, sums.data_ptr(), torch.get_num_threads())
    return sums


def uses_native_matmul(dtype: torch.dtype) -> bool:
    """Whether the native GEMM computes layers' products of large enough matrices of a type: as the ranks agreed, or
    before that, whether the verdict in the file beside the library says so (``product_choice``)."""
    if not uses_native_kernels():
        return False
    agreed = RANK_CONSENSUS.compiled_products.get(dtype)
    return _is_recorded_as_faster(dtype) if agreed is None else agreed


def choose_native_matmul(use: bool, dtype: torch.dtype) -> None:
    """Choose whether the native GEMM computes layers' products of a type; see :class:`KernelChoices`."""
    RANK_CONSENSUS.compiled_products[dtype] = use


def _is_recorded_as_faster(dtype: torch.dtype) -> bool:
    if not supports_native_matmul(dtype):
        return False
    verdict, _ = recorded_verdict(str(dtype).split(".")[-1], torch.get_num_threads())
    return verdict is not None and verdict.uses_compiled


def has_native_matmul(
    x: torch.Tensor, y: torch.Tensor, out: Optional[torch.Tensor] = None, *, accumulate: bool = False
) -> bool:
    """Whether a product x y, [rows, inner], [inner, columns], is a kernel's, which autograd is not to see: a new one,
    or what ``out`` [rows, columns] becomes, or what is added to it."""
    if x.dtype not in _NATIVE_TYPES or y.dtype != x.dtype or torch.is_grad_enabled() or x.dim() != 2 or y.dim() != 2:
        return False
    (rows, inner), columns = x.shape, y.shape[1]
    if min(rows, inner, columns) < MIN_DIMENSION or rows * inner * columns < MIN_MULTIPLY_ADDS or y.shape[0] != inner:
        return False
    if 1 not in x.stride() or 1 not in y.stride():
        return False
    if out is not None:
        types = (torch.float32,) if accumulate else (torch.float32, x.dtype)
        if out.dtype not in types or out.shape != (rows, columns) or out.stride(1) != 1:
            return False
    return uses_native_matmul(x.dtype) and _supports_gemm(_NATIVE_TYPES[x.dtype])


def supports_native_matmul(dtype: torch.dtype) -> bool:
    """Whether the library has products of a type: those of bfloat16 need a processor that multiplies pairs of them."""
    return dtype in _NATIVE_TYPES and has_native_kernels() and _supports_gemm(_NATIVE_TYPES[dtype])


@functools.lru_cache(maxsize=None)
def _supports_gemm(kind: int) -> bool:
    return _library().supports_gemm(kind)


def matmul_(
    out: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor,
    bias: Optional[torch.Tensor] = None,
    *,
    accumulate: bool = False,
) -> torch.Tensor:
    """Write x y + bias into ``out``, or add it to float32 ``out``, and return it: [rows, inner], [inner, columns],
    [columns] → [rows, columns].

    Sums are float32 and rounded at most once. ``out`` must not overlap the inputs.
    """
    (rows, inner), columns, threads = x.shape, y.shape[1], torch.get_num_threads()
    kind, result_kind = _NATIVE_TYPES[x.dtype], _NATIVE_TYPES[out.dtype]
    bias = None if bias is None else bias.float().contiguous()
    work = _workspace_address(_gemm_workspace_floats(rows, columns, inner, kind, result_kind, threads))
    sides = (x.data_ptr(), *_strides(x), y.data_ptr(), *_strides(y), kind)
    result = (_address(bias), out.data_ptr(), out.stride(0), result_kind, int(accumulate))
    _library().gemm(*sides, *result, rows, columns, inner, work, threads)
    return out


def has_native_gemv(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the native kernel multiplies few rows x [..., inputs] by a weight [outputs, inputs], unseen by
    autograd."""
    if x.dtype not in _NATIVE_TYPES or weight.dtype != x.dtype or torch.is_grad_enabled():
        return False
    if weight.dim() != 2 or x.shape[-1] != weight.shape[1] or not 0 < x.numel() <= MAX_GEMV_ROWS * x.shape[-1]:
        return False
    return weight.is_contiguous() and uses_native_kernels()


def gemv(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]) -> torch.Tensor:
    """Computes x weightᵀ + bias of few rows: [..., inputs], [outputs, inputs], [outputs] → [..., outputs], all of one
    type.

    Sums are float32 and rounded once; those of a row do not depend on the other rows, nor on the threads.
    """
    outputs, inputs = weight.shape
    x, y = x.contiguous(), pooled_empty((*x.shape[:-1], outputs), x.dtype)
    kind, rows = _NATIVE_TYPES[x.dtype], x.numel() // inputs
    bias = None if bias is None else bias.to(x.dtype).contiguous()
    threads = torch.get_num_threads() if weight.numel() * weight.element_size() >= _MIN_SHARED_BYTES else 1
    tensors = (x.data_ptr(), weight.data_ptr(), _address(bias), y.data_ptr())
    work = _workspace_address(rows * inputs) if kind == BFLOAT16 else None
    _library().gemv(*tensors, rows, outputs, inputs, kind, work, threads)
    return y


def has_native_decode_attention(q: torch.Tensor, keys: torch.Tensor) -> bool:
    """True if the native kernels compute attention of new tokens q [b, t, heads, d] to a cache of keys [b, kv heads,
    capacity, d]."""
    if q.dtype not in _NATIVE_TYPES or keys.dtype != q.dtype or q.shape[1] > _MAX_DECODED_TOKENS:
        return False
    return keys.is_contiguous() and _token_step(q) is not None and uses_native_kernels()


def _token_step(q: torch.Tensor) -> Optional[int]:
    """Elements of [b, t, heads, d] from a token to the next, over all samples; None if they differ, or heads have
    gaps."""
    (b, t, heads, d), strides = q.shape, q.stride()
    if (d > 1 and strides[3] != 1) or (heads > 1 and strides[2] != d):
        return None
    if b > 1 and t > 1 and strides[0] != t * strides[1]:
        return None
    return strides[1] if t > 1 else strides[0]


def decode_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, length: int
) -> torch.Tensor:
    """Attention of new tokens to a cache.

    Args:
        q: [b, t, heads, d].
        keys, values: the cache [b, kv heads, capacity, d], which holds the new tokens' own.
        positions: int64 [b, t], growing along a sample; a token sees the keys up to its own position.
        length: one past the last position of all samples.

    Returns:
        [b, t, heads, d]
    """
    (b, t, heads, d), (_, kv_heads, capacity, _), threads = q.shape, keys.shape, torch.get_num_threads()
    if 2 * b * kv_heads * length * d * keys.element_size() < _MIN_SHARED_BYTES:
        threads = 1
    y = pooled_empty(q.shape, q.dtype)
    step = _token_step(q)
    assert step is not None  # callers have checked it
    floats = _library().decode_attention_workspace_floats(b, t, heads, kv_heads, d, length, threads)
    tensors = (keys.data_ptr(), values.data_ptr(), positions.data_ptr(), y.data_ptr())
    sizes = (b, t, heads, kv_heads, d, capacity, length, _NATIVE_TYPES[q.dtype])
    _library().decode_attention(q.data_ptr(), step, *tensors, *sizes, _workspace_address(floats), threads)
    return y


@functools.lru_cache(maxsize=1024)
def _gemm_workspace_floats(rows: int, columns: int, inner: int, kind: int, result_kind: int, threads: int) -> int:
    return _library().gemm_workspace_floats(rows, columns, inner, kind, result_kind, threads)


def _workspace_address(floats: int) -> int:
    """The address of a workspace that products and norms share, so that it stays in the caches. (Attention uses a
    tensor that is freed: with many threads it is large.) There is one per process, since kernels run in one Python
    thread at a time. It is outside the heap, and a forked process has its own."""
    global _workspace
    if len(_workspace) < 4 * floats:
        _workspace = b""  # not beside the new one
        _workspace = (ctypes.c_char * (4 * floats)).from_buffer(private_memory(4 * floats))
    return ctypes.addressof(_workspace)


def release_workspace() -> None:
    """Free the workspace; the next product or norm allocates it again."""
    global _workspace
    _workspace = b""


_workspace: Any = b""


def _strides(x: torch.Tensor) -> Tuple[int, int]:
    return x.stride(0), x.stride(1)


def has_native_sum_of_squares(x: torch.Tensor) -> bool:
    """True if the native kernels compute the sum of squares of [n] numbers."""
    return x.dtype == torch.float32 and x.is_contiguous() and uses_native_kernels()


def native_sum_of_squares(x: torch.Tensor) -> float:
    """The sum of squares of [n] float32 numbers."""
    return _library().sum_of_squares(x.data_ptr(), x.numel(), torch.get_num_threads())


class AdamWStep(NamedTuple):
    """The numbers of one step of AdamW.

    Attributes:
        divisor: divisor of the gradients, which stay unchanged.
        keeps: factor of the parameters for weight decay.
        betas: decay rates of the first and of the second moment.
        step_size, eps: step size and epsilon, with the corrections of the moments' bias.
    """

    divisor: float
    keeps: float
    betas: Tuple[float, float]
    step_size: float
    eps: float


def step_adamw(
    parameters: torch.Tensor,
    gradients: torch.Tensor,
    moments: Tuple[torch.Tensor, torch.Tensor],
    rounded: Optional[torch.Tensor],
    step: AdamWStep,
) -> None:
    """Do a step of AdamW on [n] float32 parameters in one pass.

    Args:
        rounded: bfloat16, gets the parameters too.
    """
    (beta1, beta2), keeps = step.betas, step.keeps
    numbers = (1.0 / step.divisor, keeps, beta1, 1.0 - beta1, beta2, 1.0 - beta2, step.step_size, step.eps)
    tensors = (parameters, gradients, *moments)
    addresses = (*(x.data_ptr() for x in tensors), _address(rounded))
    _library().adamw(*addresses, parameters.numel(), *numbers, torch.get_num_threads())


def _threads_for(numbers: int) -> int:
    """Threads for a pass over a tensor."""
    return torch.get_num_threads() if numbers >= _MIN_SHARED_NUMBERS else 1


def _floats(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.float32)


def _address(x: Optional[torch.Tensor]) -> Optional[int]:
    return None if x is None else x.data_ptr()


def _library() -> Library:
    return load_library(None)  # callers have checked that there is one


@functools.lru_cache(maxsize=None)
def native_kernels_problem() -> str:
    """Why there are no native kernels that compute correct results here, in one line; empty if there are."""
    return problem_of(None, torch.get_num_threads())
