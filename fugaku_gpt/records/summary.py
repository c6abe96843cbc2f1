"""Summarises the metric lines of a run as the figures of a table row; repeatable at any time from ``metrics.jsonl``."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any, Dict, List, Mapping, Optional, Sequence

from fugaku_gpt.config.schema import RunConfig
from fugaku_gpt.formulas.flops import exact_flops, notes_flops, tflops_per_node
from fugaku_gpt.formulas.parameters import parameter_count
from fugaku_gpt.records.grid_summary import summarise_grid_times

WARMUP_SAMPLES = 2  # first touch of fresh pages, lazy library set-up

# key of a summary → its meaning and unit
KEYS: Mapping[str, str] = {
    "parameters": "trained parameters, with the vocabulary as it is without padding",
    "nodes": "nodes that the job asked for",
    "ranks": "processes, DP * TP * PP",
    "samples": "lines of iterations in `metrics.jsonl`, one for `training.log_interval` iterations: samples of the "
    "time, not sequences of the corpus",
    "warmup_samples": "how many of these lines, the first of those with the last batch size, were left out of times "
    "and speeds",
    "timed_batch": "global batch of the timed iterations, in sequences, where it is not the full one",
    "timed_seq_len": "tokens of each sequence in the timed iterations; stated together with `timed_batch`",
    "seconds_per_iteration": "median over the other lines of the time of an iteration, in seconds",
    "tokens_per_second": "tokens of a global batch / `seconds_per_iteration`, over all nodes",
    "images_per_second": "classifier of grids: global batch / `seconds_per_iteration`, over all nodes; where batches "
    "take turns in size, the seconds are the mean of the medians of each size",
    "compile_seconds": "classifier of grids: time of the first iteration beyond the median of its size: loading and "
    "choosing kernels, first touch of memory",
    "tflops_notes": "TFLOP/s of one node by the formula of the notes",
    "tflops_exact": "TFLOP/s of one node, of all matrix products",
    "rss_max_bytes": "largest resident memory of any one rank, in bytes",
    "node_used_bytes": "largest used memory of any one node, by all ranks and the system, in bytes",
    "first_loss": "loss of the first line whose loss was finite, per token or grid; null if none was",
    "last_loss": "loss of the last line whose loss was finite, per token or grid; null if none was",
    "last_accuracy": "classifier of grids: share of the grids of the last line whose class had the largest logit",
    "last_validation_accuracy": "classifier of grids: the same share in the last validation",
    "first_validation_loss": "loss of the first validation, per token or grid; null if it was not finite",
    "last_validation_loss": "loss of the last validation, per token or grid; null if it was not finite",
}


def summarise(
    config: RunConfig, iterations: Sequence[Dict[str, Any]], validations: Sequence[Dict[str, Any]]
) -> Dict[str, Any]:
    """Compute the figures of a run.

    ``seconds_per_iteration`` is the median over the logged iterations after the first ``WARMUP_SAMPLES`` (over all if
    there are no more). If the batch or the samples grow, times and rates are those of the last size, which
    ``timed_batch`` and ``timed_seq_len`` state if it is not the full one. Keys are those of ``KEYS``, and absent if
    nothing was measured.
    """
    summary: Dict[str, Any] = {
        "parameters": parameter_count(config.model),
        "nodes": config.job.nodes,
        "ranks": config.layout.ranks,
        "samples": len(iterations),
    }
    iterations = [line for line in iterations if (line.get("seconds") or 0) > 0]
    if iterations:
        if config.model.is_grid_classifier:
            summary.update(summarise_grid_times(config, iterations, WARMUP_SAMPLES))
        else:
            summary.update(_token_times(config, iterations))
        losses = [line["loss"] for line in iterations if line.get("loss") is not None]  # null: it was not finite
        summary.update(
            rss_max_bytes=_largest(iterations, "rss_max_bytes"),
            node_used_bytes=_largest(iterations, "node_used_bytes"),
            first_loss=losses[0] if losses else None,
            last_loss=losses[-1] if losses else None,
        )
    if validations:
        summary.update(
            first_validation_loss=validations[0].get("loss"), last_validation_loss=validations[-1].get("loss")
        )
        if validations[-1].get("accuracy") is not None:
            summary["last_validation_accuracy"] = validations[-1]["accuracy"]
    return summary


def _token_times(config: RunConfig, iterations: Sequence[Dict[str, Any]]) -> Dict[str, Any]:
    """Compute times and speeds of a run on sequences of tokens, from lines that have a time."""
    samples = [line["seconds"] for line in lines_of_last_size(iterations)]
    timed = samples[WARMUP_SAMPLES:] or samples
    seconds = statistics.median(timed)
    vocab, nodes = config.padded_vocab, config.job.nodes
    batch = iterations[-1].get("global_batch") or config.training.global_batch
    model = replace(config.model, seq_len=iterations[-1].get("actual_seq_len") or config.model.seq_len)
    is_full = (batch, model) == (config.training.global_batch, config.model)
    return {
        **({} if is_full else {"timed_batch": batch, "timed_seq_len": model.seq_len}),
        "warmup_samples": len(samples) - len(timed),
        "seconds_per_iteration": seconds,
        "tokens_per_second": batch * model.seq_len / seconds,
        "tflops_notes": tflops_per_node(notes_flops(model, batch, vocab), seconds, nodes),
        "tflops_exact": tflops_per_node(exact_flops(model, batch, vocab), seconds, nodes),
    }


def lines_of_last_size(lines: Sequence[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Select the lines whose iteration had the same batch and sample length as the last one."""
    sizes = [(line.get("global_batch"), line.get("actual_seq_len")) for line in lines]
    return [line for line, size in zip(lines, sizes) if size == sizes[-1]]


def _largest(lines: Sequence[Dict[str, Any]], key: str) -> Optional[int]:
    values = [line[key] for line in lines if line.get(key) is not None]
    return max(values) if values else None
