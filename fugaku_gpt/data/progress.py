"""How far a long task is: a bar where standard error is a terminal, a line now and then where it is a log."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import Callable, Iterator

_FIRST_LINE, _LINE_EVERY = 2.0, 10.0  # s
Advance = Callable[[int], None]


@contextmanager
def show_progress(title: str, total: int) -> Iterator[Advance]:
    """Gives a function that takes the bytes done so far, of ``total``."""
    if sys.stderr.isatty():
        with _bar(title, total) as advance:
            yield advance
    else:
        yield _lines(title, total)


@contextmanager
def _bar(title: str, total: int) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, completed=done)


def _lines(title: str, total: int) -> Advance:
    start = time.monotonic()
    due = start + _FIRST_LINE

    def advance(done: int) -> None:
        nonlocal due
        now = time.monotonic()
        if now < due:
            return
        due = now + _LINE_EVERY
        rate = done / (now - start) / 2**20
        share = 100 * done / total if total else 100.0
        print(f"{title}: {share:.0f}% ({done / 2**20:.1f} MiB, {rate:.1f} MiB/s)", file=sys.stderr, flush=True)

    return advance
