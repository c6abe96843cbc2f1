"""Times the command `train` until the end of the first step of the tiny model, beside the minimum of any start.

    .venv/bin/python benchmarks/startup.py
    .venv/bin/python benchmarks/startup.py --build .venv-torch17/bin/python --turns 9

Each row is a process that is started anew in every turn: ``floor`` imports torch, imports mpi4py, which calls MPI_Init,
and opens the data; ``train`` is the command on the same data until rank 0 prints the line of iteration 1, including
everything that it checks and writes before that; ``torch`` is the import alone. Seconds are measured from the start of
the process to that line. The processor time, which other work on the machine disturbs less, is that of the process and
its children until they end. The data is prepared once, from the source code of Python's standard library.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional

from turns import ROOT, middle

from fugaku_gpt.machine.local import processor_name, usable_cores

DONE = "ready"
FLOOR = f"""
import sys
import numpy
import torch
from mpi4py import MPI
torch.set_num_threads(int(sys.argv[2]))
tokens = numpy.memmap(sys.argv[1] + "/corpus.bin", dtype=numpy.uint16, mode="r")
with open(sys.argv[1] + "/corpus.idx", "rb") as file:
    index = file.read()
assert MPI.COMM_WORLD.size == 1 and len(tokens) and len(index) and tokens[0] >= 0
print("{DONE}", flush=True)
"""


class Start(NamedTuple):
    """Wall-clock seconds until the line is printed, and seconds of processor time until the end."""

    wall: float
    processor: float


def start(argv: List[str], until: str, threads: int) -> Start:
    """Runs a command to its end.

    Raises:
        SystemExit: it fails, or prints no line that begins with ``until``.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)}
    # modules are compiled once, in the turn that is not counted, as those of an installed package are
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
    assert process.stdout is not None
    wall, output = None, []
    try:
        for line in process.stdout:
            output.append(line.decode())
            if wall is None and output[-1].startswith(until):
                wall = time.perf_counter() - began
        code = process.wait()
    except BaseException:
        process.kill()
        process.wait()
        raise
    if wall is None or code != 0:
        raise SystemExit("".join(output) + f"{argv[0]} ended with exit code {code}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Start(wall, sum(getattr(after, kind) - getattr(before, kind) for kind in ("ru_utime", "ru_stime")))


def measure(python: str, folder: Path, options: argparse.Namespace, threads: int) -> List[Dict[str, Start]]:
    """Measures the turns on one build, after warm-up turns, the first of which reads the files of the libraries."""
    data, turns = str(folder / "data"), []
    settings = ["training.iterations=1", "checkpoint.at_end=false", f"node.threads_per_rank={threads}"]
    arguments = [word for setting in [*settings, *options.settings] for word in ("--set", setting)]
    for turn in range(1 - options.warm_ups, options.turns + 1):
        out = str(folder / f"run-{len(list(folder.iterdir()))}")
        commands = {
            "torch": ([python, "-c", f"import torch; print('{DONE}', flush=True)"], DONE),
            "floor": ([python, "-c", FLOOR, data, str(threads)], DONE),
            "train": (
                [python, "-m", "fugaku_gpt", "train", "--preset", "tiny", "--data", data, *arguments, "--out", out],
                "iteration 1/1 ",
            ),
        }
        names = list(commands) if turn % 2 else list(reversed(commands))
        starts = {name: start(*commands[name], threads) for name in names}
        print(
            f"turn {turn}/{options.turns}: {starts['floor'].wall:.2f} s, {starts['train'].wall:.2f} s", file=sys.stderr
        )
        if turn > 0:
            turns.append(starts)
    return turns


def main(arguments: Optional[List[str]] = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5, help="Number of counted turns, after the warm-up turns.")
    parser.add_argument("--warm-ups", type=int, default=1, help="Number of warm-up turns; 0 only to try the program.")
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="Setting of a run."
    )
    parser.add_argument("--build", action="append", default=[], help="Interpreter of a further build; repeatable.")
    options = parser.parse_args(arguments)
    threads = len(usable_cores())
    with tempfile.TemporaryDirectory(prefix="startup-") as scratch:
        folder = Path(scratch)
        prepare = ["data", "prepare", "--stdlib", "--vocab-size", "512", "--limit-mib", "0.5"]
        argv = [sys.executable, "-m", "fugaku_gpt", *prepare, "--out", str(folder / "data")]
        subprocess.run(argv, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=sys.stderr.fileno())
        print(f"tiny model, {threads} threads, {processor_name()}, {options.turns} turns")
        print(f"{'':10}{'seconds':>22}{'x floor':>22}{'processor s':>22}{'x floor':>22}")
        for python in [sys.executable, *options.build]:
            turns = measure(python, folder, options, threads)
            print(python)
            for name in turns[0]:
                columns = ""
                for kind in Start._fields:
                    seconds = [getattr(turn[name], kind) for turn in turns]
                    ratios = [getattr(turn[name], kind) / getattr(turn["floor"], kind) for turn in turns]
                    columns += f"{middle(seconds, 2):>22}{middle(ratios, 2):>22}"
                print(f"{name:10}{columns}", flush=True)


if __name__ == "__main__":
    main()
