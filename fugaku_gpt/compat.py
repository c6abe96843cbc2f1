"""What this PyTorch can do, found by trying it. No other module asks, and none compares version strings.

Operations of the model that have no good kernel for a 16-bit type in this build are computed in float32, with casts
before and after; each is tried once, forward and backward.
"""

from __future__ import annotations

import functools
import importlib
import math
import time
from typing import Any, Callable, ContextManager, Dict, FrozenSet, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F

from fugaku_gpt.machine.local import processor_name, vector_flags

_GELU_HAS_APPROXIMATE = True
try:
    F.gelu(torch.zeros(1), approximate="tanh")
except TypeError:
    _GELU_HAS_APPROXIMATE = False


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    if _GELU_HAS_APPROXIMATE:
        return F.gelu(x, approximate="tanh")
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


# operations that are tried for each 16-bit type, with inputs for the trial; the sums in them have so many equal terms
# that a kernel which adds up in 16 bits is found out
_Trial = Tuple[Callable[..., torch.Tensor], Callable[[], Sequence[torch.Tensor]]]
_TRIALS: Dict[str, _Trial] = {
    "linear": (F.linear, lambda: (_ones(600, 600), _ones(8, 600), _ones(8))),
    "matmul": (torch.matmul, lambda: (_ones(600, 600), _ones(600, 8))),
    "bmm": (torch.bmm, lambda: (_ones(2, 600, 600), _ones(2, 600, 8))),
    "baddbmm": (
        lambda x, y, z: torch.baddbmm(x, y, z, alpha=0.25),
        lambda: (_ones(2, 600, 8), _ones(2, 600, 600), _ones(2, 600, 8)),
    ),
    "gelu": (F.gelu, lambda: (_waves(8, 600),)),
    "gelu_tanh": (_gelu_tanh, lambda: (_waves(8, 600),)),
    "softmax": (lambda x: torch.softmax(x, dim=-1) * 600.0, lambda: (0.0 * _ones(8, 600),)),
}
# of products: inputs to time them with. Some builds multiply 16-bit matrices element by element (seen: 4 to 20 times
# slower than float32)
_TIMED: Dict[str, Callable[[], Sequence[torch.Tensor]]] = {
    "linear": lambda: (_waves(128, 256), _waves(256, 256), _waves(256)),
    "matmul": lambda: (_waves(128, 256), _waves(256, 256)),
    "bmm": lambda: (_waves(8, 128, 64), _waves(8, 64, 128)),
    "baddbmm": lambda: (_waves(8, 128, 128), _waves(8, 128, 64), _waves(8, 64, 128)),
}
_SLOW = 3.0  # times as long as float32
_agreed: Dict[torch.dtype, FrozenSet[str]] = {}  # what is computed in float32, once the ranks have agreed on it
_agreed_gelu_by_erf: Optional[bool] = None
_agreed_onednn: Optional[bool] = None
_ROWS_FOR_ONEDNN = 128
_WIDE = (torch.float32, torch.float64)
_LOOSE = 4.0  # roundings of a 16-bit type by which a kernel may be off


def _ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def _waves(*shape: int) -> torch.Tensor:
    return torch.arange(float(math.prod(shape))).sin().view(shape)


def has_kernel(operation: str, dtype: torch.dtype) -> bool:
    """Whether an operation is computed in a type: what was agreed on; before that, whether this build computes it and
    its gradients to that type's precision, and not much slower than in float32."""
    if dtype in _WIDE:
        return True
    if dtype in _agreed:
        return operation not in _agreed[dtype]
    return _is_precise(operation, dtype) and _is_fast(operation, dtype)


def in_float32(dtype: torch.dtype) -> List[str]:
    """The operations that are computed in float32 when training in a type; none for wide types."""
    return [name for name in _TRIALS if not has_kernel(name, dtype)]


def without_kernel(dtype: torch.dtype) -> List[str]:
    """The operations that this build cannot compute in a type, or not to its precision, however long they take."""
    return [] if dtype in _WIDE else [name for name in _TRIALS if not _is_precise(name, dtype)]


def compute_in_float32(operations: Sequence[str], dtype: torch.dtype) -> None:
    """From now on these and no others are computed in float32 when training in a type. All ranks of a run round alike
    only if all do the same, and its next start only if it does the same again; what a clock says may differ."""
    _agreed[dtype] = frozenset(operations)


@functools.lru_cache(maxsize=None)
def _is_precise(operation: str, dtype: torch.dtype) -> bool:
    function, make_inputs = _TRIALS[operation]
    tensors = [x.to(dtype) for x in make_inputs()]
    try:
        ours, judge = (_with_gradients(function, [x.to(kind) for x in tensors]) for kind in (dtype, torch.float32))
    except RuntimeError:  # "... not implemented for 'BFloat16'"
        return False
    precision = _LOOSE * torch.finfo(dtype).eps
    return all(
        float((x.float() - y).abs().max()) <= precision * float(y.abs().max().clamp(min=1.0))
        for x, y in zip(ours, judge)
    )


@functools.lru_cache(maxsize=None)
def _is_fast(operation: str, dtype: torch.dtype) -> bool:
    return operation not in _TIMED or _seconds(operation, dtype) <= _SLOW * _seconds(operation, torch.float32)


def _seconds(operation: str, dtype: torch.dtype) -> float:
    """The shortest of a few times for a product and its gradients."""
    function, inputs = _TRIALS[operation][0], [x.to(dtype) for x in _TIMED[operation]()]
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
        backward(y, (1.0 + 0.5 * _waves(*y.shape)).to(y.dtype))
    return [y.detach(), *(x.grad for x in leaves if x.grad is not None)]


def backward(y: torch.Tensor, gradient: Optional[torch.Tensor] = None) -> None:
    """Run the backward pass from ``y`` on, whose gradient is ``gradient``, [of y's shape]; default: 1, of a scalar.

    PyTorch's own way of handing a gradient in compares the two shapes by its compiler's symbolic ones: to import these,
    and sympy with them, takes each rank a third of a second and some tens of MiB.

    Raises:
        RuntimeError: ``y`` needs no gradient.
    """
    with torch.enable_grad():
        start = y if gradient is None else _Given.apply(y, gradient)
    start.backward()


class _Given(torch.autograd.Function):
    """A scalar whose gradient by ``y`` is the one given."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient  # the caller's, who holds it anyway: nothing that is kept for the backward pass
        return y.new_zeros(())

    @staticmethod
    def backward(ctx: Any, one: torch.Tensor) -> Tuple[torch.Tensor, None]:
        gradient, ctx.gradient = ctx.gradient, None
        return gradient, None


def can_train(dtype: torch.dtype) -> bool:
    """Whether this build adds, multiplies and copies tensors of a type; what it lacks besides is made up for."""
    try:
        x = torch.ones(3).to(dtype).requires_grad_()
        y = (x * x + x) * 2.0  # whose gradient has two terms that are added up
        y.sum().backward()
        total = torch.zeros(3).add_(y.detach())
        total.copy_(y.detach().clone().mul_(2.0).add_(y.detach()).masked_fill_(torch.tensor([True, False, True]), 0.0))
        return x.grad is not None and x.grad.tolist() == [6.0] * 3 and total.tolist() == [0.0, 12.0, 0.0]
    except RuntimeError:
        return False


def _or_in_float32(operation: str, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def computed(x: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        dtype = x.dtype
        if dtype in _WIDE or has_kernel(operation, dtype):
            return function(x, *others, **options)
        wide = [other.float() if isinstance(other, torch.Tensor) else other for other in others]
        return function(x.float(), *wide, **options).to(dtype)

    return computed


# products of matrices: autograd keeps the float32 copies
_linear = _or_in_float32("linear", F.linear)
_matmul = _or_in_float32("matmul", torch.matmul)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor] = None) -> torch.Tensor:
    """x weightᵀ + bias: [..., inputs], [outputs, inputs], [outputs] → [..., outputs]."""
    if _suits_onednn(x):
        return _by_onednn(x, weight, bias)
    return _linear(x, weight, bias)


def matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x y: [..., inner], [inner, columns] → [..., columns]."""
    if _suits_onednn(x):
        return _by_onednn(x, y.t())
    return _matmul(x, y)


def _suits_onednn(x: torch.Tensor) -> bool:
    """Whether a product with ``x`` is one for oneDNN, whose operator is unknown to autograd and arranges the weight
    anew for each call, which pays from some hundred rows on."""
    return (
        x.dtype == torch.float32
        and not torch.is_grad_enabled()
        and x.numel() >= _ROWS_FOR_ONEDNN * x.shape[-1] > 0
        and x.is_contiguous()
        and products_by_onednn()
    )


def _by_onednn(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor] = None) -> torch.Tensor:
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


def products_by_onednn() -> bool:
    """Whether float32 products of layers are oneDNN's: what was agreed on; before that, whether this build can hand
    them to it and would else use MKL's kernels on a processor that is not Intel's (seen: 5 to 25 % slower there)."""
    return _onednn_is_better() if _agreed_onednn is None else _agreed_onednn


def compute_products_by_onednn(by_onednn: bool) -> None:
    """From now on they are, or are not; see :func:`compute_in_float32`."""
    global _agreed_onednn
    _agreed_onednn = by_onednn


@functools.lru_cache(maxsize=None)
def _onednn_is_better() -> bool:
    return (
        torch.backends.mkl.is_available()
        and "avx512f" in vector_flags()
        and "intel" not in processor_name().lower()
        and has_onednn()
    )


@functools.lru_cache(maxsize=None)
def has_onednn() -> bool:
    """Whether oneDNN computes a layer in float32 when it is asked by itself, and precisely."""
    x, weight, bias = _waves(8, 24), _waves(16, 24), _waves(16)
    with torch.no_grad():
        try:
            y = _by_onednn(x, weight, bias)
            z = _by_onednn(x, weight.t().contiguous().t())
        except (AttributeError, RuntimeError):  # no such operator, or none for processors
            return False
        judge = F.linear(x.double(), weight.double(), bias.double())
        off = max(float((y - judge).abs().max()), float((z + bias - judge).abs().max()))
    return off <= 64.0 * torch.finfo(torch.float32).eps


class _InFloat32(torch.autograd.Function):
    """A cheap operation in float32 of which the inputs are kept as they are; the backward pass computes it again, and
    gives each a gradient of its type."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*(x.float() for x in inputs)).to(inputs[0].dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        inputs = [x.detach().float().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            y = ctx.function(*inputs)
        backward(y, grad.float())
        found = zip((x.grad for x in inputs), ctx.saved_tensors)
        return (None, *(None if grad_x is None else grad_x.to(kept.dtype) for grad_x, kept in found))


def gelu(x: torch.Tensor) -> torch.Tensor:
    """The exact GELU."""
    y: torch.Tensor = _gelu(x) if has_kernel("gelu", x.dtype) else _InFloat32.apply(_gelu, x)
    return y


def _gelu(x: torch.Tensor) -> torch.Tensor:
    if x.dtype not in _WIDE or not gelu_by_erf():  # in 16 bits 1 + erf(x) would have lost all of x below -3
        return F.gelu(x)
    y: torch.Tensor = _GeluByErf.apply(x)
    return y


class _GeluByErf(torch.autograd.Function):
    """The exact GELU for builds that compute PyTorch's element by element: the error function is vectorised there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return _normal_share(x).mul_(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        slope = torch.mul(x, x).mul_(-0.5).exp_().mul_(x).mul_(1.0 / math.sqrt(2.0 * math.pi))
        return slope.add_(_normal_share(x)).mul_(grad)


def _normal_share(x: torch.Tensor) -> torch.Tensor:
    """The share of a normal distribution below x."""
    return torch.mul(x, math.sqrt(0.5)).erf_().add_(1.0).mul_(0.5)


def gelu_by_erf() -> bool:
    """Whether the exact GELU is computed from the error function: what was agreed on; before that, whether PyTorch's
    own is slow."""
    return _gelu_is_slow() if _agreed_gelu_by_erf is None else _agreed_gelu_by_erf


def compute_gelu_by_erf(by_erf: bool) -> None:
    """From now on it is, or is not; see :func:`compute_in_float32`."""
    global _agreed_gelu_by_erf
    _agreed_gelu_by_erf = by_erf


@functools.lru_cache(maxsize=None)
def _gelu_is_slow() -> bool:
    """Whether PyTorch's GELU takes much longer than its error function (seen: half of its time, or seven times it)."""
    functions: Sequence[Callable[[torch.Tensor], torch.Tensor]] = (F.gelu, torch.erf)
    x, best = _waves(2**16), [math.inf, math.inf]
    with torch.no_grad():
        for _ in range(7):
            for place, function in enumerate(functions):
                before = time.perf_counter()
                function(x)
                best[place] = min(best[place], time.perf_counter() - before)
    return best[0] > 2.5 * best[1]


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by its tanh approximation, as in GPT-2's published weights (Hendrycks and Gimpel 2016, section 2)."""
    y: torch.Tensor = _gelu_tanh(x) if has_kernel("gelu_tanh", x.dtype) else _InFloat32.apply(_gelu_tanh, x)
    return y


def attention_dtype(dtype: torch.dtype) -> torch.dtype:
    """What attention is computed in: the type itself, or float32 where an operation of it has no good kernel."""
    return dtype if all(has_kernel(name, dtype) for name in ("bmm", "baddbmm", "softmax")) else torch.float32


def softmax_(x: torch.Tensor) -> torch.Tensor:
    """Over the last dimension; in the memory of ``x`` where this build can, of which nobody may need the rest."""
    if _softmax_works_in_place(x.dtype):
        return torch._softmax(x, -1, False, out=x)
    return torch.softmax(x, dim=-1)


def softmax_gradient_(grad: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """The gradient of a softmax's input from that of its result; ``grad`` may be written over."""
    kernel = _softmax_gradient(result.dtype)
    if kernel is not None:
        return kernel(grad, result)
    return grad.sub_((grad * result).sum(-1, keepdim=True)).mul_(result)


_MISSING = (AttributeError, RuntimeError, TypeError)  # no such function, not for this type or device, other arguments


@functools.lru_cache(maxsize=None)
def _softmax_works_in_place(dtype: torch.dtype) -> bool:
    x = _waves(2, 3, 200).to(dtype)
    try:
        expected = torch.softmax(x, dim=-1)
        return torch.equal(torch._softmax(x, -1, False, out=x), expected) and torch.equal(x, expected)
    except _MISSING:
        return False


@functools.lru_cache(maxsize=None)
def _softmax_gradient(dtype: torch.dtype) -> Optional[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """PyTorch's own kernel, by the arguments that this build takes; None where it takes none of these."""
    backward: Any = getattr(torch, "_softmax_backward_data", None)

    def in_place(grad: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = backward(grad, result, -1, result.dtype, grad_input=grad)
        return found

    def of_older_builds(grad: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = backward(grad, result, -1, result)  # the last is the input, of which the type is asked
        return found

    for function in (in_place, of_older_builds):
        result, grad = torch.softmax(_waves(2, 3, 200), dim=-1).to(dtype), _waves(2, 3, 200).cos().to(dtype)
        wide, wide_grad = result.double(), grad.double()
        expected = wide * (wide_grad - (wide_grad * wide).sum(-1, keepdim=True))
        near = _LOOSE * torch.finfo(dtype).eps * float(expected.abs().max())
        try:
            if float((function(grad, result).double() - expected).abs().max()) <= near:
                return function
        except _MISSING:
            continue
    return None


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last dimension; computed in float32 at least, which ``weight`` and ``bias`` may be beside 16 bits: their
    gradients, sums over tokens, are then not rounded. (PyTorch 2.13's kernel takes them beside 16 bits too, but adds up
    their gradients with errors of 20 to 50 roundings.)"""

    def normalised(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)

    if x.dtype in _WIDE:
        return normalised(x, weight, bias)
    y: torch.Tensor = _InFloat32.apply(normalised, x, weight, bias)
    return y


def sum_of_rows(x: torch.Tensor) -> torch.Tensor:
    """[n, width] → [width], added up in float32 at least, and left so."""
    return x.sum(0) if x.dtype in _WIDE else x.sum(0, dtype=torch.float32)


@functools.lru_cache(maxsize=None)
def fused_adamw(dtype: torch.dtype) -> Optional[Callable[..., None]]:
    """PyTorch's one-pass CPU kernel of AdamW, or None where this build has none for a type.

    Its arguments: lists of parameters, gradients, first moments, second moments, none of a fifth kind, and numbers of
    steps, then ``lr``, ``beta1``, ``beta2``, ``weight_decay``, ``eps``, ``amsgrad``, ``maximize``. The kernel itself is
    called: ``torch.optim.AdamW`` would import PyTorch's compiler first, which took half of the time until a small
    model's first step.
    """
    kernel: Optional[Callable[..., None]] = getattr(torch, "_fused_adamw_", None)
    return kernel if kernel is not None and _steps_as_adamw(kernel, dtype) else None


@functools.lru_cache(maxsize=None)
def divides_gradients(dtype: torch.dtype) -> bool:
    """Whether the fused kernel divides gradients of a type by ``grad_scale``, a float32 scalar, to the precision of
    that type, and leaves the quotients in their place."""
    kernel = fused_adamw(dtype)
    return kernel is not None and _steps_as_adamw(kernel, dtype, divisor=3.3)


def _steps_as_adamw(kernel: Callable[..., None], dtype: torch.dtype, divisor: float = 1.0) -> bool:
    """Whether a kernel takes AdamW's third step, and leaves the gradients as they were, or divided."""
    lr, beta1, beta2, decay, eps, steps = 0.1, 0.9, 0.95, 0.2, 0.05, 3
    # as many elements as no vector has: the last of them are not stepped by the loop that steps the others
    weight, gradient, first, second = (shift + _waves(67).to(dtype) for shift in (1.0, 2.0, 0.5, 2.0))
    w, g, m, v = (x.double() for x in (weight, gradient, first, second))
    g = g / divisor
    m, v = beta1 * m + (1.0 - beta1) * g, beta2 * v + (1.0 - beta2) * g * g
    root = (v / (1.0 - beta2**steps)).sqrt()
    w = w * (1.0 - lr * decay) - lr / (1.0 - beta1**steps) * m / (root + eps)
    try:
        kernel(
            [weight],
            [gradient],
            [first],
            [second],
            [],
            [torch.tensor(float(steps))],
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
            **({} if divisor == 1.0 else {"grad_scale": torch.tensor(divisor)}),
        )
    except (RuntimeError, TypeError):  # it is there but not for the CPU, or not for this type, or takes other words
        return False
    near = 2.0 * _LOOSE * torch.finfo(dtype).eps
    return all(
        float((x.double() - y).abs().max()) <= near * float(y.abs().max())
        for x, y in ((weight, w), (gradient, g), (first, m), (second, v))
    )


class Call(NamedTuple):
    """Of an operator, a function of autograd or a :func:`named` part, as the profiler has seen it; seconds by its
    clock."""

    name: str
    thread: int
    start: float
    end: float


def named(name: str) -> ContextManager[Any]:
    """A part of what :func:`profiled` runs, which is seen by this name."""
    part: ContextManager[Any] = torch.autograd.profiler.record_function(name)
    return part


def profiled(run: Callable[[], None]) -> List[Call]:
    """The calls that are made while something runs. Where :func:`has_profiler` is False there may be none.

    The profiler is the one that all builds since 1.7 have, under one name or another, where this one still has it: what
    is compared between builds is measured alike, in nanoseconds. (What took its place counts microseconds in 1.10.)
    """
    try:
        profiler: Any = importlib.import_module("torch.autograd.profiler_legacy")
    except ImportError:
        profiler = torch.autograd.profiler
    with profiler.profile() as seen:
        run()
    calls = []
    for event in seen.function_events or []:
        times = event.time_range if hasattr(event, "time_range") else event.cpu_interval  # microseconds
        calls.append(Call(event.name, event.thread, times.start * 1e-6, times.end * 1e-6))
    return calls


@functools.lru_cache(maxsize=None)
def has_profiler() -> bool:
    """Whether this build's profiler sees operators, named parts and functions of autograd inside each other."""

    def run() -> None:
        x = torch.ones(8, 8).requires_grad_()
        with named("part"):
            _GeluByErf.apply(x).sum().backward()

    try:
        calls = {call.name: call for call in profiled(run)}
        whole, function, operator = calls["part"], calls["_GeluByErf"], calls["aten::erf_"]
    except (KeyError, RuntimeError):
        return False
    return "_GeluByErfBackward" in calls and whole.start <= function.start and operator.end <= whole.end


def flush_denormals() -> bool:
    """Have denormal numbers treated as zero; False where this build cannot (Arm before PyTorch 2.3)."""
    return bool(torch.set_flush_denormal(True))


def build_facts() -> Dict[str, Any]:
    """What this build is: version, linear-algebra library, the instruction set that its kernels use, threads."""
    shown = torch.__config__.show()
    backends = getattr(torch, "backends", None)
    capability = getattr(getattr(backends, "cpu", None), "get_cpu_capability", None)
    libraries = [
        name
        for name, present in (
            ("MKL", torch.backends.mkl.is_available()),
            ("oneDNN", torch.backends.mkldnn.is_available()),
            ("OpenBLAS", "openblas" in shown.lower()),
            ("SSL2", "ssl2" in shown.lower()),
        )
        if present
    ]
    return {
        "torch": torch.__version__,
        "blas": " + ".join(libraries) or "none found",
        "instruction_set": capability() if capability is not None else _instruction_set(shown),
        "fused_adamw": fused_adamw(torch.float32) is not None,
        "torch_threads": torch.get_num_threads(),
    }


def _instruction_set(shown: str) -> str:
    """The instruction set that the build's own report names (before PyTorch 2.0 it is a line of the report)."""
    for line in shown.splitlines():
        head, found, tail = line.partition("CPU capability usage:")
        if found:
            return tail.strip()
    return "unknown"
