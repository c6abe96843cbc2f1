"""Tests that the notebook of the documentation runs from its first cell to its table, and shows what it promises."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, List

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: make dev")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: make dev")
pytest.importorskip("ipykernel", reason="ipykernel is not installed: make dev")

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "examples" / "texts-to-table.ipynb"


def shown(cell: Any, kind: str) -> List[str]:
    """The outputs of a cell in one form."""
    return [output["data"][kind] for output in cell.get("outputs", ()) if kind in output.get("data", {})]


def test_the_notebook_has_no_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None


@pytest.mark.mpi
@pytest.mark.long
def test_the_notebook_runs_and_shows_a_curve_and_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = copy.deepcopy(nbformat.read(NOTEBOOK, as_version=4))
    client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    assert any(shown(cell, "image/png") for cell in notebook.cells), "the curve"
    (table,) = [text for cell in notebook.cells for text in shown(cell, "text/markdown")]
    assert table.startswith("### ") and table.count("\n| ") >= 3
    frame = shown(notebook.cells[-1], "text/html")[0]
    assert frame.count("<tr") == 1 + 3, "a heading, the first run, two of the sweep"
    texts = [output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("layout.tp: 3: must divide model.heads 2; valid: 1, 2" in text for text in texts)
