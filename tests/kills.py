"""Kill a training run at random times and compare its metrics with those of a run that was never killed.

    python -m tests.kills --kills 100 --seed 1

A run of two ranks with asynchronous checkpoints is started with ``--resume auto``, and after a random time all of its
processes are killed with SIGKILL, launcher included. The files that are left must always suffice to resume: no start
may fail. After the last kill the run finishes, and its metrics must be those of a run that was never killed, bit for
bit.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, Tuple

import psutil

from fugaku_gpt.checkpoint.directory import list_checkpoints
from fugaku_gpt.checkpoint.retention import verify_checkpoint
from fugaku_gpt.records.run import RunDirectory
from tests.support.corpus import write_byte_corpus
from tests.support.events import has_reader_of_events, read_curves

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = (
    "model.layers=2",
    "model.hidden=64",
    "model.heads=2",
    "model.seq_len=32",
    "model.vocab_size=256",
    "model.dropout=0.1",
    "training.global_batch=4",
    "training.eval_interval=50",
    "training.eval_batches=1",
    "training.lr_schedule=constant",  # whatever the number of iterations
    "training.tensorboard=true",
    "layout.dp=2",
    "layout.zero=1",
    "node.threads_per_rank=1",
    "checkpoint.interval=5",
    "checkpoint.at_end=true",
)
_ENDLESS = 1_000_000  # iterations
_MORE = 10  # iterations after the last kill
_POLL_SECONDS = 0.02
_START_SECONDS = 240.0  # until the first new line, on a machine with other things to do
_KEYS = ("iteration", "loss", "grad_norm", "lr", "consumed_samples")


class KilledRun:
    """A training run that is killed at random times and resumed."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.out = folder / "run"
        self._folder = folder
        self._corpus = write_byte_corpus(folder / "bytes")
        self._dice = random.Random(seed)
        self.kills_by_phase: Dict[str, int] = {}

    def _command(self, out: Path, iterations: int) -> List[str]:
        command = [sys.executable, "-m", "fugaku_gpt", "train", "--data", str(self._corpus), "--out", str(out)]
        command += ["--ranks", "2", "--resume", "auto"]
        for setting in (*SETTINGS, f"training.iterations={iterations}"):
            command += ["--set", setting]
        return command

    def start_and_kill(self) -> None:
        """Start, and kill at a random time: while it starts, while it loads, or while it trains and writes."""
        before = self._lines()
        with open(self._folder / "said.txt", "ab") as log:
            process = subprocess.Popen(
                self._command(self.out, _ENDLESS), stdout=log, stderr=log, cwd=ROOT, env=_environment()
            )
        try:
            if self._dice.random() < 0.15:  # early in the start
                phase, until = "starting", time.monotonic() + 4.0 * self._dice.random()
            else:
                deadline = time.monotonic() + _START_SECONDS
                while self._lines() <= before:
                    assert process.poll() is None, f"it has ended by itself: {process.returncode}: {self.log_tail()}"
                    assert time.monotonic() < deadline, f"it does not begin: {self.log_tail()}"
                    time.sleep(_POLL_SECONDS)
                phase, until = "training", time.monotonic() + 1.5 * self._dice.random()
            while time.monotonic() < until and process.poll() is None:
                time.sleep(_POLL_SECONDS / 10)
            checkpoints = self.out / "checkpoints"
            if checkpoints.is_dir() and any(name.startswith(".step-") for name in os.listdir(checkpoints)):
                phase = "writing a checkpoint"
        finally:
            _kill_all(process, str(self.out))
        self.kills_by_phase[phase] = self.kills_by_phase.get(phase, 0) + 1

    def finish(self, out: Path, iterations: int) -> None:
        """Resume a run and let it finish."""
        command = self._command(out, iterations)
        completed = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT, env=_environment(), check=False
        )
        assert completed.returncode == 0, completed.stdout.decode("utf-8", "replace")[-3000:]

    def log_tail(self) -> str:
        """The end of the output of the runs that were killed."""
        return (self._folder / "said.txt").read_text(encoding="utf-8", errors="replace")[-3000:]

    def _lines(self) -> int:
        try:
            return (self.out / "metrics.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0


def curve(out: Path) -> Tuple[List[Any], List[Any]]:
    """Metrics of a run that must be equal to the last bit."""
    directory = RunDirectory(out)
    iterations = [tuple(line[key] for key in _KEYS) for line in directory.metrics("iteration")]
    return iterations, [(line["iteration"], line["loss"]) for line in directory.metrics("validation")]


def _events_of(out: Path) -> Dict[str, List[Any]]:
    """The same of its event files, by iteration and, for losses, by tokens."""
    directory = RunDirectory(out).events_dir
    curves = {**read_curves(directory), **read_curves(directory / "by_tokens")}
    return {tag: events for tag, events in curves.items() if tag.endswith(("/loss", "/grad_norm", "/lr"))}


def _as_events(curves: Tuple[List[Any], List[Any]]) -> Dict[str, List[Any]]:
    """The events that these metrics must have: each step once, with its value as float32."""
    tokens = {line[0]: line[4] * 32 for line in curves[0]}  # samples have 32 tokens
    return {
        **{
            f"train/{key}": [(line[0], _float32(line[n])) for line in curves[0]] for n, key in enumerate(_KEYS[:4]) if n
        },
        "validation/loss": [(iteration, _float32(loss)) for iteration, loss in curves[1]],
        "by_tokens/train/loss": [(tokens[line[0]], _float32(line[1])) for line in curves[0]],
        "by_tokens/validation/loss": [(tokens.get(iteration, 0), _float32(loss)) for iteration, loss in curves[1]],
    }


def _float32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def survives(folder: Path, kills: int, seed: int) -> str:
    """Kill a run this many times and compare it with an uninterrupted run; returns a one-line summary.

    Raises:
        AssertionError: a start has failed, a checkpoint is torn, or the curve is another.
    """
    run = KilledRun(folder, seed)
    for number in range(kills):
        run.start_and_kill()
        torn = {info.path.name: verify_checkpoint(info.path) for info in list_checkpoints(run.out / "checkpoints")}
        assert not any(torn.values()), f"after kill {number + 1}: {torn}"
        if (number + 1) % 10 == 0:
            print(f"{number + 1} kills, at iteration {RunDirectory(run.out).last_iteration()}", flush=True)
    iterations = RunDirectory(run.out).last_iteration() + _MORE
    run.finish(run.out, iterations)
    uninterrupted = folder / "judge"
    run.finish(uninterrupted, iterations)
    ours, theirs = curve(run.out), curve(uninterrupted)
    assert len(theirs[0]) == iterations and ours == theirs, _first_difference(ours, theirs)
    if has_reader_of_events():
        for out, curves in ((run.out, ours), (uninterrupted, theirs)):
            assert _events_of(out) == _as_events(curves), f"{out}: the event files have other figures than the metrics"
    phases = ", ".join(f"{count} while {phase}" for phase, count in sorted(run.kills_by_phase.items()))
    return (
        f"{kills} kills ({phases}) in {iterations} iterations: always gone on, every checkpoint whole, and the curve "
        "is the uninterrupted run's, bit for bit"
    )


def _first_difference(ours: Tuple[List[Any], List[Any]], theirs: Tuple[List[Any], List[Any]]) -> str:
    for our_lines, their_lines in zip(ours, theirs):
        for our_line, their_line in zip(our_lines, their_lines):
            if our_line != their_line:
                return f"{our_line}, but {their_line} in the run that was not killed"
    return f"{[len(part) for part in ours]} lines, but {[len(part) for part in theirs]} in the run that was not killed"


def _environment() -> Dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def _kill_all(process: "subprocess.Popen[bytes]", out: str) -> None:
    """Kill all processes with the run directory among their arguments: the trainer, the launcher, and the ranks."""
    process.kill()
    process.wait()
    while True:
        processes = [other for other in psutil.process_iter() if out in _arguments_of(other)]
        if not processes:
            return
        for other in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                other.send_signal(signal.SIGKILL)
        psutil.wait_procs(processes, timeout=5.0)


def _arguments_of(process: psutil.Process) -> List[str]:
    try:
        return [] if process.status() == psutil.STATUS_ZOMBIE else process.cmdline()
    except psutil.Error:  # gone meanwhile, or another user's
        return []


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        print(survives(Path(folder), options.kills, options.seed), flush=True)


if __name__ == "__main__":
    main()
