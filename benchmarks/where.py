"""Where the time of a step of ours goes, each part timed where it runs, beside the GEMM floor's products.

    .venv/bin/python benchmarks/where.py                            # 124M, sequence 1024 x micro-batch 1
    .venv/bin/python benchmarks/where.py --shape 256x4 --set training.dtype=bfloat16

One process, in turns: the products of ``gemm_floor.py`` alone, then a step. ``seconds`` of a part are its own, without
those of parts inside it, as a median over the turns; ``quickest`` is what they would be if every call had taken as long
as the fastest call of its kind and shape in all turns: what is between the two, the machine takes. ``floor`` are the
products of the part alone, each by its best way (a median as well), ``quickest`` of them in the turn in which each was
fastest. Attention is counted as the floor does, without the product that its backward pass computes again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections import defaultdict
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Optional, Sequence, Tuple

from contestants import threads
from step import by_one_way
from turns import thread_environment

from fugaku_gpt.config import RunConfig, load_run_config
from fugaku_gpt.formulas.parameters import size_name
from fugaku_gpt.machine.local import processor_name, usable_cores

LAYERS, LOGITS, ATTENTION = "products of layers", "products of logits", "attention: products"
ATTENTION_REST, LOSS_REST = "attention: softmax, copies", "loss beside its products"
NORM_GELU, BIASES, OPTIMISER, REST = "LayerNorm, GELU", "sums for biases", "norm, AdamW, zeroes", "everything else"
PARTS = (LAYERS, LOGITS, ATTENTION, ATTENTION_REST, LOSS_REST, NORM_GELU, BIASES, OPTIMISER, REST)
PRODUCTS = ("linear", "matmul", "linear_into", "matmul_into", "add_product")

Kind = Tuple[str, str, Tuple[Any, ...]]  # part, function, shapes


class Clock:
    """Own seconds of calls, by kind.

    Attributes:
        turns: of each turn, the seconds of every call of a kind.
        runs: calls are counted now.
    """

    def __init__(self) -> None:
        self.turns: List[Dict[Kind, List[float]]] = []
        self.runs = False
        self._inside: List[float] = []  # of each open call, what calls inside it took

    def of(self, part: Callable[[Sequence[Any]], str], name: str) -> Callable[..., ContextManager[None]]:
        """A scope for :func:`fugaku_gpt.comm.observed.inside`; ``part`` is told the shapes of a call's tensors."""

        @contextlib.contextmanager
        def timed(*its: Any, **named: Any) -> Iterator[None]:
            shapes = tuple(tuple(one.shape) for one in its if hasattr(one, "shape"))
            before = time.perf_counter()
            self._inside.append(0.0)
            try:
                yield
            finally:
                seconds = time.perf_counter() - before
                own = seconds - self._inside.pop()
                if self._inside:
                    self._inside[-1] += seconds
                if self.runs:
                    self.turns[-1][(part(shapes), name, shapes)].append(own)

        return timed

    @property
    def is_inside(self) -> bool:
        """Whether the call that is asked about is made within another one."""
        return bool(self._inside)

    def seconds(self, part: str) -> List[float]:
        """Of each turn."""
        return [sum(sum(its) for kind, its in turn.items() if kind[0] == part) for turn in self.turns]

    def quickest(self, part: str) -> float:
        """Of a turn in which each call takes as long as the fastest of its kind in any."""
        fastest = {kind: min(min(turn[kind]) for turn in self.turns if kind in turn) for kind in self.turns[-1]}
        return sum(len(its) * fastest[kind] for kind, its in self.turns[-1].items() if kind[0] == part)

    def calls(self, part: str) -> int:
        """Of the last turn."""
        return sum(len(its) for kind, its in self.turns[-1].items() if kind[0] == part)


@contextlib.contextmanager
def watched(clock: Clock, config: RunConfig) -> Iterator[None]:
    """Every part is timed in here."""
    import torch

    from fugaku_gpt import compat
    from fugaku_gpt.comm.observed import inside
    from fugaku_gpt.model.causal_attention import _CausalAttention
    from fugaku_gpt.parallel import cross_entropy
    from fugaku_gpt.parallel.gradients import GradientSum
    from fugaku_gpt.training import optimizer, trainer

    wide = {config.padded_vocab, config.model.vocab_size}

    def of_product(shapes: Sequence[Any]) -> str:
        return LOGITS if any(wide.intersection(shape) for shape in shapes) else LAYERS

    def part(name: str) -> Callable[[Sequence[Any]], str]:
        return lambda _: name

    parts = [(compat, name, of_product) for name in PRODUCTS]
    parts += [(torch, "bmm", part(ATTENTION)), (torch.Tensor, "baddbmm_", part(ATTENTION))]
    parts += [(compat, name, part(NORM_GELU)) for name in ("layer_norm", "gelu", "gelu_tanh")]
    # of what has prepared a layer's input, LayerNorm or GELU; a micro-batch's own is around everything
    parts += [(compat, "backward", lambda _: NORM_GELU if clock.is_inside else REST)]
    parts += [(compat, "sum_of_rows", part(BIASES)), (cross_entropy, "losses_of_logits", part(LOSS_REST))]
    parts += [(owner, "step", part(OPTIMISER)) for owner in (optimizer.FusedAdamW, optimizer.BlockedAdamW)]
    parts += [(trainer, "squares_of", part(OPTIMISER)), (GradientSum, "begin", part(OPTIMISER))]
    with contextlib.ExitStack() as everything:
        for owner, name, its in parts:
            everything.enter_context(inside(owner, name, clock.of(its, name)))
        for name in ("forward", "backward"):  # static methods, which autograd looks up on the class
            function = getattr(_CausalAttention, name)
            scope = clock.of(part(ATTENTION_REST), name)
            setattr(_CausalAttention, name, staticmethod(_within(scope, function)))
            everything.callback(setattr, _CausalAttention, name, staticmethod(function))
        yield


def _within(scope: Callable[..., ContextManager[None]], function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*its: Any) -> Any:
        with scope(*its):
            return function(*its)

    return called


def measure(config: RunConfig, turns: int) -> List[str]:
    """The table's lines."""
    from gemm_floor import Floor

    from fugaku_gpt.comm import ProcessGrid
    from fugaku_gpt.data.random_samples import RandomSamples
    from fugaku_gpt.training.startup import prepare_process
    from fugaku_gpt.training.trainer import Trainer

    prepare_process(threads())
    floor, values, whole = Floor(config), [], []
    clock = Clock()
    with watched(clock, config):
        run = Trainer(config, ProcessGrid.alone(), RandomSamples(config))
        for turn in range(turns + 1):
            value = floor.measure()
            if turn:  # one of each is not counted: it touches fresh memory
                values.append(value)
                clock.turns.append(defaultdict(list))
            clock.runs = turn > 0
            before = time.perf_counter()
            run.step()
            if turn:
                whole.append(time.perf_counter() - before)
            clock.runs = False
            print(f"turn {turn}/{turns}: {time.perf_counter() - before:.2f} s", file=sys.stderr, flush=True)
    return table(clock, whole, by_one_way(values))


def table(clock: Clock, whole: Sequence[float], floors: Sequence[Dict[str, Sequence[Any]]]) -> List[str]:
    """``floors``: of each turn, product → [count, seconds, ...]."""
    lines = [f"{'':30}{'calls':>7}{'seconds':>10}{'share':>8}{'quickest':>10}{'floor':>10}{'quickest':>10}"]
    everything, left = statistics.median(whole), list(whole)
    sums = [0.0, 0.0, 0.0]
    for part in PARTS[:-1]:
        seconds, quickest = clock.seconds(part), clock.quickest(part)
        left = [rest - its for rest, its in zip(left, seconds)]
        alone = [sum(row[0] * row[1] for name, row in turn.items() if _part_of(name) == part) for turn in floors]
        best = _best(floors, part)
        line = f"{part:30}{clock.calls(part):7}{statistics.median(seconds):10.3f}"
        line += f"{statistics.median(seconds) / everything:8.1%}{quickest:10.3f}"
        lines.append(line + (f"{statistics.median(alone):10.3f}{best:10.3f}" if any(alone) else ""))
        sums = [sums[0] + quickest, sums[1] + statistics.median(alone), sums[2] + best]
    rest = statistics.median(left)
    lines.append(f"{REST:30}{'':7}{rest:10.3f}{rest / everything:8.1%}{min(left):10.3f}")
    quick = sums[0] + min(left)
    lines.append(f"{'a step':30}{'':7}{everything:10.3f}{1:8.0%}{quick:10.3f}{sums[1]:10.3f}{sums[2]:10.3f}")
    return [*lines, f"of the floor: {everything / sums[1]:.3f}; quickest of quickest: {quick / sums[2]:.3f}"]


def _best(floors: Sequence[Dict[str, Sequence[Any]]], part: str) -> float:
    names = [name for name in floors[0] if _part_of(name) == part]
    return sum(floors[0][name][0] * min(turn[name][1] for turn in floors) for name in names)


def _part_of(product: str) -> str:
    kind = product.split()[0]
    return {"attention": ATTENTION, "logits": LOGITS}.get(kind, LAYERS)


def main(arguments: Optional[List[str]] = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="124m")
    parser.add_argument("--shape", default="1024x1", metavar="SxB", help="sequence length x micro-batch")
    parser.add_argument("--turns", type=int, default=3, help="that are counted, after one that is not")
    parser.add_argument("--micro-batches", type=int, default=4, help="forward and backward passes per step")
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
    lines = measure(config, options.turns)
    import torch

    told = (
        f"{size_name(config.model)}, sequence {seq_len} x micro-batch {micro_batch}, {options.micro_batches} per step"
    )
    about = f"{config.training.dtype}, {count} threads, {processor_name()}, torch {torch.__version__}"
    print(f"{told}, {about}, {options.turns} turns")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
