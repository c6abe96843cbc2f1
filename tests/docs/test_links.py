"""Tests of the documentation: links lead to existing files and anchors, the menu has every page, README is short."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Iterator, Set

import pytest
import yaml

from tests.docs.pages import DOCS, ROOT, anchors_of, links_of, name_of, pages, written_pages


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_links_lead_to_existing_targets(page: Path) -> None:
    broken = []
    for link in links_of(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        is_page = target.suffix == ".md" and target.is_file()
        if not target.exists() or (anchor and not (is_page and anchor in anchors_of(target))):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=name_of)
def test_the_site_s_links_stay_inside_of_it(page: Path) -> None:
    outside = [link for link in links_of(page) if DOCS not in (page.parent / link).resolve().parents]
    assert not outside  # files of the repository are named as code: the site does not contain them


def test_the_menu_has_every_page() -> None:
    menu = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert set(_targets(menu)) == {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}


def _targets(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    for child in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from _targets(child)


def test_every_written_page_can_be_reached_from_the_first() -> None:
    reached: Set[Path] = set()
    waiting = [DOCS / "index.md"]
    while waiting:
        page = waiting.pop()
        if page in reached:
            continue
        reached.add(page)
        waiting += [
            (page.parent / link.partition("#")[0]).resolve()
            for link in links_of(page)
            if link.partition("#")[0].endswith(".md")
        ]
    assert set(DOCS.rglob("*.md")) <= reached


@pytest.mark.parametrize("page", written_pages(), ids=lambda page: name_of(page))
def test_code_that_pages_name_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    paths = set(re.findall(r"`((?:fugaku_gpt|benchmarks|tests|env|docs|jobscripts)/[A-Za-z0-9_./-]*)`", text))
    assert not [path for path in sorted(paths) if not (ROOT / path).exists()]


def test_the_readme_is_short() -> None:
    assert (ROOT / "README.md").stat().st_size <= 8192


def test_anchors_are_those_of_headings(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Two words\n\n## `code` & more\n\n```sh\n# no heading\n```\n\n## Two words\n", encoding="utf-8")
    assert anchors_of(page) == {"two-words", "code-more", "two-words_1"}
