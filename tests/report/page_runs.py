"""Runs with every figure of the run page, written as training writes them, at any size."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any, Dict, Iterator, Sequence

from fugaku_gpt.config import dump_run_config, load_run_config
from fugaku_gpt.records.metrics import MetricsWriter
from fugaku_gpt.records.run import OK, Result, RunDirectory

STEP = 5  # iterations between lines


def page_line(number: int, lr: float, draws: random.Random) -> Dict[str, Any]:
    """The line of metrics of one iteration of a run of 16 ranks, in which rank 3 is mostly the slowest."""
    fastest = 0.8 + 0.02 * draws.random()
    slowest_rank = 3 if draws.random() < 0.8 else draws.randrange(16)
    loss = 2.5 + 5.0 * math.exp(-number * lr / 0.4) + 0.05 * draws.gauss(0, 1)
    return {
        "iteration": number,
        "consumed_samples": 64 * number,
        "consumed_tokens": 65536 * number,
        "seconds": 1.05 + 0.02 * draws.random(),
        "lr": lr * min(1.0, number / 100),
        "global_batch": 64,
        "loss": loss,
        "grad_norm": 0.4 + 3.0 * math.exp(-number / 200) + 0.1 * draws.random(),
        "samples_per_second": 60.9,
        "tokens_per_second": 62000 + 500 * draws.random(),
        "tflops_notes": 1.21 + 0.01 * draws.random(),
        "tflops_exact": 1.15 + 0.01 * draws.random(),
        "rss_max_bytes": 5.2 * 2**30,
        "node_used_bytes": 22.5 * 2**30 + draws.random() * 2**28,
        "bubble": 0.12 + 0.01 * draws.random(),
        "bubble_max": 0.17 + 0.01 * draws.random(),
        "hidden_communication": 0.83 + 0.03 * draws.random(),
        "compute_max": fastest * (1.06 + 0.02 * draws.random()),
        "compute_min": fastest,
        "compute_max_rank": slowest_rank,
        "compute_max_node": f"node{slowest_rank // 4:02}",
        "compute_min_rank": 7,
        "compute_min_node": "node01",
    }


def page_lines(lines: int, lr: float, seed: int) -> Iterator[Dict[str, Any]]:
    """The lines of a run, whose iterations are 5 apart."""
    draws = random.Random(seed)
    for number in range(STEP, STEP * lines + 1, STEP):
        yield page_line(number, lr, draws)


def write_page_run(
    folder: Path, lines: int = 50, lr: float = 1e-3, seed: int = 1, settings: Sequence[str] = (), reason: str = ""
) -> RunDirectory:
    """Write a run that has ended, well unless there is a reason."""
    directory = RunDirectory(folder)
    config = load_run_config(preset="tiny", overrides=[f"training.lr={lr}", *settings])
    directory.create(dump_run_config(config))
    writer = MetricsWriter(directory.metrics_file)
    for line in page_lines(lines, lr, seed):
        writer.write("iteration", line)
        if line["iteration"] % (10 * STEP) == 0:
            writer.write("validation", {"iteration": line["iteration"], "loss": line["loss"] + 0.1, "tokens": 65536})
            writer.write("evaluation", {"iteration": line["iteration"], "name": "held-out", "loss": line["loss"] + 0.2})
    writer.close()
    directory.write_result(Result("failed" if reason else OK, reason, 1.7e9, 1.7e9 + 60.0, STEP * lines))
    return directory
