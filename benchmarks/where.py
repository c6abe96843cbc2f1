"""Shows where the time of our training step goes, each part timed where it runs, beside the GEMM floor's products.

    .venv/bin/python benchmarks/where.py                            # 124M, sequence 1024 x micro-batch 1
    .venv/bin/python benchmarks/where.py --shape 256x4 --set training.dtype=bfloat16

One process alternates between a step and the products of ``gemm_floor.py`` alone (with the thread settings of a step,
which ``step.py`` does not give the floor). ``seconds`` of a part are the median over the turns, and exclude those of
parts inside it. ``floor`` is the time of the part's products alone, each computed in the way with the smallest median
over the turns. ``quickest`` is, for both, the sum over all kinds and shapes of call of the mean in the turn in which it
was smallest, the least disturbed one.

If attention runs in our compiled kernels, its products and softmax are one call, which is in the line of attention's
products; the line of the rest has next to nothing. ``--set node.compiled_kernels=false`` switches the kernels off.

The floor's products are those of the definition. Our step does more: attention's backward pass computes one of seven
products again; in 16 bits it also adds to the float32 sums, and casts where the build multiplies in float32.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections import defaultdict
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from step import products_by_best_way
from turns import middle, thread_environment

from fugaku_gpt.config import RunConfig, load_run_config
from fugaku_gpt.formulas.parameters import size_name
from fugaku_gpt.machine.local import processor_name, usable_cores

LAYERS, LOGITS, ATTENTION = "products of layers", "products of logits", "attention: products"
ATTENTION_REST, LOSS_REST = "attention: softmax, copies", "loss beside its products"
NORM_GELU, BIASES, OPTIMISER, REST = "LayerNorm, GELU", "sums for biases", "norm, AdamW, zeroes", "everything else"
PART_NAMES = (LAYERS, LOGITS, ATTENTION, ATTENTION_REST, LOSS_REST, NORM_GELU, BIASES, OPTIMISER, REST)
PRODUCTS = ("linear", "matmul", "linear_into", "matmul_into", "add_product")

Kind = Tuple[str, str, Tuple[Any, ...]]  # part, function, shapes


class Clock:
    """Seconds of calls by kind, without those of the calls inside.

    Attributes:
        turns: the seconds of every call of a kind, for each turn.
        runs: True while calls are counted.
        around: the parts of the open calls, the outermost first.
    """

    def __init__(self) -> None:
        self.turns: List[Dict[Kind, List[float]]] = []
        self.runs = False
        self.around: List[str] = []
        self._inside = [0.0]  # seconds of calls inside each open call

    def of(self, part: Callable[[], str], name: str) -> Callable[..., ContextManager[None]]:
        """A scope for :func:`fugaku_gpt.comm.observed.scoped_call`."""

        @contextlib.contextmanager
        def timed(*arguments: Any, **keywords: Any) -> Iterator[None]:
            kind = part(), name, tuple(tuple(argument.shape) for argument in arguments if hasattr(argument, "shape"))
            self.around.append(kind[0])
            self._inside.append(0.0)
            before = time.perf_counter()
            try:
                yield
            finally:
                seconds = time.perf_counter() - before
                self.around.pop()
                own = seconds - self._inside.pop()
                self._inside[-1] += seconds
                if self.runs:
                    self.turns[-1][kind].append(own)

        return timed

    def seconds(self, part: str) -> List[float]:
        """Seconds of a part in each turn, without those of parts inside."""
        return [sum(sum(call_seconds) for kind, call_seconds in turn.items() if kind[0] == part) for turn in self.turns]

    def quickest(self, part: str) -> float:
        """Seconds of the last turn's calls, had each kind taken as long as in the turn with its least mean."""
        last = {kind: len(call_seconds) for kind, call_seconds in self.turns[-1].items() if kind[0] == part}
        return sum(
            count * min(statistics.mean(turn[kind]) for turn in self.turns if kind in turn)
            for kind, count in last.items()
        )

    def calls(self, part: str) -> int:
        """Number of calls of a part in the last turn."""
        return sum(len(call_seconds) for kind, call_seconds in self.turns[-1].items() if kind[0] == part)


@contextlib.contextmanager
def watched(clock: Clock) -> Iterator[None]:
    """Times every part within the context. The watched model must be built within it too: its MLP takes the GELU
    function when it is built."""
    import torch

    from fugaku_gpt import compat, ops
    from fugaku_gpt.comm.observed import scoped_call
    from fugaku_gpt.model.attention_core import _CompiledAttention, _TiledAttention
    from fugaku_gpt.parallel.buffers import MasterWeights
    from fugaku_gpt.parallel.cross_entropy import _CrossEntropy
    from fugaku_gpt.parallel.gradient_path import GradientReducer
    from fugaku_gpt.training import optimizer, trainer

    def product() -> str:
        return LOGITS if LOSS_REST in clock.around else LAYERS

    def backward() -> str:
        # the backward pass of LayerNorm or GELU, a layer's preparation, is inside that of the micro-batch
        return NORM_GELU if clock.around else REST

    def always(name: str) -> Callable[[], str]:
        return lambda: name

    timed_functions: List[Tuple[Any, str, Callable[[], str]]] = [(ops, name, product) for name in PRODUCTS]
    timed_functions += [(torch, "bmm", always(ATTENTION)), (torch.Tensor, "baddbmm_", always(ATTENTION))]
    timed_functions += [(ops, name, always(NORM_GELU)) for name in ("layer_norm", "gelu", "gelu_tanh")]
    timed_functions += [(ops, name, always(ATTENTION)) for name in ("attention", "attention_gradient")]
    timed_functions += [(compat, "backward", backward), (ops, "sum_of_rows", always(BIASES))]
    optimisers = optimizer.FusedAdamW, optimizer.BlockedAdamW, optimizer.CompiledAdamW
    timed_functions += [(owner, "step", always(OPTIMISER)) for owner in optimisers]
    timed_functions += [(trainer, "squares_of", always(OPTIMISER)), (GradientReducer, "begin", always(OPTIMISER))]
    timed_functions += [(MasterWeights, "round", always(OPTIMISER))]
    ways = _TiledAttention, _CompiledAttention
    functions = [(way, name, ATTENTION_REST) for way in ways for name in ("forward", "backward")]
    with contextlib.ExitStack() as watching:
        for owner, name, part in timed_functions:
            watching.enter_context(scoped_call(owner, name, clock.of(part, name)))
        for owner, name, part_name in (*functions, (_CrossEntropy, "forward", LOSS_REST)):  # static methods
            function = getattr(owner, name)
            setattr(owner, name, staticmethod(_within(clock.of(always(part_name), name), function)))
            watching.callback(setattr, owner, name, staticmethod(function))
        yield


def _within(scope: Callable[..., ContextManager[None]], function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*arguments: Any) -> Any:
        with scope(*arguments):
            return function(*arguments)

    return called


def measure(config: RunConfig, turns: int, calls: bool) -> List[str]:
    """Measures and returns the table's lines; with ``calls`` those of :func:`calls_table` too."""
    import torch
    from gemm_floor import Floor

    from fugaku_gpt import compat
    from fugaku_gpt.comm import ProcessGrid
    from fugaku_gpt.data.random_samples import RandomSamples
    from fugaku_gpt.training.trainer import Trainer

    if not compat.can_train(getattr(torch, config.training.dtype)):
        raise SystemExit(f"this build cannot train in {config.training.dtype}")
    floor, clock = Floor(config), Clock()  # which sets up the process as `train` does
    with watched(clock):
        run = Trainer(config, ProcessGrid.alone(), RandomSamples(config))
    steps: List[float] = []
    floors: List[Dict[str, Any]] = []

    def step() -> None:
        clock.turns.append(defaultdict(list))
        with watched(clock):
            clock.runs, before = True, time.perf_counter()
            run.step()
            clock.runs = False
            steps.append(time.perf_counter() - before)

    for turn in range(turns + 1):
        works = [step, lambda: floors.append(floor.measure())]
        for work in works if turn % 2 else reversed(works):
            work()
        print(f"turn {turn}/{turns}: {steps[-1]:.2f} s, {floors[-1]['seconds']:.2f} s", file=sys.stderr, flush=True)
    del clock.turns[0]  # the first of each is not counted: it touches fresh memory
    return table(clock, steps[1:], products_by_best_way(floors[1:])) + (calls_table(clock) if calls else [])


def table(clock: Clock, steps: Sequence[float], floors: Sequence[Mapping[str, Sequence[Any]]]) -> List[str]:
    """Lines of the table of parts.

    Args:
        steps: seconds of each turn's step.
        floors: product → [count, seconds, ...], for each turn.
    """
    lines = [f"{'':30}{'calls':>7}{'seconds':>10}{'share':>8}{'quickest':>10}{'floor':>10}{'quickest':>10}"]
    step_seconds, rests = statistics.median(steps), list(steps)
    quick, quick_floor = 0.0, 0.0
    for part in PART_NAMES[:-1]:
        seconds, quickest = clock.seconds(part), clock.quickest(part)
        rests = [rest - own_seconds for rest, own_seconds in zip(rests, seconds)]
        names = [name for name in floors[0] if _part_of(name) == part]
        alone = [sum(turn[name][0] * turn[name][1] for name in names) for turn in floors]
        best = sum(floors[0][name][0] * min(turn[name][1] for turn in floors) for name in names)
        median = statistics.median(seconds)
        line = f"{part:30}{clock.calls(part):7}{median:10.3f}{median / step_seconds:8.1%}{quickest:10.3f}"
        lines.append(line + (f"{statistics.median(alone):10.3f}{best:10.3f}" if names else ""))
        quick, quick_floor = quick + quickest, quick_floor + best
    rest = statistics.median(rests)
    lines.append(f"{REST:30}{'':7}{rest:10.3f}{rest / step_seconds:8.1%}{min(rests):10.3f}")
    quick += min(rests)
    alone = [sum(count * product_seconds for count, product_seconds, *_ in turn.values()) for turn in floors]
    floor = statistics.median(alone)
    lines.append(f"{'a step':30}{'':7}{step_seconds:10.3f}{1:8.1%}{quick:10.3f}{floor:10.3f}{quick_floor:10.3f}")
    ratios = [step / floor_seconds for step, floor_seconds in zip(steps, alone)]
    return [*lines, f"of the floor: {middle(ratios)}; the quickest of both: {quick / quick_floor:.3f}"]


def calls_table(clock: Clock) -> List[str]:
    """Lines of the kinds of call: number in the last turn, median milliseconds of all turns, and seconds of a step."""
    lines = [f"{'part':30}{'call':20}{'calls':>6}{'ms':>10}{'s/step':>9}  shapes"]
    for kind in sorted(clock.turns[-1], key=str):
        part, name, shapes = kind
        call_seconds = [seconds for turn in clock.turns for seconds in turn.get(kind, ())]
        shapes_text = " ".join(str(list(shape)) for shape in shapes)
        count, median = len(clock.turns[-1][kind]), statistics.median(call_seconds)
        lines.append(f"{part:30}{name:20}{count:6}{1e3 * median:10.3f}{count * median:9.3f}  {shapes_text}")
    return lines


def _part_of(product: str) -> str:
    kind = product.split()[0]
    return {"attention": ATTENTION, "logits": LOGITS}.get(kind, LAYERS)


def main(arguments: Optional[List[str]] = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="124m")
    parser.add_argument("--shape", default="1024x1", metavar="SxB", help="Sequence length x micro-batch.")
    parser.add_argument("--turns", type=int, default=3, help="Number of counted turns, after one warm-up turn.")
    parser.add_argument("--micro-batches", type=int, default=4, help="Forward and backward passes per step.")
    parser.add_argument("--calls", action="store_true", help="Print a line for every kind and shape of call too.")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args(arguments)
    try:
        seq_len, micro_batch = (int(part) for part in options.shape.split("x"))
    except ValueError:
        parser.error(f"--shape {options.shape}: valid: two whole numbers, such as 1024x1")
    batch = f"training.global_batch={micro_batch * options.micro_batches}"
    shape = [f"model.seq_len={seq_len}", f"training.micro_batch={micro_batch}", batch]
    config = load_run_config(preset=options.preset, overrides=[*shape, *options.settings])
    from fugaku_gpt.cli.train import thread_variables

    count = config.node.threads_per_rank or len(usable_cores())
    # read when the libraries are loaded, which is later
    os.environ.update({**thread_environment(count), **thread_variables(count)})
    lines = measure(config, options.turns, options.calls)
    import torch

    model_and_shape = (
        f"{size_name(config.model)}, sequence {seq_len} x micro-batch {micro_batch}, {options.micro_batches} per step"
    )
    about = f"{config.training.dtype}, {count} threads, {processor_name()}, torch {torch.__version__}"
    print(f"{model_and_shape}, {about}, {options.turns} turns")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
