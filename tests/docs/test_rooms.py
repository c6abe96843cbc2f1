"""Tests that docs/architecture.md shows the rooms, floors and walls that the package has."""

from __future__ import annotations

import configparser
import re
from typing import List, Set

from tests.docs.pages import DOCS, ROOT

PAGE = (DOCS / "architecture.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "fugaku_gpt"
FOLDERS = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
MODULES = {path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("__")}
# folders of tests that belong to no room
SHARED_TESTS = {
    "aarch64",
    "benchmarks",
    "browser",
    "disk_faults",
    "docs",
    "fuzz",
    "golden",
    "house",
    "matrix",
    "mpi",
    "mutants",
    "support",
}


def contract(name: str, key: str) -> List[str]:
    """Returns the words of one key of an import contract in setup.cfg."""
    config = configparser.ConfigParser()
    config.read(str(ROOT / "setup.cfg"), encoding="utf-8")
    return config[f"importlinter:contract:{name}"][key].replace("|", " ").split()


def test_the_table_has_a_row_for_each_room_and_no_other() -> None:
    table = PAGE.partition("| room | what is inside |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(rows) == sorted(FOLDERS | MODULES)


def test_the_picture_shows_each_room_and_no_other() -> None:
    picture = PAGE.partition("```text\n")[2].partition("```")[0]
    assert set(re.findall(r"(\w+)/", picture)) == FOLDERS
    assert {module for module in MODULES if re.search(rf"\b{module}\b", picture)} == MODULES


def test_the_page_names_the_rooms_beyond_the_login_node_wall() -> None:
    wall = PAGE.partition("**The login-node wall.**")[2].partition("import torch")[0]
    behind = {module.rpartition(".")[2] for module in contract("login-node", "source_modules")}
    assert _code(wall) == set(contract("floors", "layers")) - behind


def test_contributing_names_the_same_rooms() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    wall = PAGE.partition("**The login-node wall.**")[2].partition("import torch")[0]
    assert _code(text.partition("what\nranks run (")[2].partition(")")[0]) == _code(wall)


def test_each_folder_of_the_package_has_a_folder_of_tests_and_no_other_has() -> None:
    tests = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert tests - SHARED_TESTS == FOLDERS


def _code(text: str) -> Set[str]:
    return set(re.findall(r"`(\w+)`", text))
