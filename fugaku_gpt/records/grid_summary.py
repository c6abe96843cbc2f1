"""Summarises the times of a run whose batches take turns in size: a classifier of grids in buckets.

``seconds_per_iteration`` is the mean over the sizes of the median time of each, weighted by how often it comes, so that
a slow moment counts as little as it does in a run of one size.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any, Dict, List, Mapping, Sequence, Tuple

from fugaku_gpt.config.schema import RunConfig
from fugaku_gpt.formulas.flops import exact_flops, notes_flops, tflops_per_node
from fugaku_gpt.typed_json import is_number

Sizes = Tuple[Tuple[int, int], ...]  # (side of a bucket, number of iterations) of the iterations of a line


def summarise_grid_times(config: RunConfig, lines: Sequence[Mapping[str, Any]], warmup: int) -> Dict[str, Any]:
    """Compute the times and speeds of a run from its lines of iterations, each of which has a time.

    Args:
        warmup: number of lines that are left out, unless there are no more.
    """
    timed = lines[warmup:] or lines
    seconds_of: Dict[Sizes, List[float]] = {}
    iterations_of: Dict[int, int] = {}
    for line in timed:
        sizes = sizes_of(config, line)
        seconds_of.setdefault(sizes, []).append(line["seconds"])
        for side, count in sizes:
            iterations_of[side] = iterations_of.get(side, 0) + count
    weights = {
        sizes: len(of_sizes) * max(1, sum(count for _, count in sizes)) for sizes, of_sizes in seconds_of.items()
    }
    medians = {sizes: statistics.median(of_sizes) for sizes, of_sizes in seconds_of.items()}
    total = sum(weights.values())
    seconds = sum(weight * medians[sizes] for sizes, weight in weights.items()) / total
    batch, nodes = config.training.global_batch, config.job.nodes
    models = {side: replace(config.model, seq_len=side * side) for side in iterations_of}
    notes, exact = (
        sum(count * flops(models[side], batch, config.padded_outputs) for side, count in iterations_of.items()) / total
        for flops in (notes_flops, exact_flops)
    )
    tokens = sum(count * batch * side * side for side, count in iterations_of.items()) / total
    summary: Dict[str, Any] = {
        "warmup_samples": len(lines) - len(timed),
        "seconds_per_iteration": seconds,
        "images_per_second": batch / seconds,
    }
    if () not in seconds_of:
        summary["tokens_per_second"] = tokens / seconds
        summary["tflops_notes"] = tflops_per_node(notes, seconds, nodes)
        summary["tflops_exact"] = tflops_per_node(exact, seconds, nodes)
    first = sizes_of(config, lines[0])
    iterations = sum(count for _, count in first)
    steady = [line["seconds"] for line in lines[1:] if sizes_of(config, line) == first]
    if first and steady and lines[0]["iteration"] == iterations:
        summary["compile_seconds"] = max(0.0, (lines[0]["seconds"] - statistics.median(steady)) * iterations)
    accuracies = [line["accuracy"] for line in lines if is_number(line.get("accuracy"))]
    if accuracies:
        summary["last_accuracy"] = accuracies[-1]
    return summary


def sizes_of(config: RunConfig, line: Mapping[str, Any]) -> Sizes:
    """The buckets of the iterations since the line before; () of a line that does not say, such as one that was
    restored from a log, unless there is only one."""
    buckets = line.get("buckets")
    sides = {str(side): side for side in config.data.buckets}
    counts = {
        sides[name]: figures["iterations"]
        for name, figures in (buckets.items() if isinstance(buckets, dict) else ())
        if name in sides and isinstance(figures, dict) and is_count(figures.get("iterations"))
    }
    only = ((config.data.buckets[-1], 1),) if len(config.data.buckets) == 1 else ()
    return tuple(sorted(counts.items())) or only


def is_count(value: object) -> bool:
    """Whether a value of JSON is a number of iterations."""
    return type(value) is int and value > 0
