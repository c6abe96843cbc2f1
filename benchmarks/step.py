"""One training step of ours beside a textbook PyTorch GPT's, and both beside this machine's matrix-multiply peak.

    .venv/bin/python benchmarks/step.py                      # 124M, sequence 1024, micro-batch 1
    .venv/bin/python benchmarks/step.py --preset tiny --pairs 9

Each runs in a process of its own, so that its peak memory is its own; they take turns (matrix products, ours, textbook,
and again), so that a slow moment of a shared machine falls on all of them. A step is ``--micro-batches`` forward and
backward passes and one AdamW step. The ratio is the median over the pairs of one turn.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Any, Callable, Dict, List, Optional

from fugaku_gpt.config import RunConfig, load_run_config
from fugaku_gpt.formulas.flops import exact_flops
from fugaku_gpt.formulas.parameters import size_name
from fugaku_gpt.machine.local import processor_name, usable_cores

Work = Callable[[], Any]


def ours(config: RunConfig) -> Work:
    """A step of this package on one rank."""
    from fugaku_gpt.comm import ProcessGrid
    from fugaku_gpt.training.startup import prepare_process
    from fugaku_gpt.training.trainer import Trainer

    prepare_process(_threads())
    trainer = Trainer(config, ProcessGrid.alone(), _Random(config))
    return lambda: trainer.step().loss


def textbook(config: RunConfig) -> Work:
    """A step of the textbook model on the same batch, with the same padded vocabulary."""
    import torch

    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from textbook_gpt import TextbookGPT

    torch.set_num_threads(_threads())
    shape = config.model
    model = TextbookGPT(shape.layers, shape.hidden, shape.heads, shape.seq_len, config.padded_vocab)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.training.lr, betas=(0.9, 0.95), weight_decay=0.1)
    samples, count = _Random(config), config.training.micro_batch

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for number in range(config.micro_batches):
            tokens = torch.from_numpy(samples.batch(number * count, count))
            loss = model(tokens[:, :-1], tokens[:, 1:]) / config.micro_batches
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    return step


def matrix_peak(config: RunConfig) -> Work:
    """FLOP/s of the fastest of a few square and model-shaped products, each repeated for a quarter of a second."""
    import torch

    torch.set_num_threads(_threads())
    tokens, h = config.model.seq_len * config.training.micro_batch, config.model.hidden
    shapes = [(2048, 2048, 2048), (tokens, h, 4 * h), (tokens, 4 * h, h), (tokens, h, min(8192, config.padded_vocab))]
    products = [(torch.randn(m, k), torch.randn(k, n), torch.empty(m, n), 2.0 * m * k * n) for m, k, n in shapes]

    def best() -> float:
        rates = []
        for a, b, out, flops in products:
            started, count = time.perf_counter(), 0
            while time.perf_counter() - started < 0.25:
                torch.mm(a, b, out=out)
                count += 1
            rates.append(flops * count / (time.perf_counter() - started))
        return max(rates)

    return best


WORKERS: Dict[str, Callable[[RunConfig], Work]] = {"peak": matrix_peak, "ours": ours, "textbook": textbook}


class _Random:
    """Samples of random tokens, the same for both models."""

    def __init__(self, config: RunConfig) -> None:
        import numpy as np

        self._shape, self._top = config.model.seq_len + 1, config.model.vocab_size
        self._numpy = np

    def batch(self, first: int, count: int) -> Any:
        """[count, seq_len + 1] token ids."""
        return self._numpy.random.RandomState(first).randint(0, self._top, size=(count, self._shape), dtype="int64")


class Worker:
    """A process that does one unit of its work whenever it is asked."""

    def __init__(self, name: str, arguments: List[str]) -> None:
        command = [sys.executable, os.path.abspath(__file__), "--worker", name, *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def work(self) -> Dict[str, float]:
        """Seconds, value, and peak memory so far, of one unit."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"a worker ended with exit code {self._process.wait()}; its message is above")
        result: Dict[str, float] = json.loads(answer)
        return result

    def close(self) -> None:
        """Let it end."""
        self._process.communicate()


def serve(work: Work) -> None:
    """Worker side: one unit for each line of standard input."""
    for _ in sys.stdin:
        started = time.perf_counter()
        value = work()
        seconds = time.perf_counter() - started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"seconds": seconds, "value": value, "peak_bytes": peak}), flush=True)


def _threads() -> int:
    return int(os.environ["OMP_NUM_THREADS"])


def _table(config: RunConfig, turns: List[Dict[str, Dict[str, float]]]) -> str:
    peak = max(turn["peak"]["value"] for turn in turns)
    flops = exact_flops(config.model, config.training.global_batch, config.padded_vocab)
    tokens = config.training.global_batch * config.model.seq_len
    lines = [
        f"{size_name(config.model)}, sequence {config.model.seq_len}, "
        f"micro-batch {config.training.micro_batch} x {config.micro_batches}, {config.training.dtype}, "
        f"{_threads()} threads, {processor_name()}, {len(turns)} pairs",
        f"matrix-multiply peak measured: {peak / 1e9:.1f} GFLOP/s",
        f"{'':10}{'sec/step':>10}{'tokens/s':>10}{'GFLOP/s':>10}{'of peak':>9}{'peak RSS':>12}{'loss':>9}",
    ]
    for name in ("ours", "textbook"):
        seconds = statistics.median(turn[name]["seconds"] for turn in turns)
        rate = flops / seconds
        rss = max(turn[name]["peak_bytes"] for turn in turns) / 2**20
        lines.append(
            f"{name:10}{seconds:10.3f}{tokens / seconds:10.1f}{rate / 1e9:10.1f}{rate / peak:9.1%}{rss:8.0f} MiB"
            f"{turns[-1][name]['value']:9.3f}"
        )
    ratios = sorted(turn["textbook"]["seconds"] / turn["ours"]["seconds"] for turn in turns)
    lines.append(
        f"ours is {statistics.median(ratios):.2f} x as fast (pairs: {', '.join(f'{ratio:.2f}' for ratio in ratios)}), "
        f"at {turns[-1]['ours']['peak_bytes'] / turns[-1]['textbook']['peak_bytes']:.2f} x the memory"
    )
    return "\n".join(lines)


def main(arguments: Optional[List[str]] = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="124m")
    parser.add_argument("--pairs", type=int, default=3, help="turns that are counted, after one that is not")
    parser.add_argument("--micro-batches", type=int, default=4, help="forward and backward passes per step")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--worker", choices=sorted(WORKERS), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    overrides = ["training.micro_batch=1", f"training.global_batch={options.micro_batches}", *options.settings]
    config = load_run_config(preset=options.preset, overrides=overrides)
    threads = config.node.threads_per_rank or len(usable_cores())
    os.environ.update(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
    if options.worker:
        serve(WORKERS[options.worker](config))
        return
    passed_on = list(arguments if arguments is not None else sys.argv[1:])
    workers = {name: Worker(name, passed_on) for name in WORKERS}
    turns = []
    for turn in range(options.pairs + 1):
        measured = {name: worker.work() for name, worker in workers.items()}
        print(f"turn {turn}/{options.pairs}: ours {measured['ours']['seconds']:.2f} s, "
              f"textbook {measured['textbook']['seconds']:.2f} s", file=sys.stderr, flush=True)  # fmt: skip
        if turn:  # the first one touches fresh memory
            turns.append(measured)
    for worker in workers.values():
        worker.close()
    print(_table(config, turns))


if __name__ == "__main__":
    main()
