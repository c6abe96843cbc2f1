"""Tests of prompts from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from fugaku_gpt.errors import UsageError
from fugaku_gpt.inference.prompts import read_prompts


def test_each_line_of_a_text_is_a_prompt(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("def f(\n\n  import\n", encoding="utf-8")
    assert read_prompts(tmp_path / "prompts.txt") == ["def f(", "  import"]


def test_json_lines_are_texts_and_conversations(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '"def\\n"\n{"prompt": "x"}\n{"messages": [{"role": "user", "content": "Hello"}]}\n', encoding="utf-8"
    )
    assert read_prompts(path) == ["def\n", "x", [{"role": "user", "content": "Hello"}]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "prompts.jsonl:1: not JSON"),
        ("3", "expected a text, or an object with prompt or messages"),
        ('{"messages": []}', "messages: expected a list of objects"),
        ('{"messages": [{"role": "wizard", "content": "x"}]}', "role .system, user, assistant, tool."),
        ("", "holds no prompt"),
    ],
)
def test_other_lines_are_refused_by_file_and_line(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(line, encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        read_prompts(tmp_path / "prompts.jsonl")


def test_a_missing_file_and_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for name in ("missing", "bytes"):
        with pytest.raises(UsageError, match=f"{name}: cannot be read"):
            read_prompts(tmp_path / name)


def test_the_form_of_a_copy_is_told_by_the_name_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "3").write_text('"hello"\n')
    assert read_prompts(tmp_path / "3", Path("p.jsonl")) == ["hello"]
    assert read_prompts(tmp_path / "3") == ['"hello"']
