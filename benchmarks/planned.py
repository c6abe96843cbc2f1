"""Compares planned seconds and memory of our trainer with measured ones: 20 layouts of two models on 1 to 4 ranks.

    .venv/bin/python benchmarks/planned.py                        # on an idle machine of two cores, about ten minutes
    .venv/bin/python benchmarks/planned.py --layouts 4
    .venv/bin/python benchmarks/planned.py --machine m.yaml       # from an earlier `plan probe --ranks 4 --threads 1`

It begins with a probe of up to 4 ranks of one thread (``plan probe``), plans every run from it, and then runs them:
real ranks, the trainer's own step on random tokens. Seconds are the median of some steps after the first two; memory is
the kernel's high-water mark of resident memory of the largest rank, libraries included. ``off`` is planned over
measured, minus 1; a ``*`` marks an 80 % interval that does not contain the measured time. The last lines compare the
results with the bars, and the exit code is 1 if one is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from fugaku_gpt.cli.main import run as run_cli
from fugaku_gpt.config import RunConfig, load_run_config
from fugaku_gpt.formulas.parameters import size_name
from fugaku_gpt.machine.constants import load_machine
from fugaku_gpt.machine.framework import framework_of
from fugaku_gpt.machine.rank import launched_rank
from fugaku_gpt.planner.trainer.run_memory import memory_of_run
from fugaku_gpt.planner.trainer.seconds import LocalPrediction, predict_run

SMALL = (
    "model.layers=4", "model.hidden=256", "model.heads=8", "model.seq_len=128", "model.vocab_size=4096",
    "training.micro_batch=2", "training.global_batch=16",
)  # fmt: skip
LARGE = (
    "model.layers=8", "model.hidden=512", "model.heads=8", "model.seq_len=256", "model.vocab_size=8192",
    "training.micro_batch=1", "training.global_batch=4",
)  # fmt: skip
# the models take turns, so that the first few layouts are of both
LAYOUTS: Tuple[Tuple[Sequence[str], Sequence[str]], ...] = (
    (SMALL, ["layout.dp=1"]),
    (LARGE, ["layout.dp=2"]),
    (SMALL, ["layout.tp=2"]),
    (LARGE, ["layout.pp=2"]),
    (SMALL, ["layout.dp=2", "layout.tp=2"]),
    (LARGE, ["layout.dp=1"]),
    (SMALL, ["layout.pp=2", "layout.chunks=2", "layout.schedule=interleaved"]),
    (LARGE, ["layout.tp=2", "layout.sequence_parallel=true"]),
    (SMALL, ["layout.dp=2"]),
    (LARGE, ["layout.tp=2", "layout.pp=2"]),
    (SMALL, ["layout.dp=1", "training.recompute=full"]),
    (LARGE, ["layout.dp=2", "layout.zero=1"]),
    (SMALL, ["layout.dp=3", "training.global_batch=18"]),
    (LARGE, ["layout.dp=1", "training.dtype=bfloat16"]),
    (SMALL, ["layout.pp=4"]),
    (LARGE, ["layout.tp=2"]),
    (SMALL, ["layout.dp=2", "layout.zero=1", "training.dtype=bfloat16"]),
    (LARGE, ["layout.dp=4"]),
    (SMALL, ["layout.pp=2", "layout.schedule=gpipe", "model.dropout=0.1"]),
    (LARGE, ["layout.dp=2", "layout.tp=2", "training.recompute=full"]),
)
RANKS = 4
SECONDS, LEAST, MOST = 6.0, 3, 12  # of a run's measured steps
TIME_BAR, MEMORY_BAR, BELOW_BAR = 0.15, 0.07, 0.05
MIB = 2.0**20


@dataclass(frozen=True)
class Row:
    """One run: planned and measured seconds per iteration, and bytes of the largest rank."""

    name: str
    ranks: int
    planned: LocalPrediction
    planned_bytes: int
    seconds: float
    peak_bytes: int

    @property
    def off(self) -> float:
        """The relative error of the planned seconds."""
        return self.planned.seconds.value / self.seconds - 1.0

    @property
    def memory_off(self) -> float:
        """The relative error of the planned memory."""
        return self.planned_bytes / self.peak_bytes - 1.0

    @property
    def is_in_interval(self) -> bool:
        """Whether the interval contains the measured seconds."""
        return self.planned.seconds.low <= self.seconds <= self.planned.seconds.high


def chosen(count: Optional[int]) -> List[List[str]]:
    """Settings of the first ``count`` layouts; default: all."""
    picked = LAYOUTS[: count or len(LAYOUTS)]
    return [[*model, *layout, "node.threads_per_rank=1"] for model, layout in picked]


def name_of(config: RunConfig) -> str:
    """A short name of model and layout."""
    layout, training = config.layout, config.training
    features = [f"{axis}{size}" for axis, size in (("dp", layout.dp), ("tp", layout.tp), ("pp", layout.pp)) if size > 1]
    features += [f"v{layout.chunks}"] if layout.chunks > 1 else []
    features += ["gpipe"] if layout.schedule == "gpipe" else []
    features += ["zero"] if layout.zero else []
    features += ["sp"] if layout.sequence_parallel else []
    features += ["recompute"] if training.recompute != "none" else []
    features += ["dropout"] if config.model.dropout else []
    features += ["bf16"] if training.dtype == "bfloat16" else []
    return f"{size_name(config.model)} {' '.join(features or ['1 rank'])}"


def measure(config: RunConfig) -> Dict[str, float]:
    """Runs steps on these ranks; returns median seconds, and the peak memory of the largest rank. Collective."""
    import torch

    from fugaku_gpt.comm import ProcessGrid, open_world
    from fugaku_gpt.data.random_samples import RandomSamples
    from fugaku_gpt.training.memory_guard import peak_resident_bytes
    from fugaku_gpt.training.startup import prepare_process
    from fugaku_gpt.training.trainer import Trainer

    prepare_process(1)
    world = open_world(threads=1)
    trainer = Trainer(config, ProcessGrid(world, config.layout, kv_copies=config.kv_copies), RandomSamples(config))
    trainer.step()
    before = time.perf_counter()
    trainer.step()
    once = torch.tensor([time.perf_counter() - before], dtype=torch.float64)
    world.all_reduce(once, "max")
    times = []
    for _ in range(max(LEAST, min(MOST, int(SECONDS / float(once))))):
        before = time.perf_counter()
        trainer.step()
        times.append(time.perf_counter() - before)
    trainer.finish()
    seconds_and_peak = torch.tensor([statistics.median(times), peak_resident_bytes()], dtype=torch.float64)
    world.all_reduce(seconds_and_peak, "max")
    return {"seconds": float(seconds_and_peak[0]), "peak": float(seconds_and_peak[1])}


def run(settings: Sequence[str], machine: Any) -> Row:
    """Plans a run, and then runs it."""
    from ranks import run_ranks

    config = load_run_config(overrides=settings)
    planned = predict_run(config, machine)
    memory = memory_of_run(config, framework_of(machine.probed.facts["torch"]), threads=1)
    lines = run_ranks(config.layout.ranks, __file__, ["--rank", *settings])
    result = next(json.loads(line) for line in lines if line.startswith('{"seconds"'))
    return Row(
        name_of(config), config.layout.ranks, planned, memory.bytes_of_rank, result["seconds"], int(result["peak"])
    )


HEADER = (
    f"{'run':28}{'ranks':>6}{'planned s':>11}{'80 %':>18}{'measured':>10}{'off':>8}"
    f"{'planned MiB':>13}{'measured':>10}{'off':>8}"
)


def line_of(row: Row) -> str:
    """A row of the table."""
    guess = row.planned.seconds
    interval = f"{guess.low:.3f} - {guess.high:.3f}{' ' if row.is_in_interval else '*'}"
    return (
        f"{row.name:28}{row.ranks:6}{guess.value:11.3f}{interval:>18}{row.seconds:10.3f}{100 * row.off:+7.1f}%"
        f"{row.planned_bytes / MIB:13.0f}{row.peak_bytes / MIB:10.0f}{100 * row.memory_off:+7.1f}%"
    )


def verdicts(rows: Sequence[Row]) -> List[Tuple[bool, str]]:
    """Whether each bar is met, and a line about it."""
    seconds = statistics.median(abs(row.off) for row in rows)
    memory = statistics.median(abs(row.memory_off) for row in rows)
    below = min(row.memory_off for row in rows)
    covered = sum(row.is_in_interval for row in rows)
    verdicts_and_texts = [
        (seconds <= TIME_BAR, f"time: off by {100 * seconds:.1f} % in the median (bar {100 * TIME_BAR:.0f} %)"),
        (memory <= MEMORY_BAR, f"memory: off by {100 * memory:.1f} % in the median (bar {100 * MEMORY_BAR:.0f} %)"),
        (below >= -BELOW_BAR, f"memory: {100 * below:+.1f} % at the lowest (bar {-100 * BELOW_BAR:+.0f} %)"),
    ]
    lines = [(met, f"{'met' if met else 'MISSED'}: {text}") for met, text in verdicts_and_texts]
    return [*lines, (True, f"80 % intervals hold {covered} of {len(rows)} measured times")]


def _machine(path: Optional[Path], seconds: float) -> Any:
    if path is not None:
        return load_machine(str(path))
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "machine.yaml")
        arguments = ["plan", "probe", "--ranks", str(RANKS), "--threads", "1", "--seconds", str(seconds), "--out", out]
        code = run_cli(arguments)
        if code:
            raise SystemExit(code)
        return load_machine(out)


def main(arguments: Optional[List[str]] = None) -> int:
    """Plans, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", type=int, metavar="K", help="Run only the first K layouts.")
    parser.add_argument("--machine", type=Path, metavar="FILE.yaml", help="Constants to be used instead of a probe.")
    parser.add_argument("--seconds", type=float, default=30.0, help="Seconds to spend on the probe.")
    parser.add_argument("--rank", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    launched = launched_rank()
    if launched is not None:
        result = measure(load_run_config(overrides=options.rank))
        if launched.rank == 0:
            print(json.dumps(result), flush=True)
        return 0
    machine = _machine(options.machine, options.seconds)
    print(f"\n{HEADER}", flush=True)
    rows = []
    for settings in chosen(options.layouts):
        rows.append(run(settings, machine))
        print(line_of(rows[-1]), flush=True)
    outcomes = verdicts(rows)
    for _, text in outcomes:
        print(text)
    beyond = sorted({text for row in rows for text in row.planned.extrapolated})
    for text in beyond:
        print(f"extrapolated: {text}")
    return 0 if all(met for met, _ in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
