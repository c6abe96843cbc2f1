"""Measures the cost of tracing (``training.trace_iterations``): steps with a trace and without, in turns.

    .venv/bin/python benchmarks/tracing.py --pairs 1000          # a tiny model on two ranks, three layouts
    .venv/bin/python benchmarks/tracing.py --preset 124m --pairs 15 --set model.seq_len=256

One trainer with a flight recorder makes all steps of a layout, in one process of each rank. Of each pair of steps one
is traced, by turns the first and the second, so that a slow moment of a shared machine falls on both. The memory of a
trace is made before its step, as in a run. ``records`` is the number of calls and phases that rank 0 keeps of a step.
``ratio`` is the time of the traced step divided by that of the other: the median of the pairs with its 95 % interval,
and the range of their middle half. What a trace costs before and after its iterations, to make its memory, to compare
clocks and to be written, is not in these figures; nor is what it would cost where ranks have cores of their own.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import List, Optional, Tuple

from ranks import run_ranks
from recorder import LAYOUTS, median_interval

from fugaku_gpt.comm import Communicator, ProcessGrid, open_world
from fugaku_gpt.comm.trace import TraceBuffer
from fugaku_gpt.config import load_run_config
from fugaku_gpt.data.random_samples import RandomSamples
from fugaku_gpt.layout.trace_room import trace_room
from fugaku_gpt.machine.local import usable_cores
from fugaku_gpt.machine.rank import launched_rank
from fugaku_gpt.records.trace import CALL_INT64S, PHASE_INT64S
from fugaku_gpt.training.startup import prepare_process
from fugaku_gpt.training.trainer import Trainer

HEAD = f"{'layout':>12} {'step ms':>9} {'records':>8} {'ratio':>7} {'95 %':>15} {'middle half':>15}"
_WARM_UP = 4  # steps, among them those whose communication is timed alone


def measure(world: Communicator, layout: str, options: argparse.Namespace) -> str:
    """Measures a row of the table. Collective."""
    recorder = world.recorder
    assert recorder is not None
    config = load_run_config(
        preset=options.preset, overrides=[*(f"layout.{setting}" for setting in layout.split()), *options.settings]
    )
    grid = ProcessGrid(world, config.layout, kv_copies=config.kv_copies)
    trainer = Trainer(config, grid, RandomSamples(config))
    room = trace_room(config, grid.coordinates.pp, 1)
    records = 0

    def step(is_traced: bool) -> float:
        nonlocal records
        buffer = TraceBuffer(recorder, *room) if is_traced else None
        world.barrier()
        before = time.perf_counter()
        if buffer is not None:
            buffer.start()
        trainer.step()
        if buffer is not None:
            buffer.stop()
        seconds = time.perf_counter() - before
        if buffer is not None:
            assert not buffer.is_cut
            records = len(buffer.calls) // (8 * CALL_INT64S) + len(buffer.phases) // (8 * PHASE_INT64S)
        return seconds

    for _ in range(_WARM_UP):
        step(is_traced=False)
    pairs: List[Tuple[float, float]] = []
    for pair in range(options.pairs):
        order = (False, True) if pair % 2 else (True, False)
        seconds = {is_traced: step(is_traced) for is_traced in order}
        pairs.append((seconds[True], seconds[False]))
    usual = statistics.median(seconds for _, seconds in pairs)
    ratios = sorted(traced / plain for traced, plain in pairs)
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    return (
        f"{layout:>12} {usual * 1e3:9.2f} {records:8} {statistics.median(ratios):7.4f} "
        f"{'{:.4f}-{:.4f}'.format(*median_interval(ratios)):>15} {f'{low:.4f}-{high:.4f}':>15}"
    )


def main(arguments: Optional[List[str]] = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args(arguments)
    if launched_rank() is None:
        print("\n".join(run_ranks(2, __file__, sys.argv[1:] if arguments is None else arguments, timeout=3600.0)))
        return
    prepare_process(1)
    alone = open_world(None)
    folder = Path(alone.broadcast_json(tempfile.mkdtemp(prefix="tracing-") if not alone.rank else ""))
    try:
        world = open_world(folder, threads=len(usable_cores()) + 1)  # ranks that wait leave the cores to others
        if world.rank == 0:
            print(HEAD, flush=True)
        for layout in LAYOUTS:
            row = measure(world, layout, options)
            if world.rank == 0:
                print(row, flush=True)
        world.barrier()
    finally:
        if alone.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
