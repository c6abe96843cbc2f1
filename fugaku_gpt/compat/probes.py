"""Probes which operations this build computes in a 16-bit type precisely and fast enough; the others run in float32,
with casts before and after. Each is tried once, forward and backward."""

from __future__ import annotations

import functools
import math
import time
from typing import Callable, Dict, List, Sequence, Tuple

import torch
import torch.nn.functional as F

from fugaku_gpt.compat.backward import backward
from fugaku_gpt.compat.kernel_choices import RANK_CONSENSUS

WIDE_DTYPES = (torch.float32, torch.float64)
TOLERANCE_ROUNDINGS = 4.0  # roundings of a 16-bit type by which a result may be off
_MAX_SLOWDOWN = 3.0  # times as long as float32

_GELU_HAS_APPROXIMATE = True
try:
    F.gelu(torch.zeros(1), approximate="tanh")
except TypeError:
    _GELU_HAS_APPROXIMATE = False


def builtin_gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by its tanh approximation, by PyTorch's kernel where this build has one."""
    if _GELU_HAS_APPROXIMATE:
        return F.gelu(x, approximate="tanh")
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


# operations that are tried for each 16-bit type, with inputs for the trial; their sums have enough equal terms to
# expose a kernel that accumulates in 16 bits
_Trial = Tuple[Callable[..., torch.Tensor], Callable[[], Sequence[torch.Tensor]]]
TRIALS: Dict[str, _Trial] = {
    "linear": (F.linear, lambda: (_ones(600, 600), _ones(8, 600), _ones(8))),
    "matmul": (torch.matmul, lambda: (_ones(600, 600), _ones(600, 8))),
    "bmm": (torch.bmm, lambda: (_ones(2, 600, 600), _ones(2, 600, 8))),
    "baddbmm": (
        lambda x, y, z: torch.baddbmm(x, y, z, alpha=0.25),
        lambda: (_ones(2, 600, 8), _ones(2, 600, 600), _ones(2, 600, 8)),
    ),
    "gelu": (F.gelu, lambda: (4.0 * probe_input(8, 600),)),
    "gelu_tanh": (builtin_gelu_tanh, lambda: (4.0 * probe_input(8, 600),)),
    "softmax": (lambda x: torch.softmax(x, dim=-1) * 600.0, lambda: (0.0 * _ones(8, 600),)),
}
# of these every result is judged by its own size: a kernel that rounds erf(x) to 16 bits before it adds 1 is off by
# half of GELU(-3) and more, which is little beside the largest result (seen: 1.10.2 in bfloat16, on processors
# without AVX-512)
_CHECKED_ELEMENTWISE = ("gelu", "gelu_tanh")
_ABSOLUTE_FLOOR = 2.0**-5  # is added to a result's size: near 0 nobody is precise by it alone
# of products: inputs to time them with. Some builds multiply 16-bit matrices element by element (seen: 4 to 20 times
# slower than float32)
_TIMED_INPUTS: Dict[str, Callable[[], Sequence[torch.Tensor]]] = {
    "linear": lambda: (probe_input(128, 256), probe_input(256, 256), probe_input(256)),
    "matmul": lambda: (probe_input(128, 256), probe_input(256, 256)),
    "bmm": lambda: (probe_input(8, 128, 64), probe_input(8, 64, 128)),
    "baddbmm": lambda: (probe_input(8, 128, 128), probe_input(8, 128, 64), probe_input(8, 64, 128)),
}


def _ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def probe_input(*shape: int) -> torch.Tensor:
    """Float32 numbers for a trial, from -1 to 1, without a pattern that would favour a kernel."""
    return torch.arange(float(math.prod(shape))).sin().view(shape)


def has_kernel(operation: str, dtype: torch.dtype) -> bool:
    """Whether an operation is computed in a type: as the ranks agreed, or before that, whether this build computes it
    and its gradients to that type's precision, and not much slower than in float32."""
    if dtype in WIDE_DTYPES:
        return True
    if dtype in RANK_CONSENSUS.in_float32:
        return operation not in RANK_CONSENSUS.in_float32[dtype]
    return _is_precise(operation, dtype) and _is_fast(operation, dtype)


def float32_operations(dtype: torch.dtype) -> List[str]:
    """The operations that are computed in float32 when training in a type; none for wide types."""
    return [name for name in TRIALS if not has_kernel(name, dtype)]


def operations_without_kernel(dtype: torch.dtype) -> List[str]:
    """The operations that this build cannot compute in a type, or not to its precision, however long they take."""
    return [] if dtype in WIDE_DTYPES else [name for name in TRIALS if not _is_precise(name, dtype)]


def choose_float32_operations(operations: Sequence[str], dtype: torch.dtype) -> None:
    """Choose the operations that are computed in float32 when training in a type, whatever their timing; see
    :class:`KernelChoices`."""
    RANK_CONSENSUS.in_float32[dtype] = frozenset(operations)


@functools.lru_cache(maxsize=None)
def _is_precise(operation: str, dtype: torch.dtype) -> bool:
    function, make_inputs = TRIALS[operation]
    tensors = [x.to(dtype) for x in make_inputs()]
    try:
        actual, expected = (_with_gradients(function, [x.to(kind) for x in tensors]) for kind in (dtype, torch.float32))
    except RuntimeError:  # "... not implemented for 'BFloat16'"
        return False
    precision = TOLERANCE_ROUNDINGS * torch.finfo(dtype).eps
    for x, y in zip(actual, expected):
        size = y.abs() + _ABSOLUTE_FLOOR if operation in _CHECKED_ELEMENTWISE else y.abs().max().clamp(min=1.0)
        if not bool(((x.float() - y).abs() <= precision * size).all()):  # NaN is near nothing
            return False
    return True


@functools.lru_cache(maxsize=None)
def _is_fast(operation: str, dtype: torch.dtype) -> bool:
    return operation not in _TIMED_INPUTS or _seconds(operation, dtype) <= _MAX_SLOWDOWN * _seconds(
        operation, torch.float32
    )


def _seconds(operation: str, dtype: torch.dtype) -> float:
    """The shortest of a few times for a product and its gradients."""
    function, inputs = TRIALS[operation][0], [x.to(dtype) for x in _TIMED_INPUTS[operation]()]
    best = math.inf
    for _ in range(4):
        before = time.perf_counter()
        _with_gradients(function, inputs)
        best = min(best, time.perf_counter() - before)
    return best


def _with_gradients(function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> List[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():  # the first to ask may be an autograd function
        y = function(*leaves)
        backward(y, (1.0 + 0.5 * probe_input(*y.shape)).to(y.dtype))
    return [y.detach(), *(x.grad for x in leaves if x.grad is not None)]


def can_train(dtype: torch.dtype) -> bool:
    """Whether this build adds, multiplies and copies tensors of a type; other missing operations have substitutes."""
    try:
        x = torch.ones(3).to(dtype).requires_grad_()
        y = (x * x + x) * 2.0  # whose gradient has two terms that are added up
        y.sum().backward()
        total = torch.zeros(3).add_(y.detach())
        total.copy_(y.detach().clone().mul_(2.0).add_(y.detach()).masked_fill_(torch.tensor([True, False, True]), 0.0))
        return x.grad is not None and x.grad.tolist() == [6.0] * 3 and total.tolist() == [0.0, 12.0, 0.0]
    except RuntimeError:
        return False
