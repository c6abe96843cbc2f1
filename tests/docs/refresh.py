"""Brings the outputs that pages show with ``<!-- rerun -->`` up to date with what their commands print now.

    python -m tests.docs.refresh      rewrites the pages; look at the diff before you commit it

A block that shows all of its output gets the new one. In a block with ``...`` each line is replaced by the most similar
line of the new output; where there is none, the line stays and is reported.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import sys
import tempfile
from pathlib import Path
from typing import List

from fugaku_gpt.cli.main import run
from tests.docs.pages import ROOT, VARIABLE, Block, blocks_of, fugaku_gpt_calls, lay_out_examples, written_pages

_SIMILAR = 0.4  # share of a line that must be the same for it to be the new form of an old one


def printed_by(line: str) -> List[str]:
    """Lines that a shown command prints now, standard error after standard output, without trailing spaces."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))  # scripts are printed as bytes
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        for call in fugaku_gpt_calls(line):
            run(call)
    printed = []
    for stream in (out, err):
        stream.seek(0)
        printed += [text.rstrip() for text in stream.read().splitlines()]
    return printed


def refreshed(block: Block) -> str:
    """The text of a block with today's output."""
    lines: List[str] = []
    for command in block.commands:
        lines += [f"$ {command}", *printed_by(command)]
    shown = block.text.splitlines()
    if "..." not in shown:
        return "\n".join(lines) + "\n"
    return "\n".join(_closest(line, lines, block) for line in shown) + "\n"


def _closest(line: str, lines: List[str], block: Block) -> str:
    if line in ("...", "") or line.startswith("$ ") or line in lines:
        return line
    similar = difflib.get_close_matches(line, lines, n=1, cutoff=_SIMILAR)
    if not similar:
        print(f"{block.page}: nothing like it is printed now: {line}", file=sys.stderr)
    return similar[0] if similar else line


def main() -> None:
    """Rewrites every page with a block that is run again."""
    os.environ["COLUMNS"] = "120"
    with tempfile.TemporaryDirectory() as folder:
        lay_out_examples(Path(folder))
        os.chdir(folder)
        for page in written_pages():
            text = page.read_text(encoding="utf-8")
            new = text
            for block in blocks_of(page):
                today = refreshed(block) if block.rerun else block.text
                if VARIABLE.sub("", today) != VARIABLE.sub("", block.text):  # else only times differ
                    new = new.replace(f"\n{block.text}```", f"\n{today}```")
            if new != text:
                page.write_text(new, encoding="utf-8")
                print(f"rewritten: {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
