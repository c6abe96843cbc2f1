"""Tests of the tiers of the suite: which tests need training, and that no test is left out of all tiers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import imports
from tests.support.imports import imported_names, needs_training

ROOT = Path(__file__).resolve().parents[2]


def recipe(target: str) -> str:
    """Returns the recipe of a target of the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (lines,) = re.findall(rf"^{target}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    return str(lines)


def test_make_test_and_make_test_long_together_run_every_test_once() -> None:
    """One selects what the other leaves out, and ``.ci/run`` calls both. A file that the long tests leave out of their
    workers, for its memory, runs alone after them."""
    expressions = [re.findall(r'-m "([^"]*)"', recipe(target)) for target in ("unit", "test-long")]
    assert expressions == [["not long"], ["long", "long"]]
    workers, alone = recipe("test-long").splitlines()
    ignored = re.findall(r"--ignore (\S+\.py)", workers)
    assert ignored == re.findall(r'-m "long" (\S+\.py)', alone) == ["tests/test_smollm2.py"]
    legs = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert legs.count("make test") == legs.count("make test-long") == 1


def test_no_option_of_pytest_leaves_tests_out() -> None:
    """Neither the configuration nor what all targets share selects tests; a named part of the suite is run as named."""
    (options,) = re.findall(r"^addopts = (.*)$", (ROOT / "setup.cfg").read_text(encoding="utf-8"), re.MULTILINE)
    (shared,) = re.findall(r"^PYTEST = (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for text in (options, shared.partition(" -m pytest ")[2]):
        assert not re.search(r"(^| )(-m|-k|--ignore|--deselect)\b", text), text
    assert '$(or $(TESTS),-m "not long" tests)' in recipe("unit")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import torch", {"torch"}),
        ("import torch.nn as nn", {"torch.nn"}),
        ("from a import b, c as d", {"a", "a.b", "a.c", "a.as", "a.d"}),  # names too many do no harm
        ("from a import (\n    b,\n    c,\n)", {"a", "a.b", "a.c"}),
        ("def later():\n    import torch", set()),
        ("if TYPE_CHECKING:\n    import torch", set()),
        ('text = "import torch"', set()),
    ],
)
def test_imports_of_the_top_level_are_seen(text: str, names: "set[str]", tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text(text + "\n", encoding="utf-8")
    assert imported_names(file) == names


def test_pytorch_is_seen_through_other_files_and_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "ROOT", tmp_path)
    monkeypatch.setattr(imports, "_module_file", imports._module_file.__wrapped__)
    texts = {
        "tests/support/helper.py": "from fugaku_gpt.deep import inner\n",
        "fugaku_gpt/__init__.py": "",
        "fugaku_gpt/deep/__init__.py": "import json\n",
        "fugaku_gpt/deep/inner.py": "import mpi4py.MPI\n",
        "tests/test_direct.py": "from tests.support.helper import anything\n",
        "tests/test_package.py": "import fugaku_gpt.deep\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert needs_training(tmp_path / "tests" / "test_direct.py")
    assert not needs_training(tmp_path / "tests" / "test_package.py")
