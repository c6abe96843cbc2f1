"""One line per logged iteration, in the terminal and in ``metrics.jsonl``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Dict, Optional, Sequence, TextIO, Tuple

from fugaku_gpt.config import RunConfig
from fugaku_gpt.formulas.flops import exact_flops, notes_flops, tflops_per_node
from fugaku_gpt.layout.schedule_times import ideal_bubble
from fugaku_gpt.layout.sequence import plan_of, predicted_bubble
from fugaku_gpt.records.run import MetricsWriter
from fugaku_gpt.training.trainer import Step


@dataclass(frozen=True)
class Measured:
    """What was measured over all ranks since the line before.

    Attributes:
        seconds: per iteration.
        rss_max: memory of the largest rank, in bytes.
        node_used: memory in use on the fullest node, in bytes.
        bubbles: of each pipeline stage, idle over busy time until the last stage is done; empty without a pipeline.
        hidden: share of the replicas' communication that computation hides, where it hides least; None where there are
            no replicas, and before it was timed.
        computing: of the slowest and of the fastest rank, (seconds that it has computed per iteration, its number);
            None where there is one rank.
    """

    seconds: float
    rss_max: int
    node_used: int
    bubbles: Tuple[float, ...] = ()
    hidden: Optional[float] = None
    computing: Optional[Tuple[Tuple[float, int], Tuple[float, int]]] = None


class TrainingLog:
    """Writes what happened; only rank 0 has one. It computes from what it is given and talks to nobody.

    Args:
        hosts: where each rank runs.
    """

    def __init__(self, config: RunConfig, metrics: MetricsWriter, stream: TextIO, hosts: Sequence[str] = ()) -> None:
        self._config = config
        self._metrics = metrics
        self._stream = stream
        self._hosts = hosts
        self._flops = lru_cache(maxsize=None)(self._flops_of)
        self._predicted = lru_cache(maxsize=None)(self._predicted_of)
        training = config.training
        self._scales = training.dtype == "float16"
        self._leaves_out = self._scales or training.non_finite == "skip" or training.rollback_every is not None
        self._lengths_vary = training.seq_ramp_start is not None

    def say(self, line: str) -> None:
        """A line for the reader of the log."""
        print(line, file=self._stream, flush=True)

    def iteration(
        self,
        iteration: int,
        steps: Sequence[Step],
        consumed: Tuple[int, int],
        left_out: int,
        measured: Measured,
    ) -> None:
        """One logged iteration, counted from 1.

        Args:
            steps: all since the line before; loss, rate and batch are those of the last.
            consumed: samples and tokens so far.
            left_out: iterations so far whose step was not done.
        """
        nodes, last = self._config.job.nodes, steps[-1]
        seconds, elapsed = measured.seconds, measured.seconds * len(steps)
        notes, exact = (sum(self._flops(step.samples, step.seq_len)[kind] for step in steps) for kind in (0, 1))
        values: Dict[str, Any] = {
            "iteration": iteration,
            "consumed_samples": consumed[0],
            "consumed_tokens": consumed[1],
            "seconds": seconds,
            "lr": last.lr,
            "global_batch": last.samples,
            **({"actual_seq_len": last.seq_len} if self._lengths_vary else {}),
            "loss": last.loss,
            **({"loss_scale": last.loss_scale} if self._scales else {}),
            "grad_norm": last.grad_norm,
            **({"skipped_iterations": left_out} if self._leaves_out or left_out else {}),
            "samples_per_second": sum(step.samples for step in steps) / elapsed,
            "tokens_per_second": sum(step.samples * step.seq_len for step in steps) / elapsed,
            "tflops_notes": tflops_per_node(notes, elapsed, nodes),
            "tflops_exact": tflops_per_node(exact, elapsed, nodes),
            **self._communication(last, measured),
            **self._stragglers(measured),
            "rss_max_bytes": measured.rss_max,
            "node_used_bytes": measured.node_used,
        }
        self._metrics.write("iteration", values)
        self.say(f"iteration {iteration:>{len(str(self._config.training.iterations))}}/{self._line(values)}")

    def _line(self, values: Dict[str, Any]) -> str:
        """The fields of an iteration's line, in their order; those that it has no value for are left out."""
        parts = [
            f"{self._config.training.iterations}",
            f"consumed samples: {values['consumed_samples']}",
            f"consumed tokens: {values['consumed_tokens']}",
            f"elapsed time per iteration (s): {values['seconds']:.3f}",
            f"learning rate: {values['lr']:.3E}",
            f"global batch size: {values['global_batch']}",
        ]
        if "actual_seq_len" in values:
            parts.append(f"actual seqlen: {values['actual_seq_len']}")
        parts.append(f"lm loss: {values['loss']:.6f}")
        if "loss_scale" in values:
            parts.append(f"loss scale: {values['loss_scale']:.1f}")
        parts.append(f"grad norm: {values['grad_norm']:.3f}")
        if "skipped_iterations" in values:
            parts.append(f"number of skipped iterations: {values['skipped_iterations']}")
        parts += [
            f"samples per second: {values['samples_per_second']:.2f}",
            f"tokens per second: {values['tokens_per_second']:.0f}",
            f"TFLOPs: {values['tflops_notes']:.3f} (exact {values['tflops_exact']:.3f})",
        ]
        if "bubble" in values:
            predicted, ideal = f"{values['bubble_predicted']:.3f}", f"{values['bubble_ideal']:.3f}"
            told = f"predicted {predicted}" + (f", with equal stages {ideal}" if ideal != predicted else "")
            parts.append(f"pipeline bubble: {values['bubble']:.3f} (most {values['bubble_max']:.3f}, {told})")
        if "hidden_communication" in values:
            parts.append(f"hidden communication: {values['hidden_communication']:.2f}")
        if "compute_max" in values:
            slowest, fastest = (
                f"{values[f'compute_{which}']:.3f} (rank {values[f'compute_{which}_rank']}"
                f"{', ' + values[f'compute_{which}_node'] if values[f'compute_{which}_node'] else ''})"
                for which in ("max", "min")
            )
            parts.append(f"computing per iteration (s): {slowest} to {fastest}")
        parts += [
            f"rank RSS: {values['rss_max_bytes'] / 2**20:.0f} MiB",
            f"node used: {values['node_used_bytes'] / 2**20:.0f} MiB",
        ]
        return " | ".join(parts) + " |"

    def left_out(self, iteration: int, step: Step) -> None:
        """An iteration whose step was not done."""
        values: Dict[str, Any] = {
            "iteration": iteration,
            "why": step.left_out,
            "loss": step.loss,
            "grad_norm": step.grad_norm,
            "samples": step.lost_samples,
        }
        line = (
            f"iteration {iteration} was skipped: {step.left_out}: loss {step.loss:g}, gradient norm {step.grad_norm:g}"
        )
        if step.returned_to is not None:
            values["returned_to"] = step.returned_to
            line += f"; weights are those after iteration {step.returned_to} again"
        self._metrics.write("left_out", values)
        self.say(f"{line}; samples lost: {step.lost_samples}")

    def validation(self, iteration: int, loss: float, tokens: int, previous: Optional[float]) -> None:
        """One validation after ``iteration`` iterations."""
        self._metrics.write("validation", {"iteration": iteration, "loss": loss, "tokens": tokens})
        change = f" | change: {loss - previous:+.6f}" if previous is not None else ""
        self.say(f"validation at iteration {iteration} | lm loss: {loss:.6f} | tokens: {tokens}{change} |")

    def checkpoint(
        self, iteration: int, name: str, size: int, ranks: int, snapshot_seconds: float, write_seconds: float
    ) -> None:
        """A checkpoint that is there now.

        Args:
            iteration: after which the state was copied.
            size: bytes of all ranks' data.
            snapshot_seconds: for which training has waited, on the rank that has waited longest.
            write_seconds: of the rank whose writing took longest.
        """
        values = {
            "iteration": iteration,
            "name": name,
            "bytes": size,
            "snapshot_seconds": snapshot_seconds,
            "write_seconds": write_seconds,
        }
        self._metrics.write("checkpoint", values)
        self.say(
            f"checkpoint at iteration {iteration}: {size / ranks / 2**20:.1f} MiB per rank, "
            f"snapshot {snapshot_seconds:.3f} s, written {write_seconds:.3f} s, {size / 1e6 / write_seconds:.0f} MB/s"
        )

    def no_checkpoint(self, iteration: int, error: str) -> None:
        """A checkpoint that could not be written."""
        self._metrics.write("checkpoint", {"iteration": iteration, "error": error})
        self.say(f"checkpoint at iteration {iteration} FAILED, nothing of it is kept: {error}")

    def resumed(self, iteration: int, checkpoint: Optional[str]) -> None:
        """The run goes on from an iteration; of later ones there may be lines already, which no longer count."""
        self._metrics.write("resumed", {"iteration": iteration, "checkpoint": checkpoint})

    def _communication(self, last: Step, measured: Measured) -> Dict[str, float]:
        """What waiting there was: of the pipeline, and of the replicas' sums."""
        figures: Dict[str, float] = {}
        layout, training = self._config.layout, self._config.training
        if measured.bubbles:
            micro_batches = last.samples // (training.micro_batch * layout.dp)
            figures["bubble"] = sum(measured.bubbles) / len(measured.bubbles)
            figures["bubble_max"] = max(measured.bubbles)
            figures["bubble_predicted"] = self._predicted(micro_batches, last.seq_len)
            figures["bubble_ideal"] = ideal_bubble(layout.schedule, layout.pp, micro_batches, layout.chunks)
        if measured.hidden is not None:
            figures["hidden_communication"] = measured.hidden
        return figures

    def _predicted_of(self, micro_batches: int, seq_len: int) -> float:
        """The bubble of one iteration by its schedule and the work of each stage."""
        # how replicas sum changes no pass, and where the ranks are need not be known for it
        config = replace(self._config, layout=replace(self._config.layout, hierarchical_sum=False))
        plan = plan_of(config)
        return predicted_bubble(replace(plan, micro_batches=micro_batches, seq_len=seq_len))

    def _stragglers(self, measured: Measured) -> Dict[str, Any]:
        """The slowest and the fastest rank, and where they are."""
        figures: Dict[str, Any] = {}
        for which, (seconds, rank) in zip(("max", "min"), measured.computing or ()):
            figures[f"compute_{which}"] = seconds
            figures[f"compute_{which}_rank"] = rank
            figures[f"compute_{which}_node"] = self._hosts[rank] if rank < len(self._hosts) else ""
        return figures

    def _flops_of(self, samples: int, seq_len: int) -> Tuple[float, float]:
        """Of one iteration, by the notes' formula and by the exact one."""
        model, vocab = replace(self._config.model, seq_len=seq_len), self._config.padded_vocab
        return notes_flops(model, samples, vocab), exact_flops(model, samples, vocab)
