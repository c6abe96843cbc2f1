"""Our own compiled kernels, where they are there and do what they should (``kernels/``)."""

from __future__ import annotations

import functools
from typing import Optional, Tuple

import torch

from fugaku_gpt.compat.agreed import AGREED
from fugaku_gpt.compat.trials import waves
from fugaku_gpt.kernels import Library, load_library
from fugaku_gpt.kernels.library import BFLOAT16, FLOAT32
from fugaku_gpt.layout.attention import takes_heads_apart

_TYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}


def has_compiled() -> bool:
    """Whether there are kernels for this processor that do what they should."""
    return _tried() is not None


def uses_compiled() -> bool:
    """Whether the kernels are used: what was agreed on; before that, whether there are any."""
    return has_compiled() and AGREED.compiled is not False


def compute_by_compiled(use: bool) -> None:
    """From now on they are, where there are any, or are not; see :class:`Agreed`."""
    AGREED.compiled = use


def attends(qkv: torch.Tensor) -> bool:
    """Whether attention of [parts, b, s / parts, 3, heads, d] is a kernel's."""
    if qkv.dtype not in _TYPES or not uses_compiled():
        return False
    return takes_heads_apart(qkv.shape[1], qkv.shape[4], torch.get_num_threads())


def attention(qkv: torch.Tensor, flags: Optional[torch.Tensor], factor: float) -> Tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of [parts, b, s / parts, 3, heads, d] with kept flags of dropout [b, heads, s, s], whose others
    are scaled by ``factor``: [parts, b, s / parts, heads, d], and logarithms of sums that its gradient needs."""
    parts, b, here, _, heads, d = qkv.shape
    y = qkv.new_empty(parts, b, here, heads, d)
    log_sums = qkv.new_empty(b, heads, parts * here, dtype=torch.float32)
    library, qkv, work, threads = _library(), qkv.contiguous(), _work(qkv), torch.get_num_threads()
    shape = (parts, b, here, heads, d, _TYPES[qkv.dtype], factor, work.data_ptr(), threads)
    library.attention_forward(qkv.data_ptr(), y.data_ptr(), log_sums.data_ptr(), _address(flags), *shape)
    return y, log_sums


def attention_gradient(
    y_grad: torch.Tensor,
    qkv: torch.Tensor,
    y: torch.Tensor,
    log_sums: torch.Tensor,
    flags: Optional[torch.Tensor],
    factor: float,
) -> torch.Tensor:
    """The gradient of :func:`attention`'s ``qkv``."""
    parts, b, here, _, heads, d = qkv.shape
    library, qkv, work, threads = _library(), qkv.contiguous(), _work(qkv), torch.get_num_threads()
    y_grad, grad = y_grad.contiguous(), torch.empty_like(qkv)
    shape = (parts, b, here, heads, d, _TYPES[qkv.dtype], factor, work.data_ptr(), threads)
    tensors = (qkv, y, y_grad, log_sums)
    library.attention_backward(*(x.data_ptr() for x in tensors), _address(flags), grad.data_ptr(), *shape)
    return grad


def counts_losses(logits: torch.Tensor) -> bool:
    """Whether the rows of these logits [n, columns] are a kernel's."""
    return logits.dtype in _TYPES and logits.stride(1) == 1 and uses_compiled()


def loss_sums(logits: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """Of each row of logits the largest, and the sum of exp(logit - largest), both float32."""
    largest, sums = (logits.new_empty(logits.shape[0], dtype=torch.float32) for _ in range(2))
    _library().loss_sums(*_rows(logits), largest.data_ptr(), sums.data_ptr(), torch.get_num_threads())
    return largest, sums


def loss_gradient_(logits: torch.Tensor, log_sums: torch.Tensor, scale: float) -> None:
    """Logits become ``scale`` exp(logit - log_sum), with a float32 number for each row."""
    _library().loss_gradient(*_rows(logits), log_sums.data_ptr(), scale, torch.get_num_threads())


def loss_of_whole_rows_(logits: torch.Tensor, scale: float, wants_gradient: bool) -> torch.Tensor:
    """The logarithms of sums of exponentials of rows that no other rank has a part of, float32; with ``wants_gradient``
    the logits become ``scale`` times the probabilities."""
    log_sums = logits.new_empty(logits.shape[0], dtype=torch.float32)
    threads = torch.get_num_threads()
    _library().loss_of_whole_rows(*_rows(logits), log_sums.data_ptr(), scale, int(wants_gradient), threads)
    return log_sums


def _rows(logits: torch.Tensor) -> Tuple[int, int, int, int, int]:
    return logits.data_ptr(), logits.shape[0], logits.shape[1], logits.stride(0), _TYPES[logits.dtype]


def normalises(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether LayerNorm of x [..., width] with a weight (and bias) [width] is a kernel's."""
    return x.dtype == torch.bfloat16 and weight.dtype == torch.float32 and uses_compiled()


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> Tuple[torch.Tensor, torch.Tensor]:
    """LayerNorm of contiguous bfloat16 x [..., width], and [2, rows] that its gradient needs."""
    width, threads = x.shape[-1], torch.get_num_threads()
    rows = x.numel() // width
    y, kept = torch.empty_like(x), x.new_empty(2, rows, dtype=torch.float32)
    work = torch.empty(threads * width)
    tensors = (x, weight.contiguous(), bias.contiguous(), y, kept[0], kept[1])
    numbers = (rows, width, eps, work.data_ptr(), threads)
    _library().layer_norm(*(tensor.data_ptr() for tensor in tensors), *numbers)
    return y, kept


def layer_norm_gradient(
    y_grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, kept: torch.Tensor
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of :func:`layer_norm`'s x, and in float32 of its weight and bias."""
    width, threads = x.shape[-1], torch.get_num_threads()
    x_grad, weight_grad, bias_grad = torch.empty_like(x), torch.empty(width), torch.empty(width)
    work = torch.empty(threads * 6 * width)
    tensors = (x, weight.contiguous(), kept[0], kept[1], y_grad.contiguous(), x_grad, weight_grad, bias_grad)
    numbers = (x.numel() // width, width, work.data_ptr(), threads)
    _library().layer_norm_gradient(*(tensor.data_ptr() for tensor in tensors), *numbers)
    return x_grad, weight_grad, bias_grad


def sums_squares(x: torch.Tensor) -> bool:
    """Whether the sum of squares of [n] numbers is a kernel's."""
    return x.dtype == torch.float32 and x.is_contiguous() and uses_compiled()


def squares(x: torch.Tensor) -> float:
    """The sum of squares of [n] float32 numbers."""
    return _library().squares(x.data_ptr(), x.numel(), torch.get_num_threads())


def step_adamw(
    parameters: torch.Tensor,
    gradients: torch.Tensor,
    moments: Tuple[torch.Tensor, torch.Tensor],
    rounded: Optional[torch.Tensor],
    *,
    divisor: float,
    keeps: float,
    betas: Tuple[float, float],
    step_size: float,
    eps: float,
) -> None:
    """A step of AdamW on [n] float32 parameters in one pass.

    Args:
        rounded: bfloat16, gets the parameters too.
        divisor: of the gradients, which stay as they are.
        keeps: what weight decay multiplies the parameters by.
        step_size, eps: with the corrections of the moments' bias.
    """
    numbers = (1.0 / divisor, keeps, betas[0], 1.0 - betas[0], betas[1], 1.0 - betas[1], step_size, eps)
    tensors = (parameters, gradients, *moments)
    addresses = (*(x.data_ptr() for x in tensors), _address(rounded))
    _library().adamw(*addresses, parameters.numel(), *numbers, torch.get_num_threads())


def _work(qkv: torch.Tensor) -> torch.Tensor:
    """Memory for all threads."""
    floats = _library().attention_floats(qkv.shape[0] * qkv.shape[2], qkv.shape[5])
    return torch.empty(torch.get_num_threads() * floats)


def _address(x: Optional[torch.Tensor]) -> Optional[int]:
    return None if x is None else x.data_ptr()


def _library() -> Library:
    library = load_library()
    assert library is not None  # whoever calls has asked
    return library


@functools.lru_cache(maxsize=None)
def _tried() -> Optional[Library]:
    """The library, once it has computed something like the definition: it may be broken, or its threads may be."""
    library = load_library()
    if library is None:
        return None
    qkv = waves(1, 2, 70, 3, 2, 8)
    y, log_sums = attention(qkv, None, 1.0)
    q, k, v = qkv[0].permute(2, 0, 3, 1, 4).unbind(0)
    scores = q.matmul(k.transpose(-2, -1)) / 8**0.5 + torch.full((70, 70), float("-inf")).triu(1)
    expected = torch.softmax(scores, -1).matmul(v).permute(0, 2, 1, 3)
    return library if float((y[0] - expected).abs().max()) <= 1e-4 else None
