"""Profiles where the time of an iteration goes, by class of operators (``training.profile_operators``).

After everything that a run leaves has been written, the trainer continues for a few real iterations, first without
PyTorch's profiler and then under it. Nothing is saved or restored, since the process ends afterwards. Training before
that pays nothing: calls that the profiler cannot name by itself (MPI, the optimiser, our own compiled kernels, copies
between number types) are wrapped in named scopes only while it runs, from outside.

Every call's own time, without the calls inside it, is counted in one class: by what computes it, or else by where it is
called. ``records/operators.py`` lists the classes.

Until all profiled iterations are over, each call takes some 3 KiB of memory, and a micro-batch of 1024 tokens of a
model of two layers makes 15,000 to 20,000 calls: do not profile large global batches on few replicas.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch

from fugaku_gpt import compat, ops
from fugaku_gpt.comm.observed import calls_in_scope, scoped_call
from fugaku_gpt.compat import OperatorCall, probes
from fugaku_gpt.model import attention, dropout
from fugaku_gpt.ops import native, reductions
from fugaku_gpt.parallel.buffers import MasterWeights
from fugaku_gpt.parallel.gradient_path import GradientReducer
from fugaku_gpt.records.operators import (
    BATCHED_MATMUL,
    CAST,
    CLASSES,
    COMMUNICATION,
    CROSS_ENTROPY,
    GELU,
    LAYER_NORM,
    MATMUL,
    OPTIMISER,
    OTHER,
    PYTHON,
    SOFTMAX,
    Operators,
)
from fugaku_gpt.training import optimizer, trainer
from fugaku_gpt.training.trainer import Trainer

_ITERATION, _MASKS = "iteration", "masks of dropout"
# named scopes, and the class of the calls inside them
_SCOPE_CLASSES = {OPTIMISER: OPTIMISER, CAST: CAST, GELU: GELU, COMMUNICATION: COMMUNICATION, _MASKS: OTHER}
# our own compiled kernels by function, with their class; it counts their own time too, as no operator runs inside them
_KERNEL_CLASSES = {
    (ops, "attention"): BATCHED_MATMUL,
    (ops, "attention_gradient"): BATCHED_MATMUL,
    (native, "layer_norm"): LAYER_NORM,
    (native, "layer_norm_gradient"): LAYER_NORM,
    (native, "rms_norm"): LAYER_NORM,
    (native, "rms_norm_gradient"): LAYER_NORM,
    (native, "gelu"): GELU,
    (native, "gelu_gradient"): GELU,
    (native, "swiglu"): GELU,
    (native, "swiglu_gradient"): GELU,
    (native, "rotate_into"): OTHER,
    (ops, "loss_sums"): CROSS_ENTROPY,
    (ops, "loss_gradient_"): CROSS_ENTROPY,
    (ops, "loss_full_rows_"): CROSS_ENTROPY,
    (native, "matmul_"): MATMUL,
    (native, "accumulate_"): OTHER,
    (native, "sum_of_rows"): OTHER,
    (ops, "step_adamw"): OPTIMISER,
    (reductions, "native_sum_of_squares"): OPTIMISER,
}
_KERNEL_SCOPE_CLASSES = {f"kernel of {kind}": kind for kind in _KERNEL_CLASSES.values()}

# operators by their names in PyTorch, over all supported builds
_OPERATOR_NAMES: Dict[str, Tuple[str, ...]] = {
    MATMUL: (
        "mm",
        "addmm",
        "addmm_",
        "mv",
        "addmv",
        "linear",
        "_addmm_activation",
        "mkldnn_linear",
        "to_mkldnn",
        "_mkldnn_transpose",
        "to_dense",
    ),
    BATCHED_MATMUL: ("bmm", "baddbmm", "baddbmm_", "_baddbmm_mkl_"),
    SOFTMAX: ("softmax", "_softmax", "_softmax_backward_data"),
    LAYER_NORM: ("layer_norm", "native_layer_norm", "native_layer_norm_backward"),
    GELU: ("gelu", "gelu_backward"),
}
_OPERATOR_CLASSES = {f"aten::{name}": kind for kind, names in _OPERATOR_NAMES.items() for name in names}
_OPERATOR_CLASSES["mkldnn::_linear_pointwise"] = MATMUL
# casts between number types, unless an operator casts for itself
_CAST_OPERATORS = ("aten::to", "aten::_to_copy")
# autograd functions, with the class of the operators inside them that have none by name. In attention only operations
# on scores and probabilities count as softmax; its copies count as they do elsewhere
_FUNCTION_CLASSES = {
    "_TiledAttention": SOFTMAX,
    "_CrossEntropy": CROSS_ENTROPY,
    "GeluByErf": GELU,
    "_SwiGlu": GELU,
    "_RmsNorm": LAYER_NORM,
}
_SCORE_OPERATORS = ("aten::add_", "aten::mul_", "aten::mul", "aten::sub_", "aten::sum")
# autograd functions inside whose backward pass autograd runs the backward pass of GELU, which has prepared their input
_GELU_BACKWARD_FUNCTIONS = ("_RowParallelBackward",)


class _CallContext(NamedTuple):
    """The influence of an enclosing call on the class of the calls inside it.

    Attributes:
        forced_class: their class, whatever they are; "" if it depends on the call.
        default_class: the class of operators that have none by name.
        in_operator: the enclosing call is an operator.
        includes_gelu_backward: the enclosing call is a backward pass that includes that of GELU.
    """

    forced_class: str = ""
    default_class: str = OTHER
    in_operator: bool = False
    includes_gelu_backward: bool = False


def profile_operators(run: Trainer, iterations: int) -> Optional[Operators]:
    """Profile the operators of ``iterations`` iterations. Collective; the trainer runs twice as many.

    Returns:
        the means over iterations and ranks, equal on every rank; None if some rank wants the run to stop, or its build
        has no profiler.

    Raises:
        RunFailed: raised by :meth:`Trainer.step`.
    """
    world = run.grid.world
    has_profiler = torch.tensor([float(compat.has_profiler())], dtype=torch.float64)
    world.all_reduce(has_profiler, "min")
    if not float(has_profiler):
        return None
    unprofiled = _TimedIterations(run, iterations)
    unprofiled()
    if unprofiled.stopped:
        return None
    timed = _TimedIterations(run, iterations)
    with _named_scopes(world.size > 1):
        calls = compat.profile_operators(timed)
    if timed.stopped:
        return None
    seconds = seconds_of_classes(calls)
    seconds = scale_to_total(seconds, timed.seconds)
    totals = [*(seconds[name] for name in CLASSES), timed.seconds, unprofiled.seconds]
    means = torch.tensor(totals, dtype=torch.float64).div_(iterations * world.size)
    world.all_reduce(means)
    *classes, profiled, bare = means.tolist()
    return Operators(iterations, profiled, world.size, dict(zip(CLASSES, classes)), bare)


class _TimedIterations:
    """A number of iterations to run and time, with all ranks starting together.

    Attributes:
        seconds: duration of all iterations.
        stopped: some rank wants the run to stop.
    """

    def __init__(self, run: Trainer, iterations: int) -> None:
        self._run = run
        self._iterations = iterations
        self.seconds = 0.0
        self.stopped = False

    def __call__(self) -> None:
        self._run.grid.world.barrier()
        before = time.perf_counter()
        with compat.profiled_range(_ITERATION):
            for _ in range(self._iterations):
                self.stopped = self._run.step().stop or self.stopped
                if self.stopped:
                    return
        self.seconds = time.perf_counter() - before


@contextlib.contextmanager
def _named_scopes(communicates: bool) -> Iterator[None]:
    """Wrap calls that the profiler would not see or could not name in named scopes."""
    scopes: List[Tuple[Any, str, Callable[..., ContextManager[Any]]]] = [
        (optimizer.BlockedAdamW, "step", _scope(OPTIMISER)),
        (optimizer.FusedAdamW, "step", _scope(OPTIMISER)),
        (optimizer.CompiledAdamW, "step", _scope(OPTIMISER)),
        (GradientReducer, "begin", _scope(OPTIMISER)),
        (trainer, "squares_of", _scope(OPTIMISER)),
        (MasterWeights, "round", _scope(CAST)),
        (probes, "builtin_gelu_tanh", _scope(GELU)),
        (attention, "keep_mask", _scope(_MASKS)),
        (dropout, "keep_mask", _scope(_MASKS)),
        (torch.Tensor, "copy_", _cast_scope),
        *((owner, name, _scope(f"kernel of {kind}")) for (owner, name), kind in _KERNEL_CLASSES.items()),
    ]
    with contextlib.ExitStack() as stack:
        if communicates:
            stack.enter_context(calls_in_scope(_scope(COMMUNICATION)))
        for scope in scopes:
            stack.enter_context(scoped_call(*scope))
        yield


def _scope(name: str) -> Callable[..., ContextManager[Any]]:
    return lambda *_, **__: compat.profiled_range(name)


def _cast_scope(to: torch.Tensor, source: torch.Tensor, *_: Any, **__: Any) -> ContextManager[Any]:
    return compat.profiled_range(CAST) if to.dtype != source.dtype else contextlib.nullcontext()


def seconds_of_classes(calls: Sequence[OperatorCall]) -> Dict[str, float]:
    """Return the calls' own time inside the iterations by class; time that no call covers counts as Python."""
    (iterations,) = [call for call in calls if call.name == _ITERATION]
    inner = [
        call
        for call in calls
        if call.thread == iterations.thread and iterations.start <= call.start and call is not iterations
    ]
    inner.sort(key=lambda call: (call.start, -call.end))
    seconds = dict.fromkeys(CLASSES, 0.0)
    # calls that are not over when another begins: their end, the context for calls inside, and their own class
    open_calls: List[Tuple[float, _CallContext, str]] = [(iterations.end, _CallContext(), PYTHON)]
    seconds[PYTHON] = iterations.end - iterations.start
    for call in inner:
        while len(open_calls) > 1 and open_calls[-1][0] <= call.start:
            open_calls.pop()
        end, context, outer_class = open_calls[-1]
        if call.start >= end:  # after the iterations
            break
        inner_context, own_class = _classify(call.name, context)
        stop = min(call.end, end)
        seconds[outer_class] -= stop - call.start
        seconds[own_class] += stop - call.start
        open_calls.append((stop, inner_context, own_class))
    return {
        name: max(0.0, class_seconds) for name, class_seconds in seconds.items()
    }  # rounding may leave a tiny negative number


def scale_to_total(seconds: Mapping[str, float], total: float) -> Dict[str, float]:
    """Return the classes' seconds such that they sum to ``total``.

    The profiler's clock and ours need not agree to the last digit. A difference is counted as Python, and if operators
    alone exceed the total, they are scaled down to it.
    """
    operators = sum(class_seconds for name, class_seconds in seconds.items() if name != PYTHON)
    share = min(1.0, total / operators) if operators > 0.0 else 1.0
    return {
        name: max(0.0, total - operators) if name == PYTHON else class_seconds * share
        for name, class_seconds in seconds.items()
    }


def _classify(name: str, context: _CallContext) -> Tuple[_CallContext, str]:
    """Return the context that a call gives to the calls inside it, and the class of its own time."""
    if _is_operator(name):
        forced_class = context.forced_class or _OPERATOR_CLASSES.get(name, "")
        if not forced_class and name in _CAST_OPERATORS and not context.in_operator:
            forced_class = CAST
        own_class = forced_class or context.default_class
        if context.includes_gelu_backward and name == "aten::add":  # the sum of two gradients, between functions
            own_class = GELU
        if own_class == SOFTMAX and not forced_class and name not in _SCORE_OPERATORS:
            own_class = OTHER
        return context._replace(forced_class=forced_class, in_operator=True), own_class
    if name in _KERNEL_SCOPE_CLASSES:
        return context._replace(forced_class=_KERNEL_SCOPE_CLASSES[name]), _KERNEL_SCOPE_CLASSES[name]
    if name in _SCOPE_CLASSES and (not context.forced_class or name == COMMUNICATION):
        context = context._replace(forced_class=_SCOPE_CLASSES[name])
    if context.forced_class:  # some scopes count the Python code inside them as well
        return context, context.forced_class if context.forced_class in (COMMUNICATION, OTHER) else PYTHON
    function = name[: -len("Backward")] if name.endswith("Backward") else name
    if function in _FUNCTION_CLASSES:
        return _CallContext(default_class=_FUNCTION_CLASSES[function]), PYTHON
    if name in _GELU_BACKWARD_FUNCTIONS:
        return _CallContext(includes_gelu_backward=True), PYTHON
    default_class = GELU if context.includes_gelu_backward else context.default_class
    return context._replace(default_class=default_class, in_operator=False), PYTHON


def _is_operator(name: str) -> bool:
    """True for an operator; False for an autograd function or a named scope."""
    return "::" in name and not name.startswith(("autograd::", "torch::", "profiler::"))
