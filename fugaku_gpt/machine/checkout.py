"""Where the running code comes from: its checkout, the files that were installed with it, its commit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Optional

import fugaku_gpt


def checkout() -> Optional[Path]:
    """The top of the checkout that this package runs from, or None where it was installed without one."""
    top = Path(fugaku_gpt.__file__).resolve().parents[1]
    return top if (top / "setup.cfg").is_file() else None


def shipped_folder(name: str) -> Path:
    """The repository's folder ``name`` (``env``, ``docs``): in the checkout, or where an installation has put it.

    An installation lies below the prefix that the package was installed into, which is not always this Python's:
    ``~/.local``, ``/usr/local``. The folder of an installation without these files does not exist.
    """
    top = checkout()
    if top is not None and (top / name).is_dir():
        return top / name
    parents = Path(fugaku_gpt.__file__).resolve().parents
    shipped = Path("share") / "fugaku_gpt" / name
    return next((prefix / shipped for prefix in parents if (prefix / shipped).is_dir()), Path(sys.prefix) / shipped)


def git_commit() -> str:
    """The commit of the running checkout, or "" if the code is an installed copy or git is missing."""
    top = checkout()
    if top is None or not (top / ".git").exists():
        return ""
    try:
        completed = subprocess.run(
            ["git", "-C", str(top), "rev-parse", "--short=12", "HEAD"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return completed.stdout.decode().strip()
