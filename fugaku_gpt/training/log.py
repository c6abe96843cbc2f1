"""One line per logged iteration, in the terminal and in ``metrics.jsonl``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Dict, Optional, Sequence, TextIO, Tuple

from fugaku_gpt.config import RunConfig
from fugaku_gpt.data.scored_text import TextLoss
from fugaku_gpt.formulas.flops import exact_flops, notes_flops, tflops_per_node
from fugaku_gpt.layout.communications import plan_of, predicted_bubble
from fugaku_gpt.layout.schedule_times import ideal_bubble
from fugaku_gpt.records.metrics import CHECKPOINT, LEFT_OUT, MetricsWriter
from fugaku_gpt.training.grid_figures import grid_figures, grid_validation_line, validation_figures
from fugaku_gpt.training.log_lines import Pace, megatron_line, short_line
from fugaku_gpt.training.trainer import SizeFigures, Step


@dataclass(frozen=True)
class IntervalMeasurements:
    """Measurements over all ranks since the previous line of the log.

    Attributes:
        seconds: seconds per iteration.
        rss_max: memory of the largest rank, in bytes.
        node_used: memory in use on the fullest node, in bytes.
        bubbles: idle over busy time of each pipeline stage until the last stage is done; empty without a pipeline.
        hidden: share of the replicas' communication that computation hides, on the replica where it hides least; None
            without replicas, and before it was timed.
        computing: (seconds of computing per iteration, rank) of the slowest and of the fastest rank; None for a single
            rank.
    """

    seconds: float
    rss_max: int
    node_used: int
    bubbles: Tuple[float, ...] = ()
    hidden: Optional[float] = None
    computing: Optional[Tuple[Tuple[float, int], Tuple[float, int]]] = None


class TrainingLog:
    """Writes the log and ``metrics.jsonl``; only rank 0 has one. It computes from its arguments and never communicates.

    Args:
        hosts: host name of each rank.
    """

    def __init__(self, config: RunConfig, metrics: MetricsWriter, stream: TextIO, hosts: Sequence[str] = ()) -> None:
        self._config = config
        self._metrics = metrics
        self._stream = stream
        self._hosts = hosts
        self._cached_flops = lru_cache(maxsize=None)(self._flops_of)
        self._cached_predicted_bubble = lru_cache(maxsize=None)(self._predicted_of)
        training = config.training
        self._has_loss_scale = training.dtype == "float16"
        self._reports_skips = (
            self._has_loss_scale or training.non_finite == "skip" or training.rollback_every is not None
        )
        self._is_of_grids = config.model.is_grid_classifier
        self._lengths_vary = training.seq_ramp_start is not None or self._is_of_grids
        self._is_short = training.log_format == "short"
        self._pace = Pace()

    def print_line(self, line: str) -> None:
        """Print a line to the log."""
        print(line, file=self._stream, flush=True)

    def iteration(
        self,
        iteration: int,
        steps: Sequence[Step],
        consumed: Tuple[int, int],
        skipped_steps: int,
        measured: IntervalMeasurements,
    ) -> None:
        """Log an iteration, counted from 1.

        Args:
            steps: all steps since the previous line; loss, learning rate and batch are those of the last.
            consumed: samples and tokens so far.
            skipped_steps: number of steps skipped so far.
        """
        nodes, last = self._config.job.nodes, steps[-1]
        seconds, elapsed = measured.seconds, measured.seconds * len(steps)
        notes, exact = (sum(self._cached_flops(step.samples, step.seq_len)[kind] for step in steps) for kind in (0, 1))
        values: Dict[str, Any] = {
            "iteration": iteration,
            "consumed_samples": consumed[0],
            "consumed_tokens": consumed[1],
            "seconds": seconds,
            "lr": last.lr,
            "global_batch": last.samples,
            **({"actual_seq_len": last.seq_len} if self._lengths_vary else {}),
            "loss": last.loss,
            **({"loss_scale": last.loss_scale} if self._has_loss_scale else {}),
            "grad_norm": last.grad_norm,
            **({"skipped_iterations": skipped_steps} if self._reports_skips or skipped_steps else {}),
            "samples_per_second": sum(step.samples for step in steps) / elapsed,
            "tokens_per_second": sum(step.samples * step.seq_len for step in steps) / elapsed,
            **(grid_figures(steps, elapsed) if self._is_of_grids else {}),
            "tflops_notes": tflops_per_node(notes, elapsed, nodes),
            "tflops_exact": tflops_per_node(exact, elapsed, nodes),
            **self._waiting_figures(last, measured),
            **self._straggler_figures(measured),
            "rss_max_bytes": measured.rss_max,
            "node_used_bytes": measured.node_used,
        }
        self._metrics.write("iteration", values)
        iterations = self._config.training.iterations
        if self._is_short:
            # grids of the remaining iterations have the sizes of those before
            self._pace.add(sum(step.samples * (1 if self._is_of_grids else step.seq_len) for step in steps), elapsed)
            self.print_line(short_line(values, iterations, self._pace.seconds_for(self._tokens_after(iteration))))
        else:
            self.print_line(megatron_line(values, iterations))

    def _tokens_after(self, iteration: int) -> int:
        """Return the tokens of the remaining iterations, each with the full batch and sample length; or the grids."""
        training = self._config.training
        samples = (training.iterations - iteration) * training.global_batch
        return samples if self._is_of_grids else samples * self._config.model.seq_len

    def skipped_step(self, iteration: int, step: Step) -> None:
        """Log an iteration whose step was skipped."""
        values: Dict[str, Any] = {
            "iteration": iteration,
            "why": step.skip_reason,
            "loss": step.loss,
            "grad_norm": step.grad_norm,
            "samples": step.lost_samples,
        }
        line = (
            f"iteration {iteration} was skipped: {step.skip_reason}: "
            f"loss {step.loss:g}, gradient norm {step.grad_norm:g}"
        )
        if step.returned_to is not None:
            values["returned_to"] = step.returned_to
            line += f"; weights are those after iteration {step.returned_to} again"
        self._metrics.write(LEFT_OUT, values)
        self.print_line(f"{line}; samples lost: {step.lost_samples}")

    def validation(
        self,
        iteration: int,
        loss: float,
        tokens: int,
        previous: Optional[float],
        sizes: Sequence[SizeFigures] = (),
        *,
        consumed_tokens: int,
    ) -> None:
        """Log a validation after ``iteration`` iterations.

        Args:
            tokens: those of the validation.
            previous: loss of the validation before, if there is one.
            sizes: of grids, the figures by their size.
            consumed_tokens: tokens that the training has consumed so far.
        """
        figures = validation_figures(sizes) if self._is_of_grids else {}
        values = {"iteration": iteration, "loss": loss, "tokens": tokens, "consumed_tokens": consumed_tokens}
        self._metrics.write("validation", {**values, **figures})
        change = f" | change: {loss - previous:+.6f}" if previous is not None else ""
        line = f"validation at iteration {iteration} | lm loss: {loss:.6f} | tokens: {tokens}{change} |"
        self.print_line(grid_validation_line(iteration, loss, figures, change) if figures else line)

    def evaluation(self, iteration: int, result: TextLoss, consumed_tokens: int) -> None:
        """Log the loss of an evaluation file after ``iteration`` iterations, with bits for each byte of its text."""
        values = {"iteration": iteration, "name": result.name, "loss": result.loss, "tokens": result.tokens}
        values.update({"bits_per_byte": result.bits_per_byte, "consumed_tokens": consumed_tokens})
        self._metrics.write("evaluation", values)
        bits = f"{result.bits_per_byte:.6f}" if result.bits_per_byte is not None else "-"
        self.print_line(
            f"{result.name} after {iteration} iterations: loss {result.loss:.6f}, {bits} bits per byte, "
            f"{result.tokens} tokens"
        )

    def checkpoint(
        self, iteration: int, name: str, size: int, ranks: int, snapshot_seconds: float, write_seconds: float
    ) -> None:
        """Log a checkpoint that has become visible.

        Args:
            iteration: the iteration after which the state was copied.
            size: bytes of all ranks' data.
            snapshot_seconds: how long training waited, on the rank that waited longest.
            write_seconds: how long writing took, on the slowest rank.
        """
        values = {
            "iteration": iteration,
            "name": name,
            "bytes": size,
            "snapshot_seconds": snapshot_seconds,
            "write_seconds": write_seconds,
        }
        self._metrics.write(CHECKPOINT, values)
        self.print_line(
            f"checkpoint at iteration {iteration}: {size / ranks / 2**20:.1f} MiB per rank, "
            f"snapshot {snapshot_seconds:.3f} s, written {write_seconds:.3f} s, {size / 1e6 / write_seconds:.0f} MB/s"
        )

    def failed_checkpoint(self, iteration: int, error: str) -> None:
        """Log a checkpoint that could not be written."""
        self._metrics.write(CHECKPOINT, {"iteration": iteration, "error": error})
        self.print_line(f"checkpoint at iteration {iteration} FAILED, nothing of it is kept: {error}")

    def resumed(self, iteration: int, checkpoint: Optional[str], consumed_tokens: int) -> None:
        """Record that the run resumes after an iteration; lines of later iterations no longer count."""
        values = {"iteration": iteration, "checkpoint": checkpoint, "consumed_tokens": consumed_tokens}
        self._metrics.write("resumed", values)

    def _waiting_figures(self, last: Step, measured: IntervalMeasurements) -> Dict[str, float]:
        """Return the figures on waiting: pipeline bubble, and hidden communication of the replicas."""
        figures: Dict[str, float] = {}
        layout, training = self._config.layout, self._config.training
        if measured.bubbles:
            micro_batches = last.samples // (training.micro_batch * layout.dp)
            figures["bubble"] = sum(measured.bubbles) / len(measured.bubbles)
            figures["bubble_max"] = max(measured.bubbles)
            figures["bubble_predicted"] = self._cached_predicted_bubble(micro_batches, last.seq_len)
            figures["bubble_ideal"] = ideal_bubble(layout.schedule, layout.pp, micro_batches, layout.chunks)
        if measured.hidden is not None:
            figures["hidden_communication"] = measured.hidden
        return figures

    def _predicted_of(self, micro_batches: int, seq_len: int) -> float:
        """Return the bubble of one iteration, predicted from its schedule and the work of each stage."""
        # the way replicas sum changes no pass, and without it the prediction does not depend on where ranks run
        config = replace(self._config, layout=replace(self._config.layout, hierarchical_sum=False))
        plan = plan_of(config)
        return predicted_bubble(replace(plan, micro_batches=micro_batches, seq_len=seq_len))

    def _straggler_figures(self, measured: IntervalMeasurements) -> Dict[str, Any]:
        """Return the figures on the slowest and the fastest rank, with their nodes."""
        figures: Dict[str, Any] = {}
        for which, (seconds, rank) in zip(("max", "min"), measured.computing or ()):
            figures[f"compute_{which}"] = seconds
            figures[f"compute_{which}_rank"] = rank
            figures[f"compute_{which}_node"] = self._hosts[rank] if rank < len(self._hosts) else ""
        return figures

    def _flops_of(self, samples: int, seq_len: int) -> Tuple[float, float]:
        """Return the FLOPs of one iteration by the notes' formula and by the exact one."""
        model, vocab = replace(self._config.model, seq_len=seq_len), self._config.padded_outputs
        return notes_flops(model, samples, vocab), exact_flops(model, samples, vocab)
