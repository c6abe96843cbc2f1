"""Tests that no output has text that a terminal, spreadsheet or browser obeys: each hostile text in each form."""

from __future__ import annotations

import csv
import io
import json
import shlex
import sys
import unicodedata
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple
from xml.etree import ElementTree

import click
import pytest
from click.testing import CliRunner

from fugaku_gpt.cli import main
from fugaku_gpt.cli.output import echo, echo_script, json_document, render_rows
from fugaku_gpt.cli.report import render_table
from fugaku_gpt.errors import UsageError
from fugaku_gpt.harmless import csv_cell, harmless, markdown_cell
from fugaku_gpt.limits import MESSAGE_LINE, MESSAGE_LINES
from fugaku_gpt.records.run import FAILED, Result, failure_lines
from fugaku_gpt.report.rows import ResultRow

HOSTILE = (
    "\x1b]0;title\x07", "\x1b[2J\x1b[H", "\x9b2J", "\x90q\x9c", "ok\rFAKE", "a\x08b", "a\x7fb", "a\0b", "\x85next",
    "\u202egnp.exe", "\u2066x\u2069", "\u200fx\u200e", "\u061cx", "\u2028x\u2029y", "\ufeffx", "\u00adx",
    "\udc80\ud800", "\U000e0041x", "=1+1", "=cmd|' /C calc'!A0", "+1+cmd", "-2+3", "@SUM(A1)", "\t=1", "\uff1d1+1",
    "\uff20A",
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "<!-- ", "</td></table><h1>x", "&lt;b&gt;",
    '" onmouseover="x', "![x](http://example.invalid/x)", "a | b", "a\nb", "$\\frac{1$", "$x$", "]]>", "a]]></style>",
)  # fmt: skip
PLAIN = (
    "\u65e5\u672c\u8a9e\u3000\u5168\u89d2\u306e\u7a7a\u767d\u3001\u7d42\u308f\u308a\u3002", "\u30ab\u30bf\u30ab\u30ca",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467", "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", "A\u00a0B",
    "caf\u00e9 na\u00efve", "-1.5", "-2e-4", "a < b", "a - b", "10 % | x".replace(" | ", " / "),
)  # fmt: skip


def obeyed(text: str, allowed: str = "\n") -> List[str]:
    """Characters that are obeyed, or are no text."""
    joiners = "\u200c\u200d"
    kinds = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return [mark for mark in text if unicodedata.category(mark) in kinds and mark not in allowed + joiners]


def row(text: str) -> ResultRow:
    return ResultRow(
        text, 1, 1, 1, 1, 1, 1, 1, status=FAILED, reason=text, job_id=text, remarks=(text,), torch_build=text,
        not_applied=(text,), torch=text, sweep=text, runs=(text,), settings=((text, text),),
    )  # fmt: skip


FORMS: Dict[str, Callable[[str], str]] = {
    **{form: lambda text, form=form: render_rows(["note"], [{"note": text}], form) for form in ("table", "md", "csv")},
    **{f"report {form}": lambda text, form=form: table_of(text, form) for form in ("table", "md", "csv", "html")},
}


def table_of(text: str, form: str) -> str:
    return render_table(([row(text)], [row(text)]), form)


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
@pytest.mark.parametrize("form", FORMS)
def test_no_form_of_output_has_characters_that_are_obeyed(form: str, text: str) -> None:
    shown = FORMS[form](text)
    if form == "report table":
        shown = harmless(shown)  # which `echo` does to it
    assert obeyed(shown, "\n\t") == []
    shown.encode("utf-8")


@pytest.mark.parametrize("text", PLAIN, ids=ascii)
@pytest.mark.parametrize("form", [form for form in FORMS if form != "report html"])
def test_ordinary_text_of_any_script_passes_unchanged(form: str, text: str) -> None:
    assert text in FORMS[form](text) and harmless(text) == text


@pytest.mark.parametrize("text", (*HOSTILE, *PLAIN), ids=ascii)
def test_json_is_printable_and_gives_every_text_back(text: str) -> None:
    for document in (render_rows(["note"], [{"note": text}], "json"), json_document([{"note": text}])):
        assert json.loads(harmless(document)) == [{"note": text}]
        assert obeyed(document) == [] and document.isascii()
    assert json.loads(table_of(text, "json"))[0]["reason"] == text


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
@pytest.mark.parametrize("form", ["csv", "report csv"])
def test_no_cell_of_a_spreadsheet_is_a_formula(form: str, text: str) -> None:
    for line in csv.reader(io.StringIO(FORMS[form](text))):
        for cell in line:
            assert len(cell) < 2 or cell[0] not in "=+-@\t\r\uff1d\uff0b\uff0d\uff20" or cell == str(csv_cell(cell))


def test_numbers_stay_numbers_in_a_spreadsheet() -> None:
    assert [csv_cell(value) for value in ("-1.5", "+2", "-", -3, 0.5, None, ["=a"], "=a")] == [
        "-1.5", "+2", "-", -3, 0.5, "", "['=a']", "'=a",
    ]  # fmt: skip


class Page(HTMLParser):
    """The tags of a page, with their attributes, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: List[Tuple[str, Tuple[Tuple[str, Optional[str]], ...]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: "List[Tuple[str, Optional[str]]]") -> None:
        self.tags.append((tag, tuple(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("text", (*HOSTILE, *PLAIN), ids=ascii)
def test_no_text_makes_a_tag_of_a_page(text: str) -> None:
    pages = [Page(), Page()]
    for page, content in zip(pages, ("plain", text)):
        page.feed(table_of(content, "html"))
    assert pages[0].tags == pages[1].tags and harmless(text) in pages[1].text


@pytest.mark.parametrize("text", (*HOSTILE, *PLAIN), ids=ascii)
def test_a_cell_of_markdown_has_neither_tags_nor_pictures_nor_cells(text: str) -> None:
    cell = markdown_cell(text)
    assert "\n" not in cell and "![" not in cell and not any(tag in cell for tag in ("<s", "<i", "<!", "</"))
    assert cell.count("|") == cell.count("\\|")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Glyph")
def test_a_picture_is_xml_whatever_text_is_in_it(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from fugaku_gpt.plotting import picture

    texts = (*HOSTILE, *PLAIN)
    for first in range(0, len(texts), 4):
        title, *labels = texts[first : first + 4]
        file = tmp_path / f"{first}.svg"
        with picture(file) as axes:
            for text in labels:
                axes.plot([1, 2], [1, 2], label=f"x{text}")
            axes.set(title=title, xlabel=(labels or [title])[-1])
            axes.legend()
        shown = " ".join("".join(element.itertext()) for element in ElementTree.parse(file).iter())
        for text in (title, *labels):
            assert "".join(harmless(text).split()) in "".join(shown.split()), ascii(text)


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_messages_and_arguments_are_shown_harmlessly(text: str, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    def fail() -> None:
        raise UsageError(f"{text}: no such file")

    monkeypatch.setattr(main, "cli", click.Command("fugaku-gpt", callback=fail))
    assert main.run([]) == 2
    out, err = capfd.readouterr()
    assert obeyed(out + err, "\n\t") == [] and "no such file" in err
    monkeypatch.undo()
    assert main.run([text.replace("\0", "")]) == 2
    assert obeyed("".join(capfd.readouterr()), "\n\t") == []


def test_a_message_of_any_size_is_cut_to_lines_that_are_read(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    def fail() -> None:
        raise UsageError("\n".join(["x" * 10**6, *map(str, range(10**4))]))

    monkeypatch.setattr(main, "cli", click.Command("fugaku-gpt", callback=fail))
    assert main.run([]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == MESSAGE_LINES.value + 1 and lines[-1] == "fugaku-gpt: and 9,901 more lines"
    assert len(lines[0]) == len("fugaku-gpt: ") + MESSAGE_LINE.value


SCRIPT = "#!/bin/bash\necho $'\u202e\x1b[0m' \udcff\r\n"


def test_a_script_goes_into_a_pipe_byte_for_byte() -> None:
    result = CliRunner().invoke(click.Command("script", callback=lambda: echo_script(SCRIPT)))
    assert result.stdout_bytes == SCRIPT.encode("utf-8", "surrogateescape")


def test_a_script_on_a_terminal_is_shown_harmlessly(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    echo_script(SCRIPT)
    echo("\x1b[0m")
    assert terminal.getvalue() == harmless(SCRIPT) + "\\x1b[0m\n" and obeyed(terminal.getvalue()) == []


def test_a_number_that_is_not_finite_is_null() -> None:
    rows = [{"a": float("nan"), "b": [float("-inf"), 1.5]}]
    assert json.loads(render_rows(["a", "b"], rows, "json")) == [{"a": None, "b": [None, 1.5]}]


def test_the_lines_of_a_failure_cannot_steer_a_terminal() -> None:
    lines = failure_lines(Result(FAILED, "\x1b[2J\u202e", 0.0, 1.0, node="\x9b"))
    assert not obeyed("".join(lines)) and "\\x1b[2J" in lines[0]


HOSTILE_VARIABLE = "A=\u202e$(\u200f)"
SETTINGS = ["--set", f"job.environment=[{json.dumps(HOSTILE_VARIABLE, ensure_ascii=False)}]", "--set", "job.elapse=600"]


@pytest.mark.parametrize(
    "command",
    [
        ["job", "render", "--preset", "tiny", "--scheduler", "slurm", *SETTINGS],
        ["job", "submit", "--preset", "tiny", "--scheduler", "slurm", "--dry-run", *SETTINGS],
        ["doctor", "node", "--job", "slurm", *SETTINGS],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_commands_print_scripts_byte_for_byte(tmp_path: Path, command: List[str], monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main.cli, command)
    assert shlex.quote("\u202e$(\u200f)").encode() in result.stdout_bytes, result.output
