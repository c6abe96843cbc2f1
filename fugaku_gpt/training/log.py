"""One line per logged iteration, in the terminal and in ``metrics.jsonl``."""

from __future__ import annotations

from typing import Any, Dict, Optional, TextIO

from fugaku_gpt.config import RunConfig
from fugaku_gpt.formulas.flops import exact_flops, notes_flops, tflops_per_node
from fugaku_gpt.records.run import MetricsWriter
from fugaku_gpt.training.trainer import Step


class TrainingLog:
    """Writes what happened; only rank 0 has one. It computes from what it is given and talks to nobody."""

    def __init__(self, config: RunConfig, metrics: MetricsWriter, stream: TextIO) -> None:
        self._config = config
        self._metrics = metrics
        self._stream = stream
        batch, vocab = config.training.global_batch, config.padded_vocab
        self._notes_flops = notes_flops(config.model, batch, vocab)
        self._exact_flops = exact_flops(config.model, batch, vocab)

    def say(self, line: str) -> None:
        """A line for the reader of the log."""
        print(line, file=self._stream, flush=True)

    def iteration(self, iteration: int, step: Step, seconds: float, rss_max: int, node_used: int) -> None:
        """One logged iteration, counted from 1; ``seconds`` is the mean per iteration since the line before."""
        config = self._config
        batch, nodes = config.training.global_batch, config.job.nodes
        values: Dict[str, Any] = {
            "iteration": iteration,
            "consumed_samples": iteration * batch,
            "consumed_tokens": iteration * batch * config.model.seq_len,
            "seconds": seconds,
            "lr": step.lr,
            "global_batch": batch,
            "loss": step.loss,
            "grad_norm": step.grad_norm,
            "samples_per_second": batch / seconds,
            "tokens_per_second": batch * config.model.seq_len / seconds,
            "tflops_notes": tflops_per_node(self._notes_flops, seconds, nodes),
            "tflops_exact": tflops_per_node(self._exact_flops, seconds, nodes),
            "rss_max_bytes": rss_max,
            "node_used_bytes": node_used,
        }
        self._metrics.write("iteration", values)
        self.say(
            f"iteration {iteration:>{len(str(config.training.iterations))}}/{config.training.iterations}"
            f" | consumed samples: {values['consumed_samples']}"
            f" | consumed tokens: {values['consumed_tokens']}"
            f" | elapsed time per iteration (s): {seconds:.3f}"
            f" | learning rate: {step.lr:.3E}"
            f" | global batch size: {batch}"
            f" | lm loss: {step.loss:.6f}"
            f" | grad norm: {step.grad_norm:.3f}"
            f" | samples per second: {values['samples_per_second']:.2f}"
            f" | tokens per second: {values['tokens_per_second']:.0f}"
            f" | TFLOPs: {values['tflops_notes']:.3f} (exact {values['tflops_exact']:.3f})"
            f" | rank RSS: {rss_max / 2**20:.0f} MiB"
            f" | node used: {node_used / 2**20:.0f} MiB |"
        )

    def validation(self, iteration: int, loss: float, tokens: int, previous: Optional[float]) -> None:
        """One validation after ``iteration`` iterations."""
        self._metrics.write("validation", {"iteration": iteration, "loss": loss, "tokens": tokens})
        change = f" | change: {loss - previous:+.6f}" if previous is not None else ""
        self.say(f"validation at iteration {iteration} | lm loss: {loss:.6f} | tokens: {tokens}{change} |")
