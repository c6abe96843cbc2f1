"""Runs every kernel on tensors that lie against inaccessible memory, at their ends and then at their beginnings.

    python -m tests.ops.fenced           all of them
    python -m tests.ops.fenced --short   small products and one thread only, for an emulated machine

It prints the name of each kernel before it runs it: a kernel that reads or writes too far is the last one named, since
the process is killed. A write into the rest of a tensor's pages is detected by their contents.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from functools import partial
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

import torch

from fugaku_gpt.ops import KeyRanges, native
from tests.ops.inputs import random as numbers

# rows, inner dimension and columns of products; the last two take several passes
SMALL_PRODUCTS = ((7, 5, 9), (8, 96, 48), (61, 101, 49))
LARGE_PRODUCTS = ((33, 1542, 97), (70, 1536, 1700))
PAGE = mmap.PAGESIZE
FILLED = 0x5A


class Fences:
    """Memory for tensors, each between two inaccessible pages."""

    def __init__(self, at_end: bool) -> None:
        """
        Args:
            at_end: tensors end where a fence begins; else they begin where one ends.
        """
        self._at_end = at_end
        self._all: List[Tuple[mmap.mmap, int, int]] = []  # with the tensor's start and end in it
        self._protect = ctypes.CDLL(None, use_errno=True).mprotect
        self._protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def memory(self, size: int) -> Any:
        """A view of ``size`` bytes between two fences."""
        pages = -(-size // PAGE)
        memory = mmap.mmap(-1, (pages + 2) * PAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        ctypes.memset(address, FILLED, len(memory))
        for fence in (address, address + (pages + 1) * PAGE):
            if self._protect(fence, PAGE, 0) != 0:
                raise OSError(ctypes.get_errno(), "mprotect")
        start = (pages + 1) * PAGE - size if self._at_end else PAGE
        self._all.append((memory, start, start + size))
        return memoryview(memory)[start : start + size]

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Like ``torch.empty``."""
        count = int(torch.Size(shape).numel())
        memory = self.memory(count * torch.empty(0, dtype=dtype).element_size())
        return torch.frombuffer(memory, dtype=dtype, count=count).view(*shape)

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """A copy without gaps; the copy of a transposed matrix is transposed."""
        if x.dim() == 2 and x.stride(0) == 1:
            return self.of(x.t()).t()
        return self.empty(x.shape, x.dtype).copy_(x)

    def check(self) -> None:
        """Exits with an error if anything was written beside a tensor."""
        for memory, start, stop in self._all:
            for part in (memory[PAGE:start], memory[stop : len(memory) - PAGE]):
                if part.strip(bytes([FILLED])):
                    raise SystemExit("written beside a tensor")


def runs(
    fences: Fences, dtype: torch.dtype, sizes: Sequence[Tuple[int, int, int]]
) -> Iterator[Tuple[str, Callable[[], object]]]:
    """Yields each kernel's name and a call of it on tensors between fences; no size is a multiple of a vector's."""

    def of(*shape: int) -> torch.Tensor:
        return fences.of(numbers(*shape).to(dtype))

    flags = fences.of(numbers(2, 4, 71, 71) > 0)
    padded = KeyRanges.bidirectional([70, 33], 71)
    ranges = KeyRanges(fences.of(padded.first), fences.of(padded.end), 71)
    yield from attention(of, fences, "", 4, KeyRanges.causal(71), None)
    yield from attention(of, fences, " with dropout", 4, KeyRanges.causal(71), flags)
    yield from attention(of, fences, " with shared keys and padding", 2, ranges, flags)
    logits, log_sums = of(5, 103), fences.of(numbers(5))
    yield "loss_sums", partial(native.loss_sums, logits)
    yield "loss_gradient_", partial(native.loss_gradient_, logits, log_sums, 0.5)
    yield "loss_full_rows_", partial(native.loss_full_rows_, logits, 0.5, True)
    x, y_grad, weight, bias = of(7, 103), of(7, 103), fences.of(numbers(103)), fences.of(numbers(103))
    yield "layer_norm", partial(native.layer_norm, x, weight, bias, 1e-5)
    statistics = fences.of(native.layer_norm(x, weight, bias, 1e-5)[1])
    yield "layer_norm_gradient", partial(native.layer_norm_gradient, y_grad, x, weight, statistics)
    yield "rms_norm", partial(native.rms_norm, x, weight, 1e-5)
    scales = fences.of(native.rms_norm(x, weight, 1e-5)[1])
    yield "rms_norm_gradient", partial(native.rms_norm_gradient, y_grad, x, weight, scales)
    spaced = of(2, 3, 2, 4, 19)[:, :, 1]
    head_grad, head_weight = of(2, 3, 4, 19), fences.of(numbers(19))
    yield "rms_norm of heads", partial(native.rms_norm, spaced, head_weight, 1e-5)
    scales = fences.of(native.rms_norm(spaced, head_weight, 1e-5)[1])
    yield "rms_norm_gradient of heads", partial(native.rms_norm_gradient, head_grad, spaced, head_weight, scales)
    pairs = of(7, 206)
    yield "swiglu", partial(native.swiglu, pairs)
    yield "swiglu_gradient", partial(native.swiglu_gradient, y_grad, pairs)
    heads, rotated, angles = of(1, 1, 7, 3, 38), of(1, 1, 7, 3, 38), fences.of(numbers(1, 1, 7, 1, 19))
    for backwards in (False, True):
        yield "rotate_into", partial(native.rotate_into, rotated, heads, angles, angles, backwards)
    for by_tanh in (False, True):
        yield "gelu", partial(native.gelu, x, by_tanh)
        yield "gelu_gradient", partial(native.gelu_gradient, y_grad, x, by_tanh)
    if dtype == torch.bfloat16:
        yield "accumulate_", partial(native.accumulate_, fences.of(numbers(7, 103)), x)
        yield "sum_of_rows", partial(native.sum_of_rows, x)
    yield "native_sum_of_squares", partial(native.native_sum_of_squares, fences.of(numbers(1003)))
    rounded = of(1003) if dtype == torch.bfloat16 else None
    parameters, gradients, first, second = (fences.of(numbers(1003).abs()) for _ in range(4))
    step = native.AdamWStep(divisor=2.0, keeps=0.9, betas=(0.9, 0.95), step_size=0.1, eps=1e-8)
    yield "step_adamw", partial(native.step_adamw, parameters, gradients, (first, second), rounded, step)
    for vectors in (1, 2, 7):
        weight, bias, x = of(37, 103), of(37), of(vectors, 103)
        yield f"gemv of {vectors}", partial(native.gemv, x, weight, bias)
    q, cache, positions = of(2, 2, 6, 19), of(2, 2, 300, 19), fences.of(torch.tensor([[0, 1], [298, 299]]))
    yield "decode_attention", partial(native.decode_attention, q, cache, of(2, 2, 300, 19), positions, 300)
    if native._library().supports_gemm(native._NATIVE_TYPES[dtype]):
        yield from products(fences, dtype, sizes)


def attention(
    of: Callable[..., torch.Tensor],
    fences: Fences,
    name: str,
    kv_heads: int,
    ranges: KeyRanges,
    flags: Optional[torch.Tensor],
) -> Iterator[Tuple[str, Callable[[], object]]]:
    """Yields attention of 4 heads, and its gradient."""
    packed, y_grad = of(1, 2, 71, 4 + 2 * kv_heads, 10), of(1, 2, 71, 4, 10)
    yield f"attention{name}", partial(native.attention, packed, 4, ranges, flags, 2.0)
    y, log_sums = (fences.of(tensor) for tensor in native.attention(packed, 4, ranges, flags, 2.0))
    inputs = (y_grad, packed, y, log_sums, ranges, flags, 2.0)
    yield f"attention_gradient{name}", partial(native.attention_gradient, *inputs)


def products(
    fences: Fences, dtype: torch.dtype, sizes: Sequence[Tuple[int, int, int]]
) -> Iterator[Tuple[str, Callable[[], object]]]:
    """Yields products of plain and transposed operands, in one pass and in several."""
    for rows, inner, columns in sizes:
        x, y, bias = numbers(rows, inner).to(dtype), numbers(inner, columns).to(dtype), fences.of(numbers(columns))
        for left in (x, x.t().contiguous().t()):
            for right in (y, y.t().contiguous().t()):
                sides = fences.of(left), fences.of(right)
                name = f"matmul_ {rows} x {inner} x {columns}, {left.stride()} {right.stride()}"
                for product_dtype in dict.fromkeys((torch.float32, dtype)):
                    yield (
                        f"{name}, {product_dtype}",
                        partial(native.matmul_, fences.empty((rows, columns), product_dtype), *sides, bias),
                    )
                sums = fences.of(numbers(rows, columns))
                yield f"{name}, added", partial(native.matmul_, sums, *sides, accumulate=True)


def main(short: bool) -> None:
    """Runs all kernels."""
    assert native.has_native_kernels()
    sizes = SMALL_PRODUCTS if short else SMALL_PRODUCTS + LARGE_PRODUCTS
    for at_end in (True, False):
        where = "at their ends" if at_end else "at their beginnings"
        for threads in (1,) if short else (1, 3):
            torch.set_num_threads(threads)
            for dtype in (torch.float32, torch.bfloat16):
                fences = Fences(at_end)
                for name, run in runs(fences, dtype, sizes):
                    print(f"{name} of {dtype} by {threads} threads, fenced {where}", flush=True)
                    with results_too(fences):
                        run()
                    fences.check()


@contextlib.contextmanager
def results_too(fences: Fences) -> Iterator[None]:
    """Places kernels' results and working memory between fences."""
    originals = native.pooled_empty, native._floats, native._workspace_address
    native.pooled_empty = fences.empty
    native._floats = lambda count: fences.empty((count,), torch.float32)
    native._workspace_address = lambda floats: ctypes.addressof(ctypes.c_char.from_buffer(fences.memory(4 * floats)))
    try:
        yield
    finally:
        native.pooled_empty, native._floats, native._workspace_address = originals


if __name__ == "__main__":
    main("--short" in sys.argv[1:])
