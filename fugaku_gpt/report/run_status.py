"""The status of a run that is followed: its progress, its newest figures, and the state of its job."""

from __future__ import annotations

import math
import statistics
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

from fugaku_gpt.config import RunConfig
from fugaku_gpt.config.values import format_duration
from fugaku_gpt.harmless import harmless
from fugaku_gpt.jobs.poll import PolledRun
from fugaku_gpt.limits import cut
from fugaku_gpt.report.page_runs import RUNNING, PageRun

BLOCKS, ASCII_LEVELS = "▁▂▃▄▅▆▇█", "_.-:=+*#"
_DEFAULTS = RunConfig()
_PACE_LINES = 50  # newest lines whose pace is that of the rest
_SAMPLES = 16  # of a column of a sparkline
_GIB = 2**30


class RunStatus(NamedTuple):
    """A run at one moment. Texts are harmless and on one line; a figure that is not there is None.

    Attributes:
        status: how it ended, the state of its job, ``running`` if a process on this machine trains it, or else
            ``unfinished``.
        reason: why it failed, or what is wrong with its files; empty if nothing is.
        iteration, iterations: that of the newest line, and how many there will be.
        remaining: seconds until its end, by the pace of its newest lines; None unless it runs.
        validation: (iteration, loss) of the newest validation.
        job: id and state of its job, and which link of a chain it is; empty without a job.
    """

    name: str
    status: str
    reason: str
    iteration: int
    iterations: int
    remaining: Optional[float]
    loss: Optional[float]
    validation: Optional[Tuple[int, float]]
    lr: Optional[float]
    grad_norm: Optional[float]
    tokens_per_second: Optional[float]
    tflops: Optional[float]
    rss_bytes: Optional[float]
    ranks: int
    job: str

    def figures(self) -> List[str]:
        """The newest figures, each with its name or unit."""
        forms = (
            (self.lr, "lr {:.2E}"),
            (self.grad_norm, "grad norm {:.4g}"),
            (self.tokens_per_second, "{:,.0f} tok/s"),
            (self.tflops, "{:.4g} TFLOPs"),
            (self.rss_bytes / _GIB if self.rss_bytes is not None else None, "{:.3g} GiB/rank"),
        )
        return [form.format(value) for value, form in forms if value is not None]

    def losses(self) -> List[str]:
        """The newest losses, each with its name."""
        shown = [f"loss {self.loss:.6g}"] if self.loss is not None else []
        if self.validation is not None:
            shown.append(f"validation {self.validation[1]:.6g} at {self.validation[0]}")
        return shown

    def progress(self) -> str:
        """How many ranks, the iteration, and the time that remains."""
        ranks = f"{self.ranks} rank" + "s" * (self.ranks != 1)
        left = f"ETA {format_duration(round(self.remaining))}" if self.remaining is not None else ""
        return "  ".join(filter(None, (ranks, f"iteration {self.iteration}/{self.iterations}", left)))

    def line(self) -> str:
        """All of it but the curve on one line, which is the same as long as nothing has changed."""
        fields = [
            self.name,
            self.status,
            *self.progress().split("  "),
            *self.losses(),
            *self.figures(),
            self.job,
            self.reason,
        ]
        return " | ".join(filter(None, fields))


def status_of(run: PageRun, polled: Optional[PolledRun] = None) -> RunStatus:
    """The status of a run as it was read last.

    Args:
        polled: what its scheduler has answered last; None without a job, and before the first answer.
    """
    record, lines, validation = run.record, run.series.iterations, run.series.validation
    iterations = int(_setting(run, "training", "iterations"))
    iteration = max(record.iterations, int(lines.newest("iteration") or 0))
    status = run.status
    validated = (int(validation.iterations[-1]), validation.newest("loss")) if len(validation) else None
    layout = [int(_setting(run, "layout", name)) for name in ("dp", "tp", "pp")]
    return RunStatus(
        name=_single_line(run.name),
        status=_single_line(status),
        reason=_single_line("; ".join(filter(None, (record.reason, *run.problems)))),
        iteration=iteration,
        iterations=iterations,
        remaining=_remaining(run, iterations - iteration) if status == RUNNING else None,
        loss=lines.newest("loss"),
        validation=(validated[0], validated[1]) if validated is not None and validated[1] is not None else None,
        lr=lines.newest("lr"),
        grad_norm=lines.newest("grad_norm"),
        tokens_per_second=lines.newest("tokens_per_second"),
        tflops=lines.newest("tflops_notes"),
        rss_bytes=lines.newest("rss_max_bytes"),
        ranks=math.prod(layout),
        job=_job_text(run, polled),
    )


def sparkline(values: Sequence[float], width: int, levels: str = BLOCKS) -> str:
    """A curve as one character for each column, from its lowest value to its highest; a gap where nothing is finite.

    Each column is the mean of some of the values that fall into it.
    """
    columns = min(width, len(values))
    means: List[Optional[float]] = []
    for column in range(columns):
        first, last = column * len(values) // columns, (column + 1) * len(values) // columns
        step = max(1, (last - first) // _SAMPLES)
        finite = [value for value in values[first:last:step] if math.isfinite(value)]
        means.append(sum(finite) / len(finite) if finite else None)
    heights = [mean for mean in means if mean is not None]
    if not heights:
        return " " * columns
    low, spread = min(heights), (max(heights) - min(heights)) or 1.0
    top = len(levels) - 1
    return "".join(" " if mean is None else levels[round((mean - low) / spread * top)] for mean in means)


def _remaining(run: PageRun, iterations: int) -> Optional[float]:
    """Seconds of this number of further iterations, without validations and checkpoints."""
    seconds = run.series.iterations.numbers.get("seconds")
    newest = [value for value in seconds[-_PACE_LINES:] if value == value] if seconds is not None else []
    return max(0, iterations) * statistics.median(newest) if newest else None


def _setting(run: PageRun, section: str, name: str) -> Any:
    value = run.settings.get(f"{section}.{name}", getattr(getattr(_DEFAULTS, section), name))
    return value if isinstance(value, int) else 0


def _job_text(run: PageRun, polled: Optional[PolledRun]) -> str:
    if polled is None or not polled.job_id:
        return f"job {_single_line(run.record.job)}" if run.record.job else ""
    link = f" ({polled.link} of {polled.chain})" if polled.chain > 1 else ""
    raw = polled.status.raw if polled.status is not None else ""
    state = polled.outcome.state + (f" {raw}" if raw and raw.lower() != polled.outcome.state else "")
    unanswered = "".join(f", {name}: {reason}" for name, reason in polled.unanswered.items())
    return _single_line(f"job {polled.job_id}{link} {state}{unanswered}")


def _single_line(text: str) -> str:
    return harmless(cut(text))
