"""Where the time of an iteration goes, by class of operators (``training.profile_operators``).

When all that lasts of a run is written, the trainer goes on for a few real iterations, first without PyTorch's profiler
and then under it. Nothing is copied and nothing put back: what they change is thrown away with the process. On the way
to there, profiling costs nothing: what the profiler cannot name by itself (calls of MPI, of the optimiser and of our
own compiled kernels, copies between number types) is put in named parts for that time only, from outside.

Every call's own time, without the calls inside it, goes to one class: by what computes it, or else by where it is
called. The classes are told in ``records/operators.py``.

Until all profiled iterations are over each call takes some 3 KiB of memory, and a micro-batch of 1024 tokens of a model
of two layers makes 15,000 to 20,000: large global batches on few replicas are not for this.
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
# named parts, and the class of what is inside them
_PARTS = {OPTIMISER: OPTIMISER, CAST: CAST, GELU: GELU, COMMUNICATION: COMMUNICATION, _MASKS: OTHER}
# our own compiled kernels by function: their class, which their own time is of, too: there are no operators in them
_KERNELS = {
    (ops, "attention"): BATCHED_MATMUL,
    (ops, "attention_gradient"): BATCHED_MATMUL,
    (native, "layer_norm"): LAYER_NORM,
    (native, "layer_norm_gradient"): LAYER_NORM,
    (native, "gelu"): GELU,
    (native, "gelu_gradient"): GELU,
    (ops, "loss_sums"): CROSS_ENTROPY,
    (ops, "loss_gradient_"): CROSS_ENTROPY,
    (ops, "loss_full_rows_"): CROSS_ENTROPY,
    (native, "matmul_"): MATMUL,
    (native, "accumulate_"): OTHER,
    (native, "sum_of_rows"): OTHER,
    (ops, "step_adamw"): OPTIMISER,
    (reductions, "native_sum_of_squares"): OPTIMISER,
}
_BY_KERNEL = {f"kernel of {kind}": kind for kind in _KERNELS.values()}

# by their names in PyTorch, in whatever build
_BY_NAME: Dict[str, Tuple[str, ...]] = {
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
_CLASS_OF = {f"aten::{name}": kind for kind, names in _BY_NAME.items() for name in names}
_CLASS_OF["mkldnn::_linear_pointwise"] = MATMUL
# of one number type to another, unless an operator makes it for itself
_CASTS = ("aten::to", "aten::_to_copy")
# functions of autograd: the class of operators in them that have none by their name. Of those in attention only what is
# done to scores and probabilities is softmax's; its copies are what they are elsewhere
_FUNCTIONS = {"_CausalAttention": SOFTMAX, "_CrossEntropy": CROSS_ENTROPY, "GeluByErf": GELU}
_OF_SCORES = ("aten::add_", "aten::mul_", "aten::mul", "aten::sub_", "aten::sum")
# what autograd does inside the backward pass of these is that of what has prepared their input: GELU, in whatever parts
_AFTER_GELU = ("_RowParallelBackward",)


class _Place(NamedTuple):
    """What is known of the calls inside of a call.

    Attributes:
        known: their class, whatever they are.
        else_: the class of operators that have none by their name.
        operator: the call is an operator's.
        after_gelu: it is a backward pass of which GELU's is a part.
    """

    known: str = ""
    else_: str = OTHER
    operator: bool = False
    after_gelu: bool = False


def profile_operators(run: Trainer, iterations: int) -> Optional[Operators]:
    """Where the time of iterations goes. Collective; the trainer goes on for twice as many.

    Returns:
        the means over iterations and ranks, equal on every rank; None where some rank wants the run to stop, or its
        build has no profiler.

    Raises:
        RunFailed: as of :meth:`Trainer.step`.
    """
    world = run.grid.world
    able = torch.tensor([float(compat.has_profiler())], dtype=torch.float64)
    world.all_reduce(able, "min")
    if not float(able):
        return None
    unprofiled = _Timed(run, iterations)
    unprofiled()
    if unprofiled.stopped:
        return None
    timed = _Timed(run, iterations)
    with _named_parts(world.size > 1):
        calls = compat.profile_operators(timed)
    if timed.stopped:
        return None
    seconds = seconds_of_classes(calls)
    seconds = fit(seconds, timed.seconds)
    figures = [*(seconds[name] for name in CLASSES), timed.seconds, unprofiled.seconds]
    means = torch.tensor(figures, dtype=torch.float64).div_(iterations * world.size)
    world.all_reduce(means)
    *classes, profiled, bare = means.tolist()
    return Operators(iterations, profiled, world.size, dict(zip(CLASSES, classes)), bare)


class _Timed:
    """Some iterations, of which the first begins on all ranks together.

    Attributes:
        seconds: of all of them.
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
def _named_parts(communicates: bool) -> Iterator[None]:
    """Have parts named that the profiler would not see, or not know."""
    parts: List[Tuple[Any, str, Callable[..., ContextManager[Any]]]] = [
        (optimizer.BlockedAdamW, "step", _named(OPTIMISER)),
        (optimizer.FusedAdamW, "step", _named(OPTIMISER)),
        (optimizer.CompiledAdamW, "step", _named(OPTIMISER)),
        (GradientReducer, "begin", _named(OPTIMISER)),
        (trainer, "squares_of", _named(OPTIMISER)),
        (MasterWeights, "round", _named(CAST)),
        (probes, "builtin_gelu_tanh", _named(GELU)),
        (attention, "keep_mask", _named(_MASKS)),
        (dropout, "keep_mask", _named(_MASKS)),
        (torch.Tensor, "copy_", _cast),
        *((owner, name, _named(f"kernel of {kind}")) for (owner, name), kind in _KERNELS.items()),
    ]
    with contextlib.ExitStack() as named:
        if communicates:
            named.enter_context(calls_in_scope(_named(COMMUNICATION)))
        for part in parts:
            named.enter_context(scoped_call(*part))
        yield


def _named(name: str) -> Callable[..., ContextManager[Any]]:
    return lambda *_, **__: compat.profiled_range(name)


def _cast(to: torch.Tensor, source: torch.Tensor, *_: Any, **__: Any) -> ContextManager[Any]:
    return compat.profiled_range(CAST) if to.dtype != source.dtype else contextlib.nullcontext()


def seconds_of_classes(calls: Sequence[OperatorCall]) -> Dict[str, float]:
    """The calls' own time inside of the iterations, by class; what no call covers is Python's."""
    (whole,) = [call for call in calls if call.name == _ITERATION]
    inner = [call for call in calls if call.thread == whole.thread and whole.start <= call.start and call is not whole]
    inner.sort(key=lambda call: (call.start, -call.end))
    seconds = dict.fromkeys(CLASSES, 0.0)
    # calls that are not over where another begins: their ends, what is known of calls inside, and their own class
    open_calls: List[Tuple[float, _Place, str]] = [(whole.end, _Place(), PYTHON)]
    seconds[PYTHON] = whole.end - whole.start
    for call in inner:
        while len(open_calls) > 1 and open_calls[-1][0] <= call.start:
            open_calls.pop()
        end, place, its_class = open_calls[-1]
        if call.start >= end:  # after the iterations
            break
        inside_it, mine = _classify(call.name, place)
        stop = min(call.end, end)
        seconds[its_class] -= stop - call.start
        seconds[mine] += stop - call.start
        open_calls.append((stop, inside_it, mine))
    return {name: max(0.0, its) for name, its in seconds.items()}  # a rounding may be left of none


def fit(seconds: Mapping[str, float], whole: float) -> Dict[str, float]:
    """The classes' seconds such that they sum to ``whole``. The profiler's clock and ours need not agree to the last
    digit: what is between is nobody's operator, and where operators alone are more than all, they share what there
    is."""
    operators = sum(its for name, its in seconds.items() if name != PYTHON)
    share = min(1.0, whole / operators) if operators > 0.0 else 1.0
    return {name: max(0.0, whole - operators) if name == PYTHON else its * share for name, its in seconds.items()}


def _classify(name: str, place: _Place) -> Tuple[_Place, str]:
    """Of a call at some place: what is known of calls inside it, and the class of its own time."""
    if _is_operator(name):
        known = place.known or _CLASS_OF.get(name, "")
        if not known and name in _CASTS and not place.operator:
            known = CAST
        its_class = known or place.else_
        if place.after_gelu and name == "aten::add":  # of two gradients, between functions
            its_class = GELU
        if its_class == SOFTMAX and not known and name not in _OF_SCORES:
            its_class = OTHER
        return place._replace(known=known, operator=True), its_class
    if name in _BY_KERNEL:
        return place._replace(known=_BY_KERNEL[name]), _BY_KERNEL[name]
    if name in _PARTS and (not place.known or name == COMMUNICATION):
        place = place._replace(known=_PARTS[name])
    if place.known:  # of what is named for its own time, that of Python is the part's too
        return place, place.known if place.known in (COMMUNICATION, OTHER) else PYTHON
    function = name[: -len("Backward")] if name.endswith("Backward") else name
    if function in _FUNCTIONS:
        return _Place(else_=_FUNCTIONS[function]), PYTHON
    if name in _AFTER_GELU:
        return _Place(after_gelu=True), PYTHON
    return place._replace(else_=GELU if place.after_gelu else place.else_, operator=False), PYTHON


def _is_operator(name: str) -> bool:
    """And not a function of autograd or a named part."""
    return "::" in name and not name.startswith(("autograd::", "torch::", "profiler::"))
