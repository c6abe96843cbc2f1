"""Measures the cost of the flight recorder: its share of a step, and steps with and without it.

    .venv/bin/python benchmarks/recorder.py --pairs 1000          # a tiny model on two ranks, three layouts
    .venv/bin/python benchmarks/recorder.py --preset 124m --pairs 5 --set model.seq_len=256

Two trainers of the same configuration take turns on the same ranks, one of them with a recorder, so that a slow moment
of a shared machine falls on both. ``calls`` is the number of uses of the recorder in a step of rank 0 (an MPI call
begins, returns, is waited for, or ends; a phase begins). ``us`` is the time of one of them inside a step, where caches
are cold, in microseconds, as a mean of the medians of each kind. ``share`` is their product as a fraction of the step.
``loop`` is the processor time of one of them in a loop that does nothing else. ``ratio`` is the time of the step with
the recorder divided by that of the step without it: the median of the pairs with its 95 % interval, and the range of
their middle half.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from ranks import open_patient_world, run_ranks

from fugaku_gpt.comm import Communicator, FlightRecorder, ProcessGrid, open_world
from fugaku_gpt.config import load_run_config
from fugaku_gpt.data.random_samples import RandomSamples
from fugaku_gpt.machine.local import usable_cores
from fugaku_gpt.machine.rank import launched_rank
from fugaku_gpt.records.flight import FORWARD
from fugaku_gpt.training.startup import prepare_process
from fugaku_gpt.training.trainer import Trainer

LAYOUTS = ("dp=2 zero=1", "tp=2", "pp=2")
METHODS = ("enter", "posted", "wait", "leave", "mark_phase")  # all that a step uses
HEAD = f"{'layout':>12} {'step ms':>9} {'calls':>6} {'us':>6} {'share':>8} {'loop us':>8} {'ratio':>7} "
HEAD += f"{'95 %':>15} {'middle half':>15}"


class Timed:
    """Times every use of a recorder within the context."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self._recorder = recorder
        self.seconds: Dict[str, List[float]] = {method: [] for method in METHODS}

    def __enter__(self) -> "Timed":
        for method in METHODS:
            setattr(self._recorder, method, self._timed(getattr(self._recorder, method), self.seconds[method]))
        return self

    def __exit__(self, *_: object) -> None:
        for method in METHODS:
            delattr(self._recorder, method)

    def _timed(self, original: Callable[..., Any], into: List[float]) -> Callable[..., Any]:
        clock = time.perf_counter

        def call(*arguments: Any, **keywords: Any) -> Any:
            before = clock()
            value = original(*arguments, **keywords)
            into.append(clock() - before)
            return value

        return call


def in_a_loop(recorder: FlightRecorder, group: int, count: int = 20000) -> float:
    """Processor time of one use in seconds, in a loop of phases with one call each, which is waited for."""
    before = time.process_time()
    for number in range(count):
        recorder.mark_phase(FORWARD, number, 0)
        ordinal = recorder.enter(group, "all_reduce", "torch.float32", (4, 128, 512), blocking=False)
        recorder.posted(ordinal)
        recorder.wait(ordinal)
        recorder.leave(ordinal)
    return (time.process_time() - before) / count / len(METHODS)


def measure(plain: Communicator, recorded: Communicator, layout: str, options: argparse.Namespace) -> str:
    """Measures a row of the table. Collective."""
    recorder = recorded.recorder
    assert recorder is not None
    layout_settings = [f"layout.{setting}" for setting in layout.split()]
    config = load_run_config(preset=options.preset, overrides=[*layout_settings, *options.settings])
    samples = RandomSamples(config)
    without, with_it = (
        Trainer(config, ProcessGrid(world, config.layout, kv_copies=config.kv_copies), samples)
        for world in (plain, recorded)
    )

    def step(trainer: Trainer) -> float:
        plain.barrier()
        before = time.perf_counter()
        trainer.step()
        return time.perf_counter() - before

    for trainer in (without, with_it):
        step(trainer)
        step(trainer)
    pairs = []
    for pair in range(options.pairs):
        order = (without, with_it) if pair % 2 else (with_it, without)
        seconds = {trainer: step(trainer) for trainer in order}
        pairs.append((seconds[with_it], seconds[without]))
    with Timed(recorder) as timed:
        for _ in range(options.steps):
            step(with_it)
    kinds = [times for times in timed.seconds.values() if times]
    calls = sum(map(len, kinds)) / options.steps
    cost = sum(statistics.median(times) * len(times) for times in kinds) / options.steps  # seconds in a step
    usual = statistics.median(seconds for _, seconds in pairs)
    ratios = sorted(recorded_seconds / plain_seconds for recorded_seconds, plain_seconds in pairs)
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    loop = in_a_loop(recorder, recorder.group("loop", range(plain.size), plain.rank))
    return (
        f"{layout:>12} {usual * 1e3:9.2f} {calls:6.0f} {cost / calls * 1e6:6.2f} {cost / usual:8.3%} {loop * 1e6:8.2f} "
        f"{statistics.median(ratios):7.4f} {'{:.4f}-{:.4f}'.format(*median_interval(ratios)):>15} "
        f"{f'{low:.4f}-{high:.4f}':>15}"
    )


def median_interval(values: Sequence[float]) -> Tuple[float, float]:
    """The two of the sorted values between which the median of their distribution lies with a probability of 95 %, by
    the binomial distribution. With fewer than 6 values these are the smallest and largest, with a lower probability."""
    reach = 1.96 * math.sqrt(len(values)) / 2.0
    low = max(0, math.floor(len(values) / 2.0 - reach))
    return values[low], values[-1 - low]


def main(arguments: Optional[List[str]] = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=10, help="Steps in which each use of the recorder is timed.")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args(arguments)
    if launched_rank() is None:
        print("\n".join(run_ranks(2, __file__, sys.argv[1:] if arguments is None else arguments, timeout=3600.0)))
        return
    prepare_process(1)
    plain = open_patient_world()
    folder = Path(plain.broadcast_json(tempfile.mkdtemp(prefix="recorder-") if not plain.rank else ""))
    try:
        recorded = open_world(folder, threads=len(usable_cores()) + 1)  # patient too
        if plain.rank == 0:
            print(HEAD, flush=True)
        for layout in LAYOUTS:
            row = measure(plain, recorded, layout, options)
            if plain.rank == 0:
                print(row, flush=True)
        plain.barrier()
    finally:
        if plain.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
