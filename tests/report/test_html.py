"""Tests of the HTML form: one file with the notes' cells, nothing external and nothing unescaped."""

from __future__ import annotations

import re
from configparser import ConfigParser
from dataclasses import replace
from html.parser import HTMLParser
from typing import List, Optional, Tuple

from fugaku_gpt.report.html import TEMPLATE, html_tables
from fugaku_gpt.report.notes_table import COLUMNS, row_cells
from fugaku_gpt.report.rows import ResultRow
from tests.report.test_notes_table import by_hand, measurements

ROW = by_hand(measurements()["fsweep.t1.L6"])
EVIL = "</td><script>alert(1)</script>&\"'"


class Tags(HTMLParser):
    """Collects tags and links, and asserts that tags are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: List[str] = []
        self.seen: List[str] = []
        self.links: List[str] = []

    def handle_starttag(self, tag: str, attrs: "List[Tuple[str, Optional[str]]]") -> None:
        self.seen.append(tag)
        self.links += [name for name, _ in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in ("meta", "br", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_page_that_needs_nothing_else() -> None:
    text = html_tables([ROW, replace(ROW, status="oom", size="350M")])
    tags = Tags()
    tags.feed(text)
    tags.close()
    assert tags.open == [] and tags.links == [] and "script" not in tags.seen
    assert not re.search(r"https?:|//|@import|url\(", text)
    body = text.partition("</style>")[2]
    assert "\n\n" not in body and body.endswith("</html>\n"), "no blank lines in the place of loops"
    assert tags.seen.count("h2") == 2 and tags.seen.count("th") == 2 * len(COLUMNS)
    assert all(f"<td>{cell}</td>" in text for cell in row_cells(ROW)[:-1]) and text.count('class="bad"') == 1
    assert "TFLOPs × nodes / 1024" in text and "/ 1000;" in html_tables([ROW], si=True)


def test_text_from_outside_is_escaped() -> None:
    evil: ResultRow = replace(ROW, size=EVIL, remarks=(EVIL,), reason=EVIL, status="failed")
    text = html_tables([evil])
    assert "<script>" not in text and "&lt;script&gt;" in text


def test_the_template_is_shipped() -> None:
    settings = ConfigParser()
    settings.read(TEMPLATE.parents[2] / "setup.cfg", encoding="utf-8")
    assert TEMPLATE.is_file() and "*.j2" in settings["options.package_data"]["fugaku_gpt.report"].split()
