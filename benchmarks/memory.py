"""Measures the peak memory that ZeRO, recompute, sequence parallelism, 1F1B and bfloat16 save, beside the formulas.

    .venv/bin/python benchmarks/memory.py
    .venv/bin/python benchmarks/memory.py --set model.layers=4 --set model.hidden=256 --only zero

Each row is one run of real ranks: the kernel's high-water mark of resident memory over two steps, above the memory that
the same rank had before its model was built (interpreter, libraries, MPI, and the pages of a small model's step). With
several ranks, the largest counts. The formula is that of `plan memory` (``planner/trainer/run_memory.py``) without its
base. It leaves out the temporaries of the running operation, and blocks that the allocator keeps. A line ``saved`` is
the difference between two rows, in which most of that cancels, except with selective recompute: its backward pass
computes the flags of attention dropout again, from random numbers that take more memory than the flags. The last column
is the measured value over that of the formula.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence, Tuple

from fugaku_gpt.config import RunConfig, load_run_config
from fugaku_gpt.formulas.parameters import size_name
from fugaku_gpt.machine.rank import launched_rank
from fugaku_gpt.planner.trainer.run_memory import memory_of_run

BASE = (
    "model.layers=8",
    "model.hidden=512",
    "model.heads=8",
    "model.seq_len=256",
    "model.vocab_size=2048",
    "model.attention_dropout=0.1",  # whose flags selective does not keep
    "training.bucket_mib=4",
    "training.global_batch=4",
)
STEPS = 2  # the optimizer's state is allocated in the first
MIB = 2.0**20


@dataclass(frozen=True)
class Pair:
    """Two runs that differ in one thing; the second should need less."""

    name: str
    common: Tuple[str, ...]
    plain: Tuple[str, Tuple[str, ...]]
    saving: Tuple[str, Tuple[str, ...]]


_SINGLE_RANK = ("training.micro_batch=4",)
_TWO_RANKS = ("layout.tp=2", "training.micro_batch=4", "model.dropout=0.1")
PAIRS = (
    Pair("zero", ("layout.dp=4",), ("dp=4, ZeRO 0", ()), ("dp=4, ZeRO 1", ("layout.zero=1",))),
    Pair("full", _SINGLE_RANK, ("recompute none", ()), ("recompute full", ("training.recompute=full",))),
    Pair("selective", _SINGLE_RANK, ("recompute none", ()), ("recompute selective", ("training.recompute=selective",))),
    Pair(
        "sequence",
        (*_TWO_RANKS, "training.recompute=selective"),
        ("tp=2", ()),
        ("tp=2, sequence parallel", ("layout.sequence_parallel=true",)),
    ),
    Pair(
        "pipeline",
        ("layout.pp=2", "training.global_batch=8"),
        ("pp=2, gpipe, 8 micro-batches", ("layout.schedule=gpipe",)),
        ("pp=2, 1f1b, 8 micro-batches", ()),
    ),
    Pair("bf16", _SINGLE_RANK, ("float32", ()), ("bfloat16", ("training.dtype=bfloat16",))),
)


def predicted_bytes(config: RunConfig) -> int:
    """The formulas' peak of the rank that needs most, above its memory before the model is built."""
    memory = memory_of_run(config, threads=1)
    return memory.bytes_of_rank - memory.stages[memory.peak_stage]["base"]


def measure(config: RunConfig, small: RunConfig) -> Dict[str, float]:
    """Trains ``config`` for a few steps on these ranks; returns the largest base and the largest peak above it, in
    bytes. Collective."""
    import torch
    from ranks import open_patient_world

    from fugaku_gpt.comm import ProcessGrid
    from fugaku_gpt.training.startup import prepare_process
    from fugaku_gpt.training.trainer import Trainer

    prepare_process(1)
    world = open_patient_world()
    warm = Trainer(small, ProcessGrid(world, small.layout, kv_copies=small.kv_copies), _Random(small))
    warm.step()
    del warm
    world.barrier()
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # the high-water mark starts anew
    base = _status_bytes("VmHWM")
    trainer = Trainer(config, ProcessGrid(world, config.layout, kv_copies=config.kv_copies), _Random(config))
    for _ in range(STEPS):
        trainer.step()
    trainer.buffers.parameters.sum()  # the last gather of parameters is over
    base_and_peak = torch.tensor([base, _status_bytes("VmHWM") - base], dtype=torch.float64)
    world.all_reduce(base_and_peak, "max")
    return {"base": float(base_and_peak[0]), "peak": float(base_and_peak[1])}


def _status_bytes(key: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        match = re.search(rf"^{key}:\s+(\d+) kB$", file.read(), re.MULTILINE)
    if match is None:
        raise SystemExit(f"/proc/self/status has no {key}: this needs Linux")
    return 1024 * int(match[1])


class _Random:
    """Samples of random tokens."""

    def __init__(self, config: RunConfig) -> None:
        import numpy as np

        self._shape, self._top = config.model.seq_len + 1, config.model.vocab_size
        self._numpy = np

    def batch(self, first, count):  # type: ignore[no-untyped-def]
        """Token ids [count, seq_len + 1] of the samples from ``first`` on."""
        return self._numpy.random.RandomState(first).randint(0, self._top, size=(count, self._shape), dtype="int64")


def _run(settings: Sequence[str]) -> Tuple[float, float]:
    """Measured and predicted bytes of a run with these settings."""
    from ranks import run_ranks

    config = load_run_config(overrides=settings)
    lines = run_ranks(config.layout.ranks, __file__, ["--rank", *settings])
    result = next(json.loads(line) for line in lines if line.startswith('{"base"'))
    return result["peak"], float(predicted_bytes(config))


def _row(name: str, measured: float, predicted: float) -> str:
    return f"{name:34}{measured / MIB:10.1f} MiB{predicted / MIB:10.1f} MiB{measured / predicted:8.3f}"


def main(arguments: Optional[List[str]] = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--only", nargs="+", choices=[pair.name for pair in PAIRS], help="Pairs to run; default: all.")
    parser.add_argument("--rank", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    launched = launched_rank()
    if launched is not None:
        config = load_run_config(overrides=options.rank)
        layers = f"model.layers={config.layout.pp * config.layout.chunks}"
        small = [layers, "model.hidden=64", "model.heads=8", "model.seq_len=64", "model.vocab_size=256"]
        result = measure(config, load_run_config(overrides=[*options.rank, *small]))
        if launched.rank == 0:
            print(json.dumps(result), flush=True)
        return
    base = [*BASE, *options.settings]
    shape = load_run_config(overrides=base).model
    print(f"{size_name(shape)}: {shape.layers} layers, hidden {shape.hidden}, sequence {shape.seq_len}; MiB of a rank")
    print(f"{'':34}{'measured':>14}{'formula':>14}{'ratio':>8}", flush=True)
    done: Dict[Tuple[str, ...], Tuple[float, float]] = {}
    for pair in PAIRS:
        if options.only is not None and pair.name not in options.only:
            continue
        figures = []
        for name, more in (pair.plain, pair.saving):
            settings = (*base, *pair.common, *more)
            if settings not in done:
                done[settings] = _run(settings)
            figures.append(done[settings])
            print(_row(name, *figures[-1]), flush=True)
        (plain, plain_predicted), (saving, saving_predicted) = figures
        print(_row("  saved", plain - saving, plain_predicted - saving_predicted), flush=True)


if __name__ == "__main__":
    sys.exit(main())
