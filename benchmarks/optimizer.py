"""Times our optimizer's step beside the time to read and write its bytes at this machine's memory bandwidth.

    .venv/bin/python benchmarks/optimizer.py                             # 124M in float32 and bfloat16
    .venv/bin/python benchmarks/optimizer.py --build .venv-torch17/bin/python --build .venv-torch110/bin/python

It times everything that a step of the trainer does after its last backward pass: the gradient's norm, the check of it,
division by the tokens and clipping, AdamW, and with bfloat16 the rounding of the float32 masters. The passes are
replaced by filling the flat gradients.

The bytes of a parameter are these: the gradient is read once for the norm, which has to be known before the first
parameter changes, and once for the step; the parameter (with bfloat16, its float32 master) and both moments are read
and written: 4 + 4 + 12 + 12 = 32; with bfloat16 the parameter is written as well: 34. The bandwidth is that of the
fastest of three streaming kernels of PyTorch over tensors that do not fit in any cache, in the same process and turn:
``copy_`` (read 1, write 1), ``add_`` in place (2, 1) and ``addcmul_`` in place (3, 1); the reads of a cache line before
a store are not counted.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Optional

from contestants import threads
from turns import Lacking, Several, Work, middle, serve, take_turns, write_samples

from fugaku_gpt.config import RunConfig, load_run_config
from fugaku_gpt.data.random_samples import RandomSamples
from fugaku_gpt.formulas.parameters import size_name
from fugaku_gpt.machine.local import processor_name, usable_cores

BYTES = {"float32": 32, "bfloat16": 34}
STREAMED = 2**25  # elements of each of the streamed tensors: 128 MiB


def work(config: RunConfig) -> Work:
    """Returns the work of a turn: it measures seconds of a step and bytes per second of streaming in this process.

    Raises:
        Lacking: this build cannot train in the type.
    """
    import torch

    from fugaku_gpt import compat
    from fugaku_gpt.comm import ProcessGrid
    from fugaku_gpt.training.startup import prepare_process
    from fugaku_gpt.training.trainer import Trainer

    class Timed(Trainer):
        """A trainer whose passes take no time, since it fills the gradients."""

        filled = 0.0

        def _losses(self, *_: Any) -> float:
            self.buffers.gradients.fill_(1e-3)
            self.filled = time.perf_counter()
            return float(config.training.global_batch * config.model.seq_len)

    if not compat.can_train(getattr(torch, config.training.dtype)):
        raise Lacking(f"this build cannot train in {config.training.dtype}")
    prepare_process(threads())
    trainer = Timed(config, ProcessGrid.alone(), RandomSamples(config))
    x, y, z = (torch.full((STREAMED,), 1e-3) for _ in range(3))
    kernels = ((8, lambda: x.copy_(y)), (12, lambda: x.add_(y, alpha=1e-3)), (16, lambda: x.addcmul_(y, z, value=1e-3)))

    def turn() -> Dict[str, Any]:
        rates = []
        for size, kernel in kernels * 2:
            before = time.perf_counter()
            kernel()
            rates.append(size * STREAMED / (time.perf_counter() - before))
        trainer.step()
        seconds = time.perf_counter() - trainer.filled
        return {"seconds": seconds, "rate": max(rates), "elements": int(trainer.buffers.gradients.numel())}

    return turn


def main(arguments: Optional[List[str]] = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="124m")
    parser.add_argument("--turns", type=int, default=9, help="Number of counted turns, after one warm-up turn.")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--build", action="append", default=[], help="Interpreter of a further build; repeatable.")
    parser.add_argument("--samples", type=Path, help="File for the figures of every turn, as JSON.")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    settings = ["training.micro_batch=1", "training.global_batch=4", *options.settings]
    if options.worker:
        dtype, path = options.worker
        run = load_run_config(preset=options.preset, overrides=[*settings, f"training.dtype={dtype}"])
        serve(path, lambda: work(run))
        return
    from fugaku_gpt.cli.train import thread_variables

    config = load_run_config(preset=options.preset, overrides=settings)
    count = config.node.threads_per_rank or len(usable_cores())
    passed_on = list(arguments if arguments is not None else sys.argv[1:])
    print(f"{size_name(config.model)}, {count} threads, {processor_name()}, {options.turns} turns")
    columns = f"{'build':14}{'type':12}{'ns / parameter':>28}{'bytes':>7}{'GB/s':>28} {'x their time':>27}"
    print(columns, flush=True)
    all_turns = []
    for python in [sys.executable, *options.build]:  # one build after the other: memory is for two at a time
        with Several() as several:
            for dtype in BYTES:
                argv = [python, os.path.abspath(__file__), *passed_on, "--worker", dtype]
                several.start(dtype, argv, thread_variables(count))
            turns = take_turns(several.workers, options.turns) if several.workers else []
        all_turns += turns
        for dtype, why in several.lacking.items():
            print(f"{python}: {dtype}: not on this build: {why}", flush=True)
        for worker in several.workers:
            size, units = BYTES[worker.name], [turn[worker.name] for turn in turns]
            elements = units[0].value["elements"]
            ratios = [unit.seconds / (elements * size / unit.value["rate"]) for unit in units]
            print(
                f"{worker.torch:14}{worker.name:12}{middle([1e9 * unit.seconds / elements for unit in units]):>28}"
                f"{size:7}{middle([unit.value['rate'] / 1e9 for unit in units], 1):>28} {middle(ratios):>27}",
                flush=True,
            )
    write_samples(options.samples, {"model": size_name(config.model), "threads": count}, all_turns)


if __name__ == "__main__":
    main()
