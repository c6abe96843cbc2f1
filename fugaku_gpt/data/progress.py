"""Shows the progress of a long task: a bar if standard error is a terminal, else a line every ten seconds."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import Callable, Iterator

_FIRST_LINE_SECONDS, _LINE_INTERVAL_SECONDS = 2.0, 10.0
Advance = Callable[[int], None]


@contextmanager
def show_progress(title: str, total: int) -> Iterator[Advance]:
    """Show progress during the block; the function that it yields takes the bytes done so far, of ``total``."""
    if sys.stderr.isatty():
        with _progress_bar(title, total) as advance:
            yield advance
    else:
        yield _progress_lines(title, total)


@contextmanager
def _progress_bar(title: str, total: int) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, completed=done)


def _progress_lines(title: str, total: int) -> Advance:
    start = time.monotonic()
    next_line_time = start + _FIRST_LINE_SECONDS

    def advance(done: int) -> None:
        nonlocal next_line_time
        current_time = time.monotonic()
        if current_time < next_line_time:
            return
        next_line_time = current_time + _LINE_INTERVAL_SECONDS
        rate = done / (current_time - start) / 2**20
        percent = 100 * done / total if total else 100.0
        print(f"{title}: {percent:.0f}% ({done / 2**20:.1f} MiB, {rate:.1f} MiB/s)", file=sys.stderr, flush=True)

    return advance
