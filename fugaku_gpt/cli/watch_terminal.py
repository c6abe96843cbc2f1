"""``fugaku-gpt watch --terminal``: runs as they grow, on a terminal, or as plain lines where there is none."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Dict, List, Sequence, Tuple

from fugaku_gpt.cli.output import echo, echo_at_once
from fugaku_gpt.errors import EXIT_OK
from fugaku_gpt.records.run import OK

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from fugaku_gpt.report.dashboard import Dashboard
    from fugaku_gpt.report.page_runs import PageRun
    from fugaku_gpt.report.run_status import RunStatus

_BLOCK_LINES = 4  # of a run on the screen, with the empty one after it
_STYLES = {OK: "green", "running": "cyan", "queued": "yellow", "held": "yellow", "unfinished": "yellow"}
_NO_RUN = "no run yet"


def watch_terminal(directories: Sequence[Path]) -> int:
    """Show runs until Ctrl-C: a screen that changes on a terminal, a line for each change elsewhere.

    Raises:
        UsageError: a folder does not exist.
    """
    from fugaku_gpt.report.dashboard import Dashboard

    with Dashboard(directories) as dashboard:
        with contextlib.suppress(KeyboardInterrupt):
            (_show_screen if sys.stdout.isatty() else _print_lines)(dashboard)
        if sys.stdout.isatty():
            for _, status in dashboard.statuses():
                echo(status.line())
    return EXIT_OK


def _print_lines(dashboard: "Dashboard") -> None:
    """Print the line of each run whenever it has changed."""
    from fugaku_gpt.report.page_runs import seconds_between_looks

    before: Dict[Path, str] = {}
    problem = note = ""
    while True:
        dashboard.look()
        statuses = dashboard.statuses()
        for run, status in statuses:
            line = status.line()
            if before.get(run.path) != line:
                echo_at_once(line)
            before[run.path] = line
        if dashboard.note != note:
            note = dashboard.note
            echo(f"note: {note or 'all runs are followed again'}", err=True)
        if dashboard.problem != problem:
            problem = dashboard.problem
            echo(f"note: {problem}" if problem else "note: jobs are followed again", err=True)
        time.sleep(seconds_between_looks(len(statuses)))


def _show_screen(dashboard: "Dashboard") -> None:
    from rich.console import Console
    from rich.live import Live

    from fugaku_gpt.report.page_runs import seconds_between_looks

    console = Console(highlight=False, soft_wrap=False)
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            dashboard.look()
            statuses = dashboard.statuses()
            live.update(screen_text(statuses, console, [dashboard.note, dashboard.problem]), refresh=True)
            time.sleep(seconds_between_looks(len(statuses)))


def screen_text(
    statuses: "Sequence[Tuple[PageRun, RunStatus]]", console: "Console", notes: Sequence[str] = ()
) -> "Text":
    """The screen: a block for each run, those that run first, as many as there is room for, and a last line."""
    from rich.text import Text

    from fugaku_gpt.report.run_status import ASCII_LEVELS, BLOCKS

    levels = BLOCKS if "utf" in (console.encoding or "").lower() else ASCII_LEVELS
    width, height = console.size
    ordered = sorted(statuses, key=lambda pair: _rank(pair[1].status))
    shown = ordered[: max(1, (height - 1) // _BLOCK_LINES)]
    lines: List[Text] = []
    for run, status in shown:
        lines += [*_block(run, status, width, levels), Text()]
    if not statuses:
        lines += [Text(_NO_RUN), Text()]
    hidden = len(ordered) - len(shown)
    footer = [f"{hidden} more run{'s' * (hidden != 1)}"] if hidden else []
    footer += [time.strftime("%H:%M:%S"), "Ctrl-C ends this, and stops no run", *filter(None, notes)]
    lines.append(_cut(Text("  ".join(footer), style="dim"), width))
    return Text("\n").join(lines)


def _block(run: "PageRun", status: "RunStatus", width: int, levels: str) -> "List[Text]":
    """The lines of a run: how far it is; its losses, with their curve in the room that they leave; its figures."""
    from rich.text import Text

    from fugaku_gpt.report.run_status import sparkline

    head = Text.assemble((status.name, "bold"), "  ", (status.status, _STYLES.get(status.status, "red")))
    head.append("  " + "  ".join(filter(None, (status.progress(), status.job, status.reason))))
    losses = "  ".join(status.losses())
    curve = sparkline(run.series.iterations.numbers.get("loss", ()), max(0, width - len(losses) - 4), levels)
    middle = Text.assemble("  ", (curve, "cyan"), "  ", losses)
    return [_cut(line, width) for line in (head, middle, Text("  " + "  ".join(status.figures())))]


def _cut(line: "Text", width: int) -> "Text":
    line.truncate(width, overflow="ellipsis")
    return line


def _rank(status: str) -> int:
    """The place of a run on the screen: those that run, those that wait, those that have ended."""
    return 0 if status == "running" else 1 if status in _STYLES and status != OK else 2
