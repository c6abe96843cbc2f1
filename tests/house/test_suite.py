"""Tests of how ``make quick`` reads from the text of test files which of them need training."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import imports
from tests.support.imports import imported_names, needs_training


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
