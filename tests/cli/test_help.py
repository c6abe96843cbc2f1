"""Tests of ``fugaku-gpt help``, which prints the pages of the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from fugaku_gpt.cli.help import documentation_pages
from fugaku_gpt.cli.main import run
from fugaku_gpt.errors import UsageError

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_a_topic_s_page_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help", "glossary"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == (DOCS / "glossary.md").read_text(encoding="utf-8").rstrip("\n")


def test_the_comment_on_a_generated_page_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help", "exit-codes"]) == 0
    assert capsys.readouterr().out.startswith("# Exit codes\n")


def test_without_a_topic_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert {line.split()[0] for line in lines} == set(documentation_pages())
    assert any(line.split(None, 1) == ["train", "Train"] for line in lines)


def test_an_unknown_topic_names_the_valid_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help", "glosary"]) == 2
    assert "did you mean glossary? valid: " in capsys.readouterr().err


def test_an_installation_without_pages_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="without its documentation"):
        documentation_pages(tmp_path)


def test_all_pages_have_different_names() -> None:
    files = [page for folder in (".", "guide", "reference") for page in (DOCS / folder).glob("*.md")]
    assert len(documentation_pages()) == len([page for page in files if page.stem != "index"])
