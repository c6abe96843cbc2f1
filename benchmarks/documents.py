"""Times attention and a step of the trainer with documents that are apart, beside the same without a mask.

    .venv/bin/python benchmarks/documents.py                 # sequences of 1024, documents of 200 tokens on average
    .venv/bin/python benchmarks/documents.py --preset 124m   # steps of the trainer, too

Attention is our compiled kernels' forward and backward pass of one sequence, or PyTorch's operators where there are no
kernels, with documents of the mean length: ``fixed``, each of that length; ``uniform``, between half and one and a half
of it; ``geometric``, any token begins one by the same chance, as in the random samples of a step. A sequence begins
with a document. All take turns in one process, with new documents in each turn.

Seconds are those of the process on its cores (``time.process_time``), of which other work on the machine takes none;
it still takes caches, and the second thread of a core. ``x`` is the time without a mask divided by that of the row,
turn by turn: median, smallest and largest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

import numpy as np
from turns import middle

from fugaku_gpt.config import load_run_config
from fugaku_gpt.data.random_samples import RandomSamples
from fugaku_gpt.machine.local import processor_name

WITHOUT = "no mask"
MASKS = {
    WITHOUT: (),
    "documents": ("data.document_mask=true",),
    "documents, positions anew": ("data.document_mask=true", "data.reset_positions=true"),
}


def starts_of(kind: str, length: int, mean: int, random: "np.random.RandomState") -> List[int]:
    """Returns the positions at which the documents of a sequence begin."""
    if kind == "geometric":
        return [0, *(np.flatnonzero(random.random_sample(length - 1) < 1 / mean) + 1).tolist()]
    starts = [0]
    while starts[-1] < length:
        size = mean if kind == "fixed" else random.randint(max(1, mean // 2), mean * 3 // 2 + 1)
        starts.append(starts[-1] + int(size))
    return starts[:-1]


def attention_works(options: argparse.Namespace, dtype: str) -> Dict[str, Callable[[], None]]:
    """Returns a forward and backward pass for each kind of documents."""
    import torch

    from fugaku_gpt import ops
    from fugaku_gpt.model.attention_core import attend

    random, length = np.random.RandomState(0), options.length
    packed = torch.randn(1, 1, length, 3 * options.heads, options.width).to(getattr(torch, dtype)).requires_grad_()
    y_grad = torch.randn(1, 1, length, options.heads, options.width).to(packed.dtype)

    def work(kind: str) -> Callable[[], None]:
        def run() -> None:
            ranges = ops.KeyRanges.causal(length)
            if kind != WITHOUT:
                ranges = ops.KeyRanges.documents([starts_of(kind, length, options.mean, random)], length)
            attend(packed, options.heads, ranges=ranges).backward(y_grad)
            packed.grad = None

        return run

    return {kind: work(kind) for kind in (WITHOUT, "fixed", "uniform", "geometric")}


def step_works(options: argparse.Namespace, dtype: str) -> Dict[str, Callable[[], Any]]:
    """Returns a step of a trainer for each mask."""
    from fugaku_gpt.comm import ProcessGrid
    from fugaku_gpt.training.trainer import Trainer

    works: Dict[str, Callable[[], Any]] = {}
    for name, mask in MASKS.items():
        settings = ["training.micro_batch=1", "training.global_batch=1", f"training.dtype={dtype}", *mask]
        config = load_run_config(preset=options.preset, overrides=[*settings, *options.settings])
        works[name] = Trainer(config, ProcessGrid.alone(), RandomSamples(config)).step
    return works


def measure(works: Dict[str, Callable[[], Any]], turns: int) -> List[Dict[str, float]]:
    """Returns the seconds of each in each turn; a first turn is not counted."""
    figures = []
    for _ in range(turns + 1):
        seconds = {}
        for name, run in works.items():
            before = time.process_time()
            run()
            seconds[name] = time.process_time() - before
        figures.append(seconds)
    return figures[1:]


def table(title: str, figures: Sequence[Dict[str, float]]) -> List[str]:
    """Returns a line for each row, below a head."""
    lines = [f"{title:34}{'processor ms':>14}{'x':>26}"]
    for name in figures[0]:
        ratios = [turn[WITHOUT] / turn[name] for turn in figures]
        milliseconds = 1e3 * statistics.median(turn[name] for turn in figures)
        lines.append(f"{name:34}{milliseconds:14.2f}{middle(ratios):>26}")
    return lines


def main(arguments: Optional[List[str]] = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1024, help="Tokens of a sequence of attention.")
    parser.add_argument("--mean", type=int, default=200, help="Mean tokens of a document of attention.")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--width", type=int, default=64, help="Width of a head.")
    parser.add_argument("--preset", help="Model of the steps; default: attention alone.")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], metavar="TYPE")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=15, help="Number of counted turns, after one warm-up turn.")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--samples", type=Path, help="File for the figures of every turn, as JSON.")
    options = parser.parse_args(arguments)
    from fugaku_gpt import ops
    from fugaku_gpt.training.startup import prepare_process

    prepare_process(options.threads)
    kernels = "our kernels" if ops.has_native_kernels() else "PyTorch's operators"
    head = f"threads: {options.threads}, {processor_name()}, {kernels}, {options.turns} turns"
    print(f"{head}, load average {os.getloadavg()[0]:.1f}")
    all_turns: List[Any] = []
    for dtype in options.dtypes:
        kinds = [(f"attention, {dtype}", attention_works)]
        if options.preset is not None:
            kinds.append((f"step of {options.preset}, {dtype}", step_works))
        for title, works in kinds:
            figures = measure(works(options, dtype), options.turns)
            all_turns.append({"title": title, "turns": figures})
            print("\n".join(table(title, figures)), flush=True)
    if options.samples is not None:
        options.samples.write_text(json.dumps(all_turns, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
