"""Formats the figures of an iteration as a line of the log: a short one to watch, or all of them in Megatron's form.

:mod:`fugaku_gpt.report.trainer_logs` reads both.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Callable, Deque, Mapping, Tuple

from fugaku_gpt.config.values import format_duration

_WINDOW = 50  # lines of the log whose pace is that of the rest


class Pace:
    """Estimates the time that remains from that of the last lines, with validations and checkpoints between them.

    Args:
        clock: returns a monotonic time, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tokens = 0
        self._lines: Deque[Tuple[float, int]] = deque(maxlen=_WINDOW)  # (time, tokens until then)

    def add(self, tokens: int, seconds: float) -> None:
        """Note a line of the log.

        Args:
            tokens: of the iterations since the previous line.
            seconds: how long these iterations took.
        """
        if not self._lines:
            self._lines.append((self._clock() - seconds, 0))
        self._tokens += tokens
        self._lines.append((self._clock(), self._tokens))

    def seconds_for(self, tokens: int) -> float:
        """Return how many seconds further tokens take; call :meth:`add` first."""
        (began, before), (ended, after) = self._lines[0], self._lines[-1]
        return tokens * (ended - began) / max(1, after - before)


def short_line(values: Mapping[str, Any], iterations: int, remaining: float) -> str:
    """Return the figures that one watches, in at most 160 columns.

    Args:
        values: a record of kind ``iteration`` of ``metrics.jsonl``.
        iterations: of the run.
        remaining: estimated seconds until its end.
    """
    fields = [
        _counter(values, iterations),
        f"loss: {_significant(values['loss'], 6)}",
        *([f"accuracy: {values['accuracy']:.2%}"] if "accuracy" in values else []),
        f"lr: {values['lr']:.2E}",
        f"grad norm: {_significant(values['grad_norm'], 4)}",
        f"s/it: {_significant(values['seconds'], 4)}",
        f"images/s: {_significant(values['images_per_second'], 4)}"
        if "images_per_second" in values
        else f"tok/s: {_rate(values['tokens_per_second'])}",
        f"TFLOPs: {_significant(values['tflops_notes'], 4)}",
        f"RSS: {_significant(values['rss_max_bytes'] / 2**30, 3)} GiB",
        f"ETA: {format_duration(round(remaining))}",
    ]
    return " | ".join(fields)


def megatron_line(values: Mapping[str, Any], iterations: int) -> str:
    """Return all figures in the form of Megatron-LM's log, in order; a field without a value is omitted.

    Args:
        values: a record of kind ``iteration`` of ``metrics.jsonl``.
        iterations: of the run.
    """
    fields = [
        _counter(values, iterations),
        f"consumed samples: {values['consumed_samples']}",
        f"consumed tokens: {values['consumed_tokens']}",
        f"elapsed time per iteration (s): {values['seconds']:.3f}",
        f"learning rate: {values['lr']:.3E}",
        f"global batch size: {values['global_batch']}",
    ]
    if "actual_seq_len" in values:
        fields.append(f"actual seqlen: {values['actual_seq_len']}")
    fields.append(f"lm loss: {values['loss']:.6f}")
    if "accuracy" in values:
        fields += [f"accuracy: {values['accuracy']:.4f}", f"images per second: {values['images_per_second']:.3f}"]
    if "loss_scale" in values:
        fields.append(f"loss scale: {values['loss_scale']:.1f}")
    fields.append(f"grad norm: {values['grad_norm']:.3f}")
    if "skipped_iterations" in values:
        fields.append(f"number of skipped iterations: {values['skipped_iterations']}")
    fields += [
        f"samples per second: {values['samples_per_second']:.2f}",
        f"tokens per second: {values['tokens_per_second']:.0f}",
        f"TFLOPs: {values['tflops_notes']:.3f} (exact {values['tflops_exact']:.3f})",
    ]
    if "bubble" in values:
        predicted, ideal = f"{values['bubble_predicted']:.3f}", f"{values['bubble_ideal']:.3f}"
        prediction = f"predicted {predicted}" + (f", with equal stages {ideal}" if ideal != predicted else "")
        fields.append(f"pipeline bubble: {values['bubble']:.3f} (most {values['bubble_max']:.3f}, {prediction})")
    if "hidden_communication" in values:
        fields.append(f"hidden communication: {values['hidden_communication']:.2f}")
    if "compute_max" in values:
        slowest, fastest = (
            f"{values[f'compute_{which}']:.3f} (rank {values[f'compute_{which}_rank']}"
            f"{', ' + values[f'compute_{which}_node'] if values[f'compute_{which}_node'] else ''})"
            for which in ("max", "min")
        )
        fields.append(f"computing per iteration (s): {slowest} to {fastest}")
    fields += [
        f"rank RSS: {values['rss_max_bytes'] / 2**20:.0f} MiB",
        f"node used: {values['node_used_bytes'] / 2**20:.0f} MiB",
    ]
    return " | ".join(fields) + " |"


def _counter(values: Mapping[str, Any], iterations: int) -> str:
    return f"iteration {values['iteration']:>{len(str(iterations))}}/{iterations}"


def _significant(value: float, digits: int) -> str:
    return f"{value:#.{digits}g}".rstrip(".")


def _rate(value: float) -> str:
    return f"{value:.0f}" if 1e3 <= value < 1e9 else _significant(value, 4)
