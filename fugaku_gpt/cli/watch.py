"""``fugaku-gpt watch``: runs as they grow."""

from __future__ import annotations

import contextlib
import html
import os
import tempfile
import webbrowser
from pathlib import Path
from typing import Iterator, Optional, Sequence, Tuple

import click

from fugaku_gpt.cli.options import PATH
from fugaku_gpt.cli.output import echo
from fugaku_gpt.errors import EXIT_OK, UsageError

_DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY")


@click.command()
@click.argument("directories", nargs=-1, required=True, metavar="DIR...", type=PATH)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    metavar="N",
    help="Port of the page on 127.0.0.1; default: 0, which picks a free one.",
)
@click.option(
    "--terminal",
    "is_terminal",
    is_flag=True,
    help="Show runs and their jobs on this terminal, not as a page; where there is none, print a line for each change.",
)
@click.option("--no-open", is_flag=True, help="Do not open a browser; without a display none is opened anyway.")
def watch(directories: Tuple[Path, ...], port: Optional[int], is_terminal: bool, no_open: bool) -> int:
    """Show the page of `report runs` of the runs in DIR, live, until Ctrl-C.

    Runs may appear, grow, end, be resumed and be removed meanwhile. The page is served on this machine alone, to those
    who have its URL with the token in it, and changes nothing. From elsewhere, an ssh tunnel leads to it:
    ssh -L PORT:127.0.0.1:PORT HOST.

    With --terminal there is no page: for each run the screen has its progress, its losses with their curve, and its
    newest figures. Schedulers are asked about its jobs as in `job watch`.
    """
    if is_terminal:
        if port is not None or no_open:
            raise UsageError("--terminal shows no page: leave out --port and --no-open")
        from fugaku_gpt.cli.watch_terminal import watch_terminal

        return watch_terminal(directories)
    return watch_page(directories, port or 0, not no_open)


def watch_page(directories: Sequence[Path], port: int, is_opened: bool) -> int:
    """Serve the live page until Ctrl-C.

    Raises:
        UsageError: a folder does not exist, or the port cannot be used.
    """
    from fugaku_gpt.report.live_runs import LiveRuns
    from fugaku_gpt.report.live_server import LiveServer

    server = LiveServer(LiveRuns(directories), port)
    with contextlib.suppress(KeyboardInterrupt), server.serving():
        echo(server.url)
        echo(
            f"Ctrl-C ends it. From elsewhere: ssh -L {server.port}:127.0.0.1:{server.port} {os.uname().nodename}",
            err=True,
        )
        with _browser(server.url) if is_opened and any(map(os.environ.get, _DISPLAYS)) else contextlib.nullcontext():
            server.wait()
    return EXIT_OK


@contextlib.contextmanager
def _browser(url: str) -> Iterator[None]:
    """Open a URL in a browser, by a file that leads to it and that only this user can read: everybody on the machine
    sees the arguments of a process, and the URL has a token."""
    with tempfile.TemporaryDirectory(prefix="fugaku-gpt-watch-") as folder:
        page = Path(folder) / "watch.html"
        page.write_text(f'<meta http-equiv="refresh" content="0; url={html.escape(url)}">', encoding="utf-8")
        webbrowser.open(page.as_uri())
        yield
