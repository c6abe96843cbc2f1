"""From the raw lines of a run to the figures of a table row; can be redone at any time from ``metrics.jsonl``."""

from __future__ import annotations

import statistics
from typing import Any, Dict, Optional, Sequence

from fugaku_gpt.config.schema import RunConfig
from fugaku_gpt.formulas.flops import exact_flops, notes_flops, tflops_per_node
from fugaku_gpt.formulas.parameters import parameter_count

WARMUP_SAMPLES = 2  # first touch of fresh pages, lazy library set-up


def summarise(
    config: RunConfig, iterations: Sequence[Dict[str, Any]], validations: Sequence[Dict[str, Any]]
) -> Dict[str, Any]:
    """The figures of a run.

    ``seconds_per_iteration`` is the median over the logged iterations after the first ``WARMUP_SAMPLES`` (over all,
    where there are no more than those). Keys are absent where nothing was measured.
    """
    summary: Dict[str, Any] = {
        "parameters": parameter_count(config.model),
        "nodes": config.job.nodes,
        "ranks": config.layout.ranks,
        "samples": len(iterations),
    }
    if iterations:
        samples = [line["seconds"] for line in iterations]
        timed = samples[WARMUP_SAMPLES:] or samples
        seconds = statistics.median(timed)
        batch, vocab, nodes = config.training.global_batch, config.padded_vocab, config.job.nodes
        summary.update(
            warmup_samples=len(samples) - len(timed),
            seconds_per_iteration=seconds,
            tokens_per_second=batch * config.model.seq_len / seconds,
            tflops_notes=tflops_per_node(notes_flops(config.model, batch, vocab), seconds, nodes),
            tflops_exact=tflops_per_node(exact_flops(config.model, batch, vocab), seconds, nodes),
            rss_max_bytes=_largest(iterations, "rss_max_bytes"),
            node_used_bytes=_largest(iterations, "node_used_bytes"),
            first_loss=iterations[0]["loss"],
            last_loss=iterations[-1]["loss"],
        )
    if validations:
        summary.update(first_validation_loss=validations[0]["loss"], last_validation_loss=validations[-1]["loss"])
    return summary


def _largest(lines: Sequence[Dict[str, Any]], key: str) -> Optional[int]:
    values = [line[key] for line in lines if line.get(key) is not None]
    return max(values) if values else None
