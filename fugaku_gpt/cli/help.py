"""``fugaku-gpt help``: the documentation's pages on the terminal."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Dict, Optional

import click

from fugaku_gpt.cli.output import echo, render_rows
from fugaku_gpt.errors import UsageError
from fugaku_gpt.machine.checkout import shipped_folder

_FOLDERS = (".", "guide", "reference")


@click.command("help")
@click.argument("topic", required=False)
def help_(topic: Optional[str]) -> None:
    """Print a page of the documentation, such as `fugaku-gpt help tutorial`; without TOPIC, list the pages.

    The text is Markdown. On a terminal it goes through the pager. Options of a command are under its own --help.
    """
    pages = documentation_pages()
    if topic is None:
        rows = [{"topic": name, "title": _title(page)} for name, page in pages.items()]
        echo(render_rows(("topic", "title"), rows, "table"), nl=False)
        return
    if topic not in pages:
        close = difflib.get_close_matches(topic, pages, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UsageError(f"{topic}: no such topic; {hint}valid: {', '.join(pages)}")
    click.echo_via_pager(_without_comment(pages[topic].read_text(encoding="utf-8")))


def documentation_pages(folder: Optional[Path] = None) -> Dict[str, Path]:
    """Topic → its Markdown file, in the checkout's ``docs/`` or among what an installation brought.

    Args:
        folder: read this folder instead.

    Raises:
        UsageError: the documentation is not there.
    """
    root = folder if folder is not None else shipped_folder("docs")
    pages = {
        page.stem: page for name in _FOLDERS for page in sorted((root / name).glob("*.md")) if page.stem != "index"
    }
    if not pages:
        raise UsageError(
            f"{root}: there are no pages: this fugaku_gpt was installed without its documentation; read docs/ of a "
            "checkout, or use --help of each command"
        )
    return pages


def _without_comment(text: str) -> str:
    """The page without the comment at its head that says it is generated."""
    return text.partition("-->\n")[2].lstrip("\n") if text.startswith("<!--") else text


def _title(page: Path) -> str:
    """The page's first heading."""
    lines = _without_comment(page.read_text(encoding="utf-8")).splitlines()
    return next((line[2:] for line in lines if line.startswith("# ")), page.stem)
