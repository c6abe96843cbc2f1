"""Reports the progress of a sweep: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import IO, Any, Dict, Optional

from fugaku_gpt.config.values import format_duration
from fugaku_gpt.records.metrics import last_line
from fugaku_gpt.records.run import OK, Result, RunDirectory
from fugaku_gpt.sweep.expand import Run

_REFRESH_SECONDS = 0.5


def describe_result(result: Result) -> str:
    """Describes in one line how a run ended: status, time, pace, losses."""
    phrases = [result.status if result.status == OK else f"{result.status}: {result.reason}"]
    summary = result.summary
    if result.ended > result.started:
        phrases.append(f"{result.ended - result.started:.1f} s")
    if summary.get("seconds_per_iteration") is not None:
        phrases.append(f"{summary['seconds_per_iteration']:.4g} s/it")
    if summary.get("last_loss") is not None:
        phrases.append(f"loss {summary['first_loss']:.3f} to {summary['last_loss']:.3f}")
    if summary.get("last_validation_loss") is not None:
        phrases.append(f"validation {summary['first_validation_loss']:.3f} to {summary['last_validation_loss']:.3f}")
    return ", ".join(phrases)


def last_iteration(metrics: Path) -> Optional[Dict[str, Any]]:
    """The newest iteration of a metrics file that is being written; None where there is none."""
    return last_line(metrics, "iteration")


class PlainProgress:
    """Prints a line at the start and at the end of each run."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def run_started(self, run: Run, number: int, total: int, directory: RunDirectory) -> None:
        """See :class:`fugaku_gpt.sweep.run.SweepProgress`."""
        self._print_line(f"[{number}/{total}] {run.name}: started")

    def run_ended(self, run: Run, number: int, total: int, result: Result, is_earlier_result: bool) -> None:
        """See :class:`fugaku_gpt.sweep.run.SweepProgress`."""
        self._print_line(
            f"[{number}/{total}] {run.name}: {'kept: ' if is_earlier_result else ''}{describe_result(result)}"
        )

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def _print_line(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


class LiveProgress:
    """Shows two bars (all runs; iterations of the current run, with its loss) below the lines of ended runs."""

    def __init__(self) -> None:
        from rich.console import Console  # imported here: a batch job without a terminal does not need it
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        self._console = Console(stderr=True)
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=self._console,
            transient=True,
        )
        self._total_task = self._bars.add_task("all runs", total=None, note="")
        self._current_task = self._bars.add_task("", total=None, note="", visible=False)
        self._directory: Optional[RunDirectory] = None
        self._is_over = threading.Event()
        self._refresher = threading.Thread(target=self._refresh, daemon=True)

    def __enter__(self) -> LiveProgress:
        self._bars.start()
        self._refresher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._refresher.join()
        self._bars.stop()

    def run_started(self, run: Run, number: int, total: int, directory: RunDirectory) -> None:
        """See :class:`fugaku_gpt.sweep.run.SweepProgress`."""
        iterations = run.config.training.iterations if run.config is not None else None
        self._bars.update(self._total_task, total=total)
        self._bars.reset(self._current_task, description=run.name, total=iterations, note="starting", visible=True)
        self._directory = directory

    def run_ended(self, run: Run, number: int, total: int, result: Result, is_earlier_result: bool) -> None:
        """See :class:`fugaku_gpt.sweep.run.SweepProgress`."""
        self._directory = None
        self._bars.update(self._total_task, total=total, completed=number)
        self._bars.update(self._current_task, visible=False)
        line = f"[{number}/{total}] {run.name}: {'kept: ' if is_earlier_result else ''}{describe_result(result)}"
        self._console.print(line, markup=False, highlight=False, style=None if result.status == OK else "red")

    def _refresh(self) -> None:
        while not self._is_over.wait(_REFRESH_SECONDS):
            directory = self._directory
            line = last_iteration(directory.metrics_file) if directory is not None else None
            if line is not None:
                loss = line.get("loss")
                loss_text = f"loss {loss:.3f}" if loss is not None else "loss is not a number"
                note = f"{loss_text}, {format_pace(line.get('seconds'))}"
                self._bars.update(self._current_task, completed=line["iteration"], note=note)


def format_pace(seconds: Optional[float]) -> str:
    """Formats seconds per iteration: ``0.12 s/it``, or H:MM:SS per iteration from a minute on."""
    if seconds is None:
        return "-"
    return f"{seconds:.3g} s/it" if seconds < 60 else f"{format_duration(seconds)}/it"
