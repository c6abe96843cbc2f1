"""The commit of the running code."""

from __future__ import annotations

import subprocess
from pathlib import Path

import fugaku_gpt


def git_commit() -> str:
    """The commit of the running checkout, or "" if the code is an installed copy or git is missing."""
    root = Path(fugaku_gpt.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return ""
    try:
        completed = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return completed.stdout.decode().strip()
