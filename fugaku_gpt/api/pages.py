"""Pages that show runs."""

from __future__ import annotations

from pathlib import Path
from typing import Sequence

from fugaku_gpt.api.settings import FilePath
from fugaku_gpt.report import run_page
from fugaku_gpt.report.run_page import WrittenPage

__all__ = ["WrittenPage", "write_run_page"]


def write_run_page(folders: Sequence[FilePath], path: FilePath) -> WrittenPage:
    """Write the curves of runs as one page, which needs a browser and no network: ``fugaku-gpt report runs``.

    Args:
        folders: run directories, and folders of them, such as
            ``[runs.directory(record).path for record in Runs("runs").where("layout.tp > 1")]``.
        path: the page, by convention ``*.html``.

    Raises:
        UsageError: a folder holds no run, none of them has metrics of its own, or the page cannot be written.
    """
    return run_page.write_run_page([Path(folder) for folder in folders], Path(path))
