"""Tests of names and prose everywhere: dialect words are rare, docstrings and help texts are sentences."""

from __future__ import annotations

import ast
import os
import shutil
from pathlib import Path
from typing import Any, List

import pytest

from tests.house import names, prose
from tests.house.test_text import tracked_files

OLD_RUNS = "tests/golden/v0.1.0/runs/"  # as that version wrote them
PROSE_SUFFIXES = (".c", ".cfg", ".h", ".j2", ".md", ".sh", ".toml", ".txt", ".yaml", ".yml")
LIMIT = 5.0  # dialect names per 1000 bound names
ROOT = names.ROOT
# the package in `make quick`, the larger rest in `make test`
EVERY_FOLDER = [".", *(pytest.param(folder, marks=pytest.mark.slow) for folder in names.FOLDERS)]

PLANTED = """
import numpy as found_numpy
from os import path as known
from os import sep as fine

FOUND_DAYS = 3

class KeptTable:
    mine: int = 0

    def look_here(self, told, *, what_for=None, **others):
        self.late_bytes = told
        others.near = 1
        for one in told:
            words, (now, fine) = one
        with open(words) as held:
            pass
        try:
            pass
        except OSError as said:
            pass
        places = [place for place in told]
        whole: int = 1
        return lambda apart: apart.parts

async def in_place(value):
    if (wanted := value):
        wanted = found(part=wanted.parts)
"""


def planted_names() -> List[str]:
    """Dialect names of the planted source, in the order of lines."""
    return [binding.name for binding in names.bindings(ast.parse(PLANTED)) if names.is_dialect(binding.name)]


def test_the_counter_sees_each_kind_of_binding() -> None:
    assert planted_names() == [
        "found_numpy",
        "known",
        "FOUND_DAYS",
        "KeptTable",
        "mine",
        "look_here",
        "others",
        "told",
        "what_for",
        "late_bytes",
        "near",
        "one",
        "now",
        "words",
        "held",
        "said",
        "place",
        "whole",
        "apart",
        "wanted",
    ]


def test_the_counter_names_line_and_kind() -> None:
    bound = {binding.name: binding for binding in names.bindings(ast.parse(PLANTED))}
    kinds = {name: bound[name].kind for name in ("FOUND_DAYS", "KeptTable", "mine", "look_here", "told", "near", "one")}
    assert kinds == {
        "FOUND_DAYS": "constant",
        "KeptTable": "class",
        "mine": "field",
        "look_here": "function",
        "told": "parameter",
        "near": "attribute",
        "one": "local",
    }
    assert PLANTED.splitlines()[bound["late_bytes"].line - 1].strip() == "self.late_bytes = told"


def test_a_name_counts_once_in_a_scope_and_again_in_another() -> None:
    twice = "def f():\n    found = 1\n    found = 2\ndef g():\n    found = 3\n"
    bound = [binding for binding in names.bindings(ast.parse(twice)) if binding.kind == "local"]
    assert [(binding.line, binding.name) for binding in bound] == [(2, "found"), (5, "found")]


@pytest.mark.parametrize("word", sorted(names.DIALECT))
def test_a_dialect_word_is_seen_in_any_spelling(word: str) -> None:
    for name in (word, f"_{word}", f"{word}_rows", f"rows_{word}", f"Row{word.title()}", word.upper(), f"{word}2"):
        assert names.is_dialect(name), name


@pytest.mark.parametrize(
    "name",
    ["place_holder_", "foundation", "key_worker", "keptn", "in_place", "_softmax_in_place", "OneForwardOneBackward"],
)
def test_names_that_only_resemble_the_dialect(name: str) -> None:
    assert names.is_dialect(name) is (name == "place_holder_")


def test_sizes_of_planted_code() -> None:
    source = (
        "@group.command()\ndef f(self, a, b, *c, d=1, **e):\n" + "    pass\n" * 60 + "class A:\n    def f(cls): ...\n"
    )
    command, method = names.functions(ast.parse(source))
    assert (names.length(command), names.length(method)) == (61, 1)
    assert (names.parameters(command), names.parameters(method)) == (["a", "b", "d", "c", "e"], [])
    assert (names.is_command(command), names.is_command(method)) == (True, False)


def test_imports_of_planted_code() -> None:
    source = (
        "import json, fugaku_gpt.records.run\nfrom fugaku_gpt import config\n"
        "from fugaku_gpt.comm.pending import Pending\n"
        "def f():\n    from fugaku_gpt.errors import Error\n"
    )
    assert names.imported_rooms(ast.parse(source)) == {"records", "config", "comm", "errors"}


@pytest.fixture
def small_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of one room and one module, in the place of the package, and a folder of tests beside it."""
    monkeypatch.setattr(names, "ROOT", tmp_path)
    monkeypatch.setattr(names, "PACKAGE", tmp_path / "fugaku_gpt")
    (tmp_path / "fugaku_gpt" / "room").mkdir(parents=True)
    (tmp_path / "fugaku_gpt" / "__init__.py").write_text("found = 1\n", encoding="utf-8")
    text = '"""Of a room."""\nfrom fugaku_gpt.alone import told\nfound = fine = 1\n'
    (tmp_path / "fugaku_gpt" / "room" / "file.py").write_text(text, encoding="utf-8")
    (tmp_path / "fugaku_gpt" / "alone.py").write_text(
        "told = 'he goes on'\nfine = 1\nmore = 2\n" * 200, encoding="utf-8"
    )
    (tmp_path / "tests" / "house").mkdir(parents=True)
    for file in ("tests/planted.py", "tests/house/prose.py"):
        (tmp_path / file).write_text('"""What is told."""\nfound = 1\n', encoding="utf-8")


@pytest.mark.usefixtures("small_package")
def test_the_table_has_a_line_for_each_room() -> None:
    cells = [line.split() for line in names.table().splitlines()[1:]]
    assert cells == [
        # files, lines, long files, functions: all, long, wide, of click; names, dialect, per 1000; prose; arrows
        ["alone", "1", "600", "1", "0", "0", "0", "0", "3", "1", "333.3", "0", "200", "0"],
        ["room", "1", "3", "0", "0", "0", "0", "0", "2", "1", "500.0", "1", "0", "1", "alone"],
        ["sum", "2", "603", "1", "0", "0", "0", "0", "5", "2", "400.0", "1", "200", "1"],
    ]


@pytest.mark.usefixtures("small_package")
def test_a_list_has_file_line_kind_and_name() -> None:
    assert list(names.dialect_list("room")) == ["fugaku_gpt/room/file.py:3: constant: found"]
    assert list(names.dialect_list("alone")) == ["fugaku_gpt/alone.py:1: constant: told"]
    assert len(list(names.dialect_list("."))) == 3
    assert list(names.prose_list("room")) == ["fugaku_gpt/room/file.py:1: docstring: begins with 'Of': Of a room."]


@pytest.mark.usefixtures("small_package")
def test_a_folder_beside_the_package_is_listed_without_quotations() -> None:
    assert list(names.dialect_list("tests/planted")) == ["tests/planted.py:2: constant: found"]
    assert list(names.prose_list("tests")) == [
        "tests/house/prose.py:1: docstring: begins with 'What': What is told.",
        "tests/planted.py:1: docstring: begins with 'What': What is told.",
        "tests/planted.py:1: docstring: says 'is told': What is told.",
    ]


def signs_of(source: str) -> List[str]:
    """Signs of all texts of a source."""
    return [sign for text in prose.texts_of(source) for sign in prose.fragment_signs(text)]


@pytest.mark.parametrize("opening", prose.OPENINGS)
def test_a_fragment_is_recognized_by_the_opening(opening: str) -> None:
    text = f"{opening.strip()} rows."
    sign = [f"begins with {opening.strip()!r}"]
    for source in (
        f'"""{text}"""',
        f'def f():\n    """{text}"""',
        f'class A:\n    """\n    {text}\n    """',
        f'click.option("--rows", help="{text}")',
        f'click.option("--rows", help=f"{text} {{rows}}.")',
        f'rows: int = option(3, "{text}")',
        f"# {text}\nrows = 3",
    ):
        assert signs_of(source) == sign, source
    assert not signs_of(f'print("{text}")')


def test_other_signs_of_a_fragment() -> None:
    assert signs_of('"""rows of a table."""') == ["begins in lower case"]
    assert signs_of('"""Rows of a table"""') == ["first paragraph does not end a sentence"]
    assert signs_of('"""Rows of a table\n\nMore of them."""') == ["first paragraph does not end a sentence"]
    assert signs_of('option("--rows", help="rows")') == [
        "begins in lower case",
        "first paragraph does not end a sentence",
    ]


def test_sentences_pass() -> None:
    assert not signs_of('"""Returns the rows (all of them.)\n\nand more"""')
    assert not signs_of('"""Offers rows."""\n# Often, bystanders.\n')
    assert not signs_of('"""torch.compile is not used here."""')
    assert not signs_of('option("--rows", help="Rows of the table.  [default: 3]")')
    assert not signs_of('rows: int = option(3, "rows of the table")')


@pytest.mark.parametrize(
    ("phrase", "example"),
    [
        ("hand in", "hands in the job"),
        ("hand in", "a job was handed\nin"),
        ("go on", "the run goes on"),
        ("go on", "to go on from it"),
        ("is told", "the rank is told"),
        ("so many", "So many nodes"),
        ("who stays", "Who stays when a rank dies"),
    ],
)
def test_a_banned_phrase_is_seen_in_any_text(phrase: str, example: str) -> None:
    for source in (
        f'"""{example}"""',
        f'raise Error(f"""{{rank}}: {example}""")',
        "# " + example.replace("\n", "\n# "),
    ):
        counted = [phrase for text in prose.texts_of(source) for phrase in prose.banned_phrases(text.content)]
        assert counted == [phrase], source


def test_phrases_that_only_resemble_banned_phrases_pass() -> None:
    assert not prose.banned_phrases("goes hand in hand; a cargo onboard; told it; beforehand in time; ego on")


@pytest.mark.slow
@pytest.mark.parametrize("folder", EVERY_FOLDER)
def test_dialect_names_are_rare(folder: str) -> None:
    bound = [binding.name for module in names.modules_below(folder) for binding in names.bindings(names.parse(module))]
    dialect = [name for name in bound if names.is_dialect(name)]
    assert 1000 * len(dialect) / len(bound) < LIMIT, f"see: python -m tests.house.names --list {folder}"


@pytest.mark.slow
@pytest.mark.parametrize("folder", EVERY_FOLDER)
def test_docstrings_and_help_texts_are_sentences(folder: str) -> None:
    assert not list(names.prose_list(folder)), f"see: python -m tests.house.names --prose {folder}"


@pytest.mark.slow
def test_no_document_or_template_says_a_banned_phrase() -> None:
    tracked = [path for path in tracked_files() if not path.relative_to(ROOT).as_posix().startswith(OLD_RUNS)]
    files = [path for path in tracked if path.suffix in PROSE_SUFFIXES or path.name == "Makefile"]
    covered = {path.relative_to(ROOT).parts[0] for path in files}
    assert {"CONTRIBUTING.md", "Makefile", "benchmarks", "docs", "env", "fugaku_gpt", "jobscripts", "tests"} <= covered
    banned = [
        f"{path.relative_to(ROOT)}: {phrase}"
        for path in files
        for phrase in prose.banned_phrases(path.read_text(encoding="utf-8"))
    ]
    assert not banned, "\n".join(banned)


def test_each_allowed_term_has_a_reason_and_a_dialect_word() -> None:
    for term, reason in names.ALLOWED.items():
        assert reason and not names.DIALECT.isdisjoint(term.split()), term


def test_files_and_folders_that_vanish_meanwhile_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "PACKAGE", tmp_path)
    monkeypatch.setattr(names, "ROOT", tmp_path)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "module.py").write_text("found = 1\n")
    scandir = os.scandir

    def scan_and_remove(path: Any) -> Any:
        if path == str(tmp_path / "b"):
            monkeypatch.setattr(os, "scandir", scandir)
            shutil.rmtree(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan_and_remove)
    modules = names.modules_below()
    assert modules == [tmp_path / "a" / "module.py"]
    monkeypatch.setattr(names, "modules_below", lambda folder: [*modules, tmp_path / "gone.py"])
    assert list(names.dialect_list(".")) == ["a/module.py:1: constant: found"]
    assert list(names.prose_list(".")) == [] and names.count("room", [tmp_path / "gone.py"]).files == 0
