"""Renders a comparison's report as a plain table, Markdown or JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, List

from fugaku_gpt.cli.output import json_document, render_rows

if TYPE_CHECKING:
    from fugaku_gpt.compare.report import Report

REPORT_FORMATS = ("table", "md", "json")


def report_text(report: "Report", form: str) -> str:
    """Render a report in one of ``REPORT_FORMATS``; the text ends in a newline."""
    if form == "json":
        return json_document(report.values)
    return _markdown(report) if form == "md" else _plain(report)


def _plain(report: "Report") -> str:
    lines: List[str] = [f"A: {report.a}", f"B: {report.b}", report.headline]
    lines += [f"  {line}" for line in report.reasons]
    for section in report.sections:
        lines += ["", section.title]
        lines += [f"  {line}" for line in section.lines]
        if section.columns:
            lines += [f"  {line}" for line in render_rows(section.columns, section.rows, "table").splitlines()]
    return "\n".join(lines) + "\n"


def _markdown(report: "Report") -> str:
    lines: List[str] = [f"# {_code(report.a)} (A) and {_code(report.b)} (B)", "", f"**{_cell(report.headline)}**"]
    lines += ["", *(f"* {_cell(line)}" for line in report.reasons)]
    for section in report.sections:
        lines += ["", f"## {section.title}"]
        if section.lines:
            lines += ["", *(f"* {_cell(line)}" for line in section.lines)]
        if section.columns:
            lines += ["", render_rows(section.columns, section.rows, "md").rstrip("\n")]
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    return f"`{text}`"


def _cell(text: str) -> str:
    return text.replace("*", "\\*").replace("_", "\\_")
