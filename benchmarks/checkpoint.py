"""Measures the cost of checkpoints: how long training stalls, and how long writing and loading take.

    .venv/bin/python benchmarks/checkpoint.py --folder /a/disk          # 124M on two ranks, ZeRO 0 and 1
    .venv/bin/python benchmarks/checkpoint.py --preset tiny --ranks 1

The table has one row for each way of saving. ``stall`` is the time in seconds for which the slowest rank's step waited
at its end: with ``asynchronous`` for the copy in memory (the first copy touches that memory, and is not counted),
otherwise for the complete save. ``write`` is the time until the slowest rank's data is on the disk. ``slower`` is the
extra time of the steps during the write, which takes processor time from the ranks. ``load`` is the time to read the
checkpoint on all ranks and compare its check sums, with the data evicted from the kernel's cache. MB are 10^6 bytes of
the complete checkpoint.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import List, Optional

from ranks import open_patient_world, run_ranks

from fugaku_gpt.checkpoint.directory import list_checkpoints
from fugaku_gpt.checkpoint.manifest import read_manifest
from fugaku_gpt.comm import Communicator, ProcessGrid
from fugaku_gpt.config import load_run_config
from fugaku_gpt.data.random_samples import RandomSamples
from fugaku_gpt.machine.rank import launched_rank
from fugaku_gpt.training.checkpoint import CheckpointSaver
from fugaku_gpt.training.resume import load_checkpoint
from fugaku_gpt.training.startup import prepare_process
from fugaku_gpt.training.trainer import Trainer

HEAD = f"{'zero':>4} {'way':>12} {'MB':>8} {'stall s':>8} {'MB/s':>8} {'write s':>8} {'MB/s':>8} {'slower s':>8} "
HEAD += f"{'load s':>8} {'MB/s':>8} {'step s':>8}"


class _Log:
    """Stands in for rank 0's log, and records the size and the time of a checkpoint."""

    size, write_seconds = 0, 0.0

    def checkpoint(self, _iteration: int, _name: str, size: int, _ranks: int, _stall: float, seconds: float) -> None:
        """Records a checkpoint that has been written."""
        self.size, self.write_seconds = size, seconds

    def failed_checkpoint(self, iteration: int, error: str) -> None:
        """Exits if a checkpoint could not be written."""
        raise SystemExit(f"checkpoint of iteration {iteration}: {error}")

    def print_line(self, line: str) -> None:
        """Prints a line."""
        print(line, flush=True)


def measure(world: Communicator, zero: int, way: str, folder: Path, options: argparse.Namespace) -> str:
    """Measures one row of the table, as medians. Collective."""
    layout = [f"layout.dp={world.size}", f"layout.zero={zero}", f"training.global_batch={world.size}"]
    layout.append(f"checkpoint.asynchronous={str(way == 'asynchronous').lower()}")
    config = load_run_config(preset=options.preset, overrides=["training.micro_batch=1", *layout, *options.settings])
    trainer = Trainer(config, ProcessGrid(world, config.layout, kv_copies=config.kv_copies), RandomSamples(config))
    log = _Log()
    checkpoints = CheckpointSaver(trainer, folder, log if world.rank == 0 else None)  # type: ignore[arg-type]  # all it asks

    def step() -> float:
        before = time.perf_counter()
        checkpoints.advance(trainer.step())
        return _slowest(world, time.perf_counter() - before)

    step()  # a cold one, whose sums do not overlap
    steps = [step() for _ in range(options.steps)]
    usual = statistics.median(steps)
    stalls, writes, slower = [], [], []
    for save in range(options.saves + 1):
        world.barrier()
        before = time.perf_counter()
        checkpoints.save({})
        stall, extra_seconds = _slowest(world, time.perf_counter() - before), 0.0
        while checkpoints.iteration_being_saved is not None:
            extra_seconds += step() - usual
        checkpoints.finish()
        if save:  # the first one touches the memory of the copy
            stalls.append(stall)
            writes.append(log.write_seconds)
            slower.append(extra_seconds)
    loads = []
    path = list_checkpoints(folder)[0].path
    manifest = read_manifest(path)
    for _ in range(options.saves):
        if world.rank == 0:
            _out_of_cache(path)
        world.barrier()
        before = time.perf_counter()
        problem = load_checkpoint(trainer, path, manifest)
        loads.append(_slowest(world, time.perf_counter() - before))
        if problem is not None:
            raise SystemExit(problem)
    if world.rank > 0:
        return ""
    size = log.size / 1e6
    stall, write, load_in = (statistics.median(figures) for figures in (stalls, writes, loads))
    figures = (stall, size / stall, write, size / write, statistics.median(slower), load_in, size / load_in, usual)
    return f"{zero:4} {way:>12} {size:8.1f} " + " ".join(
        f"{figure:8.0f}" if index in (1, 3, 6) else f"{figure:8.3f}" for index, figure in enumerate(figures)
    )


def _slowest(world: Communicator, seconds: float) -> float:
    import torch

    figure = torch.tensor([seconds], dtype=torch.float64)
    world.all_reduce(figure, "max")
    return float(figure)


def _out_of_cache(path: Path) -> None:
    for file in path.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main(arguments: Optional[List[str]] = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="124m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="Number of steps without a save, for comparison.")
    parser.add_argument("--saves", type=int, default=3, help="Number of counted saves, and of loads.")
    temporary = Path(tempfile.gettempdir())
    parser.add_argument("--folder", type=Path, default=temporary, help="Folder on the disk to be measured.")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args(arguments)
    if launched_rank() is None:
        passed_on = sys.argv[1:] if arguments is None else arguments
        print("\n".join(run_ranks(options.ranks, __file__, passed_on, timeout=3600.0)))
        return
    prepare_process(1)
    world = open_patient_world()
    folder = Path(
        world.broadcast_json(tempfile.mkdtemp(prefix="checkpoint-", dir=options.folder) if not world.rank else "")
    )
    if world.rank == 0:
        print(HEAD, flush=True)
    try:
        for zero in (0, 1) if world.size > 1 else (0,):
            for way in ("asynchronous", "synchronous"):
                row = measure(world, zero, way, folder / f"{zero}-{way}", options)
                if world.rank == 0:
                    print(row, flush=True)
    finally:
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
