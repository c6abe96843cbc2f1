"""Shows the progress of a long task: a bar if standard error is a terminal, else a line every ten seconds."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import Callable, Iterator, List

_FIRST_LINE_SECONDS, _LINE_INTERVAL_SECONDS = 2.0, 10.0
Advance = Callable[[int], None]


@contextmanager
def show_progress(title: str, total: int, unit: str = "") -> Iterator[Advance]:
    """Show progress during the block; the function that it yields takes what is done so far, of ``total``: bytes, or
    what ``unit`` names in the plural."""
    if sys.stderr.isatty():
        with _progress_bar(title, total, unit) as advance:
            yield advance
    else:
        yield _progress_lines(title, total, unit)


@contextmanager
def _progress_bar(title: str, total: int, unit: str) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    amounts: List[ProgressColumn] = [DownloadColumn(), TransferSpeedColumn()]
    if unit:
        amounts = [MofNCompleteColumn(), TextColumn(unit)]
    with Progress(
        TextColumn(title), BarColumn(), *amounts, TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, completed=done)


def _progress_lines(title: str, total: int, unit: str) -> Advance:
    start = time.monotonic()
    next_line_time = start + _FIRST_LINE_SECONDS

    def advance(done: int) -> None:
        nonlocal next_line_time
        current_time = time.monotonic()
        if current_time < next_line_time:
            return
        next_line_time = current_time + _LINE_INTERVAL_SECONDS
        seconds = current_time - start
        percent = 100 * done / total if total else 100.0
        amounts = f"{done / 2**20:.1f} MiB, {done / seconds / 2**20:.1f} MiB/s"
        if unit:
            amounts = f"{done} {unit}, {done / seconds:.0f} {unit}/s"
        left = f", {seconds * (total - done) / done:.0f} s left" if done else ""
        print(f"{title}: {percent:.0f}% ({amounts}{left})", file=sys.stderr, flush=True)

    return advance
