"""``fugaku-gpt job parse``: the contents of a ``#PJM`` script as data."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Dict, List, Tuple

import click

from fugaku_gpt.cli.options import format_option
from fugaku_gpt.cli.output import echo, json_document, render_rows
from fugaku_gpt.errors import UsageError
from fugaku_gpt.input_files import read_stream
from fugaku_gpt.jobs.script_document import script_document
from fugaku_gpt.limits import SCRIPT_TEXT
from fugaku_gpt.pjm.lexer import read_script, read_script_file
from fugaku_gpt.pjm.script import PjmScript

STDIN = "-"


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path, allow_dash=True))
@format_option(("json", "table"))
def parse(files: Tuple[Path, ...], form: str) -> None:
    """Show what #PJM scripts request, as pjsub reads them; FILE - is the standard input.

    Nothing is executed or submitted. Options that pjsub does not have are kept and marked; several FILEs give a list.
    For a script that fugaku_gpt has written, the settings that it was made from are shown as well.
    """
    scripts = [(str(path), _read(path)) for path in files]
    if form == "json":
        documents = [{"file": name, **script_document(script)} for name, script in scripts]
        echo(json_document(documents[0] if len(documents) == 1 else documents), nl=False)
        return
    rows = [row for name, script in scripts for row in _rows(name, script)]
    columns = ("file", "line", "option", "key", "value", "note")
    echo(render_rows(columns if len(files) > 1 else columns[1:], rows, "table"), nl=False)


def _read(path: Path) -> PjmScript:
    if str(path) == STDIN:
        try:
            content = read_stream(sys.stdin.buffer, SCRIPT_TEXT, "the standard input")
        except OSError as error:
            raise UsageError(f"{error.filename}: cannot be read: {error.strerror}") from None
        return read_script(content.decode("utf-8", "surrogateescape"))
    return read_script_file(path)


def _rows(name: str, script: PjmScript) -> List[Dict[str, Any]]:
    rows: List[Dict[str, Any]] = [
        {
            "line": item.line,
            "option": item.option,
            "key": item.key,
            "value": item.value,
            "note": None if item.is_supported else "not pjsub's own",
        }
        for item in script.directives
    ]
    rows += [{"line": item.line, "value": item.text, "note": item.kind} for item in script.problems]
    rows += [
        {"line": line, "value": script.lines[line - 1], "note": "below the first command"}
        for line in script.ignored_lines
    ]
    rows += [{"line": line, "value": script.lines[line - 1], "note": "comment"} for line in script.disabled_lines]
    return [{"file": name, **row} for row in sorted(rows, key=lambda row: int(row["line"]))]
