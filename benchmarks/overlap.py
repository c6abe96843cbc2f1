"""Measures how much of the replicas' communication is hidden by computation: the log's ``hidden communication``.

    .venv/bin/python benchmarks/overlap.py                    # two replicas, ZeRO 0 and 1
    .venv/bin/python benchmarks/overlap.py --replicas 4 --steps 20 --set model.hidden=768

The table has one row for each stage of ZeRO, in milliseconds per step on rank 0. ``alone`` is the time that sums of
gradients and gathers of parameters take if the replicas first wait for each other, and compute nothing at the same
time. ``exposed`` is the time that they cost the rank in steps that do compute: calls between computations and from
within kernels (``training.progress_ms``, the column ``from calls`` for sums), and waiting for messages or for a late
replica. ``hidden`` is 1 - exposed / alone on the rank where it is largest, since the last replica waits for no other.
The table has the time of a step too, since ranks that move messages with their own cores compute more slowly. On one
machine a message is a copy by the ranks' own cores: calls that make it are exposed, and little can be hidden; hiding
more needs a network.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import List, Optional

from ranks import open_patient_world, run_ranks

from fugaku_gpt.comm import Communicator, ProcessGrid
from fugaku_gpt.config import load_run_config
from fugaku_gpt.data.random_samples import RandomSamples
from fugaku_gpt.layout.communications import is_calibration_step
from fugaku_gpt.machine.rank import launched_rank
from fugaku_gpt.training.startup import prepare_process
from fugaku_gpt.training.trainer import Trainer

MODEL = (
    "model.layers=6",
    "model.hidden=384",
    "model.heads=6",
    "model.seq_len=256",
    "model.vocab_size=8192",
    "training.micro_batch=2",
    "training.bucket_mib=4",
)
MICRO_BATCHES = 2


def measure(world: Communicator, zero: int, steps: int, settings: List[str]) -> str:
    """A row of the table. Collective."""
    batch = f"training.global_batch={2 * MICRO_BATCHES * world.size}"
    layout = (f"layout.dp={world.size}", f"layout.zero={zero}")
    config = load_run_config(overrides=[*MODEL, batch, *layout, *settings])
    trainer = Trainer(config, ProcessGrid(world, config.layout, kv_copies=config.kv_copies), RandomSamples(config))
    took: List[float] = []
    for step in range(3 + steps):  # a cold one, and two that are timed alone
        before = time.perf_counter()
        trainer.step()
        if step and not is_calibration_step(step):
            took.append(time.perf_counter() - before)
    trainer.finish()
    overlap = trainer.reducer.overlap
    kinds = [kind for kind in (overlap.sums, overlap.gathers) if kind is not None]
    alone = [1e3 * (kind.alone_seconds or 0.0) for kind in kinds]
    exposed = [1e3 * (kind.per_step or 0.0) for kind in kinds]
    polled = 1e3 * overlap.sums.polled_seconds / overlap.sums.steps
    figures = [alone[0], sum(alone[1:]), exposed[0], polled, sum(exposed[1:]), 1e3 * sum(took) / len(took)]
    return f"{zero:4}" + "".join(f"{figure:14.1f}" for figure in figures) + f"{overlap.read():10.2f}"


def main(arguments: Optional[List[str]] = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="Number of overlapping steps to time.")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args(arguments)
    if options.replicas < 2:
        parser.error(f"--replicas {options.replicas}: valid: 2 or more")
    if launched_rank() is not None:
        prepare_process(1)
        world = open_patient_world()
        for zero in (0, 1):
            row = measure(world, zero, options.steps, options.settings)
            if world.rank == 0:
                print(row, flush=True)
        return
    heads = ("sums alone", "gathers alone", "sums exposed", "from calls", "gathers exp.", "a step")
    print(f"{'zero':4}" + "".join(f"{head:>14}" for head in heads) + f"{'hidden':>10}", flush=True)
    for line in run_ranks(options.replicas, __file__, arguments if arguments is not None else sys.argv[1:]):
        print(line)


if __name__ == "__main__":
    main()
